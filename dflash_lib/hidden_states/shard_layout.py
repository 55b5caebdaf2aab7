"""Where a shard's rows lie in its file, so that a sample is read by the shortest way to its bytes.

Rows of an uncompressed dataset are read from the file itself, at the places that HDF5 names for their chunks, and
compared with the checksum that the writer left of each sample: HDF5's own way reads, and sums up, the whole chunks
around them, 2 MiB each, for samples that may be smaller (measured: 4 times slower than a safetensors file a sample,
where this is 4 times faster). Nor has a file to be opened by HDF5 again once its layout is known, which would take
longer than many a sample. Compressed rows, and those of stores without such checksums, come through HDF5, which
compares each chunk's.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import h5py
import numpy as np
import xxhash

from dflash_lib.hidden_states.schema import LAST_ROWS, RAW_TYPES, SAMPLE_HASHES, SMALL, StateDataset, StoreError


class _Rows:
    """Places of a dataset's rows. chunks: int64 [chunks], the first byte of each in the file; sizes: int64 [chunks],
    bytes there; hashes: uint64 [samples], None where rows must come through HDF5."""

    def __init__(self, dataset: h5py.Dataset, stored: StateDataset):
        self.name, self.row_bytes, self.num_rows = stored.name, stored.row_bytes, dataset.shape[0]
        self.chunk_rows = dataset.chunks[0]
        hashes = None if stored.zstd else dataset.attrs.get(SAMPLE_HASHES)
        self.hashes = None if hashes is None else np.asarray(hashes)
        found = {}
        dataset.id.chunk_iter(lambda info: found.__setitem__(
            info.chunk_offset[0] // self.chunk_rows, (info.byte_offset, info.size)))
        if sorted(found) != list(range(-(-self.num_rows // self.chunk_rows))):
            raise OSError(f"{self.name}: has {len(found)} chunks for {self.num_rows} rows")
        self.chunks, self.sizes = (np.array([found[i][what] for i in range(len(found))], np.int64) for what in (0, 1))

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """First byte and number of bytes of each run of rows start:stop; of compressed ones their whole chunks."""
        while start < stop:
            number, row = divmod(start, self.chunk_rows)
            num = min(self.chunk_rows - row, stop - start)
            offset = int(self.chunks[number])
            yield ((offset, int(self.sizes[number])) if self.hashes is None else
                   (offset + row * self.row_bytes, num * self.row_bytes))
            start += num


class ShardLayout:
    """What has to be known of a shard's file to read from it without HDF5; holds no file. Where states lie is looked up
    when the first are asked for: about 8 bytes for each chunk and each sample.

    opened: gives the shard's file, opened by HDF5; offsets: int64 [S + 1] of the shard's samples. Raises OSError and
    KeyError for a damaged file, now or later.
    """

    def __init__(self, opened: Callable[[], h5py.File], datasets: Sequence[StateDataset], offsets: np.ndarray):
        self.opened, self.datasets, self.offsets = opened, datasets, offsets
        file = opened()
        self.small = {name: (file[name].id.get_offset(), np.dtype(dtype)) for name, dtype in SMALL.items()}

    @cached_property
    def rows(self) -> dict[str, _Rows]:
        """Places of the rows of each dataset of states."""
        file = self.opened()
        return {stored.name: _Rows(file[stored.name], stored) for stored in self.datasets}

    @cached_property
    def last_offsets(self) -> np.ndarray:
        """int64 [S + 1]: which rows of the last state are whose, where not every token has one."""
        return np.searchsorted(self.opened()[LAST_ROWS][:], self.offsets)

    def ranges(self, sample: int) -> Iterator[tuple[StateDataset, int, int]]:
        """The datasets of states, with the rows in each that belong to the shard's sample number `sample`."""
        for stored in self.datasets:
            offsets = self.offsets if stored.per_token else self.last_offsets
            start, stop = offsets[sample:sample + 2].tolist()
            yield stored, start, stop

    def is_direct(self, stored: StateDataset) -> bool:
        """Whether `read_rows` can read a dataset's rows."""
        return self.rows[stored.name].hashes is not None

    def read_rows(self, fd: int, stored: StateDataset, start: int, stop: int, sample: int) -> np.ndarray:
        """Raw rows start:stop of a dataset, which are those of sample number `sample`, from the opened file.

        Raises OSError when they cannot be read, StoreError when they are not what was written.
        """
        rows = self.rows[stored.name]
        if stop > rows.num_rows:
            raise OSError(f"{stored.name}: rows {start} to {stop} of {rows.num_rows}")
        raw = np.empty((stop - start, *stored.row_shape), RAW_TYPES[stored.dtype][1])
        _read_into(fd, raw, rows.spans(start, stop), stored.name)
        if xxhash.xxh3_64_intdigest(raw) != int(rows.hashes[sample]):
            raise StoreError(f"{stored.name}: the rows of its sample {sample} are not what was written")
        return raw

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
