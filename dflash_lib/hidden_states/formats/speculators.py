"""The speculators package's layout: `hidden_states/hs_{i}.safetensors` a sample beside an Arrow data set.

A file holds `hidden_states` bfloat16 [T, L + 1, H], the last slot being the last layer's output before the norm, and
`token_ids` int64 [T]; in the fp8 form `hidden_states` is float8_e4m3fn with `hidden_states_scales` float32 [T, 1, 1],
one scale a token over all slots. The data set holds input_ids, loss_mask (int64) and seq_len, row i belonging to
hs_{i}, in torch format. Layer ids there name the INPUT of a layer: theirs = ours + 1, and the last slot is id
num_hidden_layers. Source: speculators and hs-connectors 0.9.0, read from the data set class and the fp8 helper; they
keep the ids in no file, so the files written here carry them as metadata.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash_lib.files import atomic_path, fsync_folder, human_bytes, publish
from dflash_lib.hidden_states.formats.reading import (
    Samples,
    as_input_ids,
    as_loss_mask,
    encoding_name,
    files_identity,
)
from dflash_lib.hidden_states.formats.source import PRE_NORM, SourceSample
from dflash_lib.hidden_states.schema import StoreError

IDS = "aux_hidden_state_layer_ids"
STATES, SCALES, TOKENS = "hidden_states", "hidden_states_scales", "token_ids"
HS_FILE = re.compile(r"hs_(\d+)\.safetensors")
FP8, FP8_MAX, MIN_SCALE = torch.float8_e4m3fn, 448.0, 1e-12  # the package's own limits
ROWS_PER_BATCH = 256


def speculators_layer_ids(target_layer_ids: Sequence[int]) -> list[int]:
    """Their ids (inputs of layers) for our ids (outputs of layers)."""
    return [k + 1 for k in target_layer_ids]


def state_file(folder: Path | str, i: int) -> Path:
    """The file of sample `i` in an exported folder."""
    return Path(folder) / STATES / f"hs_{i}.safetensors"


def is_row_set(folder: Path) -> bool:
    """Whether a folder holds an Arrow data set as `save_to_disk` leaves it."""
    return (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file()


def state_folder(path: Path) -> Path | None:
    """Where a folder keeps its hs_{i}.safetensors: below `hidden_states/`, or directly; None where there are none."""
    for folder in (path / STATES, path):
        if folder.is_dir() and any(HS_FILE.fullmatch(entry.name) for entry in os.scandir(folder)):
            return folder
    return None


class SpeculatorsSource(Samples):
    """A folder in that layout, the data set in it, or in `dataset`, or absent: then there is no loss mask.

    `missing` names rows without a file (or, without a data set, gaps in the numbers); `extra` names files without a
    row. target_layer_ids: ours; the files' metadata by default. conversion: what `convert` left beside the files, None
    where another tool wrote them.
    """

    format = "speculators"

    def __init__(self, path: Path | str, dataset: Path | str | None = None,
                 target_layer_ids: Sequence[int] | None = None, conversion: dict[str, Any] | None = None):
        self.path, self.conversion, self.last = Path(path), conversion, PRE_NORM
        self.folder = state_folder(self.path) or self.path / STATES
        self.rows = open_rows(Path(dataset or path), required=dataset is not None)
        found = {int(match[1]) for entry in (os.scandir(self.folder) if self.folder.is_dir() else ())
                 if (match := HS_FILE.fullmatch(entry.name))}
        expected = set(range(len(self.rows) if self.rows is not None else max(found, default=-1) + 1))
        self.numbers = sorted(found | expected if self.rows is not None else found)
        self.names = [f"hs_{n}.safetensors" for n in self.numbers]
        self.missing = [f"hs_{n}.safetensors" for n in sorted(expected - found)]
        self.extra = [f"hs_{n}.safetensors" for n in sorted(found - expected)]
        first = self.probe()
        self.encoding = encoding_name(first.states, first.name)
        stated = self._stated_ids(first.name)
        self.num_hidden_layers = stated[-1] if stated else None
        self.target_layer_ids = [k - 1 for k in stated[:-1]] if stated else None
        if target_layer_ids is not None:
            self.target_layer_ids = list(target_layer_ids)

    def _stated_ids(self, name: str) -> list[int] | None:
        with safe_open(self.folder / name, "pt") as file:
            text = (file.metadata() or {}).get(IDS)
        try:
            ids = None if text is None else json.loads(text)
            if ids is not None and not all(type(k) is int for k in ids):
                raise ValueError("not whole numbers")
        except (ValueError, TypeError) as error:
            raise StoreError(f"{self.folder / name}: its metadata {IDS} is {text!r}, no list of layer ids") from error
        return ids

    def read(self, i: int) -> SourceSample:
        path = self.folder / self.names[i]
        tensors = load_file(path)
        states, scales = tensors[STATES], tensors.get(SCALES)
        encoding_name(states, str(path))
        if states.ndim != 3:
            raise StoreError(f"{path}: {STATES} of shape {list(states.shape)}; [tokens, slots, width] is needed")
        if scales is not None and (states.dtype != FP8 or scales.dtype != torch.float32 or scales.ndim != 3
                                   or len(scales) != len(states) or scales.shape[2] != 1
                                   or scales.shape[1] not in (1, states.shape[1])):
            raise StoreError(f"{path}: {SCALES} is {scales.dtype} {list(scales.shape)} beside {states.dtype} "
                             f"{list(states.shape)}; float32 [tokens, 1, 1] beside float8_e4m3fn is needed")
        ids = as_input_ids(tensors[TOKENS], str(path))
        row_ids, mask = self._row(i)
        return SourceSample(name=self.names[i], sample_id="", input_ids=ids, loss_mask=mask, states=states,
                            scales=scales, note=_compare_ids(ids, row_ids))

    def read_tokens(self, i: int) -> tuple[np.ndarray, np.ndarray | None]:
        path = self.folder / self.names[i]
        return as_input_ids(load_file(path, (TOKENS,), all_keys=False)[TOKENS], str(path)), self._row(i)[1]

    def _row(self, i: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        """input_ids and loss_mask of the row that belongs to sample `i`."""
        number = self.numbers[i]
        if self.rows is None or number >= len(self.rows):
            return None, None
        where = f"{self.path}, row {number} of the data set"
        row = self.rows[number]
        return as_input_ids(row["input_ids"], where), as_loss_mask(row["loss_mask"], where)

    def identity(self) -> dict[str, Any]:
        return files_identity(self)


def _compare_ids(ids: np.ndarray, row_ids: np.ndarray | None) -> str:
    if row_ids is None or np.array_equal(ids, row_ids):
        return ""
    what = (f"{int((ids != row_ids).sum())} of {len(ids)} differ" if len(ids) == len(row_ids)
            else f"{len(ids)} against {len(row_ids)}")
    return f"the file's token ids are not those of its row in the data set ({what}): speculators leaves it out"


def open_rows(folder: Path, required: bool) -> Any:
    """The Arrow data set in a folder, None without one. Raises StoreError when it cannot be read or lacks a column."""
    from datasets import Dataset, load_from_disk

    if not is_row_set(folder):
        if required:
            raise StoreError(f"{folder}: no Arrow data set (dataset_info.json, state.json) is there")
        return None
    try:
        rows = load_from_disk(str(folder))
    except Exception as error:  # whatever pyarrow and datasets raise for cut-off files
        raise StoreError(f"{folder}: its Arrow data set cannot be read ({type(error).__name__}: {error})") from error
    if not isinstance(rows, Dataset) or not {"input_ids", "loss_mask"} <= set(rows.column_names):
        raise StoreError(f"{folder}: its Arrow data set has no columns input_ids and loss_mask")
    return rows.with_format("numpy", columns=["input_ids", "loss_mask"])


def load_file(path: Path, needed: Sequence[str] = (STATES, TOKENS), all_keys: bool = True) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises StoreError when it is absent, cut off, or lacks one that is needed."""
    if not path.is_file():
        raise StoreError(f"{path}: no such file, though the data set has a row for it. Extract this sample again.")
    try:
        with safe_open(path, "pt") as file:
            keys = set(file.keys())
            if not keys >= set(needed):
                raise StoreError(f"{path}: has no tensor {', '.join(sorted(set(needed) - keys))}; "
                                 f"it holds {sorted(keys)}")
            wanted = keys & {STATES, SCALES, TOKENS} if all_keys else needed
            return {key: file.get_tensor(key) for key in wanted}
    except (SafetensorError, OSError, AttributeError) as error:
        raise StoreError(f"{path}: cut off, or no safetensors file ({error}). Extract this sample again.") from error


