"""Acceptance figures against hand counts and known distributions; the walk against real decoding."""

import numpy as np
import pytest
import torch

from dflash_lib.decoding.acceptance import (
    Interval,
    acceptance_difference,
    acceptance_interval,
    acceptance_length,
    by_kind,
    by_slot,
    draft_everywhere,
    ratio_interval,
    walk_acceptance,
    walk_drafts,
)
from dflash_lib.decoding.speculative import Step, greedy_generate, speculative_generate
from dflash_lib.target.capture import capture_batch
from tests.decoding.scripted import Scripted

LAYER_IDS = [1, 2, 4]
PROMPT = [1, 90, 55, 200, 31, 8, 77]


def steps(*num_new, drafted=7) -> list[Step]:
    return [Step(0, drafted, n - 1, n) for n in num_new]


def timeless(records) -> list[tuple]:
    return [(s.position, s.drafted, s.accepted, s.num_new) for s in records]


@pytest.mark.parametrize("num_new", [1, 2, 9, 14])
@pytest.mark.parametrize("slot", [1, 2, 3, 10_000])
def test_the_walk_is_what_decoding_does(tiny_talker, num_new, slot):
    text = PROMPT + greedy_generate(tiny_talker, PROMPT, num_new).token_ids
    proposer = Scripted(text, lambda n: 1 + (n + slot) % slot if slot < 10 else slot)
    real = speculative_generate(tiny_talker, proposer, PROMPT, num_new, 4, LAYER_IDS)
    handed = list(proposer.states) if num_new > 1 else []
    states = capture_batch(tiny_talker, [text], LAYER_IDS, last=False)[0].aux_hidden_states
    walked = walk_acceptance(proposer, text, len(PROMPT), states, 4)
    assert timeless(walked) == timeless(real.steps)
    assert len(proposer.states) == len(handed)
    for a, b in zip(proposer.states, handed, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_the_walk_ends_at_the_end_of_turn_as_decoding_does(tiny_talker, monkeypatch):
    answer = greedy_generate(tiny_talker, PROMPT, 12).token_ids
    monkeypatch.setattr(tiny_talker.model.generation_config, "eos_token_id", answer[7])
    answer = greedy_generate(tiny_talker, PROMPT, 12).token_ids
    text = PROMPT + answer
    states = torch.zeros(len(text) - 1, 3, 64)  # those of the last token are not needed
    for slot in (1, 2, 3, 4, 10_000):
        proposer = Scripted(text, lambda n, slot=slot: slot)
        real = speculative_generate(tiny_talker, proposer, PROMPT, 12, 5, LAYER_IDS)
        assert real.token_ids == answer
        assert timeless(walk_acceptance(proposer, text, len(PROMPT), states, 5)) == timeless(real.steps)


class Noisy:
    """Drafts depend on position, states and known tokens; a fifth of them is wrong."""

    name = "noisy"

    def __init__(self, text):
        self.text = text

    def begin(self):
        self.known, self.sum = 0, 0.0

    def extend(self, token_ids, states):
        self.known += len(token_ids)
        self.sum += float(states.sum())

    def propose(self, anchor, num_tokens):
        rng = np.random.default_rng([self.known, int(abs(self.sum) * 1000)])
        true = (self.text + [0] * num_tokens)[self.known + 1:][:num_tokens]
        return [token + int(rng.random() < 0.2) for token in true]


@pytest.mark.parametrize("block_size", [2, 3, 5, 8])
def test_drafts_of_every_position_give_the_walk_of_every_block_size(block_size):
    rng = np.random.default_rng(0)
    text = rng.integers(10, 300, 60).tolist()
    states = torch.tensor(rng.normal(size=(60, 2, 4)), dtype=torch.float32)
    for end in (10, 11, 12, 60):
        proposer = Noisy(text[:end])
        drafts = draft_everywhere(proposer, text[:end], 10, states, 8)
        assert len(drafts) == max(0, end - 11) and all(len(d) == 7 for d in drafts)
        expected = walk_acceptance(Noisy(text[:end]), text[:end], 10, states, block_size)
        assert walk_drafts(drafts, text[:end], 10, block_size) == expected
        assert sum(s.num_new for s in expected) == max(0, end - 11)


def test_acceptance_length_counts_the_bonus_token():
    assert acceptance_length(steps(1, 1)) == 1.0
    assert acceptance_length(steps(8)) == 8.0
    assert acceptance_length([*steps(1, 4), Step(0, 7, 2, 2)]) == 7 / 3  # the last one ended on an accepted draft
    with pytest.raises(ValueError, match="no verify steps"):
        acceptance_length([])


def test_interval_of_equal_prompts_has_no_width():
    assert acceptance_interval([steps(1, 2)] * 5) == Interval(1.5, 1.5, 1.5)


def test_interval_is_a_ratio_of_sums_over_whole_prompts():
    """Two prompts: drawn anew, both are the first (1/4), the second (1/4), or one of each (1/2)."""
    prompts = [steps(1, 1, 1, 1), steps(3)]
    assert acceptance_interval(prompts) == Interval(7 / 5, 1.0, 3.0)
    assert acceptance_interval(prompts, level=0.1) == Interval(7 / 5, 7 / 5, 7 / 5)


def test_interval_against_the_delta_method():
    rng = np.random.default_rng(1)
    prompts = []
    for _ in range(300):
        rate = rng.uniform(0.1, 0.7)
        prompts.append(steps(*rng.geometric(1 - rate, size=rng.integers(5, 30)).clip(max=8).tolist()))
    tokens = np.array([sum(s.num_new for s in p) for p in prompts], float)
    num = np.array([len(p) for p in prompts], float)
    ratio = tokens.sum() / num.sum()
    error = np.sqrt(np.sum((tokens - ratio * num) ** 2) * 300 / 299) / num.sum()
    interval = acceptance_interval(prompts)
    assert interval.value == pytest.approx(ratio)
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * error, rel=0.06)
    assert (interval.high + interval.low) / 2 == pytest.approx(ratio, abs=0.2 * error)
    wide = acceptance_interval(prompts, level=0.99)
    assert wide.high - wide.low == pytest.approx(2 * 2.576 * error, rel=0.08)
    assert acceptance_interval(prompts) == interval  # seeded


