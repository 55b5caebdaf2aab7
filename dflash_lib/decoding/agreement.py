"""Do two ways of decoding agree, and if not: was it rounding?

Ways of computing the same logits differ by rounding (one token at a time or a block, recurrent or chunked), so greedy
answers may part where two tokens are all but equally likely. The logits that decide whether that was so are computed
anew, from the text that both answers share: what an answer's own, possibly wrong cache would say does not count.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_lib.decoding.cache import TargetCache
from dflash_lib.target.loading import Target

NEAR_TIE = 1e-4  # logits in float32


@dataclass(frozen=True)
class Divergence:
    """Where a greedy answer leaves another one.

    position: index in the answer; expected and found: the tokens there, None = the answer has ended. gap: how far the
    less likely of the two tokens lies below the greatest logit, computed token by token and as one block, the smaller
    of both; infinite when an answer ended early, which rounding cannot explain.
    """

    position: int
    expected: int | None
    found: int | None
    gap: float

    @property
    def near_tie(self) -> bool:
        return self.gap < NEAR_TIE


def first_divergence(target: Target, prompt_ids: Sequence[int], expected: Sequence[int],
                     found: Sequence[int]) -> Divergence | None:
    """The first token in which `found` differs from `expected`, both greedy answers to a prompt; None when equal."""
    if list(expected) == list(found):
        return None
    shared = min(len(expected), len(found))
    at = next((i for i in range(shared) if expected[i] != found[i]), shared)
    if at == shared:
        return Divergence(at, *(answer[at] if at < len(answer) else None for answer in (expected, found)), math.inf)
    pair = [expected[at], found[at]]
    gaps = [float(logits.max() - logits[pair].min()) for logits in _two_ways(target, prompt_ids, expected[:at])]
    return Divergence(at, *pair, min(gaps))


@torch.inference_mode()
def _two_ways(target: Target, prompt_ids: Sequence[int], answer: Sequence[int]) -> list[Tensor]:
    """The logits [V] behind prompt and answer: the answer token by token, and as one block."""
    ways = []
    for pieces in ([prompt_ids, *([token] for token in answer)], [prompt_ids, answer] if len(answer) else [prompt_ids]):
        cache = TargetCache(target, rollback=False)
        for piece in pieces:
            output = target.model(input_ids=torch.tensor([list(piece)], device=target.device), use_cache=True,
                                  logits_to_keep=1, **cache.arguments)
        ways.append(output.logits[0, -1].float())
    return ways