def quantize(states: Tensor) -> tuple[Tensor, Tensor]:
    """The fp8 form of states [T, K, H] of any float dtype: float8_e4m3fn of that shape, and its scales float32
    [T, 1, 1], the largest magnitude of each token over 448. Bit for bit hs-connectors' (a test holds that)."""
    full = states.to(torch.float32)
    scales = (full.abs().amax(dim=(1, 2), keepdim=True) / FP8_MAX).clamp(min=MIN_SCALE)
    return (full / scales).to(FP8), scales


def write_states(path: Path, input_ids: np.ndarray, states: Tensor, scales: Tensor | None,
                 layer_ids: Sequence[int] | None) -> None:
    """Writes one file, whole or not at all. layer_ids: theirs, the last slot's included; None = not known.

    Raises StoreError when writing fails (full disk, not writable).
    """
    tensors = {STATES: states.contiguous(), TOKENS: torch.from_numpy(input_ids.astype(np.int64))}
    if scales is not None:
        tensors[SCALES] = scales.contiguous()
    metadata = None if layer_ids is None else {IDS: json.dumps(list(layer_ids))}
    try:
        with atomic_path(path) as partial:
            save_file(tensors, partial, metadata)
    except (OSError, SafetensorError) as error:
        raise writing_failed(path, error) from error


