"""Schema 1 of the hidden-state store: names, encodings, and the true bfloat16 datatype in HDF5.

The bfloat16 datatype is an IEEE float32 cut to 16 bits, described in the file itself, so that any HDF5 tool shows
numbers. The library passes the same type as memory type and thereby moves raw uint16 without a conversion (6 GB/s
against 22 MB/s through HDF5's own). float8 is e4m3 described in the same way; see `FP8_LARGEST`.

Legend of shapes: T tokens of a sample, N tokens of a shard, S samples of a shard, L tapped layers, H hidden size,
R rows of the last state.
"""

import json
from dataclasses import dataclass
from typing import Any

import h5py
import hdf5plugin  # noqa: F401  registers the Zstd filter with HDF5
import numpy as np
import torch
from torch import Tensor

SCHEMA = 1
CHUNK_BYTES = 2 << 20  # a chunk holds whole token rows and about this much
ZSTD_CHUNK_BYTES = 256 << 10  # a reader of one sample decompresses whole chunks
ZSTD_FILTER = 32015
ZSTD_LEVEL = 1
INFINITE = 0x7F80  # bf16 bits of infinity; a NaN is above
AUX = "aux_hidden_states"
AUX_SCALES = "aux_scales"
LAST = "last_hidden_state_prenorm"
LAST_ROWS = "last_rows"
TOPK_IDS, TOPK_LOGITS, TOPK_LOGSUMEXP = "topk_ids", "topk_logits", "topk_logsumexp"
SAMPLE_HASHES = "sample_xxh3"  # attribute of an uncompressed dataset of states: XXH3 64 of each sample's raw rows
LAST_STATES = ("all", "supervised", "topk", "none")
FP8 = torch.float8_e4m3fn
# The largest value of an e4m3 with infinities, which is what HDF5 can describe: the 256 to 448 that PyTorch's
# float8_e4m3fn has beyond it would be infinity and NaN to every HDF5 tool.
FP8_LARGEST = 240.0
FP8_LARGEST_CODE = 0x77
SMALL = {"input_ids": np.int32, "loss_mask": np.uint8, "offsets": np.int64, "sample_index": np.int64}


class StoreError(ValueError):
    """A store that cannot be written, read or used; the message says which file, what is wrong and what to do."""


@dataclass(frozen=True)
class Encoding:
    """name: as plans call it; fp8: the aux states are e4m3 with a float32 scale per token and layer (the last state is
    bf16 in every encoding); zstd: behind the shuffle filter; least_share: least part of the raw bytes that the data has
    been seen to take, for the check of free space."""

    name: str
    fp8: bool
    zstd: bool
    least_share: float


ENCODINGS = {e.name: e for e in (Encoding("bf16", False, False, 1.0), Encoding("bf16+zstd", False, True, 0.6),
                                 Encoding("fp8", True, False, 1.0), Encoding("fp8+zstd", True, True, 0.6))}


def get_encoding(name: str) -> Encoding:
    """The encoding of that name. Raises StoreError for an unknown one."""
    if name not in ENCODINGS:
        raise StoreError(f"encoding: {name!r} is not known here; known: {', '.join(ENCODINGS)}")
    return ENCODINGS[name]


def shard_name(index: int) -> str:
    """File name of shard `index`."""
    return f"shard-{index:05d}.h5"


@dataclass(frozen=True)
class StateDataset:
    """A dataset of a shard's states: dtype and shape of one row; per_token: a row for each token, else one for each
    stored row of the last state; zstd: compressed."""

    name: str
    dtype: torch.dtype
    row_shape: tuple[int, ...]
    per_token: bool = True
    zstd: bool = False

    @property
    def row_bytes(self) -> int:
        """Raw bytes of a row."""
        return self.dtype.itemsize * int(np.prod(self.row_shape, dtype=np.int64))


