"""Writes one shard: whole or not at all, sample by sample, with checksums and the same bytes every time."""

import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import psutil
import xxhash

from dflash_lib.files import human_bytes, publish
from dflash_lib.hidden_states.encode import EncodedSample, find_bad, num_last_rows
from dflash_lib.hidden_states.plan import ExtractionPlan
from dflash_lib.hidden_states.schema import (
    AUX,
    LAST_ROWS,
    RAW_TYPES,
    SAMPLE_HASHES,
    SCHEMA,
    SMALL,
    StateDataset,
    StoreError,
    create_states,
    set_attribute,
    shard_name,
    to_raw,
    write_raw,
)

HDF5_FORMAT = ("v110", "v110")  # checksummed metadata; every HDF5 since 1.10 reads it


def _partial_path(path: Path) -> Path:
    """The hidden file that becomes `path`: of this process alone, so that a second writer of the shard (another job on
    the same store) cannot write into it. Both would write the same bytes; the last rename wins."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.partial")


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def remove_dead_partials(store: Path | str) -> list[str]:
    """Removes what killed writers on this host left in a store's folder; returns the names.

    Another host's stay: whether its writers live cannot be asked from here.
    """
    name = re.compile(rf"\.shard-\d+\.h5\.{re.escape(socket.gethostname())}\.(\d+)\.partial")
    removed = []
    for path in sorted(Path(store).glob(".shard-*.partial")):
        found = name.fullmatch(path.name)
        if found and not _runs(int(found[1])):
            path.unlink(missing_ok=True)  # a second job may have removed it first
            removed.append(path.name)
    return removed


class _GuardedFile:
    """The file under HDF5. The first OSError is kept and later writes are dropped, because HDF5 crashes the process
    when it cannot flush while it closes (a full disk, seen with HDF5 2.0)."""

    def __init__(self, path: Path):
        self.file = open(path, "wb+", buffering=0)
        self.error: OSError | None = None

    def read(self, size: int = -1) -> bytes:
        return self.file.read(size)

    def readinto(self, buffer) -> int:
        return self.file.readinto(buffer)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        return self.file.tell()

    def write(self, data) -> int:
        left = memoryview(data)
        try:
            while len(left) and self.error is None:
                left = left[self.file.write(left):]
        except OSError as error:
            self.error = error
        return len(data)

    def truncate(self, size: int) -> int:
        try:
            if self.error is None:
                self.file.truncate(size)
        except OSError as error:
            self.error = error
        return size

    def flush(self) -> None:
        """Nothing is buffered here; `publish` fsyncs."""

    def check(self) -> None:
        """Raises the first error, if there was one."""
        if self.error is not None:
            raise self.error


class _StateStream:
    """Appends samples' rows to a dataset of states in whole chunks, so that no chunk is compressed twice, and hashes
    them: all together, and each sample's, which is what a reader of a sample compares."""

    def __init__(self, file: h5py.File, stored: StateDataset, num_rows: int):
        self.dataset, self.dtype = create_states(file, stored, num_rows), stored.dtype
        self.sample_hashes: list[int] | None = None if stored.zstd else []
        self.buffer = np.empty(self.dataset.chunks, RAW_TYPES[stored.dtype][1])
        self.filled = self.written = 0
        self.digest = hashlib.sha256()

    def append(self, raw: np.ndarray) -> None:
        """raw: [n, ...], of `to_raw`: one sample's rows."""
        if self.sample_hashes is not None:
            self.sample_hashes.append(xxhash.xxh3_64_intdigest(np.ascontiguousarray(raw)))
        while len(raw):
            part = raw[:len(self.buffer) - self.filled]
            self.buffer[self.filled:self.filled + len(part)] = part
            self.filled += len(part)
            raw = raw[len(part):]
            if self.filled == len(self.buffer):
                self._flush()

    def _flush(self) -> None:
        rows = self.buffer[:self.filled]
        self.digest.update(rows)
        write_raw(self.dataset, self.written, rows, self.dtype)
        self.written += self.filled
        self.filled = 0

    def finish(self) -> None:
        """Writes what is left, cuts the dataset to the rows that came, and notes the checksum of their raw values."""
        if self.filled:
            self._flush()
        if self.written < self.dataset.shape[0]:  # samples were quarantined
            self.dataset.id.set_extent((self.written, *self.dataset.shape[1:]))
        set_attribute(self.dataset, "sha256", self.digest.hexdigest())
        if self.sample_hashes is not None:
            self.dataset.attrs[SAMPLE_HASHES] = np.array(self.sample_hashes, np.uint64)


