"""Reads a hidden-state store: whole samples, fast, from any number of processes and threads."""

import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from torch import Tensor

from dflash_lib.files import human_bytes
from dflash_lib.hidden_states.chunk_filters import RecentChunks
from dflash_lib.hidden_states.encode import EncodedSample, dequantize_fp8
from dflash_lib.hidden_states.plan import ExtractionPlan, describe_differences
from dflash_lib.hidden_states.schema import (
    AUX,
    AUX_SCALES,
    LAST,
    LAST_ROWS,
    SCHEMA,
    SMALL,
    TOPK_IDS,
    TOPK_LOGITS,
    TOPK_LOGSUMEXP,
    StateDataset,
    StoreError,
    from_raw,
    get_attribute,
    has_digest,
    read_raw,
    repair,
    shard_name,
)
from dflash_lib.hidden_states.shard_layout import OpenFile, ShardLayout
from dflash_lib.hidden_states.side_threads import SideThreads

UNREADABLE = (OSError, KeyError, ValueError, RuntimeError)  # what h5py raises for a damaged file, by what is damaged
NUM_OPEN_FILES = 32
NUM_LAYOUTS = 2048  # of shards, kept when their files are closed: 50 kB each where a shard is 12 GB
CACHE_BYTES = 4 << 20  # decoded chunks, of an open store; and HDF5's own cache per dataset: neighbours share a chunk


@dataclass(frozen=True)
class TopLogits:
    """The target's k largest logits at R rows: ids int32 [R, k], logits float32 [R, k] in descending order, logsumexp
    over the whole vocabulary float32 [R]."""

    ids: Tensor
    logits: Tensor
    logsumexp: Tensor

    def __getitem__(self, where) -> "TopLogits":
        """Those of some rows."""
        return TopLogits(self.ids[where], self.logits[where], self.logsumexp[where])


@dataclass(frozen=True)
class StoredSample:
    """input_ids int32 [T]; loss_mask uint8 [T]; aux_hidden_states bfloat16 [T, L, H], of an fp8 store decoded;
    last_hidden_state_prenorm bfloat16 [T, H], or [R, H] at the token rows last_rows int64 [R] where the store has these
    only, None in a store without it; top_logits: in its place, at the same rows. sample_index: row in the prepared
    data."""

    sample_index: int
    input_ids: np.ndarray
    loss_mask: np.ndarray
    aux_hidden_states: Tensor
    last_hidden_state_prenorm: Tensor | None
    last_rows: Tensor | None = None
    top_logits: TopLogits | None = None


@dataclass(frozen=True)
class ShardIndex:
    """offsets int64 [S + 1]; sample_index int64 [S]; quarantined: JSON text of what was left out, with reasons."""

    offsets: np.ndarray
    sample_index: np.ndarray
    quarantined: str


def read_shard_index(store: Path | str, plan: ExtractionPlan, shard: int) -> ShardIndex:
    """Opens a shard, checks that it is whole and belongs to the plan, and returns what it holds.

    Raises FileNotFoundError when it is absent and StoreError when it is damaged or belongs to another plan.
    """
    path = Path(store) / shard_name(shard)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        with h5py.File(path, "r", locking=False) as file:
            schema, plan_hash, number = (get_attribute(file, name) for name in ("schema", "plan", "shard"))
            index = ShardIndex(file["offsets"][:], file["sample_index"][:], str(get_attribute(file, "quarantined")))
            num_tokens = file[AUX].shape[0]
            if not all(has_digest(file[name], hashlib.sha256(getattr(index, name))) for name in ("offsets",
                                                                                               "sample_index")):
                raise ValueError("offsets or sample_index: not what was written")
            if len(index.offsets) != len(index.sample_index) + 1 or index.offsets[-1] != num_tokens:
                raise ValueError(f"its offsets do not fit its {num_tokens} tokens")
    except UNREADABLE as error:
        raise StoreError(f"{path}: damaged or cut off ({error}). Start the extraction again: it replaces this shard "
                         "and keeps the others.") from error
    if (schema, plan_hash, number) != (SCHEMA, plan.hash, shard):
        raise StoreError(f"{path}: belongs to another plan (schema {schema}, plan {str(plan_hash)[:12]}, shard "
                         f"{number}; expected {SCHEMA}, {plan.hash[:12]}, {shard}). Was it copied from another store?")
    return index


