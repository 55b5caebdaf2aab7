"""normalization: the right way is exact, and the wrong ways show."""

import numpy as np
import pytest
import torch

from dflash_lib.hidden_states.normalization import EXACT, NO_NORM, OFF_BY_ONE, STORED, TWICE, compare_ways
from dflash_lib.target.loading import load_target

ROWS = [[5, 80, 200, 33, 7, 9, 14], [4, 300]]


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen3_5"])
def test_only_the_right_way_is_exact(name, request):
    ways = compare_ways(request.getfixturevalue(name), ROWS)
    assert ways[EXACT].max_difference == 0.0 and ways[EXACT].changed_share == 0.0
    assert 0 < ways[STORED].max_difference < 0.1 < min(ways[w].max_difference for w in (TWICE, NO_NORM, OFF_BY_ONE))
    assert all(len(way.kl) == 9 and (way.kl >= 0).all() for way in ways.values())


def test_ties_of_bf16_logits_are_no_change(tiny_qwen3_5_folder):
    """The exact way is exact in bf16, too; which of equally likely tokens a sort puts first says nothing."""
    target = load_target(tiny_qwen3_5_folder, "bfloat16", audit="quick")
    rows = [torch.randint(4, 384, (60,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(4)]
    ways = compare_ways(target, rows)
    assert (ways[EXACT].margin == 0).any(), "no tie among them: a blunt test"
    for name in (EXACT, STORED):
        assert ways[name].max_difference == 0 == ways[name].changed_share
    assert ways[NO_NORM].changed_share > 0.1


@torch.no_grad()
def test_figures_are_those_of_a_plain_loop(tiny_llama):
    way = compare_ways(tiny_llama, ROWS)[TWICE]
    at = 0
    for row in ROWS:
        output = tiny_llama.model(torch.tensor([row]), output_hidden_states=True)
        wrong = tiny_llama.head(tiny_llama.final_norm(output.hidden_states[-1][0]))  # HF's last is normed already
        for token, truth in enumerate(output.logits[0]):
            p, q = truth.softmax(0), wrong[token].softmax(0)
            assert way.difference[at] == pytest.approx(float((truth - wrong[token]).abs().max()), rel=1e-4)
            assert way.kl[at] == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-3, abs=1e-6)
            assert way.changed[at] == bool(truth.argmax() != wrong[token].argmax())
            first, second = truth.sort(descending=True).values[:2]
            assert way.margin[at] == pytest.approx(float(first - second), rel=1e-4, abs=1e-6)
            at += 1
    assert at == len(way.difference) and np.isfinite(way.kl).all()
