"""A few samples written in speculators' layout and read back, field by field: what 02_layout shows.

Whole data sets go through `convert`; the files and the data set are written by the same functions here and there.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from dflash_lib.conversations.prepare import PreparedRows
from dflash_lib.hidden_states.formats.speculators import (
    IDS,
    STATES,
    TOKENS,
    is_row_set,
    speculators_layer_ids,
    state_file,
    write_rows,
    write_states,
)
from dflash_lib.hidden_states.schema import StoreError
from dflash_lib.hidden_states.store import StoredSample
from dflash_lib.hidden_states.verify import StoreCheck, count_different
from dflash_lib.target.capture import capture_batch, stack_states
from dflash_lib.target.loading import Target


def write_speculators(folder: Path | str, samples: Sequence[StoredSample], target_layer_ids: Sequence[int],
                      num_hidden_layers: int) -> None:
    """Writes samples in their order: sample i becomes hs_{i} and row i of the data set.

    An export that an earlier call left in the folder is removed first. Raises StoreError when the folder holds anything
    else, when there are no samples, and for a sample without the last hidden state, which this layout needs.
    """
    folder = Path(folder)
    if not samples or any(sample.last_hidden_state_prenorm is None for sample in samples):
        raise StoreError("speculators' layout: at least one sample is needed, and each with the last hidden state")
    if folder.exists() and any(folder.iterdir()):
        if not (folder / STATES).is_dir() or not is_row_set(folder):
            raise StoreError(f"{folder}: holds something else than an export in speculators' layout; it is left alone")
        shutil.rmtree(folder)
    layer_ids = [*speculators_layer_ids(target_layer_ids), num_hidden_layers]
    for i, sample in enumerate(samples):
        states = stack_states(sample).bfloat16()
        write_states(state_file(folder, i), sample.input_ids, states, None, layer_ids)
    write_rows(folder, ((sample.input_ids, sample.loss_mask) for sample in samples))


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
            faults["field names"] += set(file.keys()) != {STATES, TOKENS}
            states, ids = file.get_tensor(STATES), file.get_tensor(TOKENS)
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