def writing_failed(path: Path, error: Exception) -> StoreError:
    """What to raise when a file could not be written."""
    folder = path.parent
    free = human_bytes(shutil.disk_usage(folder).free) if folder.is_dir() else "unknown"
    return StoreError(f"{path}: writing failed: {error}. Free on that disk: {free}. What is finished is kept: free "
                      "space, or fix the folder, and give the same command again.")


def write_rows(folder: Path | str, rows: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
    """Writes the Arrow data set of input_ids and loss_mask, row by row, the same bytes every time; `state.json`, which
    makes it one, comes last. Raises StoreError when writing fails."""
    import pyarrow as pa
    from datasets import Dataset, Features, Value, disable_progress_bars, enable_progress_bars
    from datasets import Sequence as Items
    from datasets.table import MemoryMappedTable

    folder = Path(folder)
    partial = folder / ".rows.partial"
    features = Features(input_ids=Items(Value("int64")), loss_mask=Items(Value("int64")), seq_len=Value("int64"))
    digest = hashlib.sha256()

    def batch(part: list[tuple[np.ndarray, np.ndarray]]) -> pa.RecordBatch:
        offsets = pa.array(np.cumsum([0, *(len(ids) for ids, _ in part)]), pa.int32())
        columns = [np.concatenate(values).astype(np.int64) for values in zip(*part, strict=True)]
        for column in columns:
            digest.update(column)
        return pa.record_batch([*(pa.ListArray.from_arrays(offsets, pa.array(column)) for column in columns),
                                pa.array(np.diff(offsets.to_numpy()), pa.int64())], schema=features.arrow_schema)

    disable_progress_bars()
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        with pa.OSFile(str(partial / "rows.arrow"), "wb") as file, \
                pa.ipc.new_stream(file, features.arrow_schema) as stream:
            part: list[tuple[np.ndarray, np.ndarray]] = []
            for row in rows:
                part.append(row)
                if len(part) == ROWS_PER_BATCH:
                    stream.write_batch(batch(part))
                    part = []
            if part:
                stream.write_batch(batch(part))
        table = MemoryMappedTable.from_file(str(partial / "rows.arrow"))
        Dataset(table, fingerprint=digest.hexdigest()[:16]).with_format("torch").save_to_disk(partial / "set")
        (folder / "state.json").unlink(missing_ok=True)
        for path in sorted((partial / "set").iterdir(), key=lambda path: (path.name == "state.json", path.name)):
            publish(path, path)
            os.replace(path, folder / path.name)
        fsync_folder(folder)
        shutil.rmtree(partial)
    except OSError as error:
        raise writing_failed(folder / "dataset_info.json", error) from error
    finally:
        enable_progress_bars()
