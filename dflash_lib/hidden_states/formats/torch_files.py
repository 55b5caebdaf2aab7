"""Layouts of one `torch.save` file a sample: SpecForge's `.ckpt` and `.ckpt.gz`, Model-Optimizer's `.pt`.

Both put the tapped layers side by side, [T, L * H], and store no layer ids: `target_layer_ids` must be told, or found
by an audit. Files are opened with `weights_only=True`: tensors and plain values; anything else is refused, never run.
"""

import gzip
import io
import pickle
import re
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_lib.hidden_states.formats.reading import (
    Samples,
    as_input_ids,
    as_loss_mask,
    encoding_name,
    files_identity,
)
from dflash_lib.hidden_states.formats.source import POST_NORM, SourceSample
from dflash_lib.hidden_states.schema import StoreError

CKPT = re.compile(r"data_(\d+)\.ckpt(\.gz)?")


def load_tensors(path: Path) -> dict[str, Any]:
    """The dict in a `torch.save` file, gzipped or not, mapped where that is possible.

    Raises StoreError when the file is absent, cut off, holds pickled objects, or something else than a dict.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(4)
        if start[:2] == b"\x1f\x8b":
            with gzip.open(path, "rb") as file:
                source: Any = io.BytesIO(file.read())
            start = source.getvalue()[:4]
        else:
            source = path
        is_zip = zipfile.is_zipfile(source)
        if not is_zip and start == b"PK\x03\x04":
            raise StoreError(f"{path}: cut off: the end of the file is missing. Extract this sample again.")
        if isinstance(source, io.BytesIO):
            source.seek(0)
        loaded = torch.load(source, map_location="cpu", weights_only=True, mmap=is_zip and source is path)
    except pickle.UnpicklingError as error:
        raise StoreError(f"{path}: holds pickled objects, or no torch.save file at all. Only tensors and plain values "
                         f"are loaded, because loading an object can run any code ({str(error).splitlines()[0]})"
                         ) from error
    except (OSError, EOFError, zlib.error, RuntimeError, zipfile.BadZipFile, KeyError, ValueError) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{path}: cannot be read ({_first_line(error)}). Was it cut off? Extract this sample again."
                         ) from error
    if not isinstance(loaded, dict):
        raise StoreError(f"{path}: holds a {type(loaded).__name__}, not a dict of tensors")
    return loaded


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class TorchFiles(Samples):
    """A folder of such files.

    target_layer_ids: the tapped layers in stored order, where the user knows them; hidden_size: the target's, needed
    when neither a last state nor target_layer_ids says how wide one layer is.
    """

    aux_key: str
    last_key: str
    last_required: bool

    def __init__(self, path: Path | str, target_layer_ids: Sequence[int] | None = None, hidden_size: int | None = None):
        self.path, self.hidden_size = Path(path), hidden_size
        self.target_layer_ids = None if target_layer_ids is None else list(target_layer_ids)
        self.paths = self._find()
        self.names = [str(path.relative_to(self.path)) for path in self.paths]
        self.missing, self.extra = [], []
        self._has_last: bool | None = None  # as the first file that can be read
        first = self.probe()
        self.encoding = encoding_name(first.states, first.name)
        self.last = POST_NORM if self._has_last else None

    def _find(self) -> list[Path]:
        raise NotImplementedError

    def _last_of(self, tensors: dict[str, Any], where: str) -> Tensor | None:
        return None if tensors.get(self.last_key) is None else self._rows(tensors, self.last_key, where)

    def _rows(self, tensors: dict[str, Any], key: str, where: str) -> Tensor:
        """A tensor [rows, width] of a file that may hold it as [1, rows, width]."""
        states = tensors.get(key)
        if not isinstance(states, Tensor):
            raise StoreError(f"{where}: has no tensor {key!r}; it holds {sorted(map(str, tensors))}")
        if states.ndim == 3 and len(states) == 1:
            states = states[0]
        if states.ndim != 2:
            raise StoreError(f"{where}: {key} of shape {list(states.shape)}; [tokens, width] is needed")
        encoding_name(states, where)
        return states

    def read(self, i: int) -> SourceSample:
        path = self.paths[i]
        where = str(path)
        tensors = load_tensors(path)
        aux, last = self._rows(tensors, self.aux_key, where), self._last_of(tensors, where)
        if last is None and self.last_required:
            raise StoreError(f"{where}: has no {self.last_key!r}; it holds {sorted(map(str, tensors))}")
        width = self._layer_width(aux, last, where)
        states = aux.reshape(len(aux), aux.shape[1] // width, width)
        if last is not None:
            if len(last) != len(aux):
                raise StoreError(f"{where}: {self.aux_key} has {len(aux)} rows, {self.last_key} {len(last)}")
            states = torch.cat([states, last[:, None]], dim=1)
        if tensors.get("input_ids") is None:
            raise StoreError(f"{where}: has no 'input_ids'; it holds {sorted(map(str, tensors))}")
        if self._has_last is None:
            self._has_last = last is not None
        if self._has_last != (last is not None):
            raise StoreError(f"{where}: " + (f"lacks {self.last_key!r}, which other files have" if self._has_last
                                             else f"has {self.last_key!r}, which other files lack"))
        mask = tensors.get("loss_mask")
        return SourceSample(
            name=self.names[i], sample_id=str(tensors.get("conversation_id") or self._sample_id(path)),
            input_ids=as_input_ids(tensors["input_ids"], where),
            loss_mask=None if mask is None else as_loss_mask(mask, where), states=states)

    def _sample_id(self, path: Path) -> str:
        return ""

    def _layer_width(self, aux: Tensor, last: Tensor | None, where: str) -> int:
        """How wide one layer is: the last state's width, or hidden_size, or the width shared out over the layer ids."""
        width, num_layers = aux.shape[1], self.target_layer_ids and len(self.target_layer_ids)
        hidden = last.shape[1] if last is not None else self.hidden_size
        if hidden is None and num_layers:
            hidden = width // num_layers
        if not hidden:
            raise StoreError(f"{where}: {self.aux_key} is {width} wide, all layers side by side, and nothing says how "
                             "many: give target_layer_ids or hidden_size")
        told = {"hidden_size": self.hidden_size, "target_layer_ids": num_layers}
        if width % hidden or self.hidden_size not in (None, hidden) or num_layers not in (None, width // hidden):
            raise StoreError(f"{where}: {self.aux_key} is {width} wide, which does not fit layers of {hidden}"
                             + "".join(f", {name} {value}" for name, value in told.items() if value))
        return hidden

    def identity(self) -> dict[str, Any]:
        return files_identity(self)


class SpecForgeSource(TorchFiles):
    """SpecForge: `rows_{a}-{b}/data_{i}.ckpt`, or the files directly in the folder.

    input_ids [T], loss_mask [T], hidden_states [T, L * H] or [1, T, L * H]; with DSpark target_last_hidden_states,
    behind the final norm.
    """

    format = "specforge"
    aux_key, last_key, last_required = "hidden_states", "target_last_hidden_states", False

    def _find(self) -> list[Path]:
        found = find_ckpt(self.path)
        numbers = [int(CKPT.fullmatch(path.name)[1]) for path in found]
        twice = {n for n, m in zip(numbers, numbers[1:], strict=False) if n == m}
        if twice:
            raise StoreError(f"{self.path}: several files of sample {min(twice)}; leave one of them there")
        return found


class ModelOptimizerSource(TorchFiles):
    """NVIDIA Model-Optimizer: `{conversation_id}.pt`.

    input_ids [T], hidden_states [T, H] (HF's last hidden state: behind the final norm), aux_hidden_states [T, L * H],
    and a loss_mask [T] where answers alone are learned from.
    """

    format = "model-optimizer"
    aux_key, last_key, last_required = "aux_hidden_states", "hidden_states", True

    def _find(self) -> list[Path]:
        return sorted(self.path.glob("*.pt"))

    def _sample_id(self, path: Path) -> str:
        return path.stem


def find_ckpt(folder: Path) -> list[Path]:
    """SpecForge's files in and one level below a folder, by number."""
    found = [path for pattern in ("data_*.ckpt*", "rows_*/data_*.ckpt*") for path in folder.glob(pattern)
             if CKPT.fullmatch(path.name)]
    return sorted(found, key=lambda path: (int(CKPT.fullmatch(path.name)[1]), str(path)))