def state_datasets(num_layers: int, hidden_size: int, encoding: str, last_state: str, topk: int) -> list[StateDataset]:
    """The datasets that hold the states of a shard, in their order. Raises StoreError for unknown settings."""
    how = get_encoding(encoding)
    check_last_state(last_state, topk)
    found = [StateDataset(AUX, FP8 if how.fp8 else torch.bfloat16, (num_layers, hidden_size), zstd=how.zstd)]
    if how.fp8:
        found.append(StateDataset(AUX_SCALES, torch.float32, (num_layers,)))
    if last_state in ("all", "supervised"):
        found.append(StateDataset(LAST, torch.bfloat16, (hidden_size,), last_state == "all", how.zstd))
    if last_state in ("supervised", "topk"):
        found.append(StateDataset(LAST_ROWS, torch.int64, (), False))
    if last_state == "topk":
        found += [StateDataset(TOPK_IDS, torch.int32, (topk,), False, how.zstd),
                  StateDataset(TOPK_LOGITS, torch.float32, (topk,), False),
                  StateDataset(TOPK_LOGSUMEXP, torch.float32, (), False)]
    return found


def check_last_state(last_state: str, topk: int) -> None:
    """Raises StoreError unless the two settings fit each other."""
    if last_state not in LAST_STATES:
        raise StoreError(f"last_state: {last_state!r} is not known here; known: {', '.join(LAST_STATES)}")
    if type(topk) is not int or topk < 0 or (topk == 0) == (last_state == "topk"):
        raise StoreError(f"topk: {topk!r} with last_state {last_state!r}; a number of logits is needed with \"topk\", "
                         "and 0 with the others")


def _float_type(size: int, exponent_bits: int, mantissa_bits: int, bias: int) -> h5py.h5t.TypeFloatID:
    """HDF5 datatype of `size` bytes: mantissa from bit 0, the exponent above it, the sign bit on top."""
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(8 * size - 1, mantissa_bits, exponent_bits, 0, mantissa_bits)
    kind.set_size(size)
    kind.set_ebias(bias)
    return kind


def bfloat16_type() -> h5py.h5t.TypeFloatID:
    """HDF5 datatype of bfloat16: 8 exponent bits with bias 127, 7 mantissa bits."""
    return _float_type(2, 8, 7, 127)


def float8_type() -> h5py.h5t.TypeFloatID:
    """HDF5 datatype of e4m3 up to 240: 4 exponent bits with bias 7, 3 mantissa bits."""
    return _float_type(1, 4, 3, 7)


# per torch dtype the HDF5 datatype and the NumPy dtype of raw values
RAW_TYPES = {torch.bfloat16: (bfloat16_type, np.uint16), FP8: (float8_type, np.uint8),
             torch.float32: (lambda: h5py.h5t.IEEE_F32LE, np.float32),
             torch.int32: (lambda: h5py.h5t.STD_I32LE, np.int32), torch.int64: (lambda: h5py.h5t.STD_I64LE, np.int64)}
RAW_VIEWS = {np.dtype(np.uint16): torch.bfloat16, np.dtype(np.uint8): FP8}


def to_raw(values: Tensor) -> np.ndarray:
    """A tensor's values as they are stored, on the CPU and contiguous: uint16 of bfloat16, uint8 of float8."""
    values = values.detach().cpu().contiguous()
    if values.dtype == torch.bfloat16:
        return values.view(torch.uint16).numpy()
    return values.view(torch.uint8).numpy() if values.dtype == FP8 else values.numpy()


def from_raw(raw: np.ndarray) -> Tensor:
    """Raw uint16 as bfloat16, raw uint8 as float8, others as they are: a tensor that shares its memory."""
    values, dtype = torch.from_numpy(raw), RAW_VIEWS.get(raw.dtype)
    return values if dtype is None else values.view(dtype)


