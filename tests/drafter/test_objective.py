"""Loss and walk against slow references."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from dflash_lib.drafter.attention import Packing
from dflash_lib.drafter.blocks import anchor_candidates
from dflash_lib.drafter.dataset import Batch
from dflash_lib.drafter.network import DFlashDrafter
from dflash_lib.drafter.objective import TargetEnds, batch_loss, walk
from dflash_lib.drafter.recipe import TrainOptions, drafter_config


def test_reduced_vocabulary_maps_there_and_back():
    vocab = torch.tensor([2, 5, 9])
    ends = TargetEnds(None, None, torch.zeros(3, 4), vocab)
    rows, known = ends.draft_ids(torch.tensor([5, 9, 2, 7, 100]))
    assert known.tolist() == [True, True, True, False, False]
    assert ends.target_ids(rows[known]).tolist() == [5, 9, 2]


def slow_walk(ids, mask, propose):
    """Decoding told token by token: the target says the data's tokens, the drafter what `propose(position)` says."""
    steps, position = [], 0
    while position < len(ids):
        if not (mask[position] and position + 1 < len(ids) and mask[position + 1]):
            position += 1
            continue
        accepted = 0
        for k, token in enumerate(propose(position), 1):
            if position + k < len(ids) and mask[position + k] and ids[position + k] == token:
                accepted += 1
            else:
                break
        added = sum(position + k < len(ids) and all(mask[position:position + k + 1]) for k in range(1, accepted + 2))
        steps.append((accepted, added))
        position += accepted + 1
    return steps


@pytest.mark.parametrize("right", [0.0, 0.5, 0.9, 1.0])
def test_walk_equals_decoding_told_token_by_token(right):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 50, (60,), generator=generator)
    mask = torch.zeros(60, dtype=torch.uint8)
    mask[5:30], mask[40:58] = 1, 1
    anchors = anchor_candidates(mask)
    drafted = torch.full((len(anchors), 5), -1)
    for row, a in enumerate(anchors.tolist()):
        for k in range(1, 6):
            if a + k < 60 and torch.rand((), generator=generator) < right:
                drafted[row, k - 1] = ids[a + k]
    by_anchor = dict(zip(anchors.tolist(), drafted.tolist(), strict=True))
    steps = walk(ids, mask, anchors, drafted)
    assert steps == slow_walk(ids.tolist(), mask.tolist(), by_anchor.get)
    if right == 0:
        assert steps == [(0, 1)] * len(anchors)
    if right == 1:  # answers of 25 and 18 tokens: the first token is the anchor, then steps of 6 until the end
        assert [s for s in steps if s != (5, 6)] == [(5, 5)]  # 17 = 6 + 6 + 5: the last step has no bonus


@pytest.fixture
def packed(tiny_llama):
    """A network, the target's ends with half of its vocabulary, and a batch of two documents of 10 tokens."""
    torch.manual_seed(0)
    vocab = torch.arange(0, 384, 2)
    network = DFlashDrafter(drafter_config(tiny_llama, [1, 4], TrainOptions(block_size=4, mask_token_id=3),
                                           len(vocab)))
    ends = TargetEnds(tiny_llama.embedding, tiny_llama.final_norm, tiny_llama.head.weight[vocab], vocab)
    slots = torch.tensor([[1, 2], [1, 3], [1, 1], [3, 2]])
    labels, weights = torch.randint(0, 384, (4, 2)), torch.rand(4, 2)
    labels[:2] = 2 * torch.tensor([[5, 6], [7, 8]])
    weights[3] = 0  # nothing supervised
    batch = Batch((0, 1), Packing((10, 10), (2, 2)), torch.randn(20, 2, 64), torch.randn(20, 64),
                  torch.arange(10).repeat(2), torch.tensor([2, 5, 0, 4]), torch.tensor([0, 0, 10, 10]),
                  torch.randint(0, 384, (4, 4)), slots, labels, weights)
    return network, ends, batch