def test_differences_are_paired():
    """Prompts differ much, the two proposers on each prompt little: only pairing sees it."""
    ours = [steps(n, n) for n in (1, 2, 3, 4, 5, 6)]
    theirs = [steps(n, n, n, n) for n in (1, 2, 3, 4, 5, 6)]
    assert acceptance_difference(ours, theirs) == Interval(0.0, 0.0, 0.0)
    better = [steps(n + 1, n) for n in (1, 2, 3, 4, 5, 6)]
    for interval, expected in ((acceptance_difference(better, ours), 0.5), (acceptance_difference(ours, better), -0.5)):
        assert [interval.value, interval.low, interval.high] == pytest.approx([expected] * 3)
    single = acceptance_interval(ours)
    assert single.high - single.low > 2
    with pytest.raises(ValueError, match="6 prompts with 5"):
        acceptance_difference(ours, ours[1:])


def test_prompts_without_steps_are_allowed():
    """An answer of one token has no verify step."""
    assert acceptance_interval([steps(1, 2), [], steps(1, 2)]).value == 1.5
    with pytest.raises(ValueError, match="no verify steps"):
        acceptance_interval([[], []])


def test_kinds():
    result = by_kind([steps(1), steps(2, 2), steps(4), []], ["b", "a", "a", "none"])
    assert list(result) == ["a", "b"]
    assert result["a"].value == 8 / 3 and result["b"] == Interval(1.0, 1.0, 1.0)


def test_slots_by_hand():
    records = [Step(0, 3, 0, 1), Step(0, 3, 2, 3), Step(0, 3, 3, 4), Step(0, 3, 1, 2),
               Step(0, 3, 1, 1)]  # the last one's answer ended on an accepted draft: slot 2 was never tried
    result = by_slot(records)
    assert result.conditional == [4 / 5, 2 / 3, 1 / 2]
    assert result.num_tried == [5, 3, 2]
    assert result.cumulative == [4 / 5, 2 / 5, 1 / 5]


def test_slots_that_were_never_reached():
    result = by_slot(steps(1, 1, drafted=2))
    assert result.cumulative == [0.0, 0.0] and result.num_tried == [2, 0]
    assert result.conditional[0] == 0.0 and np.isnan(result.conditional[1])
    assert by_slot([]).cumulative == []


@pytest.mark.parametrize("num_prompts", [5, 8, 24])
def test_intervals_hold_the_truth_as_often_as_they_say(num_prompts):
    """Answers of 20 to 60 steps whose acceptance differs from prompt to prompt; 95 % is promised."""
    generator, held, trials = np.random.default_rng(0), 0, 300
    for trial in range(trials):
        shares = generator.beta(4, 6, num_prompts)  # their mean is 0.4, and steps do not depend on them
        num_steps = generator.integers(20, 60, num_prompts)
        accepted = generator.binomial(num_steps, shares)
        interval = ratio_interval(np.stack([num_steps + accepted, num_steps], axis=1).astype(float),
                                  num_resamples=1000, seed=trial)
        held += interval.low <= 1.4 <= interval.high
    assert 0.91 <= held / trials <= 0.985
