"""Undoes HDF5's filters on one chunk, outside HDF5.

HDF5 works on one chunk at a time, under a lock of the whole process: a second thread that reads through it, to train
ahead or to validate, waits for the first. Here any number of threads decode chunks at the same time, each step lets
other threads run (NumPy's and Arrow's own loops), and the shuffle is undone for the rows that are asked for only. The
filters are those of `schema.create_states`: shuffle (where a value has several bytes), Zstd, Fletcher-32; a chunk's
filter mask is obeyed.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache

import h5py
import numpy as np

from dflash_lib.hidden_states.schema import RAW_TYPES, ZSTD_FILTER, StateDataset

CHECKSUM_BYTES = 4  # a Fletcher-32 stands behind its chunk, little-endian
SUM_WORDS = 1024  # 16-bit words that are summed up together: their sum, and that of MOST_BYTES in columns, fit 32 bits
MOST_BYTES = 64 << 20
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def fletcher32(data: np.ndarray) -> int:
    """HDF5's Fletcher-32 (H5_checksum_fletcher32) of uint8 [n], at most MOST_BYTES: 16-bit words, the first byte of
    each on top, a last odd byte on top of a zero; sum1 = w1 + w2 + ..., sum2 = the sum of sum1 after each word, both
    with end-around carry, so that only no words or zeros alone give 0; result sum2 << 16 | sum1.

    With that carry, sums are numbers modulo 65535, and swapping the bytes of all words multiplies them by 256: the
    words are summed as the machine has them, and the two sums are swapped in the end.
    """
    if len(data) > MOST_BYTES:
        raise ValueError(f"fletcher32: {len(data)} bytes; at most {MOST_BYTES} can be summed up")
    if len(data) % 2:
        data = np.append(data, np.uint8(0))
    words = data.view("<u2")
    num, whole = len(words), len(words) // SUM_WORDS * SUM_WORDS
    grid, rest = words[:whole].reshape(-1, SUM_WORDS), words[whole:].astype(np.int64)
    by_row, by_column = (grid.sum(axis=axis, dtype=np.uint32).astype(np.int64) for axis in (1, 0))
    grid_sum = int(by_row.sum())
    sum1 = grid_sum + int(rest.sum())
    # word i counts num - i times: with i = row * SUM_WORDS + column that is a sum over rows and one over columns
    sum2 = (num * grid_sum - SUM_WORDS * int(np.arange(len(grid)) @ by_row) - int(np.arange(SUM_WORDS) @ by_column)
            + int(np.arange(len(rest), 0, -1) @ rest))
    return _carried(sum2) << 16 | _carried(sum1)


def _carried(total: int) -> int:
    """A sum of words in the machine's order as 16 bits in HDF5's: 0xFFFF stands for multiples of 65535 other than 0."""
    return (total * 256 - 1) % 0xFFFF + 1 if total else 0


@cache
def _zstd():
    import pyarrow  # here: it takes 0.1 s, and is needed for compressed stores only

    return pyarrow.Codec("zstd")


def _content_size(frame: memoryview) -> int | None:
    """How many bytes a Zstd frame says that it holds (RFC 8878, 3.1.1.1), None when it does not say.

    Arrow fails where the content is another than that, but leaves what is missing to a larger buffer undefined.
    """
    if len(frame) < 18 or bytes(frame[:4]) != ZSTD_MAGIC:
        return None
    flags = frame[4]
    single, size = flags >> 5 & 1, (0, 2, 4, 8)[flags >> 6]
    size = size or single
    start = 5 + (1 - single) + (0, 1, 2, 4)[flags & 3]
    return int.from_bytes(frame[start:start + size], "little") + (256 if size == 2 else 0) if size else None


@dataclass(frozen=True)
class Decoded:
    """A chunk's raw bytes; shuffled: the first bytes of all its values, then all second ones, and so on."""

    data: memoryview
    shuffled: bool


