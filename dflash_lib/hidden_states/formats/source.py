"""What every layout is read as: samples one by one, with what the layout says about its own slots, nothing decided.

A reader never repairs: it hands out the stored values (fp8 as float8 with its scales beside it), so that an audit sees
what a trainer would see. `decoded` is the one place where scales are applied.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

PRE_NORM, POST_NORM = "pre-norm", "post-norm"


@dataclass(frozen=True, kw_only=True)
class SourceSample:
    """One sample as stored.

    name: the sample in words, for messages (its file name, or the store's sample index); sample_id: the conversation's
    id where the layout has one, else "". input_ids: int64 [T], None where the layout lacks them; loss_mask: uint8 [T]
    or None. states: [rows, K, H] in the stored dtype, the tapped layers in stored order and behind them the last
    state, if there is one; rows may differ from T in a damaged sample. scales: float32, broadcastable to `states`, for
    fp8; None otherwise. note: what the layout's own parts say against each other, in words, such as a data set whose
    ids are not the file's; "" when nothing.
    """

    name: str
    sample_id: str
    input_ids: np.ndarray | None
    loss_mask: np.ndarray | None
    states: Tensor
    scales: Tensor | None = None
    note: str = ""

    def decoded(self) -> Tensor:
        """The states as float32 [rows, K, H], scales applied."""
        states = self.states.to(torch.float32)
        return states if self.scales is None else states * self.scales


class StateSource(Protocol):
    """A folder of samples in one layout, opened for reading; nothing is loaded before it is asked for.

    format: the layout's name, one of `open_states`' names; encoding: "bf16", "bf16+zstd", "fp8", "fp16", "fp32", ...;
    target_layer_ids: the tapped layers as the folder states them, in OUR numbering (outputs of layers, 0-based) and
    stored order, None where it does not say; last: PRE_NORM or POST_NORM as the layout has it, None without a last
    state. names: the samples' names in order, `len(source)` of them.
    """

    format: str
    encoding: str
    target_layer_ids: list[int] | None
    last: str | None
    names: list[str]

    def __len__(self) -> int: ...

    def read(self, i: int) -> SourceSample:
        """Sample `i`. Raises StoreError, naming the file, when it is missing, cut off or of another layout."""
        ...

    def __iter__(self) -> Iterator[SourceSample]: ...
