"""Acceptance from several sides: how many drafts a step accepts, where in the answer, in how repetitive a text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_lib.decoding.acceptance import Interval, acceptance_interval
from dflash_lib.decoding.speculative import Step

REPETITION_EDGES = (0.0, 0.05, 0.1, 0.2, 0.4, 1.0)
NGRAM = 3


@dataclass(frozen=True)
class Bin:
    """Acceptance within low <= x < high (the last bin of shares holds its upper end, too); `acceptance` is None where
    no step falls into it."""

    low: float
    high: float
    acceptance: Interval | None
    num_steps: int
    num_prompts: int


def accepted_histogram(steps: Sequence[Step], block_size: int) -> np.ndarray:
    """int64 [block_size]: the number of verify steps that accepted 0, 1, ..., block_size - 1 drafts.

    Raises ValueError for a step that drafted more than a block of that size holds.
    """
    longest = max((step.drafted for step in steps), default=0)
    if longest >= block_size:
        raise ValueError(f"a step drafted {longest} tokens, more than block_size {block_size} has room for")
    return np.bincount([step.accepted for step in steps], minlength=block_size)


def position_edges(longest: int) -> list[int]:
    """Bin edges for positions in answers: 0, 8, 16, 32, ... beyond `longest`."""
    edges = [0, 8]
    while edges[-1] < longest:
        edges.append(2 * edges[-1])
    return edges


def by_position(steps_by_prompt: Sequence[Sequence[Step]], prompt_lens: Sequence[int],
                edges: Sequence[int] | None = None) -> list[Bin]:
    """Acceptance by where in the answer a verify step begins: its anchor is the answer's token 0, 1, 2, ...

    prompt_lens: tokens of each prompt; edges: ascending, None = `position_edges`. The intervals are over prompts.
    """
    placed = [[(step.position - length, step) for step in steps]
              for steps, length in zip(steps_by_prompt, prompt_lens, strict=True)]
    if edges is None:
        edges = position_edges(1 + max((at for steps in placed for at, _ in steps), default=0))
    return [_bin(low, high, [[step for at, step in steps if low <= at < high] for steps in placed])
            for low, high in zip(edges, edges[1:], strict=False)]


def repetitiveness(prompt_ids: Sequence[int], answer_ids: Sequence[int], n: int = NGRAM) -> float:
    """The share of the answer's n-grams (runs of n tokens that end in the answer, and may begin in the prompt) that
    stood in prompt and answer before. NaN when there is none."""
    text, seen, repeated, num = [*prompt_ids, *answer_ids], set(), 0, 0
    for end in range(n, len(text) + 1):
        gram = tuple(text[end - n:end])
        if end > len(prompt_ids):
            num += 1
            repeated += gram in seen
        seen.add(gram)
    return repeated / num if num else math.nan


def by_repetition(steps_by_prompt: Sequence[Sequence[Step]], shares: Sequence[float],
                  edges: Sequence[float] = REPETITION_EDGES) -> list[Bin]:
    """Acceptance by how repetitive an answer is. shares: `repetitiveness` of each answer."""
    bins = []
    for low, high in zip(edges, edges[1:], strict=False):
        inside = [low <= share < high or share == high == edges[-1] for share in shares]
        bins.append(_bin(low, high, [steps for steps, yes in zip(steps_by_prompt, inside, strict=True) if yes]))
    return bins


def _bin(low: float, high: float, steps_by_prompt: Sequence[Sequence[Step]]) -> Bin:
    some = [steps for steps in steps_by_prompt if steps]
    return Bin(low, high, acceptance_interval(some) if some else None, sum(map(len, some)), len(some))