@dataclass(frozen=True)
class ChunkFilters:
    """What HDF5 did to the chunks of a dataset. num_bytes: of a chunk's raw values; value_bytes: of one; filters: their
    HDF5 numbers, in the order in which they were applied."""

    num_bytes: int
    value_bytes: int
    filters: tuple[int, ...]

    @classmethod
    def of(cls, dataset: h5py.Dataset, stored: StateDataset) -> "ChunkFilters | None":
        """None for a dataset that is not as `schema.create_states` makes a compressed one: for HDF5 itself to read."""
        settings, value_bytes = dataset.id.get_create_plist(), stored.dtype.itemsize
        found = [settings.get_filter(i) for i in range(settings.get_nfilters())]
        num_bytes = int(np.prod(dataset.chunks, dtype=np.int64)) * value_bytes
        wanted = (*([h5py.h5z.FILTER_SHUFFLE] if value_bytes > 1 else []), ZSTD_FILTER, h5py.h5z.FILTER_FLETCHER32)
        as_written = (tuple(code for code, *_ in found) == wanted and num_bytes <= MOST_BYTES // 2
                      and dataset.chunks[1:] == dataset.shape[1:] == stored.row_shape
                      and dataset.id.get_type().equal(RAW_TYPES[stored.dtype][0]())
                      and (value_bytes == 1 or tuple(found[0][2])[:1] == (value_bytes,)))
        return cls(num_bytes, value_bytes, wanted) if as_written else None

    def check(self, chunk: np.ndarray, mask: int, where: str) -> np.ndarray:
        """What a chunk's checksum covers, of its bytes in the file (uint8), once compared with that as HDF5 does. mask:
        the chunk's filter mask, bit i of which says that filter i was left out; where: for messages. Raises OSError."""
        if self._skips(mask, h5py.h5z.FILTER_FLETCHER32):
            return chunk
        covered, tail = chunk[:-CHECKSUM_BYTES], chunk[-CHECKSUM_BYTES:].tobytes()
        swapped = bytes((tail[1], tail[0], tail[3], tail[2])) if len(tail) == CHECKSUM_BYTES else b""
        # HDF5 before 1.6.3 swapped the bytes on such machines, and every later one takes both
        if fletcher32(covered).to_bytes(CHECKSUM_BYTES, "little") not in (tail, swapped):
            raise OSError(f"{where}: its bytes do not fit their checksum (Fletcher-32)")
        return covered

    def decode(self, covered: np.ndarray, mask: int, where: str) -> Decoded:
        """The values of a chunk out of what `check` gave. Raises OSError."""
        data = memoryview(covered)
        if not self._skips(mask, ZSTD_FILTER):
            if _content_size(data) != self.num_bytes:
                raise OSError(f"{where}: no Zstd frame of {self.num_bytes} bytes")
            data = memoryview(_zstd().decompress(data, self.num_bytes))  # raises OSError as well
        if len(data) != self.num_bytes:
            raise OSError(f"{where}: has {len(data)} bytes in the place of {self.num_bytes}")
        return Decoded(data, not self._skips(mask, h5py.h5z.FILTER_SHUFFLE))

    def _skips(self, mask: int, code: int) -> bool:
        return code not in self.filters or bool(mask >> self.filters.index(code) & 1)

    def copy_rows(self, decoded: Decoded, first: int, rows: np.ndarray) -> None:
        """Fills `rows` (contiguous, of the dataset's raw dtype) with those of a chunk from its row `first` on."""
        values = rows.reshape(-1)
        start = first * (values.size // len(rows))
        data = np.frombuffer(decoded.data, np.uint8)
        if not decoded.shuffled:
            values.view(np.uint8)[:] = data[start * self.value_bytes:][:values.nbytes]
            return
        planes = data.reshape(self.value_bytes, -1)[:, start:start + values.size]
        if values.dtype == np.uint16:  # three times as fast as the general way
            np.copyto(values, planes[1])
            np.left_shift(values, 8, out=values)
            np.bitwise_or(values, planes[0], out=values)
            return
        by_byte = values.view(np.uint8).reshape(-1, self.value_bytes)
        for byte, plane in enumerate(planes):
            by_byte[:, byte] = plane


class RecentChunks:
    """The most recently used decoded chunks, at most `num_bytes` of them: neighbouring samples share a chunk.

    Each is kept with the checksum that stood behind it in the file: a reader reads and compares the bytes in the file
    all the same, and is spared the decompression only. May be used by several threads.
    """

    def __init__(self, num_bytes: int):
        self.num_bytes, self.used = num_bytes, 0
        self._chunks: OrderedDict[tuple, tuple[bytes, Decoded]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple, checksum: bytes) -> Decoded | None:
        """The chunk that was put there with this checksum."""
        with self._lock:
            found = self._chunks.get(key)
            if found is None or found[0] != checksum:
                return None
            self._chunks.move_to_end(key)
            return found[1]

    def put(self, key: tuple, checksum: bytes, chunk: Decoded) -> None:
        """Keeps a chunk, and lets go of the ones that were used longest ago."""
        with self._lock:
            if key in self._chunks:
                self.used -= len(self._chunks.pop(key)[1].data)
            self._chunks[key] = (checksum, chunk)
            self.used += len(chunk.data)
            while self.used > self.num_bytes:
                self.used -= len(self._chunks.popitem(last=False)[1][1].data)
