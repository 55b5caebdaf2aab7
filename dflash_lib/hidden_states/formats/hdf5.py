"""This project's own store, read as every other layout is."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_lib.hidden_states.formats.reading import Samples
from dflash_lib.hidden_states.formats.source import PRE_NORM, SourceSample
from dflash_lib.hidden_states.schema import AUX, AUX_SCALES, LAST, get_encoding
from dflash_lib.hidden_states.store import HiddenStateStore, StoredSample, describe_last_state


class StoreSource(Samples):
    """A hidden-state store; sample i is the i-th of its sample indices, ascending.

    The last state is a slot behind the tapped layers where it is stored for every token in their type; in other forms
    (fp8, supervised rows only, top-k logits) it is not: `last_elsewhere` says so, `audit.last_state` looks at it.

    Raises StoreError, as opening a store does, when shards are missing or damaged.
    """

    format = "store"

    def __init__(self, path: Path | str):
        self.path, self.store = Path(path), HiddenStateStore.open(path)
        self.plan = self.store.plan
        self.encoding, self.target_layer_ids = self.plan.encoding, self.store.target_layer_ids
        self.fp8 = get_encoding(self.encoding).fp8
        self.last = PRE_NORM if self.plan.last and not self.fp8 else None
        if self.last is None and self.plan.last_state != "none":
            self.last_elsewhere = describe_last_state(self.plan) + (", in bf16 beside fp8" if self.fp8 else "")
        self.indices = self.store.sample_indices
        self.names = [f"sample {index}" for index in self.indices]
        self.missing, self.extra = [], []

    def read(self, i: int) -> SourceSample:
        ids, mask = self.store.read_tokens(self.indices[i])
        stored = self.store.read_encoded(self.indices[i]).tensors
        states = stored[AUX] if self.last is None else torch.cat([stored[AUX], stored[LAST][:, None]], dim=1)
        return SourceSample(name=self.names[i], sample_id="", input_ids=ids.astype(np.int64), loss_mask=mask,
                            states=states, scales=stored[AUX_SCALES][..., None] if self.fp8 else None)

    def read_whole(self, i: int) -> StoredSample:
        """Sample `i` with its last state, in whatever form the store has it."""
        return self.store.read(self.indices[i])

    def read_tokens(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        ids, mask = self.store.read_tokens(self.indices[i])
        return ids.astype(np.int64), mask

    def order(self) -> list[int]:
        """As they lie in the shards: neighbours share a chunk."""
        row = {index: i for i, index in enumerate(self.indices)}
        return [row[index] for content in self.store.shards.values() for index in content.sample_index.tolist()]

    def identity(self) -> dict[str, Any]:
        return {"format": self.format, "encoding": self.encoding, "plan": self.plan.hash}
