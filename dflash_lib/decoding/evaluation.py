"""Evaluation on held-out prompts: the target's greedy answers, and every proposer walked along them.

The answers are written once, batched; walking a proposer along them is exact for greedy decoding, and cheap.
side_by_side.py decodes for real.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from dflash_lib.decoding.acceptance import draft_everywhere, walk_acceptance, walk_drafts
from dflash_lib.decoding.baselines import BigramProposer, OtherSampleStates, PromptLookupProposer, ZeroedStates
from dflash_lib.decoding.eval_prompts import EvalPrompt
from dflash_lib.decoding.speculative import Step
from dflash_lib.drafter.inference import Proposer
from dflash_lib.target.capture import capture_batch, plan_batches
from dflash_lib.target.generate import generate_batch
from dflash_lib.target.loading import Target, quiet_transformers

TOKENS_AT_ONCE = 4096  # padded tokens of a captured batch
PROMPTS_AT_ONCE = 32


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


@quiet_transformers()  # that fast kernels are missing is in the load report
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


def with_layers(answers: Sequence[Answer], captured: Sequence[int], layer_ids: Sequence[int]) -> list[Answer]:
    """The answers with the states of `layer_ids` only, of those of the layers `captured`, in whose order they lie."""
    columns = [list(captured).index(k) for k in layer_ids]
    return [replace(answer, states=answer.states[:, columns]) for answer in answers]


def draft_answers(proposer: Proposer, answers: Sequence[Answer], block_size: int) -> list[list[list[int]]]:
    """The proposer's block_size - 1 drafts behind every token of every answer but its last."""
    return [draft_everywhere(proposer, a.text_ids, len(a.prompt.token_ids), a.states, block_size) for a in answers]


def walk_block_sizes(drafts: Sequence[Sequence[Sequence[int]]], answers: Sequence[Answer],
                     block_size: int) -> dict[int, list[list[Step]]]:
    """Steps on every answer for every block size from 2 to `block_size`, from the drafts of `draft_answers`.

    For proposers whose shorter drafts are the beginning of their longer ones (the trained drafter's are: it always
    fills the block that it was trained for).
    """
    return {size: [walk_drafts(d, a.text_ids, len(a.prompt.token_ids), size)
                   for d, a in zip(drafts, answers, strict=True)] for size in range(2, block_size + 1)}


def walk_baselines(proposer: Proposer, bigram: BigramProposer | None, answers: Sequence[Answer],
                   block_size: int) -> dict[str, list[list[Step]]]:
    """Steps on every answer of what a toy would score: bigram table (if there is one), prompt look-up, and the trained
    proposer shown zeroed states and the states of the next answer in the list. Raises ValueError for fewer than two
    answers."""
    if len(answers) < 2:
        raise ValueError("another sample's states need at least two prompts")
    lookup, zeroed = PromptLookupProposer(), ZeroedStates(proposer)
    others = [OtherSampleStates(proposer, answers[(i + 1) % len(answers)].states) for i in range(len(answers))]
    named: dict[str, list[Proposer]] = {} if bigram is None else {"bigram table": [bigram] * len(answers)}
    named |= {"prompt look-up": [lookup] * len(answers),
              "zeroed states": [zeroed] * len(answers), "another sample's states": others}
    return {name: [walk_acceptance(p, a.text_ids, len(a.prompt.token_ids), a.states, block_size)
                   for p, a in zip(proposers, answers, strict=True)] for name, proposers in named.items()}
