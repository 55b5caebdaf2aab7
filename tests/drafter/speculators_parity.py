"""Parity with speculators 0.9.0, and each deliberate difference with its size (`objective.py` lists the reasons).

Run by test_speculators_parity.py in a process of its own, which has the package on its path.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from loguru import logger
from speculators.models.dflash.attention import create_anchor_block_mask_mod
from speculators.models.dflash.utils import select_anchors
from torch.nn.attention.flex_attention import create_mask

from dflash_lib.drafter import attention as our_attention
from dflash_lib.drafter.attention import attention_mask
from dflash_lib.drafter.blocks import anchor_candidates
from dflash_lib.drafter.network import FULL, SLIDING
from dflash_lib.target.capture import capture_batch
from dflash_lib.target.loading import Target, load_target
from tests.drafter.speculators_side import (
    BLOCK,
    DIFFERENCES,
    MASKS,
    ROUNDING,
    check_equal,
    differ,
    make_pair,
    make_samples,
    mask_of,
    our_weights,
    packed,
    run_both,
)
from tests.families import FAMILIES, make_family

WRONG_NORM = {"qwen3_5_moe", "qwen3_next"}  # speculators 0.9.0 multiplies with weight where these do with 1 + weight


@pytest.fixture(scope="module", autouse=True)
def table():
    """Prints what was measured; BENCHMARKS.md holds it."""
    logger.remove()  # the package's log of every file that it opens
    yield
    print()
    for name, found in DIFFERENCES.items():
        print(f"PARITY | {name} | {max(found):.1e} |")


@pytest.fixture(scope="module", params=["llama_untied", "qwen3_5"])
def target(request, tmp_path_factory) -> Target:
    """A dense target, and a hybrid whose norm multiplies with 1 + weight."""
    return load_target(make_family(tmp_path_factory.mktemp("target") / request.param, request.param))


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Target:
    return load_target(make_family(tmp_path_factory.mktemp("target") / "dense", "llama_untied"))


@pytest.fixture(scope="module")
def greedy(target):
    return make_samples(target, MASKS, greedy=True)


@pytest.mark.parametrize("kl_weight", [0.0, 1.0], ids=["ce", "kl"])
@pytest.mark.parametrize("num_anchors", [3, 100], ids=["few anchors", "every anchor"])
def test_everything_agrees_on_the_targets_own_text(target, greedy, tmp_path, monkeypatch, kl_weight, num_anchors):
    """Several documents packed, anchors up to the last token but one of each. The package gathers the target's logits
    in another way where anchors are few."""
    pair = make_pair(target, tmp_path)
    found = run_both(pair, greedy, monkeypatch, kl_weight, num_anchors)
    num_blocks = sum(min(num_anchors, len(anchor_candidates(torch.from_numpy(s.loss_mask)))) for s in greedy)
    assert len(found["anchors"]) == num_blocks and (num_blocks * BLOCK < found["row"]["input_ids"].shape[1]) == (
        num_anchors == 3)
    if num_anchors == 100:
        assert [len(s.input_ids) - 2 in anchors for s, anchors in zip(
            greedy, found["batch"].anchors.split(found["batch"].packing.num_blocks), strict=True)] == [
            True, True, False]  # the third document ends on an unsupervised token
    check_equal(pair, found, "KL" if kl_weight else "cross-entropy")


@pytest.mark.parametrize("kl_weight", [0.0, 1.0], ids=["ce", "kl"])
def test_reduced_vocabulary_agrees_where_it_holds_every_label(target, greedy, tmp_path, monkeypatch, kl_weight):
    used = {int(t) for s in greedy for t in s.input_ids}
    vocab = torch.tensor(sorted(used | set(range(0, 384, 7))))
    assert len(vocab) < 200
    pair = make_pair(target, tmp_path, vocab)
    assert torch.equal(pair.theirs.t2d.nonzero().flatten(), vocab)
    assert torch.equal(pair.theirs.d2t + torch.arange(len(vocab)), vocab)
    check_equal(pair, run_both(pair, greedy, monkeypatch, kl_weight), "reduced vocabulary")


@pytest.mark.parametrize("kinds", [[SLIDING, SLIDING], [SLIDING, FULL]], ids=["all", "mixed"])
def test_sliding_window_agrees_while_the_window_holds_the_context(target, greedy, tmp_path, monkeypatch, kinds):
    window = max(len(s.input_ids) for s in greedy) + BLOCK
    pair = make_pair(target, tmp_path, layer_types=kinds, sliding_window=window)
    assert pair.theirs.sliding_window_non_causal is False and pair.ours.config.layer_types == tuple(kinds)
    assert pair.theirs.sliding_window_indices == [i for i, kind in enumerate(kinds) if kind == SLIDING]
    check_equal(pair, run_both(pair, greedy, monkeypatch, 0.0), "sliding window, wide")
    check_equal(pair, run_both(pair, greedy, monkeypatch, 1.0), "sliding window, wide")


def test_difference_sliding_windows_lower_bound(target, greedy, tmp_path, monkeypatch):
    """Theirs sees a - W <= p from every slot, ours (and vLLM) q - (W - 1) <= p: nothing else differs, for with that
    bound in place of ours everything agrees."""
    window = 8
    pair = make_pair(target, tmp_path, layer_types=[SLIDING, SLIDING], sliding_window=window)
    found = run_both(pair, greedy, monkeypatch, 0.0)
    anchors = found["batch"].anchors
    far = anchors >= window  # theirs drops a context position here, ours one more from slot 0 on
    apart = (found["our_hidden"] - found["hidden"]).abs().amax(dim=(1, 2)) / found["hidden"].abs().max()
    assert 10 < far.sum() < len(far) and apart[far].min() > 1e-3
    DIFFERENCES["deliberate: sliding window of 8, hidden states"] = [apart.max().item()]

    seen = attention_mask(torch.tensor([20]), torch.arange(BLOCK)[None], BLOCK, 30, window)[0]
    mod, num_queries, num_keys = create_anchor_block_mask_mod(torch.zeros(30, dtype=torch.long), 30, torch.tensor([20]),
                                                              BLOCK, window, False)
    theirs = create_mask(mod, None, None, num_queries, num_keys, device="cpu")[0, 0]
    assert [int(row[:30].nonzero().min()) for row in seen] == [13, 14, 15, 16, 17, 18]
    assert [int(row[:30].nonzero().min()) for row in theirs] == [12] * BLOCK
    assert torch.equal(seen[:, 30:], theirs[:, 30:]), "both are causal inside the block"

    def their_bound(anchors, slots, block_size, num_context, sliding_window):
        mask = attention_mask(anchors, slots, block_size, num_context, num_context + block_size)  # causal, all of it
        position, edge = torch.arange(num_context), anchors[:, None, None] - sliding_window
        mask[..., :num_context] = (position >= edge) & (position < anchors[:, None, None])
        return mask

    monkeypatch.setattr(our_attention, "attention_mask", their_bound)
    check_equal(pair, run_both(pair, greedy, monkeypatch, 0.0), "sliding window, narrow, with their lower bound")


def test_difference_labels(target, tmp_path, monkeypatch):
    """On text that is not the target's own, cross-entropy there is still with the target's argmax."""
    samples = make_samples(target, MASKS, greedy=False)
    pair = make_pair(target, tmp_path)
    found = run_both(pair, samples, monkeypatch, 0.0)
    batch = found["batch"]
    weights, log_q = our_weights(found), found["logits"].log_softmax(dim=-1)
    data = F.pad(batch.labels, (1, 0))
    argmax = found["targets"].argmax(dim=-1)
    nll = [-log_q.gather(2, labels[..., None])[..., 0] for labels in (data, argmax)]
    assert found["parts"].loss_sum.item() == pytest.approx((weights * nll[0]).sum().item(), rel=1e-5)
    assert found["loss"].item() == pytest.approx(((weights * nll[1]).sum() / found["mask"].sum()).item(), rel=1e-5)
    other = ((data != argmax) & (weights > 0)).sum() / (weights > 0).sum()
    assert other > 0.9, "random text is what the target would not have said"
    assert (weights * (nll[0] - nll[1]).abs()).sum() / weights.sum() > 0.3, "nats a slot"
    DIFFERENCES["deliberate: share of random text's labels that differ"] = [other.item()]
    check_equal(pair, run_both(pair, samples, monkeypatch, 1.0), "KL on random text", same_labels=False)


def test_difference_the_loss_is_normalised_otherwise(target, greedy, tmp_path, monkeypatch):
    """Ours is the weighted mean, theirs divides the weighted sum by the number of slots: a factor that the block size
    and gamma fix nearly, and that anchors near an end move from batch to batch."""
    pair = make_pair(target, tmp_path)
    found = run_both(pair, greedy, monkeypatch, 0.0)
    ours = found["parts"].loss_sum / found["parts"].weight_sum
    factor = found["mask"].sum() / our_weights(found).sum()
    assert (ours / found["loss"]).item() == pytest.approx(factor.item(), rel=1e-5) and factor > 1.2
    DIFFERENCES["deliberate: our loss over theirs (block 6, gamma 4)"] = [factor.item()]


def test_difference_blocks_that_cross_into_the_next_document(target, tmp_path, monkeypatch):
    """A document without a prompt behind another: their blocks train on its tokens from the other's context."""
    samples = make_samples(target, [mask_of(20, 5), mask_of(20, 0)], greedy=True)
    pair = make_pair(target, tmp_path)
    found = run_both(pair, samples, monkeypatch, 0.0)
    ours, theirs = our_weights(found) > 0, found["mask"] > 0
    anchors = found["anchors"]
    crossing = (anchors[:, None] < 20) & (anchors[:, None] + torch.arange(BLOCK) >= 20)
    assert torch.equal(theirs & ~crossing, ours), "the only slots more are beyond the document's end"
    # anchors 15 .. 18 of the first document have 1, 2, 3 and 4 slots behind its end
    assert (theirs & crossing).sum() == 1 + 2 + 3 + 4 and not (ours & crossing).any()
    assert differ("blocks that cross: hidden states all the same", found["our_hidden"], found["hidden"]) < ROUNDING
    DIFFERENCES["deliberate: trained slots that are the next document's"] = [(theirs & crossing).sum() / theirs.sum()]


