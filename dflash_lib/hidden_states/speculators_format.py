"""The speculators package's layout: `hidden_states/hs_{i}.safetensors` a sample beside an Arrow data set.

A file holds `hidden_states` bfloat16 [T, L + 1, H], the last slot being the last layer's output before the norm, and
`token_ids` int64 [T]. The data set holds input_ids and loss_mask (int64) and seq_len, one row a sample, in torch
format. Its layer ids name the INPUT of a layer: theirs = ours + 1, and the last slot is id num_hidden_layers. Source:
speculators 0.9.0, read from its data set class; the ids are kept in each file's metadata here, where it keeps none.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dflash_lib.conversations.prepare import PreparedRows
from dflash_lib.files import atomic_path
from dflash_lib.hidden_states.schema import StoreError
from dflash_lib.hidden_states.store import StoredSample
from dflash_lib.hidden_states.verify import StoreCheck, count_different
from dflash_lib.target.capture import capture_batch
from dflash_lib.target.loading import Target

IDS = "aux_hidden_state_layer_ids"


def speculators_layer_ids(target_layer_ids: Sequence[int]) -> list[int]:
    """Their ids (inputs of layers) for our ids (outputs of layers)."""
    return [k + 1 for k in target_layer_ids]


def state_file(folder: Path | str, i: int) -> Path:
    """The file of sample `i` in an exported folder."""
    return Path(folder) / "hidden_states" / f"hs_{i}.safetensors"


def write_speculators(folder: Path | str, samples: Sequence[StoredSample], target_layer_ids: Sequence[int],
                      num_hidden_layers: int) -> None:
    """Writes samples in their order: sample i becomes hs_{i} and row i of the data set.

    Raises StoreError when the folder holds anything already, when there are no samples, and for a sample without the
    last hidden state, which this layout needs.
    """
    from datasets import Dataset, Features, Sequence, Value, disable_progress_bars, enable_progress_bars

    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise StoreError(f"{folder}: is not empty; remove it, or name another folder")
    if not samples or any(sample.last_hidden_state_prenorm is None for sample in samples):
        raise StoreError("speculators' layout: at least one sample is needed, and each with the last hidden state")
    for i, sample in enumerate(samples):
        states = torch.cat([sample.aux_hidden_states, sample.last_hidden_state_prenorm[:, None]], dim=1)
        tensors = {"hidden_states": states.bfloat16().contiguous(),
                   "token_ids": torch.from_numpy(sample.input_ids.astype(np.int64))}
        metadata = {IDS: json.dumps([*speculators_layer_ids(target_layer_ids), num_hidden_layers])}
        with atomic_path(state_file(folder, i)) as partial:
            save_file(tensors, partial, metadata)
    integers = Sequence(Value("int64"))
    rows = Dataset.from_dict(
        {"input_ids": [sample.input_ids.tolist() for sample in samples],
         "loss_mask": [sample.loss_mask.tolist() for sample in samples],
         "seq_len": [len(sample.input_ids) for sample in samples]},
        features=Features(input_ids=integers, loss_mask=integers, seq_len=Value("int64"))).with_format("torch")
    disable_progress_bars()
    try:
        rows.save_to_disk(folder)
    finally:
        enable_progress_bars()


def rewrite_speculators(folder: Path | str, samples: Sequence[StoredSample], target_layer_ids: Sequence[int],
                        num_hidden_layers: int) -> None:
    """`write_speculators` into a folder that an earlier call may have written: what that left is removed first.

    Raises StoreError when the folder holds anything that is no such export.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        if not (folder / "hidden_states").is_dir() or not (folder / "dataset_info.json").is_file():
            raise StoreError(f"{folder}: holds something else than an export in speculators' layout; it is left alone")
        shutil.rmtree(folder)
    write_speculators(folder, samples, target_layer_ids, num_hidden_layers)


def capture_samples(target: Target, prepared: PreparedRows, target_layer_ids: Sequence[int]) -> list[StoredSample]:
    """All prepared rows captured as one batch, as the store would hand them out. For a few rows."""
    rows = [prepared.row(i) for i in range(len(prepared))]
    captured = capture_batch(target, [ids for ids, _ in rows], target_layer_ids, dtype=torch.bfloat16)
    return [StoredSample(i, ids, mask, sample.aux_hidden_states.cpu(), sample.last_hidden_state_prenorm.cpu())
            for i, ((ids, mask), sample) in enumerate(zip(rows, captured, strict=True))]


NAMES = ["files and rows", "field names", "dtypes and shapes", "layer ids + 1, last slot behind", "token ids in file",
         "input_ids in data set", "loss_mask in data set", "seq_len in data set", "aux hidden states",
         "last slot before the norm"]


def check_speculators(folder: Path | str, samples: Sequence[StoredSample], target_layer_ids: Sequence[int],
                      num_hidden_layers: int) -> list[StoreCheck]:
    """Reads an exported folder back and compares every field with the samples that it was made from.

    Returns the checks in NAMES with the number of samples or values that differ.
    """
    from datasets import load_from_disk

    rows = load_from_disk(str(folder))
    faults = dict.fromkeys(NAMES, 0)
    faults["files and rows"] = abs(len(rows) - len(samples)) + abs(
        len(list(Path(folder).glob("hidden_states/*"))) - len(samples))
    faults["field names"] = int(set(rows.column_names) != {"input_ids", "loss_mask", "seq_len"})
    wanted_ids = [*speculators_layer_ids(target_layer_ids), num_hidden_layers]
    for i, sample in enumerate(samples):
        with safe_open(state_file(folder, i), framework="pt") as file:
            faults["field names"] += set(file.keys()) != {"hidden_states", "token_ids"}
            states, ids = file.get_tensor("hidden_states"), file.get_tensor("token_ids")
            faults["layer ids + 1, last slot behind"] += json.loads(file.metadata()[IDS]) != wanted_ids
        row = rows[i]
        num_tokens, num_layers, hidden = sample.aux_hidden_states.shape
        right_form = (states.dtype, *states.shape) == (torch.bfloat16, num_tokens, num_layers + 1, hidden) and all(
            values.dtype == torch.int64 and values.shape == (num_tokens,)
            for values in (ids, row["input_ids"], row["loss_mask"]))
        faults["dtypes and shapes"] += not right_form
        if not right_form:
            continue
        faults["token ids in file"] += count_different(ids.numpy(), sample.input_ids)
        faults["input_ids in data set"] += count_different(row["input_ids"].numpy(), sample.input_ids)
        faults["loss_mask in data set"] += count_different(row["loss_mask"].numpy(), sample.loss_mask)
        faults["seq_len in data set"] += int(row["seq_len"]) != num_tokens
        faults["aux hidden states"] += int((states[:, :-1] != sample.aux_hidden_states.bfloat16()).sum())
        faults["last slot before the norm"] += int((states[:, -1] != sample.last_hidden_state_prenorm.bfloat16()).sum())
    return [StoreCheck(name, int(faults[name])) for name in NAMES]
