"""Greedy decoding of one sequence with the target alone, and with a proposer whose drafts the target verifies.

A verify step runs the target once over the anchor (the newest token, not yet in the cache) and its drafts. Drafts are
accepted as long as they equal the target's own choice; the target's choice behind them is the bonus token, and the
next anchor. So the output is what greedy decoding gives, whatever is proposed. Timings are wall-clock seconds.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_lib.decoding.cache import DecodingError, cache_argument, crop_cache, new_cache
from dflash_lib.drafter.inference import Proposer
from dflash_lib.target.capture import HiddenStateTap
from dflash_lib.target.generate import stop_token_ids
from dflash_lib.target.loading import Target


@dataclass(frozen=True)
class Step:
    """One verify step.

    position: the anchor's position in the sequence; drafted: number of draft tokens; accepted: those that stand in the
    answer; num_new: tokens that the step added to the answer, the bonus token counted. num_new is accepted + 1, except
    in an answer's last step when the answer ends on an accepted draft token: no bonus token follows then.
    verify_s: seconds of the target; draft_s: seconds of the proposer (drafting, and taking in the confirmed tokens).
    """

    position: int
    drafted: int
    accepted: int
    num_new: int
    verify_s: float = 0.0
    draft_s: float = 0.0


@dataclass(frozen=True)
class Decoded:
    """token_ids: the answer, its end-of-turn token included; finish_reason: "stop" or "length"; seconds: all of it;
    prefill_seconds: the prompt's part, up to the first token."""

    token_ids: list[int]
    finish_reason: str
    seconds: float
    prefill_seconds: float

    @property
    def decode_seconds(self) -> float:
        """Seconds behind the first token."""
        return self.seconds - self.prefill_seconds


@dataclass(frozen=True)
class SpeculativeDecoded(Decoded):
    """As Decoded, with the verify steps; prefill_seconds contains the proposer's reading of the prompt."""

    steps: list[Step]

    @property
    def verify_seconds(self) -> float:
        return sum(step.verify_s for step in self.steps)

    @property
    def draft_seconds(self) -> float:
        return sum(step.draft_s for step in self.steps)


class _TargetRunner:
    """The target with one growing sequence in its cache."""

    def __init__(self, target: Target, prompt_ids: Sequence[int], max_new_tokens: int):
        limit = getattr(target.config, "max_position_embeddings", None)
        if not len(prompt_ids):
            raise DecodingError("the prompt is empty; at least one token is needed")
        if max_new_tokens < 1:
            raise DecodingError(f"max_new_tokens: at least 1 is needed, got {max_new_tokens}")
        if limit is not None and len(prompt_ids) + max_new_tokens > limit:
            raise DecodingError(f"{len(prompt_ids)} prompt tokens and {max_new_tokens} new ones exceed the target's "
                                f"{limit} positions")
        self.target = target
        self.cache = new_cache(target)
        self.cache_name = cache_argument(target.model)

    def clock(self) -> float:
        """Wall-clock seconds, after the device has finished what it was given."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def choose(self, token_ids: Sequence[int], num_choices: int) -> list[int]:
        """Appends tokens to the sequence; the target's greedy choice behind each of the last `num_choices` of them."""
        input_ids = torch.tensor([token_ids], device=self.target.device)
        output = self.target.model(input_ids=input_ids, use_cache=True, logits_to_keep=num_choices,
                                   **{self.cache_name: self.cache})
        return output.logits[0].argmax(dim=-1).tolist()


def _cut(new: list[int], room: int, stop: set[int]) -> tuple[list[int], str | None]:
    """The new tokens up to an end-of-turn token or the length limit, and the finish reason (None = go on)."""
    new = new[:room]
    for i, token in enumerate(new):
        if token in stop:
            return new[:i + 1], "stop"
    return new, "length" if len(new) == room else None


