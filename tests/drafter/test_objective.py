"""Loss and walk against slow references."""

import math

import pytest
import torch
import torch.nn.functional as F

from dflash_lib.drafter.blocks import anchor_candidates
from dflash_lib.drafter.losses import weighted_cross_entropy, weighted_kl, weighted_topk_kl
from dflash_lib.drafter.objective import TargetEnds, walk
from dflash_lib.hidden_states.store import TopLogits


def test_cross_entropy_and_kl_equal_float64_loops():
    torch.manual_seed(0)
    logits, target_logits = torch.randn(7, 11), 2 * torch.randn(7, 11)
    labels, weights = torch.randint(0, 11, (7,)), torch.rand(7)
    ce = kl = 0.0
    for row in range(7):
        q = logits[row].double().softmax(0)
        p = target_logits[row].double().softmax(0)
        ce -= weights[row].item() * math.log(q[labels[row]])
        kl += weights[row].item() * sum((p[v] * (p[v] / q[v]).log()).item() for v in range(11))
    assert weighted_cross_entropy(logits, labels, weights).item() == pytest.approx(ce, rel=1e-5)
    assert weighted_kl(logits, target_logits, weights).item() == pytest.approx(kl, rel=1e-5)
    assert weighted_kl(logits, logits, weights).item() == pytest.approx(0, abs=1e-6)


def top_of(target_logits: torch.Tensor, k: int) -> TopLogits:
    largest = target_logits.topk(k, dim=-1)
    return TopLogits(largest.indices.int(), largest.values, target_logits.logsumexp(dim=-1))


@pytest.mark.parametrize("k", [1, 3, 10, 11])
@pytest.mark.parametrize("head", [list(range(11)), [1, 2, 5, 8], [0]])
def test_top_k_kl_equals_float64_loops_over_the_tokens_and_the_rest(k, head):
    torch.manual_seed(k)
    logits, target_logits = torch.randn(7, len(head), requires_grad=True), 3 * torch.randn(7, 11)
    weights, ends = torch.rand(7), TargetEnds(None, None, None, torch.tensor(head))
    top = top_of(target_logits, k)
    loss = weighted_topk_kl(logits, top, *ends.draft_ids(top.ids.long()), weights)
    exact = logits.detach().double().requires_grad_()
    wanted = exact.sum() * 0
    for row in range(7):
        p, q = target_logits[row].double().softmax(0), exact[row].softmax(0)
        ids = top.ids[row].tolist()
        known = [i for i in ids if i in head]
        rest = 1 - sum(p[i].item() for i in ids) if len(known) < len(head) and k < 11 else 0.0
        whole = sum(p[i] for i in known) + rest
        if whole == 0:
            continue
        kl = sum(p[i] / whole * (p[i] / whole / q[head.index(i)]).log() for i in known)
        if rest:
            others = 1 - sum((q[head.index(i)] for i in known), torch.zeros((), dtype=torch.float64))
            kl = kl + rest / whole * (rest / whole / others).log()
        wanted = wanted + weights[row].item() * kl
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-4, abs=1e-5)
    loss.backward()
    wanted.backward()
    assert torch.allclose(logits.grad.double(), exact.grad, atol=1e-4)


def test_top_k_kl_is_never_above_the_whole_one_and_grows_to_it():
    torch.manual_seed(0)
    logits, target_logits, weights = torch.randn(20, 50), 3 * torch.randn(20, 50), torch.ones(20)
    rows = [top_of(target_logits, k) for k in (1, 2, 5, 20, 50)]
    found = [weighted_topk_kl(logits, top, top.ids.long(), torch.ones_like(top.ids, dtype=torch.bool), weights).item()
             for top in rows]
    whole = weighted_kl(logits, target_logits, weights).item()
    assert found == sorted(found) and found[-1] == pytest.approx(whole, rel=1e-5) and found[0] < 0.9 * whole


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


def test_batch_loss_equals_block_by_block(tiny_llama):
    from dflash_lib.drafter.dataset import Batch
    from dflash_lib.drafter.network import DFlashDrafter
    from dflash_lib.drafter.objective import batch_loss
    from dflash_lib.drafter.training import TrainOptions, drafter_config

    torch.manual_seed(0)
    vocab = torch.arange(0, 384, 2)
    network = DFlashDrafter(drafter_config(tiny_llama, [1, 4], TrainOptions(block_size=4, mask_token_id=3),
                                           len(vocab)))
    ends = TargetEnds(tiny_llama.embedding, tiny_llama.final_norm, tiny_llama.head.weight[vocab], vocab)
    aux, last = torch.randn(2, 10, 2, 64), torch.randn(2, 10, 64)
    anchors, ids = torch.tensor([[2, 5], [4, 0]]), torch.randint(0, 384, (2, 2, 4))
    slots = torch.tensor([[[1, 2], [1, 3]], [[1, 1], [3, 2]]])
    labels, weights = torch.randint(0, 384, (2, 2, 2)), torch.rand(2, 2, 2)
    labels[0] = 2 * torch.tensor([[5, 6], [7, 8]])
    weights[1, 1] = 0  # a padded anchor
    batch = Batch((0, 1), aux, last, torch.arange(10).expand(2, -1), anchors, ids, slots, labels, weights)
    for kl_weight in (0.0, 0.3, 1.0):
        parts = batch_loss(network, ends, batch, kl_weight)
        loss = total = 0.0
        for doc in range(2):
            context = network.context(aux[doc:doc + 1], torch.arange(10)[None])
            for block in range(2):
                hidden = network(ends.embedding(ids[doc, block])[None, None], anchors[doc, block][None, None], context)
                for column, k in enumerate(slots[doc, block].tolist()):
                    label, weight = labels[doc, block, column].item(), weights[doc, block, column].item()
                    if weight == 0 or label % 2:
                        continue
                    log_q = (hidden[0, 0, k] @ ends.head.T).log_softmax(0)
                    p = (tiny_llama.final_norm(last[doc, anchors[doc, block] + k - 1]) @ ends.head.T).softmax(0)
                    ce, kl = -log_q[label // 2], F.kl_div(log_q, p, reduction="sum")
                    loss += weight * ((1 - kl_weight) * ce + kl_weight * kl).item()
                    total += weight
        assert parts.loss_sum.item() == pytest.approx(loss, rel=1e-4)
        assert parts.weight_sum.item() == pytest.approx(total, rel=1e-5)
    assert parts.slot_counts.tolist() == [0, 4, 1, 1]


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
