"""Verifies a store against the rows that it was extracted from: every token id, every value, every checksum."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass

import h5py
import numpy as np

from dflash_lib.conversations.prepare import PreparedRows
from dflash_lib.hidden_states.encode import bad_rows, predicting_rows
from dflash_lib.hidden_states.schema import (
    LAST_ROWS,
    SMALL,
    StateDataset,
    StoreError,
    has_digest,
    read_raw,
    repair,
    shard_name,
)
from dflash_lib.hidden_states.store import UNREADABLE, HiddenStateStore, ShardIndex


@dataclass(frozen=True)
class StoreCheck:
    """One named check: num_faults, the first fault in words ("" when there is none), how many faults are allowed."""

    name: str
    num_faults: int
    first_fault: str = ""
    limit: int = 0

    @property
    def ok(self) -> bool:
        return self.num_faults <= self.limit


class _Faults:
    def __init__(self, names: list[str]):
        self.count = dict.fromkeys(names, 0)
        self.first = dict.fromkeys(names, "")

    def add(self, name: str, num: int, text: str) -> None:
        self.count[name] += num
        if num and not self.first[name]:
            self.first[name] = text


NAMES = ["checksums", "samples missing", "samples quarantined", "token ids", "loss mask", "rows not finite",
         "rows all zero", "last-state rows missing"]
MAX_QUARANTINED_SHARE = 0.001  # a rare unusable sample must not block a job for ever; more mean a broken target


def max_quarantined(num_samples: int) -> int:
    """How many of a store's samples may be quarantined: 0.1 %, but one in a small store."""
    return max(1, int(num_samples * MAX_QUARANTINED_SHARE))


def verify_store(store: HiddenStateStore, prepared: PreparedRows,
                 on_progress: Callable[[int], None] | None = None) -> list[StoreCheck]:
    """Reads the whole store once and returns the checks in NAMES, one each, faults counted.

    on_progress: called with the number of tokens read so far. A shard whose bytes cannot be read counts as a checksum
    fault. No fault is allowed, except `max_quarantined` samples. Raises StoreError when the store was made from other
    rows than `prepared`.
    """
    store.require(data_fingerprint=prepared.fingerprint)
    faults = _Faults(NAMES)
    seen: set[int] = set()
    num_tokens = 0
    for shard in store.shards:
        try:
            _verify_shard(store, shard, prepared, faults)
        except UNREADABLE as error:
            faults.add("checksums", 1, f"{shard_name(shard)}: {error}. {repair(shard_name(shard))}")
        content = store.shards[shard]
        seen.update(content.sample_index.tolist())
        for entry in json.loads(content.quarantined):
            faults.add("samples quarantined", 1, f"sample {entry['sample_index']}: {entry['reason']}")
            seen.add(entry["sample_index"])
        num_tokens += int(content.offsets[-1])
        if on_progress is not None:
            on_progress(num_tokens)
    absent = sorted(set(range(len(prepared))) - seen)
    faults.add("samples missing", len(absent), f"sample {absent[0]}" if absent else "")
    limits = {"samples quarantined": max_quarantined(len(prepared))}
    return [StoreCheck(name, faults.count[name], faults.first[name], limits.get(name, 0)) for name in NAMES]


def require_verified(checks: list[StoreCheck]) -> None:
    """Raises StoreError that names every failed check with its first fault."""
    failed = [f"  {check.name}: {check.num_faults}, first: {check.first_fault}" for check in checks if not check.ok]
    if failed:
        raise StoreError("the store is not as it should be:\n" + "\n".join(failed))


def _verify_shard(store: HiddenStateStore, shard: int, prepared: PreparedRows, faults: _Faults) -> None:
    file, content = store.file(shard), store.shards[shard]
    where = shard_name(shard)
    arrays = {}
    for name in SMALL:
        arrays[name] = file[name][:]
        _compare_digest(file[name], hashlib.sha256(np.ascontiguousarray(arrays[name])), where, faults)
    for row, index in enumerate(content.sample_index.tolist()):
        start, stop = content.offsets[row:row + 2]
        for name, stored, wanted in zip(("token ids", "loss mask"), (arrays["input_ids"], arrays["loss_mask"]),
                                        prepared.row(index), strict=True):
            wrong = count_different(stored[start:stop], wanted)
            faults.add(name, wrong, f"{where}, sample {index}: {wrong} of {len(wanted)} tokens differ")
    starts = content.offsets[:-1].tolist()
    wanted = np.concatenate([start + predicting_rows(arrays["loss_mask"][start:stop])
                             for start, stop in zip(starts, content.offsets[1:].tolist(), strict=True)])
    for stored in store.plan.datasets:
        num_rows = int(content.offsets[-1]) if stored.per_token else len(wanted)
        if stored.name not in file:
            faults.add("last-state rows missing", num_rows, f"{where}: no dataset {stored.name}")
            continue
        if stored.name == LAST_ROWS and not np.array_equal(file[LAST_ROWS][:], wanted):
            faults.add("last-state rows missing", 1, f"{where}: its last_rows are not those that predict a supervised "
                                                     "token")
        faults.add("last-state rows missing", abs(num_rows - file[stored.name].shape[0]), f"{where}, {stored.name}")
        _verify_states(file[stored.name], stored, content, np.arange(num_rows) if stored.per_token else wanted, where,
                       faults)


def count_different(stored: np.ndarray, wanted: np.ndarray) -> int:
    """Tokens that differ; all of them when the lengths do."""
    if len(stored) != len(wanted):
        return max(len(stored), len(wanted))
    return int((stored != wanted).sum())


def _verify_states(dataset: h5py.Dataset, stored: StateDataset, content: ShardIndex, tokens: np.ndarray, where: str,
                   faults: _Faults) -> None:
    """Values and checksum of one dataset; tokens: the shard's token row of each of its rows."""
    digest, step = hashlib.sha256(), dataset.chunks[0]
    for start in range(0, dataset.shape[0], step):
        raw = read_raw(dataset, start, min(start + step, dataset.shape[0]), stored.dtype)
        digest.update(raw)
        found = bad_rows(stored.name, raw)
        for name, bad in zip(("rows not finite", "rows all zero"), found or (), strict=False):
            if bad.any():
                token = int(tokens[min(start + int(np.argwhere(bad)[0][0]), len(tokens) - 1)])
                row = int(np.searchsorted(content.offsets, token, side="right")) - 1
                faults.add(name, int(bad.sum()), f"{where}, {dataset.name[1:]}, sample {content.sample_index[row]}, "
                                                 f"token {token - content.offsets[row]}")
    _compare_digest(dataset, digest, where, faults)


def _compare_digest(dataset: h5py.Dataset, digest, where: str, faults: _Faults) -> None:
    if not has_digest(dataset, digest):
        faults.add("checksums", 1, f"{where}: {dataset.name[1:]} differs from what was written. {repair(where)}")
