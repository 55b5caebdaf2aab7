"""Where a shard's rows lie in its file, so that a sample is read by the shortest way to its bytes.

Rows of an uncompressed dataset are read from the file itself, at the places that HDF5 names for their chunks, and
compared with the checksum that the writer left of each sample: HDF5's own way reads, and sums up, the whole chunks
around them, 2 MiB each, for samples that may be smaller (measured: 4 times slower than a safetensors file a sample,
where this is 4 times faster). Nor has a file to be opened by HDF5 again once its layout is known, which would take
longer than many a sample. Compressed rows are read in the same way, whole chunks with the checksum of each, and decoded
here (`chunk_filters`), since HDF5 does that for one thread at a time only. Datasets that are not as this library writes
them, and uncompressed ones of stores without checksums of samples, come through HDF5, which compares each chunk's.
"""

import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import h5py
import numpy as np
import xxhash

from dflash_lib.hidden_states.chunk_filters import CHECKSUM_BYTES, ChunkFilters, RecentChunks
from dflash_lib.hidden_states.schema import LAST_ROWS, RAW_TYPES, SAMPLE_HASHES, SMALL, StateDataset, StoreError
from dflash_lib.hidden_states.side_threads import SideThreads


class _Rows:
    """Places of a dataset's rows. chunks: int64 [chunks], the first byte of each in the file; sizes: int64 [chunks],
    bytes there; masks: int64 [chunks], which filters were left out; hashes: uint64 [samples] of uncompressed rows,
    filters of compressed ones, both None where rows must come through HDF5."""

    def __init__(self, dataset: h5py.Dataset, stored: StateDataset):
        self.name, self.row_bytes, self.num_rows = stored.name, stored.row_bytes, dataset.shape[0]
        self.chunk_rows = dataset.chunks[0]
        hashes = None if stored.zstd else dataset.attrs.get(SAMPLE_HASHES)
        self.hashes = None if hashes is None else np.asarray(hashes)
        self.filters = ChunkFilters.of(dataset, stored) if stored.zstd else None
        found = {}
        dataset.id.chunk_iter(lambda info: found.__setitem__(
            info.chunk_offset[0] // self.chunk_rows, (info.byte_offset, info.size, info.filter_mask)))
        if sorted(found) != list(range(-(-self.num_rows // self.chunk_rows))):
            raise OSError(f"{self.name}: has {len(found)} chunks for {self.num_rows} rows")
        self.chunks, self.sizes, self.masks = np.array([found[i] for i in range(len(found))], np.int64).reshape(-1, 3).T

    def parts(self, start: int, stop: int) -> list[tuple[int, int, int, int]]:
        """The chunks that hold rows start:stop: number, first row in it, number of rows of it, and how many came before
        these."""
        found, first = [], start
        while start < stop:
            number, row = divmod(start, self.chunk_rows)
            num = min(self.chunk_rows - row, stop - start)
            found.append((number, row, num, start - first))
            start += num
        return found

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """First byte and number of bytes of each run of rows start:stop; of compressed ones their whole chunks."""
        for number, row, num, _ in self.parts(start, stop):
            yield self.span(number) if self.hashes is None else (
                int(self.chunks[number]) + row * self.row_bytes, num * self.row_bytes)

    def span(self, number: int) -> tuple[int, int]:
        """First byte and number of bytes of a whole chunk."""
        return int(self.chunks[number]), int(self.sizes[number])


class OpenFile:
    """A file opened for reading, closed with its owner. Raises OSError."""

    def __init__(self, path: Path):
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self, _close=os.close) -> None:  # a default: at the interpreter's end `os` may be gone by now
        """Closes it; once is enough."""
        if getattr(self, "fd", -1) >= 0:
            _close(self.fd)
            self.fd = -1

    __del__ = close


class ShardLayout:
    """What has to be known of a shard's file to read from it without HDF5; holds no file. Where states lie is looked up
    when the first are asked for: about 8 bytes for each chunk and each sample.

    offsets: int64 [S + 1] of the shard's samples. For a damaged file h5py raises, now or later, whatever it does.
    """

    def __init__(self, path: Path, datasets: Sequence[StateDataset], offsets: np.ndarray):
        self.path, self.datasets, self.offsets = path, datasets, offsets
        with self._opened() as file:
            self.small = {name: (file[name].id.get_offset(), np.dtype(dtype)) for name, dtype in SMALL.items()}

    def _opened(self) -> h5py.File:
        return h5py.File(self.path, "r", locking=False)

    @cached_property
    def rows(self) -> dict[str, _Rows]:
        """Places of the rows of each dataset of states."""
        with self._opened() as file:
            return {stored.name: _Rows(file[stored.name], stored) for stored in self.datasets}

    @cached_property
    def last_offsets(self) -> np.ndarray:
        """int64 [S + 1]: which rows of the last state are whose, where not every token has one."""
        with self._opened() as file:
            return np.searchsorted(file[LAST_ROWS][:], self.offsets)

    def ranges(self, sample: int) -> Iterator[tuple[StateDataset, int, int]]:
        """The datasets of states, with the rows in each that belong to the shard's sample number `sample`."""
        for stored in self.datasets:
            offsets = self.offsets if stored.per_token else self.last_offsets
            start, stop = offsets[sample:sample + 2].tolist()
            yield stored, start, stop

    def is_direct(self, stored: StateDataset) -> bool:
        """Whether `read_rows` can read a dataset's rows."""
        rows = self.rows[stored.name]
        return rows.hashes is not None or rows.filters is not None

    def read_rows(self, fd: int, stored: StateDataset, start: int, stop: int, sample: int,
                  recent: RecentChunks, threads: SideThreads) -> np.ndarray:
        """Raw rows start:stop of a dataset, which are those of sample number `sample`, from the opened file. recent:
        chunks that need not be decompressed again; threads: over which compressed ones are spread.

        Raises OSError when they cannot be read, OSError or StoreError when they are not what was written.
        """
        rows = self.rows[stored.name]
        if stop > rows.num_rows:
            raise OSError(f"{stored.name}: rows {start} to {stop} of {rows.num_rows}")
        raw = np.empty((stop - start, *stored.row_shape), RAW_TYPES[stored.dtype][1])
        if rows.filters is not None:
            threads.each(lambda parts: self._read_chunks(fd, rows, parts, raw, recent), rows.parts(start, stop))
            return raw
        _read_into(fd, raw, rows.spans(start, stop), stored.name)
        if xxhash.xxh3_64_intdigest(raw) != int(rows.hashes[sample]):
            raise StoreError(f"{stored.name}: the rows of its sample {sample} are not what was written")
        return raw

    def _read_chunks(self, fd: int, rows: _Rows, parts: list[tuple[int, int, int, int]], raw: np.ndarray,
                     recent: RecentChunks) -> None:
        """Fills `raw` with compressed rows, of `_Rows.parts`. The bytes in the file are read and compared with their
        checksum each time, of chunks too whose values are still there."""
        for number, row, num, to in parts:
            (offset, size), mask, where = rows.span(number), int(rows.masks[number]), f"{rows.name}, chunk {number}"
            chunk = np.empty(size, np.uint8)
            _read_into(fd, chunk, [(offset, size)], rows.name)
            covered = rows.filters.check(chunk, mask, where)
            key, checksum = (self.path.name, rows.name, number), chunk[-CHECKSUM_BYTES:].tobytes()
            decoded = recent.get(key, checksum)
            if decoded is None:
                decoded = rows.filters.decode(covered, mask, where)
                recent.put(key, checksum, decoded)
            rows.filters.copy_rows(decoded, row, raw[to:to + num])

    def read_small(self, fd: int, name: str, start: int, stop: int) -> np.ndarray:
        """Values start:stop of one of the small datasets, from the opened file. Raises OSError."""
        offset, dtype = self.small[name]
        values = np.empty(stop - start, dtype)
        _read_into(fd, values, [(offset + start * dtype.itemsize, values.nbytes)], name)
        return values

    def read_ahead(self, fd: int, sample: int) -> None:
        """Has the system fetch a sample's states from the disk, and does not wait for them."""
        if hasattr(os, "posix_fadvise"):  # macOS has none
            for stored, start, stop in self.ranges(sample):
                for offset, size in self.rows[stored.name].spans(start, stop):
                    os.posix_fadvise(fd, offset, size, os.POSIX_FADV_WILLNEED)


def _read_into(fd: int, values: np.ndarray, spans, name: str) -> None:
    """Fills a contiguous array with the bytes at `spans`, one after another."""
    left = memoryview(values.reshape(-1).view(np.uint8))
    for offset, size in spans:
        while size:
            num = os.preadv(fd, [left[:size]], offset)
            if not num:
                raise OSError(f"{name}: the file ends before its rows do")
            left, offset, size = left[num:], offset + num, size - num
