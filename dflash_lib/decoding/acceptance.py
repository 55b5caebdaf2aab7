"""Acceptance of drafts: the length with its confidence interval, by slot, by kind, and without running the target.

Acceptance length (DESIGN.md, convention 13) is tokens an answer gained in verify steps over the number of steps, the
bonus token counted: 1 + accepted drafts, averaged over steps. An answer's last step, cut by end of turn or length
limit, counts the tokens that it added to the answer, for every proposer alike; the first token of an answer comes from
the prompt's own forward and belongs to no step.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from torch import Tensor

from dflash_lib.decoding.speculative import Step
from dflash_lib.drafter.inference import Proposer
from dflash_lib.hidden_states.sampling import interval_factor

NUM_RESAMPLES = 10_000


@dataclass(frozen=True)
class Interval:
    """An estimate with the bounds of its bootstrap confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"

    def signed(self) -> str:
        """As a difference: "+0.200 (+0.150 to +0.250)"; without bounds where they are one number, as those of a single
        seed are: that says nothing about noise."""
        bounds = "" if self.low == self.high else f" ({self.low:+.3f} to {self.high:+.3f})"
        return f"{self.value:+.3f}{bounds}"


def acceptance_length(steps: Sequence[Step]) -> float:
    """Tokens added a verify step, from 1 to block_size. Raises ValueError without any step."""
    if not steps:
        raise ValueError("acceptance length of no verify steps: were all answers one token long?")
    return sum(step.num_new for step in steps) / len(steps)


def _counts(steps_by_prompt: Sequence[Sequence[Step]]) -> np.ndarray:
    """[prompts, 2]: tokens added and steps of each prompt."""
    counts = np.array([[sum(s.num_new for s in steps), len(steps)] for steps in steps_by_prompt], dtype=np.float64)
    if not counts.size or not counts[:, 1].any():
        raise ValueError("acceptance length of no verify steps: were all answers one token long?")
    return counts


def _resampled(values: np.ndarray, num_resamples: int, seed: int) -> np.ndarray:
    """[resamples, columns]: column sums over prompts drawn with replacement. One seed draws the same prompts."""
    num = len(values)
    times_drawn = np.random.default_rng(seed).multinomial(num, np.full(num, 1 / num), num_resamples)
    return times_drawn @ values


def _interval(value: float, samples: np.ndarray, level: float, num_prompts: int) -> Interval:
    """Percentiles of `samples`, further out for few prompts as Student's t is (Hesterberg 2015, "expanded percentile"):
    plain ones held the truth in 83 % of the cases with 5 prompts and in 92 % with 24, instead of 95. One prompt has no
    interval: low = high = value."""
    if num_prompts < 2:
        return Interval(*3 * (float(value),))
    z = NormalDist().inv_cdf((1 + level) / 2)
    tail = NormalDist().cdf(-z * interval_factor(num_prompts, math.inf, z))
    low, high = np.nanquantile(samples, [tail, 1 - tail])
    return Interval(float(value), float(low), float(high))


def _ratio(sums: np.ndarray) -> np.ndarray:
    """tokens / steps along the last axis; NaN for a resample without any step."""
    return np.divide(sums[..., 0], sums[..., 1], out=np.full(sums.shape[:-1], np.nan), where=sums[..., 1] > 0)


def ratio_interval(values: np.ndarray, level: float = 0.95, num_resamples: int = NUM_RESAMPLES,
                   seed: int = 0) -> Interval:
    """sum(values[:, 0]) / sum(values[:, 1]) with the percentile bootstrap interval of whole rows drawn anew.

    values: [prompts, 2].
    """
    return _interval(_ratio(values.sum(axis=0)), _ratio(_resampled(values, num_resamples, seed)), level,
                     len(values))


def ratio_difference(values: np.ndarray, baseline: np.ndarray, level: float = 0.95, num_resamples: int = NUM_RESAMPLES,
                     seed: int = 0) -> Interval:
    """The ratio of sums of `values` minus that of `baseline`, with the paired bootstrap interval: the same rows are
    drawn of both. [prompts, 2] each; raises ValueError when their numbers of rows differ."""
    if len(values) != len(baseline):
        raise ValueError(f"paired comparison of {len(values)} prompts with {len(baseline)}")
    both = np.hstack([values, baseline])
    sums, total = _resampled(both, num_resamples, seed), both.sum(axis=0)
    return _interval(_ratio(total[:2]) - _ratio(total[2:]), _ratio(sums[:, :2]) - _ratio(sums[:, 2:]), level,
                     len(values))