def missing_shards(store: Path | str, plan: ExtractionPlan) -> tuple[list[int], dict[int, str]]:
    """Shards that have to be extracted: absent ones and damaged ones; and, for the damaged, what is wrong."""
    missing, damaged = [], {}
    for shard in range(len(plan.shards)):
        try:
            read_shard_index(store, plan, shard)
        except FileNotFoundError:
            missing.append(shard)
        except StoreError as error:
            missing.append(shard)
            damaged[shard] = str(error)
    return missing, damaged


def describe_last_state(plan: ExtractionPlan) -> str:
    """Where and how the last hidden state is stored, in words."""
    return {"all": "before the final norm, of every token",
            "supervised": "before the final norm, at the rows that predict a supervised token",
            "topk": f"as the target's {plan.topk} largest logits at the rows that predict a supervised token",
            "none": "not stored"}[plan.last_state]


class HiddenStateStore:
    """A store opened for reading. Files are opened by the process that reads from them, never carried over a fork.

    Any number of threads may use one store: what it keeps is looked up under a lock, and samples are read outside of
    it, at the same time; those that must come through HDF5, which has a lock of its own, one after another. A file that
    is being read from stays open until it was, though another thread closes the store or opens many others.
    decode_threads: over so many the compressed chunks of a sample are spread; what is read is the same.
    """

    def __init__(self, folder: Path, plan: ExtractionPlan, shards: dict[int, ShardIndex], decode_threads: int = 1):
        self.folder, self.plan, self.shards, self.decode_threads = folder, plan, shards, decode_threads
        self._where = {int(index): (shard, row) for shard, content in shards.items()
                       for row, index in enumerate(content.sample_index)}
        self._layouts: OrderedDict[int, ShardLayout] = OrderedDict()
        self._checked: set[int] = set()
        self._start_anew()

    def _start_anew(self) -> None:
        """Holds no file, nor anything else that is this process's alone."""
        self._files: OrderedDict[int, h5py.File] = OrderedDict()
        self._fds: OrderedDict[int, OpenFile] = OrderedDict()
        self._recent, self._threads = RecentChunks(CACHE_BYTES), SideThreads(self.decode_threads)
        self._lock = threading.RLock()
        self._pid = os.getpid()

    @classmethod
    def open(cls, folder: Path | str, allow_incomplete: bool = False, decode_threads: int = 1) -> "HiddenStateStore":
        """Opens the store in `folder`.

        Raises StoreError when it has no plan, when shards are damaged, and, unless `allow_incomplete`, when shards are
        missing: training on a part would go unnoticed.
        """
        folder = Path(folder)
        plan = ExtractionPlan.load(folder)
        shards, missing = {}, []
        for shard in range(len(plan.shards)):
            try:
                shards[shard] = read_shard_index(folder, plan, shard)
            except FileNotFoundError:
                missing.append(shard)
        if missing and not allow_incomplete:
            shown = ", ".join(map(shard_name, missing[:3])) + (", ..." if len(missing) > 3 else "")
            raise StoreError(f"{folder}: {len(missing)} of {len(plan.shards)} shards are missing ({shown}). "
                             "Start the extraction again (04_extract): it does what is missing.")
        return cls(folder, plan, shards, decode_threads)

    def require(self, target: dict[str, str] | None = None, target_layer_ids: Sequence[int] | None = None,
                data_fingerprint: str | None = None) -> None:
        """Raises StoreError, with the differences shown, unless the store was made from this target (its identity),
        these layer ids and these prepared rows; None = do not ask."""
        found = {}
        if target is not None:
            found |= {f"target.{key}": (self.plan.target.get(key), target.get(key))
                      for key in ("weights", "config", "tokenizer") if self.plan.target.get(key) != target.get(key)}
        if target_layer_ids is not None and list(target_layer_ids) != self.plan.target_layer_ids:
            found["target_layer_ids"] = (self.plan.target_layer_ids, list(target_layer_ids))
        if data_fingerprint is not None and data_fingerprint != self.plan.data["fingerprint"]:
            found["data.fingerprint"] = (self.plan.data["fingerprint"], data_fingerprint)
        if found:
            raise StoreError(f"{self.folder}: made for something else than is asked for:\n"
                             f"{describe_differences(found, 'the store has', 'asked for')}\n"
                             "Use another store_dir, or extract anew.")

    @property
    def sample_indices(self) -> list[int]:
        """Sample indices (rows of the prepared data) that the store holds, ascending."""
        return sorted(self._where)

    def in_file_order(self, sample_indices: Sequence[int]) -> list[int]:
        """The same samples in the order in which the shards hold them: who goes through many opens each file once."""
        return sorted(sample_indices, key=self._locate)

    @property
    def num_samples(self) -> int:
        return len(self._where)

    @property
    def num_quarantined(self) -> int:
        """Samples that the extraction left out because their states were unusable."""
        return sum(len(json.loads(content.quarantined)) for content in self.shards.values())

    @property
    def target_layer_ids(self) -> list[int]:
        return list(self.plan.target_layer_ids)

    @property
    def hidden_size(self) -> int:
        return self.plan.hidden_size

    def lengths(self) -> np.ndarray:
        """Tokens of each sample, int64, in the order of `sample_indices`."""
        return np.array([self.length(index) for index in self.sample_indices], np.int64)

    def length(self, sample_index: int) -> int:
        """Tokens of one sample."""
        shard, row = self._locate(sample_index)
        offsets = self.shards[shard].offsets
        return int(offsets[row + 1] - offsets[row])

    def _locate(self, sample_index: int) -> tuple[int, int]:
        if sample_index not in self._where:
            raise StoreError(f"{self.folder}: holds no sample {sample_index}")
        return self._where[sample_index]

    def file(self, shard: int) -> h5py.File:
        """The file of a shard, opened by HDF5; the least recently used ones are closed again, by whichever thread."""
        return self._kept("_files", shard, NUM_OPEN_FILES, lambda path: h5py.File(
            path, "r", locking=False, rdcc_nbytes=CACHE_BYTES), h5py.File.close)

    def _fd(self, shard: int) -> OpenFile:
        """The file of a shard, opened by the system. It is closed when nobody has it any more, neither this store nor
        a thread that reads from it."""
        return self._kept("_fds", shard, NUM_OPEN_FILES, OpenFile)

    def _layout(self, shard: int) -> ShardLayout:
        """The layout of a shard's file, whose small datasets were once compared with their checksums by this process.
        The states need no such look: each sample, or each chunk, has a checksum that is compared at every read."""
        def look(path: Path) -> ShardLayout:
            file = self.file(shard)
            if shard not in self._checked:
                small = [*SMALL, *(stored.name for stored in self.plan.datasets if stored.name == LAST_ROWS)]
                wrong = [name for name in small if not has_digest(file[name], hashlib.sha256(file[name][:]))]
                if wrong:
                    raise StoreError(f"{path}: {', '.join(wrong)}: not what was written. {repair(path.name)}")
                self._checked.add(shard)
            return ShardLayout(path, self.plan.datasets, self.shards[shard].offsets)

        return self._kept("_layouts", shard, NUM_LAYOUTS, look)

    def _kept(self, where: str, shard: int, num: int, make: Callable[[Path], Any],
              drop: Callable[[Any], None] = lambda _kept: None) -> Any:
        """What `make` gives for a shard's file; the newest `num` are kept in the attribute `where`, others dropped."""
        with self._locked():
            kept = getattr(self, where)
            if shard not in kept:
                path = self.folder / shard_name(shard)
                try:
                    kept[shard] = make(path)
                except StoreError:
                    raise
                except UNREADABLE as error:
                    raise StoreError(f"{path}: cannot be opened ({error}). {repair(path.name)}") from error
                if len(kept) > num:
                    drop(kept.popitem(last=False)[1])
            kept.move_to_end(shard)
            return kept[shard]

    def _locked(self) -> threading.RLock:
        """The lock on what is kept. A process that was forked from this one forgets the files, and a lock that another
        thread may have held at that moment and would never let go of there."""
        if os.getpid() != self._pid:
            self._start_anew()
        return self._lock

    def read_tokens(self, sample_index: int) -> tuple[np.ndarray, np.ndarray]:
        """input_ids int32 [T] and loss_mask uint8 [T] of one sample, without its states."""
        shard, row = self._locate(sample_index)
        start, stop = self.shards[shard].offsets[row:row + 2].tolist()
        layout = self._layout(shard)
        with self._named(shard, sample_index):
            file = self._fd(shard)
            return tuple(layout.read_small(file.fd, name, start, stop) for name in ("input_ids", "loss_mask"))

    def read_encoded(self, sample_index: int) -> EncodedSample:
        """The states of one sample as they are stored, rows of the last state numbered within it. Raises StoreError
        when the store lacks it or its bytes cannot be read."""
        shard, row = self._locate(sample_index)
        layout = self._layout(shard)
        with self._named(shard, sample_index):
            file, threads = self._fd(shard), self._threads
            tensors = {stored.name: from_raw(
                layout.read_rows(file.fd, stored, first, end, row, self._recent, threads)
                if layout.is_direct(stored) else self._read_through_hdf5(shard, stored, first, end))
                for stored, first, end in layout.ranges(row)}
        if LAST_ROWS in tensors:
            tensors[LAST_ROWS] = tensors[LAST_ROWS] - int(layout.offsets[row])
        return EncodedSample(tensors)

    def _read_through_hdf5(self, shard: int, stored: StateDataset, first: int, end: int) -> np.ndarray:
        """Raw rows of a dataset; under the lock, since another thread may close the file otherwise."""
        with self._locked():
            return read_raw(self.file(shard)[stored.name], first, end, stored.dtype)

    @contextmanager
    def _named(self, shard: int, sample_index: int) -> Iterator[None]:
        """Whatever goes wrong inside names the file and the sample, and says what to do."""
        try:
            yield
        except UNREADABLE as error:  # StoreError is a ValueError
            raise StoreError(f"{self.folder / shard_name(shard)}: sample {sample_index} cannot be read ({error}). "
                             f"{repair(shard_name(shard))}") from error

    def read_ahead(self, sample_indices: Sequence[int]) -> None:
        """Has the system fetch these samples from the disk meanwhile; their `read` then does not wait for it. A hint:
        what is wrong with them, `read` will say."""
        for index in sample_indices:
            shard, row = self._locate(index)
            with suppress(*UNREADABLE):
                layout, file = self._layout(shard), self._fd(shard)
                layout.read_ahead(file.fd, row)

    def read(self, sample_index: int) -> StoredSample:
        """One whole sample, decoded. Raises StoreError when the store lacks it or its bytes cannot be read."""
        input_ids, loss_mask = self.read_tokens(sample_index)
        tensors = self.read_encoded(sample_index).tensors
        aux = tensors[AUX]
        if AUX_SCALES in tensors:
            aux = dequantize_fp8(aux, tensors[AUX_SCALES]).bfloat16()
        top = TopLogits(*(tensors[name] for name in (TOPK_IDS, TOPK_LOGITS, TOPK_LOGSUMEXP))) if (
            TOPK_IDS in tensors) else None
        return StoredSample(sample_index, input_ids, loss_mask, aux, tensors.get(LAST), tensors.get(LAST_ROWS), top)

    def close(self) -> None:
        """Closes the files; the store can still be read from, which opens them again."""
        with self._locked():
            while self._files:
                self._files.popitem()[1].close()
            self._fds.clear()
            self._threads = SideThreads(self.decode_threads)  # the others end when no read has them any more

    def __enter__(self) -> "HiddenStateStore":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __getstate__(self) -> dict:
        own = ("_files", "_fds", "_recent", "_threads", "_lock")  # of this process: a spawned worker opens its own
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._start_anew()

    def describe(self) -> str:
        """What the store holds, as a few lines of text."""
        plan = self.plan
        on_disk = sum((self.folder / shard_name(shard)).stat().st_size for shard in self.shards)
        lengths = self.lengths()
        supervised = sum(int(self.file(shard)["loss_mask"][:].sum()) for shard in self.shards)
        tokens = int(lengths.sum())
        rows = [
            ("store", str(self.folder)),
            ("target", f"{plan.target['name']} ({plan.target['dtype']}, weights {plan.target['weights'][:12]}), "
                       f"{plan.num_hidden_layers} layers of {plan.hidden_size}"),
            ("aux hidden states", f"outputs of layers {plan.target_layer_ids}"),
            ("last hidden state", describe_last_state(plan)),
            ("encoding", plan.encoding),
            ("samples", f"{self.num_samples} of {plan.num_samples}, {lengths.min()} to "
                        f"{lengths.max()} tokens" if len(lengths) else "none yet"),
            ("tokens", f"{tokens}, {supervised} supervised"),
            ("shards", f"{len(self.shards)} of {len(plan.shards)}"),
            ("on disk", f"{human_bytes(on_disk)}, {on_disk / max(tokens, 1):.0f} bytes a token "
                        f"(uncompressed {plan.bytes_per_token:.0f})"),
            ("file locks", "none needed: HDF5's own are off, and nothing uses flock"),
            ("data", f"fingerprint {plan.data['fingerprint'][:12]}"), ("plan", plan.hash[:12]),
        ]
        return "\n".join(f"{name:<18} {value}" for name, value in rows)