class ShardWriter:
    """Context manager that writes shard `index` of a plan into the store's folder.

    masks: loss masks of the shard's samples, which say how many rows of the last state come. `add` each sample in the
    plan's order. On a clean exit the file is flushed, fsynced and renamed into place; on an exception nothing is left.
    A sample whose states are not finite or hold all-zero rows is left out and noted in the attribute `quarantined`.
    Raises StoreError when writing fails (full disk), when a sample is missing, and when every sample of the shard was
    quarantined: then the target is broken, not the data.
    """

    def __init__(self, store: Path | str, plan: ExtractionPlan, index: int, masks: Sequence[np.ndarray] = ()):
        self.plan, self.index = plan, index
        self.num_last_rows = num_last_rows(plan, masks)
        self.path = Path(store) / shard_name(index)
        self.partial = _partial_path(self.path)
        self.input_ids: list[np.ndarray] = []
        self.loss_mask: list[np.ndarray] = []
        self.sample_index: list[int] = []
        self.quarantined: list[dict[str, Any]] = []
        self.splits: list[dict[str, Any]] = []
        self.num_tokens = 0

    def __enter__(self) -> "ShardWriter":
        plan, num_tokens = self.plan, self.plan.shard_tokens[self.index]
        try:
            self.guard = _GuardedFile(self.partial)
        except OSError as error:
            raise self._failed(error) from error
        self.file = h5py.File(self.guard, "w", libver=HDF5_FORMAT)
        self.streams = {stored.name: _StateStream(self.file, stored,
                                                  num_tokens if stored.per_token else self.num_last_rows)
                        for stored in plan.datasets}
        set_attribute(self.streams[AUX].dataset, "target_layer_ids", plan.target_layer_ids)
        return self

    def add(self, sample_index: int, input_ids: np.ndarray, loss_mask: np.ndarray, encoded: EncodedSample) -> bool:
        """Appends one sample: input_ids int32 [T], loss_mask uint8 [T], its encoded states. False when its states are
        unusable and it was left out."""
        raws = {name: to_raw(values) for name, values in encoded.tensors.items()}
        bad = find_bad(raws)
        if bad:
            self.leave_out(sample_index, bad)
            return False
        if LAST_ROWS in raws:
            raws[LAST_ROWS] = raws[LAST_ROWS] + self.num_tokens  # numbered within the shard
        for name, stream in self.streams.items():
            stream.append(raws[name])
        self.guard.check()
        self.input_ids.append(input_ids)
        self.loss_mask.append(loss_mask)
        self.sample_index.append(sample_index)
        self.num_tokens += len(input_ids)
        return True

    def leave_out(self, sample_index: int, reason: str) -> None:
        """Notes a sample as quarantined, in the place of adding it."""
        self.quarantined.append({"sample_index": sample_index, "reason": reason})

    def note_split(self, batch: Sequence[int], parts: Sequence[Sequence[int]]) -> None:
        """Notes that a batch of sample indices did not fit into memory and was run in parts: its values then agree with
        an undisturbed run's within rounding only."""
        self.splits.append({"batch": list(batch), "parts": [list(part) for part in parts]})

    def _finish(self) -> None:
        done = {*self.sample_index, *(entry["sample_index"] for entry in self.quarantined)}
        wanted = self.plan.samples_of(self.index)
        if len(done) != len(self.sample_index) + len(self.quarantined) or done != set(wanted):
            raise StoreError(f"{self.path}: {len(done)} different samples were added, the plan has {len(wanted)}")
        if not self.sample_index:
            raise StoreError(f"{self.path}: every sample was unusable; the first: {self.quarantined[0]['reason']}. "
                             "The target's states are broken: check its weights and dtype.")
        for stream in self.streams.values():
            stream.finish()
        arrays = {"input_ids": np.concatenate(self.input_ids), "loss_mask": np.concatenate(self.loss_mask),
                  "offsets": np.cumsum([0, *map(len, self.input_ids)]), "sample_index": np.array(self.sample_index)}
        for name, dtype in SMALL.items():
            values = np.ascontiguousarray(arrays[name], dtype)
            dataset = self.file.create_dataset(name, data=values, track_times=False)
            set_attribute(dataset, "sha256", hashlib.sha256(values).hexdigest())
        set_attribute(self.file, "schema", SCHEMA)
        set_attribute(self.file, "plan", self.plan.hash)
        set_attribute(self.file, "shard", self.index)
        set_attribute(self.file, "encoding", self.plan.encoding)
        set_attribute(self.file, "target", dict(sorted(self.plan.target.items())))  # as a plan read from disk has it
        set_attribute(self.file, "quarantined", json.dumps(self.quarantined))
        if self.splits:
            set_attribute(self.file, "splits", json.dumps(self.splits))
        self.file.close()
        self.guard.check()
        self.guard.file.close()
        publish(self.partial, self.path)

    def __exit__(self, kind, error, _traceback) -> None:
        try:
            if kind is None:
                self._finish()
        except OSError as failure:
            raise self._failed(failure) from failure
        finally:
            self.file.close()
            self.guard.file.close()
            with suppress(OSError):  # where nothing can be removed any more, the reason for that is raised already
                self.partial.unlink(missing_ok=True)
        if kind is not None and issubclass(kind, OSError) and error is self.guard.error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> StoreError:
        folder = self.path.parent
        free = human_bytes(shutil.disk_usage(folder).free) if folder.is_dir() else "unknown"
        return StoreError(f"{self.path}: writing failed: {error}. Free on that disk: {free}; the shard takes up to "
                          f"{human_bytes(self.plan.shard_tokens[self.index] * self.plan.bytes_per_token)}. "
                          "Finished shards are kept: free space, or fix the folder, and start again.")