def block_by_block(network, ends, batch, norm, kl_weight, weight_of):
    """Loss sum and weight sum by a loop over slots; weight_of(block, column, cross_entropies of the block)."""
    loss = total = 0.0
    for block in range(4):
        start = int(batch.starts[block])
        context = network.context(batch.aux_hidden_states[start:start + 10], torch.arange(10))
        hidden = network.blocks(ends.embedding(batch.input_ids[block])[None], batch.anchors[block][None], context)[0]
        found = {}
        for column, k in enumerate(batch.slots[block].tolist()):
            label = batch.labels[block, column].item()
            if batch.weights[block, column] == 0 or label % 2:
                continue
            log_q = (hidden[k] @ ends.head.T).log_softmax(0)
            row = start + batch.anchors[block] + k - batch.first_slot
            p = (norm(batch.last_hidden_state_prenorm[row]) @ ends.head.T).softmax(0)
            found[column] = (-log_q[label // 2].item(), F.kl_div(log_q, p, reduction="sum").item())
        for column, (ce, kl) in found.items():
            weight = weight_of(block, column, {c: value[0] for c, value in found.items()})
            loss, total = loss + weight * ((1 - kl_weight) * ce + kl_weight * kl), total + weight
    return loss, total


@torch.no_grad()
@pytest.mark.parametrize("kl_weight", [0.0, 0.3, 1.0])
def test_batch_loss_equals_block_by_block(packed, tiny_llama, kl_weight):
    network, ends, batch = packed
    parts = batch_loss(network, ends, batch, kl_weight)
    loss, total = block_by_block(network, ends, batch, tiny_llama.final_norm, kl_weight,
                                 lambda block, column, _: batch.weights[block, column].item())
    assert parts.loss_sum.item() == pytest.approx(loss, rel=1e-4)
    assert parts.weight_sum.item() == pytest.approx(total, rel=1e-5)
    assert parts.slot_counts.tolist() == [0, 4, 1, 1]


@torch.no_grad()
def test_dpace_weighs_by_the_blocks_own_losses(packed, tiny_llama):
    """With all slots trained; with the anchor's slot drafting, too."""
    network, ends, batch = packed
    with pytest.raises(ValueError, match="2 of 3 are trained; set slots_per_anchor"):
        batch_loss(network, ends, batch, 0.0, 0.5)
    labels = 2 * torch.randint(0, 192, (4, 4))
    labels[0, 2] += 1  # one that the reduced head lacks
    batch = replace(batch, slots=torch.arange(4).expand(4, -1), labels=labels,
                    weights=torch.tensor([[1.0, 1, 1, 1], [1, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]), first_slot=0)

    def weight_of(block, column, cross_entropies):
        weight = 0.0
        for j in (j for j in cross_entropies if j >= column):
            weight += math.prod(0.5 * math.exp(-cross_entropies[i]) + 0.5 for i in cross_entropies if i <= j)
        return weight

    parts = batch_loss(network, ends, batch, 0.4, 0.5)
    loss, _ = block_by_block(network, ends, batch, tiny_llama.final_norm, 0.4, weight_of)
    known = ((batch.weights > 0) & (batch.labels % 2 == 0)).sum().item()
    assert known == 7 and parts.loss_sum.item() == pytest.approx(loss, rel=1e-4) and parts.weight_sum.item() == known


def test_a_batch_without_any_supervised_slot_still_reaches_every_weight(packed):
    """Other processes wait for its gradients."""
    network, ends, batch = packed
    parts = batch_loss(network, ends, replace(batch, weights=torch.zeros(4, 2)), 0.5)
    assert parts.weight_sum == 0 and parts.loss_sum == 0 and parts.slot_counts.sum() == 0
    parts.loss_sum.backward()
    assert all(p.grad is not None and not p.grad.any() for p in network.parameters())


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_walk_takes_the_steps_that_evaluation_takes(right):
    """Training-time acceptance and decoding's own walk are one rule."""
    from dflash_lib.decoding.acceptance import walk_drafts

    generator = torch.Generator().manual_seed(5)
    ids, prompt = torch.randint(0, 50, (40,), generator=generator), 7
    mask = (torch.arange(40) >= prompt).to(torch.uint8)
    anchors = anchor_candidates(mask)
    drafted = torch.stack([torch.stack([
        ids[a + k] if a + k < 40 and torch.rand((), generator=generator) < right else torch.tensor(-1)
        for k in range(1, 6)]) for a in anchors.tolist()])
    theirs = walk_drafts(drafted.tolist(), ids.tolist(), prompt, 6)
    assert walk(ids, mask, anchors, drafted) == [(step.accepted, step.num_new) for step in theirs]
