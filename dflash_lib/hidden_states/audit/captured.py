"""Samples that were just captured, as a source to audit: a trial, before anything is stored."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from dflash_lib.hidden_states.formats.source import PRE_NORM, SourceSample
from dflash_lib.hidden_states.store import StoredSample
from dflash_lib.target.capture import stack_states
from dflash_lib.target.loading import Target


class CapturedStates:
    """A StateSource over captured samples, each with the last state before the norm."""

    format, encoding, last = "captured", "bf16", PRE_NORM

    def __init__(self, samples: Sequence[StoredSample], target_layer_ids: Sequence[int]):
        self.samples, self.target_layer_ids = list(samples), list(target_layer_ids)
        self.names = [f"sample {sample.sample_index}" for sample in samples]

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, i: int) -> SourceSample:
        """Sample `i`."""
        sample = self.samples[i]
        states = stack_states(sample)
        return SourceSample(name=self.names[i], sample_id="", input_ids=sample.input_ids.astype(np.int64),
                            loss_mask=sample.loss_mask, states=states)

    def __iter__(self) -> Iterator[SourceSample]:
        return (self.read(i) for i in range(len(self)))

    @torch.no_grad()
    def with_normed_last(self, target: Target) -> "CapturedStates":
        """The same with the mistake of taking HF's `hidden_states[-1]` for the last state: it is behind the norm."""
        norm, dtype = target.final_norm, next(target.final_norm.parameters())
        samples = [replace(s, last_hidden_state_prenorm=norm(s.last_hidden_state_prenorm.to(dtype)).bfloat16().cpu())
                   for s in self.samples]
        return CapturedStates(samples, self.target_layer_ids)