@torch.inference_mode()
def greedy_generate(target: Target, prompt_ids: Sequence[int], max_new_tokens: int) -> Decoded:
    """Continues `prompt_ids` token by token. Raises DecodingError (empty prompt, too long, cache not supported)."""
    runner, stop = _TargetRunner(target, prompt_ids, max_new_tokens), set(stop_token_ids(target))
    begin = runner.clock()
    token_ids, finish = _cut(runner.choose(list(prompt_ids), 1), max_new_tokens, stop)
    prefilled = runner.clock()
    while finish is None:
        new, finish = _cut(runner.choose(token_ids[-1:], 1), max_new_tokens - len(token_ids), stop)
        token_ids += new
    return Decoded(token_ids, finish, runner.clock() - begin, prefilled - begin)


@torch.inference_mode()
def speculative_generate(target: Target, proposer: Proposer, prompt_ids: Sequence[int], max_new_tokens: int,
                         block_size: int, layer_ids: Sequence[int]) -> SpeculativeDecoded:
    """Continues `prompt_ids` with verify steps of `block_size` tokens: the anchor and block_size - 1 drafts.

    layer_ids: target layers whose outputs the proposer reads. The proposer is handed the states of exactly the tokens
    that are confirmed, as the verify steps computed them. Raises DecodingError as `greedy_generate` does, for a
    block_size below 2 and for a proposer that returns another number of drafts than asked for.
    """
    if block_size < 2:
        raise DecodingError(f"block_size counts the anchor, so at least 2 is needed, got {block_size}")
    runner, stop = _TargetRunner(target, prompt_ids, max_new_tokens), set(stop_token_ids(target))
    context = list(prompt_ids)  # confirmed tokens in the cache; the anchor is not among them
    steps: list[Step] = []
    begin = runner.clock()
    proposer.begin()
    with HiddenStateTap(target, layer_ids) as tap:
        token_ids, finish = _cut(runner.choose(context, 1), max_new_tokens, stop)
        if finish is None:
            proposer.extend(context, _states(tap, len(context)))
        prefilled = runner.clock()
        while finish is None:
            anchor, start = token_ids[-1], runner.clock()
            drafts = proposer.propose(anchor, block_size - 1)
            if len(drafts) != block_size - 1:
                raise DecodingError(f"{proposer.name}: {block_size - 1} drafts asked for, {len(drafts)} proposed")
            drafted = runner.clock()
            choices = runner.choose([anchor, *drafts], block_size)
            matching = next((i for i, draft in enumerate(drafts) if draft != choices[i]), len(drafts))
            new, finish = _cut(choices[:matching + 1], max_new_tokens - len(token_ids), stop)
            crop_cache(runner.cache, len(context) + 1 + matching)
            verified = runner.clock()
            if finish is None:
                proposer.extend([anchor, *drafts[:matching]], _states(tap, 1 + matching))
            steps.append(Step(len(context), len(drafts), min(matching, len(new)), len(new), verified - drafted,
                              drafted - start + runner.clock() - verified))
            context += [anchor, *drafts[:matching]]
            token_ids += new
    return SpeculativeDecoded(token_ids, finish, runner.clock() - begin, prefilled - begin, steps)


def _states(tap: HiddenStateTap, num_tokens: int) -> Tensor:
    """[num_tokens, L, H] float32: the newest forward's states of its first tokens."""
    return tap.aux[0, :num_tokens].float()


@torch.inference_mode()
def measure_verify_seconds(target: Target, context_ids: Sequence[int], lengths: Sequence[int],
                           num_repeats: int = 8) -> dict[int, float]:
    """Median seconds of one target forward over n tokens behind `context_ids`, for each n of `lengths`.

    n = 1 is a step of plain decoding. The lengths take turns, so that a machine that slows down hits them alike.
    """
    runner = _TargetRunner(target, context_ids, max(lengths))
    runner.choose(list(context_ids), 1)
    seconds: dict[int, list[float]] = {n: [] for n in lengths}
    for repeat in range(num_repeats + 1):
        for n in lengths:
            start = runner.clock()
            runner.choose([context_ids[-1]] * n, n)
            if repeat:  # the first round warms up
                seconds[n].append(runner.clock() - start)
            crop_cache(runner.cache, len(context_ids))
    return {n: sorted(values)[len(values) // 2] for n, values in seconds.items()}