def test_difference_which_anchors_are_drawn(dense):
    """Theirs: any supervised token but the last block_size of the packed row, so many a row. Ours: own and next token
    supervised, up to a document's end, so many a document."""
    samples = make_samples(dense, MASKS, greedy=False)
    row = packed(samples, sum(len(mask) for mask in MASKS))  # a full row, no padding behind
    theirs, valid = select_anchors(row["loss_mask"], 1000, BLOCK)
    theirs, offsets = set(theirs[valid].tolist()), np.cumsum([0, *map(len, MASKS)])
    ours = {int(a) + int(offset) for s, offset in zip(samples, offsets, strict=False)
            for a in anchor_candidates(torch.from_numpy(s.loss_mask))}
    supervised = set(np.flatnonzero(np.concatenate(MASKS)).tolist())
    assert theirs == {a for a in supervised if a < len(np.concatenate(MASKS)) - BLOCK}
    assert ours == {a for a in supervised if a + 1 in supervised and a + 1 not in offsets}
    assert theirs - ours == {22, 42, 62} and ours - theirs == {88, 89, 90, 91}
    drawn, valid = select_anchors(row["loss_mask"], 12, BLOCK)
    assert valid.sum() == 12, "a row of three documents has no more than a row of one"


def test_difference_labels_outside_the_reduced_vocabulary(target, greedy, tmp_path, monkeypatch):
    """Theirs trains the best of what the reduced head has, ours leaves such a slot out (and counts it as missed)."""
    used = sorted({int(t) for s in greedy for t in s.input_ids[s.loss_mask > 0]})
    left_out = used[::2]
    vocab = torch.tensor([t for t in range(384) if t not in left_out])
    pair = make_pair(target, tmp_path, vocab)
    found = run_both(pair, greedy, monkeypatch, 0.0)
    labels = F.pad(found["batch"].labels, (1, 0))
    unknown = torch.isin(labels, torch.tensor(left_out)) & (our_weights(found) > 0)
    assert 0.1 < unknown.sum() / (our_weights(found) > 0).sum() < 0.95
    kept = our_weights(found) * ~unknown
    assert found["parts"].weight_sum.item() == pytest.approx(kept.sum().item(), rel=1e-5)
    nll = -found["logits"].log_softmax(dim=-1).gather(2, found["targets"].argmax(dim=-1)[..., None])[..., 0]
    assert found["loss"].item() == pytest.approx(
        ((our_weights(found) * nll).sum() / found["mask"].sum()).item(), rel=1e-5)
    assert found["parts"].loss_sum.item() == pytest.approx((kept * nll).sum().item(), rel=1e-5)
    assert torch.equal(found["mask"] > 0, our_weights(found) > 0), "they train them all"


