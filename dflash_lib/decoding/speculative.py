"""Decoding of one sequence with the target alone, and with a proposer whose drafts the target verifies.

A verify step runs the target once over the anchor (the newest token, not yet in the cache) and its drafts. Drafts are
accepted as long as they equal the target's own choice; the target's choice behind them is the bonus token, and the
next anchor. So the output is what greedy decoding gives, whatever is proposed. With a temperature, the output is
distributed as the target's own samples (choosing.py). Refused drafts are taken out of the target's cache again
(cache.py). Timings are wall-clock seconds.
"""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_lib.decoding.cache import DecodingError, TargetCache
from dflash_lib.decoding.choosing import Choice, Draft, Greedy, Sampling
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
    """The target with one growing sequence in its cache. rollback: tokens are to be taken back."""

    def __init__(self, target: Target, prompt_ids: Sequence[int], max_new_tokens: int, rollback: bool):
        limit = getattr(target.config, "max_position_embeddings", None)
        if not len(prompt_ids):
            raise DecodingError("the prompt is empty; at least one token is needed")
        if max_new_tokens < 1:
            raise DecodingError(f"max_new_tokens: at least 1 is needed, got {max_new_tokens}")
        if limit is not None and len(prompt_ids) + max_new_tokens > limit:
            raise DecodingError(f"{len(prompt_ids)} prompt tokens and {max_new_tokens} new ones exceed the target's "
                                f"{limit} positions")
        self.target = target
        self.cache = TargetCache(target, rollback)

    def clock(self) -> float:
        """Wall-clock seconds, after the device has finished what it was given."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def append(self, token_ids: Sequence[int]) -> Tensor:
        """Appends tokens to the sequence; the target's logits [V] behind the last of them."""
        return self._forward(token_ids, 1)[0]

    def verify(self, token_ids: Sequence[int]) -> Tensor:
        """Appends tokens to the sequence, some of which may be taken back; the logits [n, V] behind each."""
        with self.cache.recording():
            return self._forward(token_ids, len(token_ids))

    def _forward(self, token_ids: Sequence[int], num_logits: int) -> Tensor:
        input_ids = torch.tensor([token_ids], device=self.target.device)
        output = self.target.model(input_ids=input_ids, use_cache=True, logits_to_keep=num_logits,
                                   **self.cache.arguments)
        return output.logits[0]


def _cut(new: list[int], room: int, stop: set[int]) -> tuple[list[int], str | None]:
    """The new tokens up to an end-of-turn token or the length limit, and the finish reason (None = go on)."""
    new = new[:room]
    for i, token in enumerate(new):
        if token in stop:
            return new[:i + 1], "stop"
    return new, "length" if len(new) == room else None


@torch.inference_mode()
def greedy_generate(target: Target, prompt_ids: Sequence[int], max_new_tokens: int) -> Decoded:
    """Continues `prompt_ids` token by token. Raises DecodingError (empty prompt, too long)."""
    return _generate(target, prompt_ids, max_new_tokens, Greedy())


@torch.inference_mode()
def sample_generate(target: Target, prompt_ids: Sequence[int], max_new_tokens: int, temperature: float,
                    seed: int = 0) -> Decoded:
    """Continues `prompt_ids` token by token, each drawn from softmax(logits / temperature).

    Raises DecodingError as `greedy_generate` does, and for a temperature that is not above 0.
    """
    return _generate(target, prompt_ids, max_new_tokens, Sampling(temperature, seed))


def _generate(target: Target, prompt_ids: Sequence[int], max_new_tokens: int, choice: Choice) -> Decoded:
    runner = _TargetRunner(target, prompt_ids, max_new_tokens, rollback=False)
    stop = set(stop_token_ids(target))
    begin = runner.clock()
    token_ids, finish = _cut([choice.choose(runner.append(prompt_ids))], max_new_tokens, stop)
    prefilled = runner.clock()
    while finish is None:
        new, finish = _cut([choice.choose(runner.append(token_ids[-1:]))], max_new_tokens - len(token_ids), stop)
        token_ids += new
    return Decoded(token_ids, finish, runner.clock() - begin, prefilled - begin)


