"""Choosing tokens: greedy, and speculative sampling, whose answers must be distributed as the target's own samples."""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3_5TextConfig

from dflash_lib.decoding.cache import DecodingError
from dflash_lib.decoding.choosing import Draft, Greedy, Sampling
from dflash_lib.decoding.speculative import sample_generate, speculative_generate
from dflash_lib.target.loading import Target

VOCAB, NUM_NEW, STOP = 4, 3, 3


def deviation(counts: dict, probabilities: dict) -> float:
    """Pearson's chi-square of counted answers as a standard normal deviate (Wilson and Hilferty's approximation).

    Answers that are to come less than five times are taken together. 3 is exceeded once in 740 times.
    """
    num, rare, chi_square, cells = sum(counts.values()), [0.0, 0.0], 0.0, 0
    assert set(counts) <= {answer for answer, p in probabilities.items() if p > 0}
    for answer, p in probabilities.items():
        if num * p < 5:
            rare = [rare[0] + counts.get(answer, 0), rare[1] + num * p]
            continue
        chi_square, cells = chi_square + (counts.get(answer, 0) - num * p) ** 2 / (num * p), cells + 1
    if rare[1] > 1:
        chi_square, cells = chi_square + (rare[0] - rare[1]) ** 2 / rare[1], cells + 1
    degrees = cells - 1
    return ((chi_square / degrees) ** (1 / 3) - 1 + 2 / (9 * degrees)) / math.sqrt(2 / (9 * degrees))


def count(answers) -> dict:
    found: dict = {}
    for answer in answers:
        found[answer] = found.get(answer, 0) + 1
    return found


# A target and a drafter that are tables of logits.

generator = torch.Generator().manual_seed(7)
TARGET = 0.7 * torch.randn(VOCAB, VOCAB, generator=generator)  # row: the token before
DRAFTER = 1.5 * torch.randn(2, VOCAB, generator=generator)  # row: the slot
DRAFTER[1, 2] = -math.inf  # a token that is never drafted there
ANCHOR, TEMPERATURE = 1, 0.8


def exact(temperature: float) -> dict:
    """The probability of each three tokens behind the anchor."""
    p = (TARGET.double() / temperature).softmax(dim=-1)
    return {(a, b, c): float(p[ANCHOR, a] * p[a, b] * p[b, c])
            for a, b, c in itertools.product(range(VOCAB), repeat=3)}


def table_answers(choice, num: int, drawn: bool):
    """`num` answers of three tokens, from blocks of two drafts."""
    q = (DRAFTER.double() / TEMPERATURE).softmax(dim=-1)
    for _ in range(num):
        answer = [ANCHOR]
        while len(answer) < 4:
            ids = [choice._draw(row) for row in q] if drawn else [2, 0]
            accepted, bonus = choice.accept(Draft(ids, q if drawn else None), TARGET[[answer[-1], *ids]])
            answer += [*ids[:accepted], bonus]
        yield tuple(answer[1:4])


@pytest.mark.parametrize("drawn", [True, False])
def test_answers_are_distributed_as_the_targets(drawn):
    counts = count(table_answers(Sampling(TEMPERATURE, 0), 2500, drawn))
    assert abs(deviation(counts, exact(TEMPERATURE))) < 3
    assert deviation(counts, exact(1.6 * TEMPERATURE)) > 5  # so a wrong temperature would be seen


class AcceptsAll(Sampling):
    def accept(self, draft, logits):
        return len(draft.token_ids), self.choose(logits[-1])


class RefusedFromP(Sampling):
    """Draws from p where a draft was refused, instead of from what is left of it."""
    def accept(self, draft, logits):
        num, token = super().accept(draft, logits)
        return num, token if num == len(draft.token_ids) else self.choose(logits[num])


class BonusFromBefore(Sampling):
    def accept(self, draft, logits):
        return super().accept(draft, torch.cat([logits[:-1], logits[-2:-1]]))


class SaysUniform(Sampling):
    """Takes drafts for drawn from another distribution than they were."""
    def accept(self, draft, logits):
        return super().accept(Draft(draft.token_ids, torch.full_like(draft.probabilities, 1 / VOCAB)), logits)


@pytest.mark.parametrize("fault", [AcceptsAll, RefusedFromP, BonusFromBefore, SaysUniform])
def test_wrong_sampling_is_seen(fault):
    """Planted faults."""
    counts = count(table_answers(fault(TEMPERATURE, 0), 2500, drawn=True))
    assert deviation(counts, exact(TEMPERATURE)) > 5


