"""Where a conversion writes to: a store, shard by shard, or speculators' layout, file by file.

Each unit (a shard, a file) is whole or absent, can be asked for, written, and compared with the source bit for bit.
"""

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dflash_lib.files import human_bytes
from dflash_lib.hidden_states.encode import (
    EncodedSample,
    dequantize_fp8,
    encode_sample,
    find_bad,
    predicting_rows,
    quantize_fp8,
)
from dflash_lib.hidden_states.extraction import check_free_space
from dflash_lib.hidden_states.formats.hdf5 import StoreSource
from dflash_lib.hidden_states.formats.reading import Samples
from dflash_lib.hidden_states.formats.source import SourceSample
from dflash_lib.hidden_states.formats.speculators import (
    FP8,
    STATES,
    load_file,
    open_rows,
    quantize,
    speculators_layer_ids,
    state_file,
    write_rows,
    write_states,
)
from dflash_lib.hidden_states.formats.survey import check_tokens
from dflash_lib.hidden_states.plan import ExtractionPlan
from dflash_lib.hidden_states.schema import (
    AUX,
    AUX_SCALES,
    LAST,
    LAST_ROWS,
    StoreError,
    get_encoding,
    shard_name,
    to_raw,
)
from dflash_lib.hidden_states.shards import ShardWriter, remove_dead_partials
from dflash_lib.hidden_states.store import HiddenStateStore, missing_shards
from dflash_lib.target.capture import CapturedSample


def read_checked(source: Samples, i: int) -> SourceSample:
    """Sample `i`, as a trainer could use it. Raises StoreError when its parts do not fit each other."""
    sample = source.read(i)
    if sample.note:
        raise StoreError(f"{source.path}, {sample.name}: {sample.note}")
    check_tokens(sample.name, sample.input_ids, sample.loss_mask)
    if len(sample.states) != len(sample.input_ids):
        raise StoreError(f"{source.path}, {sample.name}: {len(sample.states)} rows of states for "
                         f"{len(sample.input_ids)} tokens")
    first = source.dtype
    if sample.states.dtype != first:  # what is said of the whole (rounded or not) would not be true of this one
        raise StoreError(f"{source.path}, {sample.name}: stored as {sample.states.dtype}, the first one as {first}; "
                         "write its file anew, or take it out")
    if sample.states.dtype.itemsize == 1 and sample.scales is None:
        raise StoreError(f"{source.path}, {sample.name}: 8-bit states without their scales, wrong by these factors; "
                         "extract it again")
    num_slots = len(source.target_layer_ids or ()) + (source.last is not None)
    if source.target_layer_ids is not None and sample.states.shape[1] != num_slots:
        raise StoreError(f"{source.path}, {sample.name}: {sample.states.shape[1]} slots, but layers "
                         f"{source.target_layer_ids}{' and the last state' if source.last else ''} make {num_slots}")
    return sample