@torch.inference_mode()
def speculative_generate(target: Target, proposer: Proposer, prompt_ids: Sequence[int], max_new_tokens: int,
                         block_size: int, layer_ids: Sequence[int], *, temperature: float = 0.0,
                         seed: int = 0) -> SpeculativeDecoded:
    """Continues `prompt_ids` with verify steps of `block_size` tokens: the anchor and block_size - 1 drafts.

    layer_ids: target layers whose outputs the proposer reads. The proposer is handed the states of exactly the tokens
    that are confirmed, as the verify steps computed them. temperature: 0 = greedy; above, tokens are distributed as
    those of `sample_generate` (but are not the same ones for the same seed). Raises DecodingError as these do, for a
    block_size below 2, for a target whose cache cannot be rolled back, and for a proposer that returns another number
    of drafts than asked for.
    """
    if block_size < 2:
        raise DecodingError(f"block_size counts the anchor, so at least 2 is needed, got {block_size}")
    choice = Sampling(temperature, seed) if temperature else Greedy()
    runner = _TargetRunner(target, prompt_ids, max_new_tokens, rollback=True)
    stop = set(stop_token_ids(target))
    context = list(prompt_ids)  # confirmed tokens in the cache; the anchor is not among them
    steps: list[Step] = []
    begin = runner.clock()
    proposer.begin()
    with HiddenStateTap(target, layer_ids) as tap:
        token_ids, finish = _cut([choice.choose(runner.append(context))], max_new_tokens, stop)
        if finish is None:
            proposer.extend(context, _states(tap, len(context)))
        prefilled = runner.clock()
        while finish is None:
            anchor, start = token_ids[-1], runner.clock()
            draft = choice.draft(proposer, anchor, block_size - 1)
            drafts = draft.token_ids
            if len(drafts) != block_size - 1:
                raise DecodingError(f"{proposer.name}: {block_size - 1} drafts asked for, {len(drafts)} proposed")
            drafted = runner.clock()
            accepted, bonus = choice.accept(draft, runner.verify([anchor, *drafts]))
            new, finish = _cut([*drafts[:accepted], bonus], max_new_tokens - len(token_ids), stop)
            runner.cache.forget(len(drafts) - accepted)
            verified = runner.clock()
            if finish is None:
                proposer.extend([anchor, *drafts[:accepted]], _states(tap, 1 + accepted))
            steps.append(Step(len(context), len(drafts), min(accepted, len(new)), len(new), verified - drafted,
                              drafted - start + runner.clock() - verified))
            context += [anchor, *drafts[:accepted]]
            token_ids += new
    return SpeculativeDecoded(token_ids, finish, runner.clock() - begin, prefilled - begin, steps)


def _states(tap: HiddenStateTap, num_tokens: int) -> Tensor:
    """[num_tokens, L, H] float32: the newest forward's states of its first tokens."""
    return tap.aux[0, :num_tokens].float()


@torch.inference_mode()
def measure_verify_seconds(target: Target, context_ids: Sequence[int], lengths: Sequence[int],
                           num_repeats: int = 8) -> dict[int, float]:
    """Median seconds of verifying n tokens behind `context_ids` and taking every second one back, for each n of
    `lengths`.

    n = 1 is a step of plain decoding: nothing is recorded or taken back. The lengths take turns, so that a machine that
    slows down hits them alike.
    """
    runner, choice = _TargetRunner(target, context_ids, max(lengths), rollback=True), Greedy()
    runner.append(context_ids)
    prefilled = runner.cache
    seconds: dict[int, list[float]] = {n: [] for n in lengths}
    for repeat in range(num_repeats + 1):
        for n in lengths:
            runner.cache = copy.deepcopy(prefilled)
            token_ids, start = [context_ids[-1]] * n, runner.clock()
            if n == 1:
                choice.choose(runner.append(token_ids))
            else:
                choice.accept(Draft(token_ids[1:]), runner.verify(token_ids))
                runner.cache.forget(n // 2)
            if repeat:  # the first round warms up
                seconds[n].append(runner.clock() - start)
    return {n: sorted(values)[len(values) // 2] for n, values in seconds.items()}
