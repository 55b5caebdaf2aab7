"""How the next token is chosen from the target's logits, and how many drafts that choice accepts.

Greedy: a draft is accepted when it is the target's own choice. Sampling: speculative sampling (Leviathan et al. 2023,
Chen et al. 2023): a draft x drawn from the distribution q is accepted with probability min(1, p(x) / q(x)), where p is
the target's; the token behind the last accepted draft is drawn from the positive part of p - q at a refusal, and from
p when nothing was refused. So the answer is distributed as the target's own samples, whatever is proposed.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dflash_lib.decoding.cache import DecodingError
from dflash_lib.drafter.inference import Proposer


@dataclass(frozen=True)
class Draft:
    """token_ids: n drafts; probabilities: [n, V], the distributions that they were drawn from, one slot independent of
    the draws of the others. None = not drawn: each slot's distribution is all on its draft."""

    token_ids: list[int]
    probabilities: Tensor | None = None


class Choice(Protocol):
    """A rule for choosing tokens."""

    def draft(self, proposer: Proposer, anchor: int, num_tokens: int) -> Draft:
        """Asks the proposer for drafts behind the anchor."""

    def choose(self, logits: Tensor) -> int:
        """The next token; logits: [V]."""

    def accept(self, draft: Draft, logits: Tensor) -> tuple[int, int]:
        """How many of the n drafts stand, and the token behind them; logits: [n + 1, V], behind the anchor and each
        draft."""


class Greedy:
    """The most likely token."""

    def draft(self, proposer: Proposer, anchor: int, num_tokens: int) -> Draft:
        return Draft(proposer.propose(anchor, num_tokens))

    def choose(self, logits: Tensor) -> int:
        return int(logits.argmax())

    def accept(self, draft: Draft, logits: Tensor) -> tuple[int, int]:
        choices = logits.argmax(dim=-1).tolist()
        num = next((i for i, token in enumerate(draft.token_ids) if token != choices[i]), len(draft.token_ids))
        return num, choices[num]


class Sampling:
    """Tokens drawn from softmax(logits / temperature), with a random state of its own.

    A proposer with `propose_sampled(anchor, num_tokens, temperature, generator)` draws its drafts and says from which
    distributions; any other proposes as ever. Raises DecodingError for a temperature that is not above 0 and finite.
    """

    def __init__(self, temperature: float, seed: int):
        if not 0 < temperature < math.inf:
            raise DecodingError(f"temperature: a finite number above 0 is needed to sample, got {temperature}")
        self.temperature = temperature
        self.generator = torch.Generator().manual_seed(seed)

    def _uniform(self) -> float:
        """From [0, 1) in steps of 2^-24, so that products with it in float64 stay below 1."""
        return float(torch.rand((), generator=self.generator))

    def _draw(self, weights: Tensor) -> int:
        """An index of `weights` [V] float64, drawn in proportion to them; never one of weight 0."""
        cumulative = weights.cumsum(dim=0)
        return int(torch.searchsorted(cumulative, cumulative[-1] * self._uniform(), right=True))

    def _probabilities(self, logits: Tensor) -> Tensor:
        return (logits.double() / self.temperature).softmax(dim=-1)

    def draft(self, proposer: Proposer, anchor: int, num_tokens: int) -> Draft:
        draw = getattr(proposer, "propose_sampled", None)
        if draw is None:
            return Draft(proposer.propose(anchor, num_tokens))
        return Draft(*draw(anchor, num_tokens, self.temperature, self.generator))

    def choose(self, logits: Tensor) -> int:
        return self._draw(self._probabilities(logits))

    def accept(self, draft: Draft, logits: Tensor) -> tuple[int, int]:
        for slot, token in enumerate(draft.token_ids):
            p = self._probabilities(logits[slot])
            if draft.probabilities is None:
                q = torch.zeros_like(p)
                q[token] = 1.0
            else:
                q = draft.probabilities[slot].to(p)
            if self._uniform() * q[token] >= p[token]:
                rest = (p - q).clamp(min=0)
                return slot, self._draw(rest if rest.any() else p)  # p and q equal but for rounding
        return len(draft.token_ids), self.choose(logits[-1])