def test_difference_gemmas_scaled_embedding(tmp_path, monkeypatch):
    """Gemma multiplies its embedding with sqrt(hidden); ours goes through its module, theirs takes the bare rows."""
    target = load_target(make_family(tmp_path / "gemma", "gemma3_text"))
    samples = make_samples(target, MASKS, greedy=True)
    pair = make_pair(target, tmp_path)
    found = run_both(pair, samples, monkeypatch, 0.0)
    assert differ("deliberate: Gemma's embedding, hidden states", found["our_hidden"], found["hidden"]) > 0.05
    with torch.no_grad():
        pair.theirs.embed_tokens.weight.mul_(target.hidden_size ** 0.5)
    check_equal(pair, run_both(pair, samples, monkeypatch, 0.0), "Gemma, its rows scaled")
    check_equal(pair, run_both(pair, samples, monkeypatch, 1.0), "Gemma, its rows scaled")


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_targets_from_the_stored_last_state(name, tmp_path):
    """Ours are the target's logits for every family (tests/drafter/test_targets.py); theirs not for two."""
    target = load_target(make_family(tmp_path / name, name))
    pair = make_pair(target, tmp_path)
    row = list(range(40, 60))
    last = capture_batch(target, [row], [0])[0].last_hidden_state_prenorm
    logits = target.model(torch.tensor([row])).logits[0]
    theirs = pair.theirs.verifier_lm_head(pair.theirs.verifier_norm(last))
    assert ((pair.ends.target_logits(last) - logits).abs().max() / logits.abs().max()) < ROUNDING
    kind = "deliberate" if name in WRONG_NORM else "theirs"
    apart = differ(f"{kind}: the target's logits by speculators, {name}", theirs, logits)
    assert apart > 0.3 if name in WRONG_NORM else apart < ROUNDING
