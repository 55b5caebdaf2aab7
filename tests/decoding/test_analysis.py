"""Acceptance by position, by repetition, as a histogram: against slow and obvious counts."""

import numpy as np
import pytest

from dflash_lib.decoding.acceptance import acceptance_interval
from dflash_lib.decoding.analysis import (
    accepted_histogram,
    by_position,
    by_repetition,
    position_edges,
    repetitiveness,
)
from dflash_lib.decoding.speculative import Step


def random_answers(seed=0, num=6):
    """Steps of answers behind prompts of different lengths, and those lengths."""
    rng, all_steps, lengths = np.random.default_rng(seed), [], []
    for _ in range(num):
        lengths.append(int(rng.integers(1, 30)))
        at, steps = lengths[-1], []
        for _ in range(int(rng.integers(1, 25))):
            new = int(rng.integers(1, 6))
            steps.append(Step(at, 5, new - 1, new))
            at += new
        all_steps.append(steps)
    return all_steps, lengths


def test_histogram():
    all_steps, _ = random_answers()
    steps = [s for steps in all_steps for s in steps]
    assert accepted_histogram(steps, 8).tolist() == [sum(s.accepted == k for s in steps) for k in range(8)]
    assert accepted_histogram([], 3).tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="drafted 5 tokens, more than block_size 5"):
        accepted_histogram(steps, 5)


def test_position_edges_double():
    assert position_edges(0) == [0, 8] and position_edges(8) == [0, 8] and position_edges(9) == [0, 8, 16]
    assert position_edges(129)[-1] == 256


def test_by_position_against_a_loop():
    all_steps, lengths = random_answers()
    bins = by_position(all_steps, lengths)
    assert bins[0].low == 0 and all(a.high == b.low for a, b in zip(bins, bins[1:], strict=False))
    for b in bins:
        inside = []
        for steps, length in zip(all_steps, lengths, strict=True):
            inside.append([step for step in steps if b.low <= step.position - length and
                           step.position - length < b.high])
        assert b.num_steps == sum(len(steps) for steps in inside)
        assert b.num_prompts == sum(len(steps) > 0 for steps in inside)
        assert b.acceptance == acceptance_interval([steps for steps in inside if steps])
    assert sum(b.num_steps for b in bins) == sum(map(len, all_steps))
    nothing, = by_position([[]], [4])
    assert nothing.acceptance is None and nothing.num_steps == 0


@pytest.mark.parametrize(("prompt", "answer", "expected"), [
    ([], [1, 2, 3, 1, 2, 3], 1 / 4),             # 123 231 312 | 123
    ([1, 2, 3], [1, 2, 3], 1 / 3),               # 231 312 | 123
    ([7, 8], [7, 8, 9], 0),
    ([], [5, 5, 5, 5, 5], 2 / 3),
    ([1, 2, 3, 4], [2, 3, 4], 1 / 3),            # 342 423 | 234
])
def test_repetitiveness_by_hand(prompt, answer, expected):
    assert repetitiveness(prompt, answer) == pytest.approx(expected)


def test_repetitiveness_against_a_search():
    rng = np.random.default_rng(1)
    for _ in range(30):
        text = rng.integers(0, 3, size=40).tolist()
        prompt, answer = text[:15], text[15:]
        for n in (1, 2, 4):
            shares = []
            for end in range(16, 41):
                gram = text[end - n:end]
                shares.append(any(text[i:i + n] == gram for i in range(end - n)))
            assert repetitiveness(prompt, answer, n) == pytest.approx(np.mean(shares))
    assert np.isnan(repetitiveness([], [1, 2]))


def test_by_repetition():
    all_steps, _ = random_answers()
    shares = [0.0, 0.05, 0.1, 0.39, 1.0, float("nan")]
    bins = by_repetition(all_steps, shares)
    assert [b.num_prompts for b in bins] == [1, 1, 1, 1, 1]
    assert [b.acceptance for b in bins] == [acceptance_interval([steps]) for steps in all_steps[:5]]
    assert by_repetition(all_steps[:1], [0.3])[0].acceptance is None
