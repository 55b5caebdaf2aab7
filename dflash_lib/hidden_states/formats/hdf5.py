"""This project's own store, read as every other layout is."""

from pathlib import Path
from typing import Any

import numpy as np

from dflash_lib.hidden_states.formats.reading import Samples
from dflash_lib.hidden_states.formats.source import PRE_NORM, SourceSample
from dflash_lib.hidden_states.store import HiddenStateStore
from dflash_lib.target.capture import stack_states


class StoreSource(Samples):
    """A hidden-state store; sample i is the i-th of its sample indices, ascending.

    Raises StoreError, as opening a store does, when shards are missing or damaged.
    """

    format = "store"

    def __init__(self, path: Path | str):
        self.path, self.store = Path(path), HiddenStateStore.open(path)
        self.plan = self.store.plan
        self.encoding, self.target_layer_ids = self.plan.encoding, self.store.target_layer_ids
        self.last = PRE_NORM if self.plan.last else None
        self.indices = self.store.sample_indices
        self.names = [f"sample {index}" for index in self.indices]
        self.missing, self.extra = [], []

    def read(self, i: int) -> SourceSample:
        sample = self.store.read(self.indices[i])
        return SourceSample(name=self.names[i], sample_id="", input_ids=sample.input_ids.astype(np.int64),
                            loss_mask=sample.loss_mask, states=stack_states(sample))

    def read_tokens(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        ids, mask = self.store.read_tokens(self.indices[i])
        return ids.astype(np.int64), mask

    def order(self) -> list[int]:
        """As they lie in the shards: neighbours share a chunk."""
        row = {index: i for i, index in enumerate(self.indices)}
        return [row[index] for content in self.store.shards.values() for index in content.sample_index.tolist()]

    def identity(self) -> dict[str, Any]:
        return {"format": self.format, "encoding": self.encoding, "plan": self.plan.hash}
