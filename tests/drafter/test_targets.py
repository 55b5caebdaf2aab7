"""What a drafter is trained towards: the target's logits, made again from the stored last state, for every family."""

import numpy as np
import pytest
import torch

from dflash_lib.drafter.inference import head_rows
from dflash_lib.drafter.objective import TargetEnds
from dflash_lib.hidden_states.store import HiddenStateStore
from dflash_lib.target.capture import capture_batch
from dflash_lib.target.loading import load_target
from tests.families import FAMILIES, make_family
from tests.hidden_states.rows import make_prepared, make_store

ONE_PLUS_WEIGHT = {"qwen3_5_text", "qwen3_5", "qwen3_5_moe", "qwen3_next", "gemma3_text", "gemma3"}
ROW = [5, 80, 200, 33, 7, 9, 14, 300, 301, 12, 77]


def make_ends(target, draft_vocab=None) -> TargetEnds:
    """As the trainer makes them."""
    head = head_rows(target.head.weight, draft_vocab).float()
    return TargetEnds(target.embedding, target.final_norm, head, draft_vocab)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """(name, target in float32) of every family, its norms random."""
    return request.param, load_target(make_family(tmp_path_factory.mktemp("families") / request.param, request.param))


@torch.no_grad()
def test_targets_are_the_targets_own_logits(family):
    _, target = family
    logits = target.model(torch.tensor([ROW])).logits[0]
    last = capture_batch(target, [ROW], [0])[0].last_hidden_state_prenorm
    assert torch.allclose(make_ends(target).target_logits(last), logits, rtol=1e-5, atol=1e-5)
    vocab = torch.tensor([0, 7, 33, 383])
    assert torch.allclose(make_ends(target, vocab).target_logits(last), logits[:, vocab], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_norm_is_the_families(family):
    """Against the formula in float64, with the factor that each family's own code multiplies with; the other factor is
    far off."""
    name, target = family
    last = capture_batch(target, [ROW], [0])[0].last_hidden_state_prenorm
    x, weight = last.double(), target.final_norm.weight.double()
    normed = x / (x.pow(2).mean(dim=-1, keepdim=True) + target.config.rms_norm_eps).sqrt()
    right, wrong = (1 + weight, weight) if name in ONE_PLUS_WEIGHT else (weight, 1 + weight)
    ours, head = make_ends(target).target_logits(last), target.head.weight.double()
    scale = ours.abs().max().item()
    assert (ours - (normed * right) @ head.T).abs().max().item() < 1e-5 * scale
    assert (ours - (normed * wrong) @ head.T).abs().max().item() > 0.3 * scale


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_bfloat16_targets_stored_state_gives_its_logits(name, tmp_path):
    """The store keeps bfloat16: what a target that computes in it handed out comes back bit for bit. The head's product
    is float32 where the target's is bfloat16, so logits agree to the rounding of one bfloat16 result."""
    target = load_target(make_family(tmp_path / "target", name), "bfloat16", audit="quick")
    prepared = make_prepared(target, num_samples=3)
    make_store(tmp_path / "store", target, prepared, target_layer_ids=[0, 2], token_budget=1)  # each sample alone
    store, ends = HiddenStateStore.open(tmp_path / "store"), make_ends(target)
    for index in store.sample_indices:
        sample = store.read(index)
        logits = target.model(torch.from_numpy(sample.input_ids).long()[None]).logits[0].float()
        made = ends.target_logits(sample.last_hidden_state_prenorm.float())
        assert np.array_equal(prepared.row(index)[0], sample.input_ids)
        assert (made - logits).abs().max().item() <= 2**-8 * logits.abs().max().item()
        assert (made.argmax(dim=-1) == logits.argmax(dim=-1)).float().mean() > 0.9  # bf16 logits have ties