def acceptance_interval(steps_by_prompt: Sequence[Sequence[Step]], level: float = 0.95,
                        num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> Interval:
    """Acceptance length over all steps, with the percentile bootstrap interval of whole prompts drawn anew.

    Prompts are drawn, not steps, because steps of one answer are alike; the estimate is a ratio of sums.
    """
    return ratio_interval(_counts(steps_by_prompt), level, num_resamples, seed)


def acceptance_difference(steps_by_prompt: Sequence[Sequence[Step]], baseline: Sequence[Sequence[Step]],
                          level: float = 0.95, num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> Interval:
    """Acceptance length minus the baseline's on the same prompts, with the paired bootstrap interval.

    Raises ValueError when the two have not the same number of prompts.
    """
    return ratio_difference(_counts(steps_by_prompt), _counts(baseline), level, num_resamples, seed)


def by_kind(steps_by_prompt: Sequence[Sequence[Step]], kinds: Sequence[str]) -> dict[str, Interval]:
    """The acceptance interval of each kind of prompt, kinds in alphabetical order."""
    groups: dict[str, list[Sequence[Step]]] = {}
    for steps, kind in zip(steps_by_prompt, kinds, strict=True):
        groups.setdefault(kind, []).append(steps)
    return {kind: acceptance_interval(groups[kind]) for kind in sorted(groups) if any(groups[kind])}


@dataclass(frozen=True)
class SlotAcceptance:
    """Acceptance of slot k = 1, 2, ... (the k-th draft token).

    conditional: of the steps whose earlier slots were accepted, the share that accepted slot k (NaN = never tried);
    cumulative: of all steps that drafted slot k, the share that accepted it (what servers report); num_tried: steps
    behind `conditional`.
    """

    conditional: list[float]
    cumulative: list[float]
    num_tried: list[int]


def by_slot(steps: Sequence[Step]) -> SlotAcceptance:
    """Acceptance of each slot. A slot behind an answer's end was neither accepted nor refused."""
    conditional, cumulative, num_tried = [], [], []
    for slot in range(1, max((s.drafted for s in steps), default=0) + 1):
        drafted = [s for s in steps if s.drafted >= slot]
        accepted = sum(s.accepted >= slot for s in drafted)
        refused = sum(s.accepted == slot - 1 and s.num_new == slot for s in drafted)
        num_tried.append(accepted + refused)
        conditional.append(accepted / num_tried[-1] if num_tried[-1] else float("nan"))
        cumulative.append(accepted / len(drafted))
    return SlotAcceptance(conditional, cumulative, num_tried)


def _walk(token_ids: Sequence[int], prompt_len: int, drafts_at: Callable[[int], Sequence[int]],
          confirm: Callable[[int, int], None]) -> list[Step]:
    """Steps from accepted token to accepted token; `confirm(start, end)` is told of newly confirmed positions."""
    steps, anchor = [], prompt_len
    while anchor < len(token_ids) - 1:
        drafts, rest = drafts_at(anchor), token_ids[anchor + 1:]
        matching = next((i for i, (draft, token) in enumerate(zip(drafts, rest, strict=False)) if draft != token),
                        min(len(drafts), len(rest)))
        num_new = min(matching + 1, len(rest))
        steps.append(Step(anchor, len(drafts), matching, num_new))
        if anchor + num_new < len(token_ids) - 1:
            confirm(anchor, anchor + num_new)
        anchor += num_new
    return steps


def walk_acceptance(proposer: Proposer, token_ids: Sequence[int], prompt_len: int, aux_states: Tensor,
                    block_size: int) -> list[Step]:
    """The steps that speculative decoding would take, walking a known greedy answer instead of running the target.

    token_ids: prompt and answer, as greedy decoding gave it; aux_states: [tokens, L, H] float32, the target's states
    of that text (those of the last token may be missing). Exact for greedy decoding: a draft is accepted when it equals
    the answer's token. Step times are zero.
    """
    proposer.begin()
    if len(token_ids) - prompt_len > 1:
        proposer.extend(token_ids[:prompt_len], aux_states[:prompt_len])
    return _walk(token_ids, prompt_len, lambda anchor: proposer.propose(token_ids[anchor], block_size - 1),
                 lambda start, end: proposer.extend(token_ids[start:end], aux_states[start:end]))


def draft_everywhere(proposer: Proposer, token_ids: Sequence[int], prompt_len: int, aux_states: Tensor,
                     block_size: int) -> list[list[int]]:
    """The block_size - 1 drafts behind every token of a known answer but its last, in order."""
    proposer.begin()
    drafts, known = [], 0
    for anchor in range(prompt_len, len(token_ids) - 1):
        proposer.extend(token_ids[known:anchor], aux_states[known:anchor])
        known = anchor
        drafts.append(proposer.propose(token_ids[anchor], block_size - 1))
    return drafts


def walk_drafts(drafts: Sequence[Sequence[int]], token_ids: Sequence[int], prompt_len: int,
                block_size: int) -> list[Step]:
    """As `walk_acceptance`, from the drafts of `draft_everywhere`, of which the first block_size - 1 are used."""
    return _walk(token_ids, prompt_len, lambda anchor: drafts[anchor - prompt_len][:block_size - 1],
                 lambda start, end: None)
