"""Evaluation: prompts, walks of all proposers, real decoding side by side."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dflash_lib.decoding.acceptance import Interval, acceptance_length, walk_acceptance
from dflash_lib.decoding.agreement import Divergence
from dflash_lib.decoding.baselines import BigramProposer
from dflash_lib.decoding.eval_prompts import EvalPrompt
from dflash_lib.decoding.evaluation import answer_prompts, draft_answers, walk_baselines, walk_block_sizes, with_layers
from dflash_lib.decoding.side_by_side import (
    BlockLength,
    SideBySide,
    Speed,
    Way,
    best_block_size,
    block_lengths,
    decode_in_turns,
    decode_side_by_side,
    fastest,
    measure_step_seconds,
    record,
    showpiece,
    speed_of,
)
from dflash_lib.decoding.speculative import (
    Decoded,
    SpeculativeDecoded,
    Step,
    greedy_generate,
    speculative_generate,
)
from dflash_lib.target.capture import capture_batch

LAYER_IDS = [1, 2, 4]
PROMPTS = [EvalPrompt("a", "facts", "A", [1, 90, 55]), EvalPrompt("b", "lists", "B", [1, 90, 55, 200, 31, 8, 77]),
           EvalPrompt("c", "facts", "C", [300, 12])]


class FromStates:
    """Drafts that depend on every state handed over, position by position; shorter drafts begin longer ones."""

    name = "from states"

    def begin(self):
        self.sum, self.num = 0.0, 0

    def extend(self, token_ids, states):
        self.sum += float((states.sum(dim=(1, 2)) * (1 + torch.arange(self.num, self.num + len(token_ids)))).sum())
        self.num += len(token_ids)

    def propose(self, anchor, num_tokens):
        rng = np.random.default_rng(int(abs(self.sum) * 10) % 1000)
        return [int(t) for t in rng.choice([141, 203, 312, 314, 89], 20)[:num_tokens]]


@pytest.fixture(scope="module")
def answers(tiny_talker):
    return answer_prompts(tiny_talker, PROMPTS, 10, LAYER_IDS)


def test_answers_and_their_states(tiny_talker, answers):
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.prompt is prompt
        assert answer.token_ids == greedy_generate(tiny_talker, prompt.token_ids, 10).token_ids
        alone = capture_batch(tiny_talker, [answer.text_ids], LAYER_IDS, last=False)[0].aux_hidden_states
        torch.testing.assert_close(answer.states, alone, rtol=1e-4, atol=1e-4)


def test_every_block_size_is_walked(answers):
    walks = walk_block_sizes(draft_answers(FromStates(), answers, 5), answers, 5)
    assert list(walks) == [2, 3, 4, 5]
    for size, walk in walks.items():
        for answer, steps in zip(answers, walk, strict=True):
            prompt_len = len(answer.prompt.token_ids)
            assert steps == walk_acceptance(FromStates(), answer.text_ids, prompt_len, answer.states, size)


def test_baselines_see_what_their_names_say(answers):
    seen = {}

    class Recorder(FromStates):
        def begin(self):
            super().begin()
            self.all = []
            seen.setdefault("runs", []).append(self.all)

        def extend(self, token_ids, states):
            self.all.append(states)

    walks = walk_baselines(Recorder(), BigramProposer(np.arange(384)), answers, 4)
    assert list(walks) == ["bigram table", "prompt look-up", "zeroed states", "another sample's states"]
    assert all(len(walk) == 3 for walk in walks.values())
    for run in seen["runs"][:3]:
        assert not torch.cat(run).any()
    for i, run in enumerate(seen["runs"][3:]):
        handed, other = torch.cat(run), answers[(i + 1) % 3].states
        num = min(len(handed), len(other))
        assert torch.equal(handed[:num], other[:num])
    bigram = acceptance_length([s for steps in walks["bigram table"] for s in steps])
    repeated = sum(a == b for answer in answers for a, b in zip(answer.token_ids, answer.token_ids[1:], strict=False))
    assert (bigram > 1) == (repeated > 0)
    assert list(walk_baselines(Recorder(), None, answers, 4)) == list(walks)[1:]
    with pytest.raises(ValueError, match="at least two prompts"):
        walk_baselines(Recorder(), BigramProposer(np.arange(384)), answers[:1], 4)


def test_side_by_side(tiny_talker, answers):
    done = []
    results = decode_side_by_side(tiny_talker, FromStates(), PROMPTS, 10, [3, 5], LAYER_IDS, done.append)
    assert done == [1, 2, 3]
    walks = walk_block_sizes(draft_answers(FromStates(), answers, 5), answers, 5)
    for i, (result, answer) in enumerate(zip(results, answers, strict=True)):
        assert result.prompt is PROMPTS[i] and list(result.speculative) == [3, 5]
        assert result.plain.token_ids == answer.token_ids
        for decoded in result.speculative.values():
            assert decoded.token_ids == answer.token_ids
    for size in (3, 5):
        speed = speed_of(results, size)
        assert (speed.block_size, speed.num_prompts, speed.num_identical) == (size, 3, 3)
        assert speed.speedup.low <= speed.speedup.value <= speed.speedup.high
        steps = [step for r in results for step in r.speculative[size].steps]
        assert speed.acceptance_length == acceptance_length(steps)
    assert len(walks[3]) == 3


def test_ways_of_several_drafters_take_turns(tiny_talker):
    """Other block sizes and other layers in one call, each as if it were alone."""
    ways = {"a": Way(FromStates(), 3, [1, 2, 4]), "b": Way(FromStates(), 5, [0, 5])}
    results = decode_in_turns(tiny_talker, ways, PROMPTS, 10)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.plain.token_ids == greedy_generate(tiny_talker, prompt.token_ids, 10).token_ids
        for name, way in ways.items():
            alone = speculative_generate(tiny_talker, FromStates(), prompt.token_ids, 10, way.block_size, way.layer_ids)
            assert result.outcome(name) == "identical" and result.divergences == {}
            assert [s.accepted for s in result.speculative[name].steps] == [s.accepted for s in alone.steps]
    assert speed_of(results, "b", 5).block_size == 5


def test_layers_of_answers(tiny_talker, answers):
    wide = answer_prompts(tiny_talker, PROMPTS, 10, [0, 1, 2, 4])
    for one, other in zip(with_layers(wide, [0, 1, 2, 4], LAYER_IDS), answers, strict=True):
        torch.testing.assert_close(one.states, other.states, rtol=0, atol=0)


def test_a_near_tie_is_not_equal_and_a_difference_is_neither(tiny_talker, monkeypatch):
    """A decoder that goes astray at one place: what counts is the gap between the two tokens there."""
    from dflash_lib.decoding import agreement, side_by_side

    def astray(*arguments, **more):
        found = speculative_generate(*arguments, **more)
        wrong = [*found.token_ids[:2], (found.token_ids[2] + 1) % 384, *found.token_ids[3:]]
        return SpeculativeDecoded(wrong, found.finish_reason, found.seconds, found.prefill_seconds, found.steps)

    monkeypatch.setattr(side_by_side, "speculative_generate", astray)
    results = decode_side_by_side(tiny_talker, FromStates(), PROMPTS[:1], 6, [3], LAYER_IDS)
    assert results[0].divergences[3].position == 2 and results[0].outcome(3) == "different"
    speed = speed_of(results, 3)
    assert (speed.num_identical, speed.num_near_ties, speed.num_different) == (0, 0, 1)
    monkeypatch.setattr(agreement, "NEAR_TIE", 1000.0)
    speed = speed_of(results, 3)
    assert (speed.num_identical, speed.num_near_ties, speed.num_different) == (0, 1, 0)


def test_outcomes_by_hand():
    plain, same = Decoded([1, 2], "length", 1.0, 0.5), SpeculativeDecoded([1, 2], "length", 1.0, 0.5, [])
    stopped = SpeculativeDecoded([1, 2], "stop", 1.0, 0.5, [])
    other = SpeculativeDecoded([1, 3], "length", 1.0, 0.5, [])
    tie, gap = Divergence(1, 2, 3, 5e-5), Divergence(1, 2, 3, 2e-4)
    result = SideBySide(PROMPTS[0], plain, {"same": same, "stopped": stopped, "tie": other, "gap": other},
                        {"tie": tie, "gap": gap})
    assert [result.outcome(way) for way in result.speculative] == ["identical", "different", "near-tie", "different"]


def decoded(num_tokens, seconds, prefill, steps=None, tokens=None):
    tokens = tokens or list(range(num_tokens))
    if steps is None:
        return Decoded(tokens, "length", seconds, prefill)
    return SpeculativeDecoded(tokens, "length", seconds, prefill, steps)


def test_speed_by_hand():
    steps = [Step(5, 3, 1, 2, 0.2, 0.05)] * 5
    results = [SideBySide(PROMPTS[0], decoded(11, 11.0, 1.0), {4: decoded(11, 4.0, 1.0, steps)}),
               SideBySide(PROMPTS[1], decoded(11, 11.0, 1.0),
                          {4: decoded(11, 4.0, 1.0, steps, tokens=[9] * 11)})]
    speed = speed_of(results, 4)
    assert (speed.num_identical, speed.num_near_ties, speed.num_different) == (1, 0, 1)
    assert speed.acceptance_length == 2.0
    assert (speed.tokens_per_second, speed.plain_tokens_per_second) == (22 / 8, 1.0)
    assert speed.speedup == Interval(2.75, 2.75, 2.75)
    assert (speed.plain_step_s, speed.step_s) == (1.0, pytest.approx(0.6))
    assert (speed.verify_s, speed.draft_s) == (pytest.approx(0.2), pytest.approx(0.05))
    assert speed.break_even == pytest.approx(0.6)
    assert speed.output_token_s == pytest.approx(6 / 20) and speed.draft_share == pytest.approx(0.05 / 0.6)


def test_block_lengths_by_hand():
    walks = {3: [[Step(0, 2, 2, 3)], [Step(0, 2, 0, 1)]], 2: [[Step(0, 1, 0, 1), Step(1, 1, 1, 2)], []]}
    two, three = block_lengths(walks, {1: 0.1, 2: 0.11, 3: 0.13}, 0.02)
    assert (two.block_size, two.acceptance_length, two.break_even) == (2, 1.5, pytest.approx(1.3))
    assert (three.block_size, three.acceptance_length, three.break_even) == (3, 2.0, pytest.approx(1.5))
    assert three.speedup == pytest.approx(2 / 1.5)
    assert best_block_size([two, three]) == 3
    assert best_block_size([BlockLength(2, 1.2, 1.0), BlockLength(3, 2.4, 2.0)]) == 2  # equal: the smaller one


def test_what_a_server_is_compared_with():
    steps = [Step(3, 3, 1, 2), Step(5, 3, 3, 3)]
    first = SideBySide(PROMPTS[0], decoded(1, 1.0, 1.0), {4: decoded(1, 1.0, 1.0, [])})
    second = SideBySide(PROMPTS[1], decoded(6, 2.0, 1.0), {4: decoded(6, 1.0, 0.5, steps)})
    assert record(second, 4) == {
        "id": "b", "kind": "lists", "prompt_ids": PROMPTS[1].token_ids, "token_ids": [0, 1, 2, 3, 4, 5],
        "finish_reason": "length", "accepted": [1, 3], "num_new": [2, 3]}
    assert showpiece([first, second], 4) is second
    with pytest.raises(ValueError):
        showpiece([first], 4)


def test_step_seconds(tiny_talker, answers):
    verify, draft = measure_step_seconds(tiny_talker, FromStates(), answers[0], 4, num_repeats=2)
    assert list(verify) == [1, 2, 3, 4] and min(verify.values()) > 0 and draft > 0


def test_the_faster_way_is_the_one_that_decoded_faster():
    """Costs had promised another: what was timed counts."""
    speeds = {size: SimpleNamespace(block_size=size, speedup=SimpleNamespace(value=value))
              for size, value in ((2, 0.33), (8, 0.54), (5, 0.54))}
    assert fastest(speeds).block_size == 8


@pytest.mark.parametrize("speedup, step_s, words", [
    (Interval(1.5, 1.2, 1.8), 1.3, ""), (Interval(1.5, 0.9, 1.8), 1.3, "no certain difference"),
    (Interval(2.5, 2.2, 2.8), 1.3, "disturbed"), (Interval(1.5, 1.2, 1.8), 0.9, "disturbed")])
def test_a_speedup_that_cannot_be_says_so(speedup, step_s, words):
    """2 tokens a step, each step at least as long as a plain one: at most twice as fast."""
    speed = Speed(4, 1, 1, 0, 0, 2.0, 1.0, 1.0, speedup, 1.0, step_s, 0.5, 0.1, 0.5)
    assert (words in speed.caveat) and bool(speed.caveat) == bool(words)
