"""Baselines against counting by hand."""

from collections import Counter, defaultdict

import numpy as np
import pytest
import torch

from dflash_lib.decoding.baselines import BigramProposer, OtherSampleStates, PromptLookupProposer, ZeroedStates
from tests.decoding.scripted import Scripted


def test_bigram_table_against_counters():
    rng = np.random.default_rng(0)
    rows = [(rng.integers(0, 12, n).astype(np.int32), rng.integers(0, 2, n).astype(np.uint8)) for n in (40, 1, 60, 2)]
    counts, overall = defaultdict(Counter), Counter()
    for ids, mask in rows:
        for a, b, on in zip(ids[:-1], ids[1:], mask[1:], strict=True):
            if on:
                counts[int(a)][int(b)] += 1
                overall[int(b)] += 1

    def best(counter):
        return min(counter, key=lambda token: (-counter[token], token))

    table = BigramProposer.from_rows(iter(rows), 15).following
    assert table.tolist() == [best(counts[a]) if a in counts else best(overall) for a in range(15)]


def test_bigram_drafts_follow_the_table():
    proposer = BigramProposer(np.array([1, 2, 0, 3]))
    proposer.begin()
    assert proposer.propose(1, 4) == [2, 0, 1, 2] and proposer.propose(3, 2) == [3, 3]


def test_bigram_without_pairs():
    with pytest.raises(ValueError, match="no supervised token"):
        BigramProposer.from_rows([(np.array([1, 2], np.int32), np.array([1, 0], np.uint8))], 4)


@pytest.mark.parametrize(("text", "anchor", "expected"), [
    ([1, 2, 3, 4, 9, 1, 2], 3, [4, 9, 1]),          # three tokens match
    ([1, 2, 5, 8, 2, 6, 8], 2, [6, 8, 2]),          # (8, 2) before the newer lone 2
    ([7, 3, 4, 5, 3, 6, 1], 3, [6, 1, 3]),          # the newest occurrence
    ([7, 8, 9], 9, [9, 9, 9]),                      # behind the text's end the last token is repeated
    ([7, 5, 8], 5, [8, 5, 5]),
    ([7, 8, 9], 4, [4, 4, 4]),                      # no match
    ([4], 4, [4, 4, 4]),
    ([1, 2, 3, 9, 5, 2, 3, 8, 1, 2], 3, [9, 5, 2]),  # the longer match, though older
])
def test_prompt_lookup(text, anchor, expected):
    proposer = PromptLookupProposer()
    proposer.begin()
    for part in (text[:2], text[2:]):
        proposer.extend(part, torch.zeros(len(part), 1, 1))
    assert proposer.propose(anchor, 3) == expected
    proposer.begin()
    assert proposer.propose(anchor, 2) == [anchor, anchor]


def test_zeroed_states():
    inner = Scripted([1, 2, 3, 4])
    proposer = ZeroedStates(inner)
    proposer.begin()
    states = torch.randn(2, 3, 4)
    proposer.extend([1, 2], states)
    assert inner.token_ids == [1, 2] and inner.states[0].shape == (2, 3, 4) and not inner.states[0].any()
    assert states.all() and proposer.propose(3, 1) == [4]
    assert proposer.name == "scripted, zeroed states"


def test_other_samples_states_go_position_by_position():
    other = torch.arange(4.0)[:, None, None].expand(4, 2, 3)
    inner = Scripted(list(range(30)))
    proposer = OtherSampleStates(inner, other)
    for _ in range(2):  # begin starts anew
        proposer.begin()
        proposer.extend([0, 1, 2], torch.randn(3, 2, 3))
        proposer.extend([3], torch.randn(1, 2, 3))
        proposer.extend([4, 5, 6, 7, 8], torch.randn(5, 2, 3))
        assert torch.cat(inner.states)[:, 0, 0].tolist() == [0, 1, 2, 3, 1, 2, 3, 1, 2]
    assert proposer.propose(9, 1) == [10]
    with pytest.raises(ValueError, match="at least 2"):
        OtherSampleStates(inner, other[:1])
