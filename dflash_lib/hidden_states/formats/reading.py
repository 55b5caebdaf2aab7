"""What the readers of all layouts share: checks of what a file holds, and walking through the samples."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_lib.files import hash_value
from dflash_lib.hidden_states.formats.source import SourceSample
from dflash_lib.hidden_states.schema import StoreError

ENCODING_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
                  torch.float8_e4m3fn: "fp8"}
NUM_PROBED = 8  # the first so many samples are asked for a layout's dtype and size: the very first may be damaged


class Samples:
    """A reader's samples by number. A layout adds its own `read`, `read_tokens` and `identity`.

    missing: names of samples that ought to be there and have no file; extra: names of files that no row belongs to;
    last_elsewhere: in words, a last state that is stored, but not as a slot of every token.
    """

    last_elsewhere: str = ""
    format: str
    encoding: str
    target_layer_ids: list[int] | None
    last: str | None
    path: Path
    names: list[str]
    missing: list[str]
    extra: list[str]

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[SourceSample]:
        return (self.read(i) for i in range(len(self)))

    def read(self, i: int) -> SourceSample:
        """Sample `i`. Raises StoreError, naming the file, when it is missing, cut off or of another layout."""
        raise NotImplementedError

    def read_tokens(self, i: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        """input_ids and loss_mask of sample `i`, as `read` gives them, with as little of its states as can be."""
        sample = self.read(i)
        return sample.input_ids, sample.loss_mask

    def order(self) -> list[int]:
        """All samples in the order in which they are read fastest."""
        return list(range(len(self)))

    def probe(self) -> SourceSample:
        """The first sample that can be read. Raises what the first one raises when none of the first few can."""
        first = None
        for i in range(min(len(self), NUM_PROBED)):
            try:
                return self.read(i)
            except StoreError as error:
                first = first or error
        raise first or StoreError(f"{self.path}: holds no samples")

    @cached_property
    def dtype(self) -> torch.dtype:
        """What the first samples' states are stored as."""
        return self.probe().states.dtype

    def identity(self) -> dict[str, Any]:
        """What tells this source from another one, as JSON: a conversion goes on only with the same."""
        raise NotImplementedError

    def describe(self) -> str:
        """The source in one line."""
        layers = "not stated" if self.target_layer_ids is None else self.target_layer_ids
        return (f"{self.path}: {self.format}, {self.encoding}, {len(self)} samples, outputs of layers {layers}, "
                f"last state {self.last or self.last_elsewhere or 'not stored'}")


def files_identity(source: Samples) -> dict[str, Any]:
    """Identity of a folder of files: a hash over their names. Not over their sizes: a file that was damaged may be
    replaced while a conversion waits, and its end compares the content."""
    return {"format": source.format, "encoding": source.encoding, "files": hash_value(source.names)}


def encoding_name(states: Tensor, where: str) -> str:
    """The encoding of stored states by their dtype. Raises StoreError for one that no state is stored in."""
    if states.dtype not in ENCODING_NAMES:
        raise StoreError(f"{where}: its states are {str(states.dtype).removeprefix('torch.')}, no floating dtype that "
                         f"states are stored in ({', '.join(ENCODING_NAMES.values())})")
    return ENCODING_NAMES[states.dtype]


def as_input_ids(values: Any, where: str) -> np.ndarray:
    """Token ids [T] or [1, T] as int64 [T]. Raises StoreError for anything that is no row of whole numbers."""
    ids = _row(values, "input_ids", where)
    if ids.dtype.kind not in "iu":
        raise StoreError(f"{where}: its token ids are {ids.dtype}, not whole numbers")
    return ids.astype(np.int64)


def as_loss_mask(values: Any, where: str) -> np.ndarray:
    """A loss mask [T] or [1, T] of 0 and 1 in any dtype as uint8 [T]. Raises StoreError for other values."""
    mask = _row(values, "loss_mask", where)
    if not np.isin(mask, (0, 1)).all():
        raise StoreError(f"{where}: its loss mask holds other values than 0 and 1")
    return mask.astype(np.uint8)


def _row(values: Any, name: str, where: str) -> np.ndarray:
    if isinstance(values, Tensor):
        values = values.float().numpy() if values.dtype == torch.bfloat16 else values.numpy()
    row = np.asarray(values)
    if row.ndim == 2 and len(row) == 1:
        row = row[0]
    if row.ndim != 1 or not len(row):
        raise StoreError(f"{where}: {name} of shape {list(row.shape)}; one row of tokens is needed")
    return row
