"""Evaluation on held-out prompts: every proposer on the same greedy answers, and real decoding side by side.

The target's greedy answers are written once, batched; proposers are then walked along them (exact for greedy decoding,
and cheap). Speed is measured by decoding for real, with and without drafter, prompt by prompt in turns.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dflash_lib.conversations.formats import ConversationError, read_conversations
from dflash_lib.conversations.templates import as_template, encode_prompt
from dflash_lib.decoding.acceptance import (
    Interval,
    acceptance_length,
    draft_everywhere,
    ratio_interval,
    walk_acceptance,
    walk_drafts,
)
from dflash_lib.decoding.baselines import BigramProposer, OtherSampleStates, PromptLookupProposer, ZeroedStates
from dflash_lib.decoding.speculative import (
    Decoded,
    SpeculativeDecoded,
    Step,
    greedy_generate,
    measure_verify_seconds,
    speculative_generate,
)
from dflash_lib.drafter.inference import Proposer
from dflash_lib.target.capture import capture_batch, plan_batches
from dflash_lib.target.generate import generate_batch
from dflash_lib.target.loading import Target

TOKENS_AT_ONCE = 4096  # padded tokens of a captured batch
PROMPTS_AT_ONCE = 32


@dataclass(frozen=True)
class EvalPrompt:
    """A held-out prompt: its text, and its tokens with the generation prompt."""

    id: str
    kind: str
    text: str
    token_ids: list[int]


@dataclass(frozen=True)
class Answer:
    """A prompt with the target's greedy answer and its states: [prompt + answer tokens, L, H] float32."""

    prompt: EvalPrompt
    token_ids: list[int]
    states: Tensor

    @property
    def text_ids(self) -> list[int]:
        """Prompt and answer."""
        return self.prompt.token_ids + self.token_ids


def read_prompts(path: Path | str, template, num_prompts: int | None = None) -> list[EvalPrompt]:
    """The first `num_prompts` conversations of a file (None = all), each to be continued by the target.

    template: a ChatTemplate, made with the options that the training text was rendered with, or a tokenizer for the
    default ones. `text` is what the user says. Raises as `read_conversations`, and ConversationError for a conversation
    that does not end with a user turn.
    """
    prompts, template = [], as_template(template)
    for conversation in read_conversations(path, num_prompts, need_assistant=False):
        if conversation.messages[-1]["role"] != "user":
            raise ConversationError(f"{path}: conversation {conversation.id!r} does not end with a user turn, so there "
                                    "is nothing to answer")
        text = "\n".join(m["content"] for m in conversation.messages if m["role"] == "user")
        prompts.append(EvalPrompt(conversation.id, str(conversation.extra.get("kind", "")), text,
                                  encode_prompt(template, conversation)))
    return prompts


def answer_prompts(target: Target, prompts: Sequence[EvalPrompt], max_new_tokens: int,
                   layer_ids: Sequence[int]) -> list[Answer]:
    """The target's greedy answers, batched, and its states for prompt and answer."""
    answers: list[list[int]] = []
    for start in range(0, len(prompts), PROMPTS_AT_ONCE):
        batch = [prompt.token_ids for prompt in prompts[start:start + PROMPTS_AT_ONCE]]
        answers += [generation.token_ids for generation in generate_batch(target, batch, max_new_tokens)]
    rows = [prompt.token_ids + answer for prompt, answer in zip(prompts, answers, strict=True)]
    states: dict[int, Tensor] = {}
    for batch in plan_batches(list(map(len, rows)), TOKENS_AT_ONCE):
        captured = capture_batch(target, [rows[i] for i in batch], layer_ids, last=False)
        states.update((i, sample.aux_hidden_states.float()) for i, sample in zip(batch, captured, strict=True))
    return [Answer(prompt, answer, states[i]) for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))]


def walk_block_sizes(proposer: Proposer, answers: Sequence[Answer], block_size: int) -> dict[int, list[list[Step]]]:
    """The proposer's steps on every answer for every block size from 2 to `block_size`.

    For proposers whose shorter drafts are the beginning of their longer ones (the trained drafter's are: it always
    fills the block that it was trained for).
    """
    drafts = [draft_everywhere(proposer, a.text_ids, len(a.prompt.token_ids), a.states, block_size) for a in answers]
    return {size: [walk_drafts(d, a.text_ids, len(a.prompt.token_ids), size)
                   for d, a in zip(drafts, answers, strict=True)] for size in range(2, block_size + 1)}


def walk_baselines(proposer: Proposer, bigram: BigramProposer, answers: Sequence[Answer],
                   block_size: int) -> dict[str, list[list[Step]]]:
    """Steps on every answer of what a toy would score: bigram table, prompt look-up, and the trained proposer shown
    zeroed states and the states of the next answer in the list. Raises ValueError for fewer than two answers."""
    if len(answers) < 2:
        raise ValueError("another sample's states need at least two prompts")
    lookup, zeroed = PromptLookupProposer(), ZeroedStates(proposer)
    others = [OtherSampleStates(proposer, answers[(i + 1) % len(answers)].states) for i in range(len(answers))]
    named = {"bigram table": [bigram] * len(answers), "prompt look-up": [lookup] * len(answers),
             "zeroed states": [zeroed] * len(answers), "another sample's states": others}
    return {name: [walk_acceptance(p, a.text_ids, len(a.prompt.token_ids), a.states, block_size)
                   for p, a in zip(proposers, answers, strict=True)] for name, proposers in named.items()}


