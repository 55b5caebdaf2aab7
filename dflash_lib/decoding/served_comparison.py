"""Does serving agree? The training's walk, Transformers' decoding and a server side by side, by slot, and a verdict.

The three draft for the same prompts. Where texts are equal so are the verify steps, up to rounding, so differences are
taken prompt by prompt: a gap is the server's figure minus ours with its paired bootstrap interval over prompts. It
counts when the interval leaves out zero and the gap is above `TOLERANCE`. The slots share one error rate of 5 %
(Bonferroni), and fewer than `MIN_PROMPTS` prompts decide nothing. A server's own sampling noise by slot stands beside
it (Wilson's binomial interval).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_lib.decoding.acceptance import (
    Interval,
    acceptance_interval,
    by_slot,
    ratio_difference,
    ratio_interval,
    walk_acceptance,
)
from dflash_lib.decoding.agreement import first_divergence
from dflash_lib.decoding.served import Served, ServedAnswer, ask, in_answer
from dflash_lib.decoding.served_causes import likely_causes
from dflash_lib.decoding.server import Server, ServerOptions
from dflash_lib.decoding.speculative import Step
from dflash_lib.drafter.folder import load_drafter
from dflash_lib.drafter.inference import DrafterProposer
from dflash_lib.target.capture import capture_batch
from dflash_lib.target.loading import Target

TOLERANCE = 0.01  # of the acceptance length, and of the steps that accept a slot
ROUNDING = 0.5  # logits: a few units in the last place of bfloat16 between 16 and 32
BLIND = 0.1  # of the acceptance length: what is measured with more noise than that decides nothing
# For equal texts: fewer prompts than this with the same steps, and counts that differ by more than that share of the
# steps on average, mean that the drafts are others. Seen: layer ids one off, 2 of 8 prompts the same; bfloat16 against
# float32, 9 of 12.
OTHER_DRAFTS, OTHER_COUNTS = 0.5, 0.04
MIN_PROMPTS = 8  # with fewer, chance alone puts all differences on one side, and a bootstrap interval is too short


@dataclass(frozen=True)
class Reference:
    """What the workbench decoded for a prompt, and its verify steps; from a record of 07_evaluate's `decoded`."""

    id: str
    prompt_ids: list[int]
    token_ids: list[int]
    finish_reason: str
    steps: list[Step]

    @classmethod
    def from_record(cls, record: dict[str, Any], block_size: int) -> "Reference":
        steps, position = [], len(record["prompt_ids"])
        for accepted, num_new in zip(record["accepted"], record["num_new"], strict=True):
            steps.append(Step(position, block_size - 1, accepted, num_new))
            position += num_new
        return cls(record["id"], record["prompt_ids"], record["token_ids"], record["finish_reason"], steps)


@dataclass(frozen=True)
class Row:
    """One line of the comparison: a slot's share of verify steps that accept it, or the acceptance length (slot 0).

    walked: the training's walk, None where it was not made; ours: Transformers, with its interval over prompts; served:
    the server, with its own noise; gap: served minus ours, paired; None where the server does not say. beyond: the gap
    is no noise.
    """

    slot: int
    walked: float | None
    ours: Interval
    served: Interval | None
    gap: Interval | None
    beyond: bool


