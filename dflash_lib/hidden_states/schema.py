"""Schema 1 of the hidden-state store: names, encodings, and the true bfloat16 datatype in HDF5.

The bfloat16 datatype is an IEEE float32 cut to 16 bits, described in the file itself, so that any HDF5 tool shows
numbers. The library passes the same type as memory type and thereby moves raw uint16 without a conversion (6 GB/s
against 22 MB/s through HDF5's own).

Legend of shapes: T tokens of a sample, N tokens of a shard, S samples of a shard, L tapped layers, H hidden size.
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
ZSTD_FILTER = 32015
ZSTD_LEVEL = 1
INFINITE = 0x7F80  # bf16 bits of infinity; a NaN is above
AUX = "aux_hidden_states"
LAST = "last_hidden_state_prenorm"
SMALL = {"input_ids": np.int32, "loss_mask": np.uint8, "offsets": np.int64, "sample_index": np.int64}


class StoreError(ValueError):
    """A store that cannot be written, read or used; the message says which file, what is wrong and what to do."""


@dataclass(frozen=True)
class Encoding:
    """name: as plans call it; zstd: behind the shuffle filter; least_share: least part of the raw bytes that the data
    has been seen to take, for the check of free space."""

    name: str
    zstd: bool
    least_share: float


ENCODINGS = {e.name: e for e in (Encoding("bf16", False, 1.0), Encoding("bf16+zstd", True, 0.6))}


def get_encoding(name: str) -> Encoding:
    """The encoding of that name. Raises StoreError for an unknown one."""
    if name not in ENCODINGS:
        raise StoreError(f"encoding: {name!r} is not known here; known: {', '.join(ENCODINGS)}")
    return ENCODINGS[name]


def shard_name(index: int) -> str:
    """File name of shard `index`."""
    return f"shard-{index:05d}.h5"


def bytes_per_token(num_layers: int, hidden_size: int, last: bool) -> int:
    """Raw bf16 bytes of one token's states: `num_layers` tapped layers, plus the last one if stored."""
    return 2 * hidden_size * (num_layers + bool(last))


def bfloat16_type() -> h5py.h5t.TypeFloatID:
    """HDF5 datatype of bfloat16: sign bit 15, 8 exponent bits from 7 with bias 127, 7 mantissa bits from 0."""
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_size(2)
    kind.set_ebias(127)
    return kind


def to_raw(states: Tensor) -> np.ndarray:
    """Any float tensor as bfloat16 (round to nearest even), raw uint16, on the CPU and contiguous."""
    return states.to(torch.bfloat16).contiguous().view(torch.uint16).cpu().numpy()


def from_raw(raw: np.ndarray) -> Tensor:
    """Raw uint16 as a bfloat16 tensor that shares its memory."""
    return torch.from_numpy(raw).view(torch.bfloat16)


def create_states(group: h5py.Group, name: str, shape: tuple[int, ...], encoding: Encoding) -> h5py.Dataset:
    """Creates an empty bfloat16 dataset [N, ...] whose chunks are whole token rows, CHUNK_BYTES or somewhat less, so
    that the last one is about full: HDF5 stores whole chunks.

    Times are not tracked: HDF5 files would differ by them alone. Each chunk carries a Fletcher-32 checksum, which HDF5
    compares at every read: bits that rot between verification and training are an error, not training data.
    """
    row_bytes = 2 * int(np.prod(shape[1:]))
    num_chunks = -(-shape[0] // max(1, CHUNK_BYTES // row_bytes))
    chunk = (-(-shape[0] // num_chunks), *shape[1:])
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_chunk(chunk)
    settings.set_obj_track_times(False)
    settings.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    if encoding.zstd:
        settings.set_shuffle()
        settings.set_filter(ZSTD_FILTER, h5py.h5z.FLAG_MANDATORY, (ZSTD_LEVEL,))
    settings.set_fletcher32()
    space = h5py.h5s.create_simple(shape)
    return h5py.Dataset(h5py.h5d.create(group.id, name.encode(), bfloat16_type(), space, settings))


def _spaces(dataset: h5py.Dataset, start: int, count: int) -> tuple[h5py.h5s.SpaceID, h5py.h5s.SpaceID]:
    """Memory and file dataspace of rows start:start+count."""
    shape = (count, *dataset.shape[1:])
    file_space = dataset.id.get_space()
    file_space.select_hyperslab((start, *[0] * (len(shape) - 1)), shape)
    return h5py.h5s.create_simple(shape), file_space


def write_raw(dataset: h5py.Dataset, start: int, raw: np.ndarray) -> None:
    """Writes raw uint16 rows from row `start` on, without conversion."""
    dataset.id.write(*_spaces(dataset, start, len(raw)), raw, mtype=bfloat16_type())


def read_raw(dataset: h5py.Dataset, start: int, stop: int) -> np.ndarray:
    """Reads rows start:stop as raw uint16, without conversion."""
    raw = np.empty((stop - start, *dataset.shape[1:]), np.uint16)
    if len(raw):
        dataset.id.read(*_spaces(dataset, start, len(raw)), raw, mtype=bfloat16_type())
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


def find_bad_rows(raw: np.ndarray) -> str:
    """What is wrong with raw states [T, ..., H] of one sample, "" when nothing: not finite, or all-zero rows."""
    magnitudes = row_magnitudes(raw)
    infinite, zero = int((magnitudes >= INFINITE).sum()), int((magnitudes == 0).sum())
    if infinite:
        return f"{infinite} of {magnitudes.size} rows not finite"
    return f"{zero} of {magnitudes.size} rows all zero" if zero else ""


def has_digest(dataset: h5py.Dataset, digest) -> bool:
    """Whether a dataset's attribute `sha256` is that of `digest` (a hashlib object over the values that were read)."""
    return get_attribute(dataset, "sha256") == digest.hexdigest()


def repair(shard: str) -> str:
    """What to do about a damaged shard: resuming replaces shards that are absent or cannot be opened, no others."""
    return f"Delete {shard} from the store and run 04_extract (or convert) again: it makes this shard anew."