@dataclass(frozen=True)
class SideBySide:
    """One prompt decoded plainly and, by block size, speculatively."""

    prompt: EvalPrompt
    plain: Decoded
    speculative: dict[int, SpeculativeDecoded]


def decode_side_by_side(target: Target, proposer: Proposer, prompts: Sequence[EvalPrompt], max_new_tokens: int,
                        block_sizes: Sequence[int], layer_ids: Sequence[int],
                        on_prompt: Callable[[int], None] | None = None) -> list[SideBySide]:
    """Decodes every prompt plainly and with each block size.

    The order rotates from prompt to prompt, so that a machine that slows down hits all alike; one short decoding of
    each kind goes before, unmeasured. `on_prompt` is called with the number of finished prompts.
    """
    modes: list[int | None] = [None, *block_sizes]

    def decode(mode: int | None, prompt: EvalPrompt, num_tokens: int) -> Decoded:
        if mode is None:
            return greedy_generate(target, prompt.token_ids, num_tokens)
        return speculative_generate(target, proposer, prompt.token_ids, num_tokens, mode, layer_ids)

    for mode in modes:
        decode(mode, prompts[0], min(4, max_new_tokens))
    results = []
    for i, prompt in enumerate(prompts):
        turn = i % len(modes)
        decoded = {mode: decode(mode, prompt, max_new_tokens) for mode in modes[turn:] + modes[:turn]}
        results.append(SideBySide(prompt, decoded[None], {size: decoded[size] for size in block_sizes}))
        if on_prompt is not None:
            on_prompt(i + 1)
    return results


@dataclass(frozen=True)
class Speed:
    """Real decoding with one block size against plain decoding, over all prompts.

    tokens_per_second and plain_tokens_per_second: whole answers, prompt included. speedup: their ratio, with its
    interval over prompts. plain_step_s: seconds of a plain step; step_s: of a verify step with all that belongs to it,
    of which verify_s are the target's and draft_s the proposer's. break_even: step_s / plain_step_s, the acceptance
    length from which on drafting pays. num_identical: prompts whose tokens equal plain decoding's.
    """

    block_size: int
    num_prompts: int
    num_identical: int
    acceptance_length: float
    tokens_per_second: float
    plain_tokens_per_second: float
    speedup: Interval
    plain_step_s: float
    step_s: float
    verify_s: float
    draft_s: float

    @property
    def break_even(self) -> float:
        return self.step_s / self.plain_step_s


def speed_of(results: Sequence[SideBySide], block_size: int) -> Speed:
    """Speed with one block size. Raises ValueError when no answer has a second token."""
    plain = [r.plain for r in results]
    drafted = [r.speculative[block_size] for r in results]
    steps = [step for d in drafted for step in d.steps]
    num_tokens = sum(len(d.token_ids) for d in drafted)
    seconds = np.array([[p.seconds, d.seconds] for p, d in zip(plain, drafted, strict=True)])
    plain_steps = sum(len(p.token_ids) - 1 for p in plain)
    return Speed(
        block_size=block_size, num_prompts=len(results),
        num_identical=sum(p.token_ids == d.token_ids and p.finish_reason == d.finish_reason
                          for p, d in zip(plain, drafted, strict=True)),
        acceptance_length=acceptance_length(steps),
        tokens_per_second=num_tokens / float(seconds[:, 1].sum()),
        plain_tokens_per_second=sum(len(p.token_ids) for p in plain) / float(seconds[:, 0].sum()),
        speedup=ratio_interval(seconds),
        plain_step_s=sum(p.decode_seconds for p in plain) / max(plain_steps, 1),
        step_s=sum(d.decode_seconds for d in drafted) / len(steps),
        verify_s=sum(d.verify_seconds for d in drafted) / len(steps),
        draft_s=sum(d.draft_seconds for d in drafted) / len(steps))


def record(result: SideBySide, block_size: int) -> dict[str, Any]:
    """What a comparison with a server needs of one prompt, JSON-able: tokens asked and answered, steps."""
    decoded = result.speculative[block_size]
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


def showpiece(results: Sequence[SideBySide], block_size: int) -> SideBySide:
    """The prompt whose answer has the longest accepted drafts. Raises ValueError when no answer has a verify step."""
    candidates = [result for result in results if result.speculative[block_size].steps]
    return max(candidates, key=lambda result: acceptance_length(result.speculative[block_size].steps))


def block_lengths(walks: dict[int, list[list[Step]]], verify_seconds: dict[int, float],
                  draft_seconds: float) -> list[BlockLength]:
    """Promises of each block size in `walks`. verify_seconds: of a target forward over n tokens, for 1 and every block
    size; draft_seconds: of one draft."""
    return [BlockLength(size, acceptance_length([step for steps in walk for step in steps]),
                        (verify_seconds[size] + draft_seconds) / verify_seconds[1])
            for size, walk in sorted(walks.items())]
