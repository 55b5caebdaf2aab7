"""States in memory as a source for audits, extracted as each tool would."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from dflash_lib.hidden_states.formats.source import POST_NORM, PRE_NORM, SourceSample
from dflash_lib.target.capture import capture_batch
from dflash_lib.target.loading import Target

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn,
          "fp8 a token": torch.float8_e4m3fn}


@dataclass
class MemorySource:
    """A StateSource of samples in a list."""

    samples: list[SourceSample]
    target_layer_ids: list[int] | None
    last: str | None = PRE_NORM
    format: str = "memory"
    encoding: str = "bf16"
    missing: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [sample.name for sample in self.samples]

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, i: int) -> SourceSample:
        return self.samples[i]

    def __iter__(self):
        return iter(self.samples)


def encode(states: Tensor, encoding: str) -> tuple[Tensor, Tensor | None]:
    """States float32 [T, K, H] as an encoding stores them, with scales for fp8: one a token and slot, or one a token
    over all slots ("fp8 a token", as speculators does)."""
    if not encoding.startswith("fp8"):
        return states.to(DTYPES[encoding]), None
    over = (1, 2) if encoding == "fp8 a token" else (2,)
    scales = (states.abs().amax(dim=over, keepdim=True) / 448).clamp(min=1e-12)
    return (states / scales).to(torch.float8_e4m3fn), scales


def states_of(target: Target, ids: list[int], layer_ids: list[int], last: str | None = PRE_NORM) -> Tensor:
    """The right states, float32 [T, K, H]."""
    captured, = capture_batch(target, [ids], layer_ids)
    parts = [captured.aux_hidden_states.float()]
    if last is not None:
        final = captured.last_hidden_state_prenorm
        with torch.no_grad():
            parts.append((target.final_norm(final) if last == POST_NORM else final).float()[:, None])
    return torch.cat(parts, dim=1)


def make_rows(rng: np.random.Generator, target: Target, num: int = 6, shortest: int = 9,
              longest: int = 32) -> list[list[int]]:
    """Random token rows of different lengths; none repeats."""
    lengths = rng.choice(np.arange(shortest, longest + 1), num, replace=False)
    return [rng.integers(4, target.config.vocab_size, n).tolist() for n in lengths]


def make_sample(index: int, ids: list[int], states: Tensor, encoding: str = "bf16") -> SourceSample:
    stored, scales = encode(states, encoding)
    mask = (np.arange(len(ids)) >= len(ids) // 2).astype(np.uint8)
    return SourceSample(name=f"hs_{index}", sample_id="", input_ids=np.array(ids, np.int64), loss_mask=mask,
                        states=stored, scales=scales)


def extract(target: Target, rows: list[list[int]], layer_ids: list[int], last: str | None = PRE_NORM,
            encoding: str = "bf16") -> MemorySource:
    """A clean source."""
    samples = [make_sample(i, ids, states_of(target, ids, layer_ids, last), encoding) for i, ids in enumerate(rows)]
    return MemorySource(samples, list(layer_ids), last, encoding=encoding.split()[0])


def with_states(sample: SourceSample, states: Tensor, encoding: str = "bf16", **changes) -> SourceSample:
    stored, scales = encode(states, encoding)
    return replace(sample, states=stored, scales=scales, **changes)