def test_drafts_that_are_certain_or_impossible():
    sampling, logits = Sampling(1.0, 0), torch.tensor([[0.0, -math.inf, -math.inf]] * 3)
    for _ in range(20):
        assert sampling.accept(Draft([0, 0]), logits) == (2, 0)
        assert sampling.accept(Draft([1, 0]), logits) == (0, 0)
        assert sampling.accept(Draft([0, 2], torch.tensor([[1.0, 0, 0], [0.0, 0, 1]])), logits) == (1, 0)
    same = torch.tensor([0.2, 0.3, 0.5]).double()
    for token in range(3):  # drafter and target agree: nothing is ever refused
        assert Sampling(1.0, token).accept(Draft([token], same[None]), same.log()[None].repeat(2, 1))[0] == 1


def test_greedy_by_hand():
    logits = torch.eye(5)[[3, 1, 4]]
    assert Greedy().choose(logits[0]) == 3
    assert Greedy().accept(Draft([3, 1]), logits) == (2, 4)
    assert Greedy().accept(Draft([3, 2]), logits) == (1, 1)
    assert Greedy().accept(Draft([0, 1]), logits) == (0, 3)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_bad_temperatures(temperature):
    with pytest.raises(DecodingError, match="temperature: a finite number above 0"):
        Sampling(temperature, 0)


# Real targets with a vocabulary of six.

SMALL = {"vocab_size": 6, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 8, "initializer_range": 0.3, "pad_token_id": None}
CONFIGS = {"llama": lambda: LlamaConfig(num_hidden_layers=2, **SMALL),
           "qwen3_5": lambda: Qwen3_5TextConfig(
               num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
               linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, **SMALL)}
PROMPT = [1, 4, 0]


def small_target(family: str) -> Target:
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]()).float().eval().requires_grad_(False)
    model.lm_head.weight.mul_(4)
    model.generation_config.eos_token_id = STOP
    return Target(Path(family), model, SimpleNamespace(eos_token_id=STOP), None)


@torch.no_grad()
def exact_answers(target, temperature: float) -> dict:
    """The probability of every answer of up to three tokens, ended by the stop token or cut."""
    answers = list(itertools.product(range(6), repeat=NUM_NEW))
    logits = target.model(input_ids=torch.tensor([[*PROMPT, *answer] for answer in answers])).logits
    p = (logits[:, len(PROMPT) - 1:-1].double() / temperature).softmax(dim=-1)
    found: dict = {}
    for row, answer in zip(p, answers, strict=True):
        end = answer.index(STOP) + 1 if STOP in answer else NUM_NEW
        found[answer[:end]] = math.prod(float(row[i, answer[i]]) for i in range(end))
    assert sum(found.values()) == pytest.approx(1)
    return found


class Drawing:
    """Draws from distributions that depend on the confirmed tokens and the target's states."""

    name = "drawing"

    def begin(self):
        self.sum = 0.0

    def extend(self, token_ids, states):
        self.sum += float(states.sum())

    def propose_sampled(self, anchor, num_tokens, temperature, generator):
        logits = torch.sin(self.sum + anchor + torch.arange(6.0) * torch.arange(1.0, num_tokens + 1)[:, None])
        q = (logits.double() * 1.5 / temperature).softmax(dim=-1)
        return torch.multinomial(q, 1, generator=generator)[:, 0].tolist(), q


class Fixed(Drawing):
    """Drafts that are not drawn."""

    propose_sampled = None

    def propose(self, anchor, num_tokens):
        return [(anchor + 2 * i) % 6 for i in range(1, num_tokens + 1)]


@pytest.mark.slow
@pytest.mark.parametrize("proposer", [Drawing(), Fixed(), None])
@pytest.mark.parametrize("family", CONFIGS)
def test_decoded_answers_are_distributed_as_the_targets(family, proposer):
    target = small_target(family)
    probabilities = exact_answers(target, 0.9)

    def answer(seed: int) -> tuple[int, ...]:
        if proposer is None:
            return tuple(sample_generate(target, PROMPT, NUM_NEW, 0.9, seed).token_ids)
        return tuple(speculative_generate(target, proposer, PROMPT, NUM_NEW, 3, [0, 1], temperature=0.9,
                                          seed=seed).token_ids)
    counts = count(answer(seed) for seed in range(1500))
    assert abs(deviation(counts, probabilities)) < 3
    assert deviation(counts, exact_answers(target, 1.3)) > 5


def test_sampling_is_repeatable_and_drawn_drafts_are_used():
    target, proposer = small_target("qwen3_5"), Drawing()
    target.model.generation_config.eos_token_id = 5

    def answer(seed, **more):
        return speculative_generate(target, proposer, PROMPT, 12, 4, [0, 1], temperature=0.9, seed=seed, **more)
    assert answer(1).token_ids == answer(1).token_ids
    assert len({tuple(answer(seed).token_ids) for seed in range(4)}) > 1
    assert any(step.accepted for seed in range(4) for step in answer(seed).steps)
    with pytest.raises(DecodingError, match="temperature"):
        speculative_generate(target, proposer, PROMPT, 4, 4, [0, 1], temperature=-0.5)