@dataclass(frozen=True)
class TextAgreement:
    """Served texts against Transformers' greedy ones.

    num_near_ties, num_rounding, num_apart: answers that leave ours where two tokens are all but equally likely, where a
    16-bit server's rounding may be the reason, and where it cannot; num_unjudged: that leave ours, and nothing says
    where the logits stand. positions: of the first differing tokens, near-ties left out.
    """

    num_prompts: int
    num_identical: int
    num_near_ties: int = 0
    num_rounding: int = 0
    num_apart: int = 0
    num_unjudged: int = 0
    positions: tuple[int, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """The figures and the verdict.

    raw_length: 1 + accepted over steps as the server counts, drafts behind an answer's end included. num_counted:
    prompts whose steps are known on both sides; num_steps: the server's verify steps for these; num_slots: drafts a
    step of the server. num_same_steps: prompts whose steps are ours, counted slot by slot, None where the server does
    not say: with equal texts that is the sharpest test. verdict: "agree", "gap" (in texts, acceptance or drafts) or
    "inconclusive"; causes: of a gap, the likeliest first; visible_gap: the smallest difference in length that these
    prompts would have shown.
    """

    engine: str
    model: str
    block_size: int
    num_prompts: int
    num_counted: int
    num_steps: int
    num_slots: int | None
    length: Row
    raw_length: float | None
    slots: list[Row]
    texts: TextAgreement
    visible_gap: float | None
    num_same_steps: int | None
    verdict: str
    causes: list[str]
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def evaluate_served(url: str, references: Sequence[Reference], max_new_tokens: int, block_size: int, out: Path | str, *,
                    sample_from_anchor: bool = False, target: Target | None = None,
                    walked: Sequence[Sequence[Step]] | None = None, options: ServerOptions | None = None,
                    on_answer: Callable[[int], None] | None = None) -> Comparison:
    """Asks the server at `url` for the references' prompts and compares.

    block_size: tokens a verify step; sample_from_anchor: the drafter's convention, which an engine may not know; out:
    file for the answers (`served.ask`: resumable); target: judges where texts part, and decodes the tokens of a
    server that returns text only; walked: steps of the training's walk, prompt by prompt. Raises as `served.ask`.
    """
    served = ask(Server(url, options), [(one.id, one.prompt_ids) for one in references], max_new_tokens, out, on_answer)
    return compare(references, served, block_size, compare_texts(references, served.answers, target), walked,
                   sample_from_anchor)


def walk_references(target: Target, drafter: Path | str, references: Sequence[Reference]) -> list[list[Step]]:
    """The steps of the training's walk over the references' answers: the drafter in the folder `drafter` shown the
    target's states of the whole text, captured at once."""
    trained = load_drafter(drafter)
    proposer, config = DrafterProposer(trained, target), trained.config
    walks = []
    for one in references:
        text = one.prompt_ids + one.token_ids
        states = capture_batch(target, [text], config.target_layer_ids, last=False)[0].aux_hidden_states.float()
        walks.append(walk_acceptance(proposer, text, len(one.prompt_ids), states, config.num_drafts + 1))
    return walks


def compare_texts(references: Sequence[Reference], answers: Sequence[ServedAnswer],
                  target: Target | None) -> TextAgreement:
    """Each served answer against the reference's, up to its first differing token.

    Without token ids, texts are compared, special tokens left out; where these part the logits are not judged.
    """
    counts = dict.fromkeys(("num_identical", "num_near_ties", "num_rounding", "num_apart", "num_unjudged"), 0)
    positions = []
    for ours, theirs in zip(references, answers, strict=True):
        at = _parts_at(ours, theirs, target)
        if at is None:
            counts["num_identical"] += 1
            continue
        if target is None or theirs.token_ids is None:
            counts["num_unjudged"] += 1
        elif not 0 <= min(theirs.token_ids) <= max(theirs.token_ids) < target.embedding.weight.shape[0]:
            counts["num_apart"] += 1  # tokens that this target does not have
        else:
            divergence = first_divergence(target, ours.prompt_ids, ours.token_ids, theirs.token_ids)
            if divergence.near_tie:
                counts["num_near_ties"] += 1
                continue
            counts["num_rounding" if divergence.gap < ROUNDING else "num_apart"] += 1
        positions.append(at)
    return TextAgreement(len(references), positions=tuple(positions), **counts)


def _parts_at(ours: Reference, theirs: ServedAnswer, target: Target | None) -> int | None:
    """Index of the first token in which the answers differ, None when they do not; 0 where it cannot be told."""
    if theirs.token_ids is not None:
        shared = min(len(ours.token_ids), len(theirs.token_ids))
        at = next((i for i in range(shared) if ours.token_ids[i] != theirs.token_ids[i]), shared)
        if at == len(ours.token_ids) == len(theirs.token_ids):
            return None
        ended = at == len(theirs.token_ids) == len(ours.token_ids) - 1  # servers may keep the end-of-turn to themselves
        return None if ended and ours.finish_reason == theirs.finish_reason == "stop" else at
    if target is None:
        return 0

    def text(num_tokens: int) -> str:
        return target.tokenizer.decode(ours.token_ids[:num_tokens], skip_special_tokens=True,
                                       clean_up_tokenization_spaces=False)
    if text(len(ours.token_ids)) == theirs.text:
        return None
    return next((n - 1 for n in range(1, len(ours.token_ids) + 1) if not theirs.text.startswith(text(n))),
                len(ours.token_ids) - 1)


def compare(references: Sequence[Reference], served: Served, block_size: int, texts: TextAgreement,
            walked: Sequence[Sequence[Step]] | None = None, sample_from_anchor: bool = False) -> Comparison:
    """The figures and the verdict. References, answers and walks stand in the same order."""
    counted = [i for i, answer in enumerate(served.answers) if answer.counts is not None]
    answers = [served.answers[i] for i in counted]
    by_prompt = [references[i].steps for i in counted] if counted else [one.steps for one in references]
    walk_steps = None if walked is None else [s for i in (counted or range(len(walked))) for s in walked[i]]
    warnings = list(served.warnings)
    cut = [theirs for ours, theirs in zip(references, served.answers, strict=True)
           if theirs.finish_reason == "length" and theirs.num_tokens < len(ours.token_ids)]
    if cut and texts.num_apart + texts.num_unjudged:
        warnings.append(f"cut: the server ended {len(cut)} answers for their length before ours end, first {cut[0].id} "
                        f"after {cut[0].num_tokens} tokens: does it cap max_tokens?")
    num_slots = max((len(answer.counts.accepted) for answer in answers), default=0) or None
    length = _length_row(by_prompt, answers, served, walk_steps)
    slots = _slot_rows(by_prompt, answers, block_size, walk_steps)
    steps, accepted = sum(a.counts.num_steps for a in answers), sum(sum(a.counts.accepted) for a in answers)
    drafted = [a.counts.num_drafted for a in answers]
    if num_slots and None not in drafted and sum(drafted) < steps * num_slots:
        warnings.append(f"short-blocks: {sum(drafted)} drafts in {steps} steps of {num_slots}: some drafted fewer")
    visible = None if length.gap is None else max(TOLERANCE * length.ours.value, (length.gap.high - length.gap.low) / 2)
    same = sum(_same_steps(*pair) for pair in zip(by_prompt, answers, strict=True)) if num_slots else None
    apart = [_apart(*pair) for pair in zip(by_prompt, answers, strict=True)] if num_slots else [0.0]
    are_others = same is not None and texts.num_identical == texts.num_prompts and (
        same < OTHER_DRAFTS * len(answers) and sum(apart) > OTHER_COUNTS * len(apart))
    if are_others:
        warnings.append(f"other-drafts: texts are equal, yet only {same} of {len(answers)} prompts took the same "
                        f"verify steps, and counts differ by {100 * sum(apart) / len(apart):.0f} % of the "
                        "steps. Rounding moves single steps of long answers; more than that means that the server's "
                        "drafts are not ours, even where acceptance looks right: see the causes")
    rows, enough = [length, *slots], len(by_prompt) >= MIN_PROMPTS
    if texts.num_apart or (num_slots or block_size - 1) != block_size - 1 or enough and (
            are_others or any(r.beyond for r in rows)):
        verdict = "gap"
    elif texts.num_unjudged or texts.num_rounding * 2 > texts.num_prompts or not enough:
        verdict = "inconclusive"
    elif visible is None or visible > BLIND * length.ours.value:
        verdict = "inconclusive"
    else:
        verdict = "agree"
    return Comparison(
        engine=served.engine, model=served.model, block_size=block_size, num_prompts=len(references),
        num_counted=len(counted), num_steps=steps, num_slots=num_slots, length=length,
        raw_length=1 + accepted / steps if num_slots and steps else None, slots=slots, texts=texts, visible_gap=visible,
        num_same_steps=same, verdict=verdict, warnings=warnings,
        causes=_causes(rows, texts, num_slots, block_size, are_others, sample_from_anchor) if verdict == "gap" else [])


def _same_steps(steps: Sequence[Step], answer: ServedAnswer) -> bool:
    """Whether the server took as many steps for a prompt, and accepted as many drafts of each slot."""
    low, high = in_answer(answer.counts, answer.num_tokens)
    return len(steps) == answer.counts.num_steps and all(
        fewest <= sum(step.accepted >= slot for step in steps) <= most
        for slot, (fewest, most) in enumerate(zip(low, high, strict=True), 1))


def _apart(steps: Sequence[Step], answer: ServedAnswer) -> float:
    """How far a server's counts for a prompt are from ours: steps and accepted drafts of each slot, in shares of our
    steps."""
    low, high = in_answer(answer.counts, answer.num_tokens)
    ours = [sum(step.accepted >= slot for step in steps) for slot in range(1, len(low) + 1)]
    slots = sum(max(fewest - num, num - most, 0) for num, fewest, most in zip(ours, low, high, strict=True))
    return (abs(len(steps) - answer.counts.num_steps) + slots) / max(len(steps), 1)


def _causes(rows: Sequence[Row], texts: TextAgreement, num_slots: int | None, block_size: int,
            are_others: bool, sample_from_anchor: bool) -> list[str]:
    length, *slots = rows
    return likely_causes(
        ours=[row.ours.value for row in slots], served=[row.served.value for row in slots if row.served is not None],
        is_off=are_others or any(row.beyond for row in rows), is_higher=length.beyond and length.gap.value > 0,
        num_apart=texts.num_apart, positions=texts.positions, num_slots=num_slots, block_size=block_size,
        sample_from_anchor=sample_from_anchor)


def _length_row(by_prompt: Sequence[Sequence[Step]], answers: Sequence[ServedAnswer], served: Served,
                walk_steps: Sequence[Step] | None) -> Row:
    """Tokens a verify step: those of the answers behind their first, so drafts behind an answer's end do not count."""
    ours = acceptance_interval(by_prompt)
    walked = None if not walk_steps else sum(s.num_new for s in walk_steps) / len(walk_steps)
    if not any(answer.counts.num_steps for answer in answers):
        if served.accept_length is None:
            return Row(0, walked, ours, None, None, False)
        gap, noise = served.accept_length - ours.value, math.sqrt(2) * (ours.high - ours.low) / 2
        exact = Interval(*3 * (served.accept_length,))
        return Row(0, walked, ours, exact, Interval(gap, gap - noise, gap + noise),
                   abs(gap) > max(noise, TOLERANCE * ours.value))
    theirs = np.array([[a.num_tokens - 1, a.counts.num_steps] for a in answers], dtype=np.float64)
    mine = np.array([[sum(s.num_new for s in steps), len(steps)] for steps in by_prompt], dtype=np.float64)
    gap = ratio_difference(theirs, mine)
    return Row(0, walked, ours, ratio_interval(theirs), gap, _is_beyond(gap, TOLERANCE * ours.value))


def _slot_rows(by_prompt: Sequence[Sequence[Step]], answers: Sequence[ServedAnswer], block_size: int,
               walk_steps: Sequence[Step] | None) -> list[Row]:
    walked = by_slot(walk_steps).cumulative if walk_steps else []
    level, rows = 1 - 0.05 / (block_size - 1), []
    bounds = [in_answer(a.counts, a.num_tokens) for a in answers]
    for slot in range(1, block_size):
        mine = np.array([[sum(s.accepted >= slot for s in steps), len(steps)] for steps in by_prompt], dtype=np.float64)
        walk = walked[slot - 1] if slot <= len(walked) else None
        served = gap = None
        if any(a.counts.num_steps for a in answers) and all(slot <= len(a.counts.accepted) for a in answers):
            low, high = (np.array([[bound[side][slot - 1], a.counts.num_steps]
                                   for bound, a in zip(bounds, answers, strict=True)], dtype=np.float64)
                         for side in (0, 1))
            gaps = [ratio_difference(side, mine, level) for side in (low, high)]
            gap = Interval((gaps[0].value + gaps[1].value) / 2, gaps[0].low, gaps[1].high)
            num_steps, fewest, most = low[:, 1].sum(), low[:, 0].sum(), high[:, 0].sum()
            served = Interval((fewest + most) / 2 / num_steps, wilson(fewest, num_steps)[0], wilson(most, num_steps)[1])
        rows.append(Row(slot, walk, ratio_interval(mine), served, gap, gap is not None and _is_beyond(gap, TOLERANCE)))
    return rows


def _is_beyond(gap: Interval, tolerance: float) -> bool:
    return (gap.low > 0 or gap.high < 0) and abs(gap.value) > tolerance


def wilson(num: float, of: float, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share: `num` out of `of` independent trials. It is not empty at 0 or 1."""
    share, spread = num / of, z * z / of
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / of + spread / (4 * of))
    return max(0.0, middle - half), min(1.0, middle + half)