def as_bf16(sample: SourceSample) -> Tensor:
    """The states as bfloat16 [T, K, H]: as stored, or decoded and rounded."""
    return sample.states if sample.states.dtype == torch.bfloat16 else sample.decoded().to(torch.bfloat16)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one dtype, shape and bit pattern (-0 is not 0, a NaN is itself)."""
    return a.dtype == b.dtype and a.shape == b.shape and (not a.numel() or torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)))


def recode(stored: EncodedSample, before: ExtractionPlan, plan: ExtractionPlan, loss_mask: np.ndarray) -> EncodedSample:
    """What a store of `plan` holds of a sample that a store of the plan `before` holds; what both hold alike is not
    rounded again."""
    tensors, fp8 = dict(stored.tensors), get_encoding(plan.encoding).fp8
    if AUX_SCALES in tensors and not fp8:
        tensors[AUX] = dequantize_fp8(tensors[AUX], tensors.pop(AUX_SCALES)).bfloat16()
    elif fp8 and AUX_SCALES not in tensors:
        tensors[AUX], tensors[AUX_SCALES] = quantize_fp8(tensors[AUX])
    if plan.last_state == "supervised" and before.last_state == "all":
        tensors[LAST_ROWS] = torch.from_numpy(predicting_rows(loss_mask))
        tensors[LAST] = tensors[LAST][tensors[LAST_ROWS]]
    return EncodedSample({dataset.name: tensors[dataset.name] for dataset in plan.datasets})


class StoreDestination:
    """A store of `plan`. where: the source's sample for each sample index; quarantined: index -> reason, of samples
    that the plan names and the source does not hold."""

    def __init__(self, source: Samples, folder: Path, plan: ExtractionPlan, where: dict[int, int],
                 quarantined: dict[int, str]):
        self.source, self.folder, self.plan, self.where, self.quarantined = source, folder, plan, where, quarantined
        self.units = list(range(len(plan.shards)))
        self.store: HiddenStateStore | None = None

    def size(self, shard: int) -> int:
        """Samples of a unit."""
        return len(self.plan.samples_of(shard))

    def todo(self) -> list[int]:
        """Units that are absent or damaged; raises StoreError when the disk is too small for them."""
        remove_dead_partials(self.folder)
        todo, _ = missing_shards(self.folder, self.plan)
        check_free_space(self.folder, self.plan, todo)
        return todo

    def _sample(self, index: int) -> tuple[SourceSample, EncodedSample]:
        """A sample, and its states as the plan stores them."""
        sample = read_checked(self.source, self.where[index])
        num_layers = len(self.plan.target_layer_ids)
        if sample.states.shape[2] != self.plan.hidden_size:
            raise StoreError(f"{self.source.path}, {sample.name}: states {sample.states.shape[2]} wide; the target's "
                             f"hidden size is {self.plan.hidden_size}")
        if isinstance(self.source, StoreSource):
            stored = self.source.store.read_encoded(self.source.indices[self.where[index]])
            return sample, recode(stored, self.source.plan, self.plan, sample.loss_mask)
        states = as_bf16(sample)
        captured = CapturedSample(states[:, :num_layers],
                                  None if self.plan.last_state == "none" else states[:, num_layers])
        return sample, encode_sample(None, self.plan, sample.loss_mask, captured)

    def write(self, shard: int) -> None:
        """Writes one shard. Raises StoreError for a bad sample, and for more tokens than were planned."""
        left, samples = self.plan.shard_tokens[shard], self.plan.samples_of(shard)
        masks = [self.source.read_tokens(self.where[index])[1] for index in samples if index not in self.quarantined
                 ] if self.plan.last_state in ("supervised", "topk") else []
        with ShardWriter(self.folder, self.plan, shard, masks) as writer:
            for index in samples:
                if index in self.quarantined:
                    writer.leave_out(index, self.quarantined[index])
                    continue
                sample, encoded = self._sample(index)
                left -= len(sample.input_ids)
                if left < 0:
                    raise StoreError(f"{self.source.path}, {sample.name}: longer than when the conversion was begun. "
                                     f"Remove {self.folder} to start anew.")
                writer.add(index, sample.input_ids.astype(np.int32), sample.loss_mask, encoded)

    def finish(self) -> list[str]:
        """Opens the complete store; returns what there is to say about it."""
        self.store = HiddenStateStore.open(self.folder)
        num = self.store.num_quarantined - len(self.quarantined)
        return [f"{num} samples were left out: their states are not finite or hold all-zero rows (the shards' "
                "attribute `quarantined` names them)"] if num else []

    def check(self, shard: int) -> None:
        """Raises StoreError unless a shard holds what the source does, bit for bit, as the encoding rounds it."""
        held = set(self.store.shards[shard].sample_index.tolist())
        for index in self.plan.samples_of(shard):
            if index in self.quarantined:
                continue
            sample, encoded = self._sample(index)
            if index not in held:
                same = bool(find_bad({name: to_raw(values) for name, values in encoded.tensors.items()}))
            else:
                ids, mask = self.store.read_tokens(index)
                stored = self.store.read_encoded(index).tensors
                same = (np.array_equal(ids, sample.input_ids) and np.array_equal(mask, sample.loss_mask)
                        and all(same_bits(values, encoded.tensors[name]) for name, values in stored.items()))
            if not same:
                raise differs(self.folder / shard_name(shard), f"sample {index}", f"{self.source.path}, {sample.name}")


class SpeculatorsDestination:
    """speculators' layout in `folder`: encoding "bf16" or "fp8"; num_hidden_layers: for the ids in the files' metadata,
    None = not known; with_states=False writes the Arrow data set alone; num_tokens: of all samples, where known."""

    def __init__(self, source: Samples, folder: Path, encoding: str, num_hidden_layers: int | None,
                 with_states: bool = True, num_tokens: int | None = None):
        self.source, self.folder, self.encoding, self.num_tokens = source, folder, encoding, num_tokens
        self.with_states = with_states
        ids = source.target_layer_ids
        self.layer_ids = None if ids is None or num_hidden_layers is None else [*speculators_layer_ids(ids),
                                                                                num_hidden_layers]
        self.units = source.order()

    def size(self, _i: int) -> int:
        """Samples of a unit."""
        return 1

    def todo(self) -> list[int]:
        """Files that are absent; raises StoreError when the disk is too small for them."""
        if not self.with_states:
            return []
        folder = state_file(self.folder, 0).parent
        there = {entry.name for entry in os.scandir(folder)} if folder.is_dir() else set()
        todo = [i for i in self.units if state_file(self.folder, i).name not in there]
        if self.num_tokens and todo:
            _, slots, hidden = self.source.probe().states.shape
            token_bytes = slots * hidden * (1 if self.encoding == "fp8" else 2)
            needed = self.num_tokens * token_bytes * len(todo) / len(self.units)
            stat = os.statvfs(self.folder)
            if needed > stat.f_bavail * stat.f_frsize:
                raise StoreError(f"{self.folder}: {human_bytes(stat.f_bavail * stat.f_frsize)} free, but the files to "
                                 f"write take {human_bytes(needed)}. Free space, or name another folder.")
        return todo

    def _encode(self, sample: SourceSample) -> tuple[Tensor, Tensor | None]:
        """States and scales as they are written; what is in the package's fp8 form already stays as it is."""
        if self.encoding != "fp8":
            return as_bf16(sample), None
        if sample.states.dtype == FP8 and sample.scales is not None and sample.scales.shape[1] == 1:
            return sample.states, sample.scales
        return quantize(as_bf16(sample))

    def write(self, i: int) -> None:
        """Writes one file."""
        sample = read_checked(self.source, i)
        write_states(state_file(self.folder, i), sample.input_ids, *self._encode(sample), self.layer_ids)

    def finish(self) -> list[str]:
        """Writes the Arrow data set."""

        def rows():
            for i in range(len(self.source)):
                ids, mask = self.source.read_tokens(i)
                check_tokens(self.source.names[i], ids, mask)
                yield ids, mask

        write_rows(self.folder, rows())
        self.rows = open_rows(self.folder, required=True)
        if len(self.rows) != len(self.units):
            raise StoreError(f"{self.folder}: its data set has {len(self.rows)} rows for {len(self.units)} samples")
        if self.with_states:
            folder = state_file(self.folder, 0).parent
            strange = {entry.name for entry in os.scandir(folder)} - {state_file(self.folder, i).name
                                                                      for i in self.units}
            for name in [name for name in strange if name.startswith(".")]:  # what a killed write left
                (folder / name).unlink()
                strange.remove(name)
            if strange:
                raise StoreError(f"{self.folder / STATES}: holds {min(strange)}, which is no part of this conversion. "
                                 "Remove it and give the same command again.")
        return []

    def check(self, i: int) -> None:
        """Raises StoreError unless a file and its row hold what the source does, bit for bit."""
        where = f"{self.source.path}, {self.source.names[i]}"
        row, (ids, mask) = self.rows[i], self.source.read_tokens(i)
        if not (np.array_equal(row["input_ids"], ids) and np.array_equal(row["loss_mask"], mask)):
            raise differs(self.folder / "state.json", f"row {i}", where)
        if not self.with_states:
            return
        path = state_file(self.folder, i)
        tensors = load_file(path)
        states, scales = self._encode(read_checked(self.source, i))
        wanted = {"hidden_states": states, "token_ids": torch.from_numpy(ids.astype(np.int64))}
        wanted |= {} if scales is None else {"hidden_states_scales": scales}
        if set(tensors) != set(wanted) or not all(same_bits(tensors[key], wanted[key]) for key in wanted):
            raise differs(path, "it", where)


def differs(path: Path, what: str, source: str) -> StoreError:
    """What to raise when a destination is not what it was made from."""
    return StoreError(f"{path}: {what} differs from {source}: the disk, or a change of the source meanwhile. Remove "
                      f"{path} and give the same command again: it is made anew.")


Destination = StoreDestination | SpeculatorsDestination
