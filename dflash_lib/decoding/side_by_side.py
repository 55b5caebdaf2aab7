"""Real decoding with and without drafters, in turns on the same prompts: speed, and whether the output is the same."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflash_lib.decoding.acceptance import Interval, acceptance_length, ratio_interval
from dflash_lib.decoding.agreement import Divergence, first_divergence
from dflash_lib.decoding.eval_prompts import EvalPrompt
from dflash_lib.decoding.evaluation import Answer
from dflash_lib.decoding.speculative import (
    Decoded,
    SpeculativeDecoded,
    Step,
    greedy_generate,
    measure_verify_seconds,
    speculative_generate,
)
from dflash_lib.drafter.inference import Proposer
from dflash_lib.target.loading import Target


@dataclass(frozen=True)
class Way:
    """A way of decoding speculatively: with which proposer, block size and tapped layers."""

    proposer: Proposer
    block_size: int
    layer_ids: Sequence[int]


@dataclass(frozen=True)
class SideBySide:
    """One prompt decoded plainly and, by name of the way or by block size, speculatively. divergences: where an answer
    left the plain one, under the same names; equal answers have none."""

    prompt: EvalPrompt
    plain: Decoded
    speculative: dict[Hashable, SpeculativeDecoded]
    divergences: dict[Hashable, Divergence] = field(default_factory=dict)

    def outcome(self, way: Hashable) -> str:
        """"identical"; "near-tie": they part where rounding explains it; "different": they part where it does not."""
        decoded = self.speculative[way]
        if decoded.token_ids == self.plain.token_ids and decoded.finish_reason == self.plain.finish_reason:
            return "identical"
        divergence = self.divergences.get(way)
        return "near-tie" if divergence is not None and divergence.near_tie else "different"


def decode_in_turns(target: Target, ways: Mapping[Hashable, Way], prompts: Sequence[EvalPrompt], max_new_tokens: int,
                    on_prompt: Callable[[int], None] | None = None) -> list[SideBySide]:
    """Decodes every prompt plainly and in each way.

    The order rotates from prompt to prompt, so that a machine that slows down hits all alike; one short decoding of
    each kind goes before, unmeasured. Where an answer differs from the plain one, the target is asked whether that was
    a near-tie. `on_prompt` is called with the number of finished prompts.
    """
    modes: list[Hashable] = [None, *ways]

    def decode(mode: Hashable, prompt: EvalPrompt, num_tokens: int) -> Decoded:
        if mode is None:
            return greedy_generate(target, prompt.token_ids, num_tokens)
        way = ways[mode]
        return speculative_generate(target, way.proposer, prompt.token_ids, num_tokens, way.block_size, way.layer_ids)

    for mode in modes:
        decode(mode, prompts[0], min(4, max_new_tokens))
    results = []
    for i, prompt in enumerate(prompts):
        turn = i % len(modes)
        decoded = {mode: decode(mode, prompt, max_new_tokens) for mode in modes[turn:] + modes[:turn]}
        plain = decoded[None]
        parted = {way: first_divergence(target, prompt.token_ids, plain.token_ids, decoded[way].token_ids)
                  for way in ways}
        results.append(SideBySide(prompt, plain, {way: decoded[way] for way in ways},
                                  {way: found for way, found in parted.items() if found is not None}))
        if on_prompt is not None:
            on_prompt(i + 1)
    return results


def decode_side_by_side(target: Target, proposer: Proposer, prompts: Sequence[EvalPrompt], max_new_tokens: int,
                        block_sizes: Sequence[int], layer_ids: Sequence[int],
                        on_prompt: Callable[[int], None] | None = None) -> list[SideBySide]:
    """`decode_in_turns` with one proposer and several block sizes, which name the ways."""
    ways = {size: Way(proposer, size, layer_ids) for size in block_sizes}
    return decode_in_turns(target, ways, prompts, max_new_tokens, on_prompt)


@dataclass(frozen=True)
class Speed:
    """Real decoding with one block size against plain decoding, over all prompts.

    tokens_per_second and plain_tokens_per_second: whole answers, prompt included. speedup: plain decoding's seconds for
    as many tokens over those with drafts, with its interval over prompts. plain_step_s: seconds of a plain step;
    step_s: of a verify step with all that belongs to it, of which verify_s are the target's and draft_s the proposer's.
    output_token_s: seconds of an output token behind the first (time per output token); of plain decoding that is
    plain_step_s. break_even: step_s / plain_step_s, the acceptance length from which on drafting pays. num_identical,
    num_near_ties, num_different: prompts by `SideBySide.outcome`.
    """

    block_size: int
    num_prompts: int
    num_identical: int
    num_near_ties: int
    num_different: int
    acceptance_length: float
    tokens_per_second: float
    plain_tokens_per_second: float
    speedup: Interval
    plain_step_s: float
    step_s: float
    verify_s: float
    draft_s: float
    output_token_s: float

    @property
    def break_even(self) -> float:
        return self.step_s / self.plain_step_s

    @property
    def caveat(self) -> str:
        """What to think of the speed-up, in words behind it; "" when it stands as it is. A verify step takes at least
        as long as a plain one, so no speed-up is above the acceptance length unless something disturbed the times."""
        if self.speedup.value > self.acceptance_length or self.break_even < 1:
            return ", more than these steps allow: other work on this machine disturbed the times"
        return ", no certain difference" if self.speedup.low <= 1 <= self.speedup.high else ""

    @property
    def draft_share(self) -> float:
        """The proposer's share of a verify step's seconds."""
        return self.draft_s / self.step_s


def speed_of(results: Sequence[SideBySide], way: Hashable, block_size: int | None = None) -> Speed:
    """Speed in one way; block_size: the way's, if the way is not a block size itself. Raises ValueError when no answer
    has a second token."""
    plain = [r.plain for r in results]
    drafted = [r.speculative[way] for r in results]
    steps = [step for d in drafted for step in d.steps]
    num_tokens = sum(len(d.token_ids) for d in drafted)
    seconds = np.array([[p.seconds, d.seconds] for p, d in zip(plain, drafted, strict=True)])
    # answers that part may differ in length: plain decoding's seconds for as many tokens
    for_as_many = np.array([[len(d.token_ids) / len(p.token_ids), 1.0] for p, d in zip(plain, drafted, strict=True)])
    plain_steps = sum(len(p.token_ids) - 1 for p in plain)
    outcomes = [r.outcome(way) for r in results]
    decode_s = sum(d.decode_seconds for d in drafted)
    return Speed(
        block_size=way if block_size is None else block_size, num_prompts=len(results),
        num_identical=outcomes.count("identical"), num_near_ties=outcomes.count("near-tie"),
        num_different=outcomes.count("different"), acceptance_length=acceptance_length(steps),
        tokens_per_second=num_tokens / float(seconds[:, 1].sum()),
        plain_tokens_per_second=sum(len(p.token_ids) for p in plain) / float(seconds[:, 0].sum()),
        speedup=ratio_interval(seconds * for_as_many),
        plain_step_s=sum(p.decode_seconds for p in plain) / max(plain_steps, 1),
        step_s=decode_s / len(steps),
        verify_s=sum(d.verify_seconds for d in drafted) / len(steps),
        draft_s=sum(d.draft_seconds for d in drafted) / len(steps),
        output_token_s=decode_s / (num_tokens - len(drafted)))


def fastest(speeds: Mapping[Hashable, Speed]) -> Speed:
    """The way that decoded fastest for real, whatever costs had promised; of equal ones the first."""
    return max(speeds.values(), key=lambda speed: speed.speedup.value)


def record(result: SideBySide, way: Hashable) -> dict[str, Any]:
    """What a comparison with a server needs of one prompt, JSON-able: tokens asked and answered, steps."""
    decoded = result.speculative[way]
    return {"id": result.prompt.id, "kind": result.prompt.kind, "prompt_ids": result.prompt.token_ids,
            "token_ids": decoded.token_ids, "finish_reason": decoded.finish_reason,
            "accepted": [step.accepted for step in decoded.steps], "num_new": [step.num_new for step in decoded.steps]}


def measure_step_seconds(target: Target, proposer: Proposer, answer: Answer, block_size: int,
                         num_repeats: int = 8) -> tuple[dict[int, float], float]:
    """Seconds of verifying n tokens behind a text, rollback of half of them included, for n = 1 (a step of plain
    decoding) to `block_size`, and of one draft.

    Medians; the draft contains the taking in of one confirmed token.
    """
    text = answer.text_ids
    verify = measure_verify_seconds(target, text, range(1, block_size + 1), num_repeats)
    start = max(1, len(text) - num_repeats - 1)
    proposer.begin()
    proposer.extend(text[:start], answer.states[:start])
    seconds = []
    for at in range(start, len(text) - 1):
        begin = time.perf_counter()
        proposer.extend(text[at:at + 1], answer.states[at:at + 1])
        proposer.propose(text[at + 1], block_size - 1)
        seconds.append(time.perf_counter() - begin)
    return verify, sorted(seconds)[len(seconds) // 2]


@dataclass(frozen=True)
class BlockLength:
    """What a block size promises: acceptance_length from the walk; break_even: cost of a verify step of that many
    tokens with its draft, in plain steps; speedup: their ratio."""

    block_size: int
    acceptance_length: float
    break_even: float

    @property
    def speedup(self) -> float:
        return self.acceptance_length / self.break_even


def best_block_size(lengths: Sequence[BlockLength]) -> int:
    """The block size that promises the greatest speed-up; of equals the smaller one."""
    return max(lengths, key=lambda length: (length.speedup, -length.block_size)).block_size


def showpiece(results: Sequence[SideBySide], way: Hashable) -> SideBySide:
    """The prompt whose answer has the longest accepted drafts. Raises ValueError when no answer has a verify step."""
    candidates = [result for result in results if result.speculative[way].steps]
    return max(candidates, key=lambda result: acceptance_length(result.speculative[way].steps))


def block_lengths(walks: dict[int, list[list[Step]]], verify_seconds: dict[int, float],
                  draft_seconds: float) -> list[BlockLength]:
    """Promises of each block size in `walks`. verify_seconds: of a target forward over n tokens, for 1 and every block
    size; draft_seconds: of one draft."""
    return [BlockLength(size, acceptance_length([step for steps in walk for step in steps]),
                        (verify_seconds[size] + draft_seconds) / verify_seconds[1])
            for size, walk in sorted(walks.items())]