def create_states(group: h5py.Group, stored: StateDataset, num_rows: int) -> h5py.Dataset:
    """Creates an empty dataset of `num_rows` rows whose chunks are whole rows, CHUNK_BYTES (ZSTD_CHUNK_BYTES when
    compressed) or somewhat less, so that the last one is about full: HDF5 stores whole chunks.

    Times are not tracked: HDF5 files would differ by them alone. Each chunk carries a Fletcher-32 checksum, which HDF5
    compares at every read: bits that rot between verification and training are an error, not training data.
    """
    at_most = ZSTD_CHUNK_BYTES if stored.zstd else CHUNK_BYTES
    num_chunks = max(1, -(-num_rows // max(1, at_most // stored.row_bytes)))
    chunk = (max(1, -(-num_rows // num_chunks)), *stored.row_shape)
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_chunk(chunk)
    settings.set_obj_track_times(False)
    settings.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    if stored.zstd:
        if stored.dtype.itemsize > 1:
            settings.set_shuffle()
        settings.set_filter(ZSTD_FILTER, h5py.h5z.FLAG_MANDATORY, (ZSTD_LEVEL,))
    settings.set_fletcher32()
    space = h5py.h5s.create_simple((num_rows, *stored.row_shape), (h5py.h5s.UNLIMITED, *stored.row_shape)
                                   if num_rows == 0 else None)
    kind, _ = RAW_TYPES[stored.dtype]
    return h5py.Dataset(h5py.h5d.create(group.id, stored.name.encode(), kind(), space, settings))


def _spaces(dataset: h5py.Dataset, start: int, count: int) -> tuple[h5py.h5s.SpaceID, h5py.h5s.SpaceID]:
    """Memory and file dataspace of rows start:start+count."""
    shape = (count, *dataset.shape[1:])
    file_space = dataset.id.get_space()
    file_space.select_hyperslab((start, *[0] * (len(shape) - 1)), shape)
    return h5py.h5s.create_simple(shape), file_space


def write_raw(dataset: h5py.Dataset, start: int, raw: np.ndarray, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes raw rows from row `start` on, without conversion. dtype: of the stored values."""
    dataset.id.write(*_spaces(dataset, start, len(raw)), raw, mtype=RAW_TYPES[dtype][0]())


def read_raw(dataset: h5py.Dataset, start: int, stop: int, dtype: torch.dtype = torch.bfloat16) -> np.ndarray:
    """Reads rows start:stop raw, without conversion. dtype: of the stored values."""
    kind, raw_type = RAW_TYPES[dtype]
    raw = np.empty((stop - start, *dataset.shape[1:]), raw_type)
    if len(raw):
        dataset.id.read(*_spaces(dataset, start, len(raw)), raw, mtype=kind())
    return raw


def set_attribute(owner: h5py.HLObject, name: str, value: Any) -> None:
    """Sets an attribute; text and JSON as fixed-length UTF-8 bytes, which keeps files deterministic."""
    if not isinstance(value, (int, str)):
        value = json.dumps(value, ensure_ascii=False)
    owner.attrs[name] = np.bytes_(value.encode("utf-8")) if isinstance(value, str) else value


def get_attribute(owner: h5py.HLObject, name: str) -> str | int:
    """An attribute that `set_attribute` set; JSON comes back as text. Raises KeyError when it is absent."""
    value = owner.attrs[name]
    return value.decode("utf-8") if isinstance(value, bytes) else int(value)


def row_magnitudes(raw: np.ndarray) -> np.ndarray:
    """Largest magnitude of each row of raw bf16 [..., H], as its bits without the sign, uint16 [...].

    Bits order as magnitudes do, so 0 means a row of zeros and INFINITE or more a row with infinity or NaN.
    """
    return (raw & np.uint16(0x7FFF)).max(axis=-1)


def has_digest(dataset: h5py.Dataset, digest) -> bool:
    """Whether a dataset's attribute `sha256` is that of `digest` (a hashlib object over the values that were read)."""
    return get_attribute(dataset, "sha256") == digest.hexdigest()


def repair(shard: str) -> str:
    """What to do about a damaged shard: resuming replaces shards that are absent or cannot be opened, no others."""
    return f"Delete {shard} from the store and run 04_extract (or convert) again: it makes this shard anew."
