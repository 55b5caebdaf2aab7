"""Losses and their closed gradients against slow float64 references, and the chunked head against logits that are
whole."""

import math

import pytest
import torch
import torch.nn.functional as F

from dflash_lib.drafter import head_loss as module
from dflash_lib.drafter.blocks import dpace_weights
from dflash_lib.drafter.head_loss import chunk_rows, head_loss
from dflash_lib.drafter.losses import TopTargets, row_losses
from dflash_lib.drafter.objective import TargetEnds
from dflash_lib.hidden_states.store import TopLogits


def mixed(logits, labels, kl_weight, target_logits):
    """Loss rows by autograd's own functions, in float64."""
    log_q, p = logits.double().log_softmax(-1), target_logits.double().softmax(-1)
    kl = (p * (p.log() - log_q)).sum(-1)
    return (1 - kl_weight) * F.nll_loss(log_q, labels, reduction="none") + kl_weight * kl


@pytest.mark.parametrize("kl_weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_losses_and_gradients_equal_float64_loops(kl_weight, dtype):
    torch.manual_seed(0)
    logits, target_logits = 3 * torch.randn(7, 11, dtype=dtype), 2 * torch.randn(7, 11, dtype=dtype)
    labels = torch.randint(0, 11, (7,))
    exact = logits.double().requires_grad_()
    slow = mixed(exact, labels, kl_weight, target_logits)
    gradient, = torch.autograd.grad(slow.sum(), exact)
    by_hand = []
    for row in range(7):  # without any of torch's loss functions
        q, p = logits[row].double().softmax(0), target_logits[row].double().softmax(0)
        kl = sum((p[v] * (p[v] / q[v]).log()).item() for v in range(11))
        by_hand.append(-(1 - kl_weight) * math.log(q[labels[row]].item()) + kl_weight * kl)
    found = row_losses(logits.clone(), labels, kl_weight, target_logits.clone())
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    assert slow.tolist() == pytest.approx(by_hand, rel=1e-9)
    assert torch.allclose(found.loss.double(), slow, **close)
    assert torch.allclose(found.gradient.double(), gradient, **close)
    assert torch.allclose(found.cross_entropy, F.cross_entropy(logits, labels, reduction="none"), **close)
    assert torch.equal(found.best, logits.argmax(-1))


def test_the_kl_of_equal_distributions_is_zero():
    logits = torch.randn(7, 11)
    found = row_losses(logits.clone(), torch.zeros(7, dtype=torch.int64), 1.0, logits.clone())
    assert found.loss.abs().max() < 1e-6 and found.gradient.abs().max() < 1e-6


def test_huge_logits_stay_finite():
    logits = torch.tensor([[1e4, 0.0, -1e4], [-3e4, 3e4, 0.0]])
    found = row_losses(logits.clone(), torch.tensor([2, 0]), 0.5, torch.tensor([[0.0, 0.0, 0.0], [9e3, 0.0, 1.0]]))
    assert found.loss.isfinite().all() and found.gradient.isfinite().all()


def top_of(target_logits: torch.Tensor, k: int) -> TopLogits:
    largest = target_logits.topk(k, dim=-1)
    return TopLogits(largest.indices.int(), largest.values, target_logits.logsumexp(dim=-1))


@pytest.mark.parametrize("kl_weight", [1.0, 0.4])
@pytest.mark.parametrize("k", [1, 3, 10, 11])
@pytest.mark.parametrize("head", [list(range(11)), [1, 2, 5, 8], [0]])
def test_top_k_kl_equals_float64_loops_over_the_tokens_and_the_rest(k, head, kl_weight):
    torch.manual_seed(k)
    logits, target_logits = torch.randn(7, len(head)), 3 * torch.randn(7, 11)
    labels, ends = torch.zeros(7, dtype=torch.int64), TargetEnds(None, None, None, torch.tensor(head))
    top = top_of(target_logits, k)
    found = row_losses(logits.clone(), labels, kl_weight, TopTargets(top, *ends.draft_ids(top.ids.long())))
    exact = logits.double().requires_grad_()
    wanted = []
    for row in range(7):
        p, q = target_logits[row].double().softmax(0), exact[row].softmax(0)
        ids = top.ids[row].tolist()
        known = [i for i in ids if i in head]
        rest = 1 - sum(p[i].item() for i in ids) if len(known) < len(head) and k < 11 else 0.0
        whole = sum(p[i] for i in known) + rest
        kl = exact.sum() * 0
        if whole:
            kl = kl + sum(p[i] / whole * (p[i] / whole / q[head.index(i)]).log() for i in known)
        if rest:
            others = 1 - sum((q[head.index(i)] for i in known), torch.zeros((), dtype=torch.float64))
            kl = kl + rest / whole * (rest / whole / others).log()
        wanted.append(kl_weight * kl - (1 - kl_weight) * q[0].log())
    assert found.loss.tolist() == pytest.approx([w.item() for w in wanted], rel=1e-4, abs=1e-5)
    gradient, = torch.autograd.grad(sum(wanted), exact)
    assert torch.allclose(found.gradient.double(), gradient, atol=1e-4)


def test_top_k_kl_is_never_above_the_whole_one_and_grows_to_it():
    torch.manual_seed(0)
    logits, target_logits, labels = torch.randn(20, 50), 3 * torch.randn(20, 50), torch.zeros(20, dtype=torch.int64)
    tops = [top_of(target_logits, k) for k in (1, 2, 5, 20, 50)]
    found = [row_losses(logits.clone(), labels, 1.0, TopTargets(top, top.ids.long(), torch.ones_like(
        top.ids, dtype=torch.bool))).loss.sum().item() for top in tops]
    whole = row_losses(logits.clone(), labels, 1.0, target_logits.clone()).loss.sum().item()
    assert found == sorted(found) and found[-1] == pytest.approx(whole, rel=1e-5) and found[0] < 0.9 * whole


def test_a_kl_without_anything_of_the_target_is_refused():
    with pytest.raises(ValueError, match="needs the target's last state or its top logits"):
        row_losses(torch.randn(2, 3), torch.tensor([0, 1]), 0.5, None)


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("kl_weight", [0.0, 0.7])
def test_the_chunked_head_equals_whole_logits(rows, kl_weight, monkeypatch):
    """Loss, gradient in the hidden states under any weights, whatever the chunk; logits of more than a chunk never
    exist."""
    torch.manual_seed(0)
    head, hidden = torch.randn(13, 6, dtype=torch.float64), torch.randn(10, 6, dtype=torch.float64, requires_grad=True)
    target_logits, labels = torch.randn(10, 13, dtype=torch.float64), torch.randint(0, 13, (10,))
    weights, largest, real = torch.rand(10, dtype=torch.float64), [], module.row_losses

    def watched(logits, *rest):
        largest.append(len(logits))
        return real(logits, *rest)

    monkeypatch.setattr(module, "CHUNK_BYTES", {"cpu": rows * 13 * 8})
    monkeypatch.setattr(module, "row_losses", watched)
    assert chunk_rows(head) == rows
    slow = mixed(hidden @ head.T, labels, kl_weight, target_logits)
    expected, = torch.autograd.grad((slow * weights).sum(), hidden)
    loss, cross_entropy, best = head_loss(hidden, head, labels, kl_weight, lambda part: target_logits[part].clone(),
                                          chunk_rows(head))
    found, = torch.autograd.grad((loss * weights).sum(), hidden)
    assert torch.allclose(loss, slow, atol=1e-12) and torch.allclose(found, expected, atol=1e-12)
    assert torch.equal(best, (hidden @ head.T).argmax(-1)) and not cross_entropy.requires_grad
    assert max(largest) == min(rows, 10) and sum(largest) == 10


def test_a_bfloat16_head_rounds_its_products_only():
    torch.manual_seed(0)
    head, hidden = torch.randn(40, 16), torch.randn(5, 16, requires_grad=True)
    labels = torch.randint(0, 40, (5,))
    loss, *_ = head_loss(hidden, head.bfloat16(), labels, 0.0, lambda _: None, 2)
    whole, *_ = head_loss(hidden, head, labels, 0.0, lambda _: None, 2)
    assert loss.dtype == torch.float32 and 0 < (loss - whole).abs().max() < 0.1
    loss.sum().backward()
    assert hidden.grad.dtype == torch.float32


def slow_dpace(cross_entropy, supervised, alpha):
    """arXiv 2605.18810 by loops: w_k = sum over j >= k of the product of s_i for i <= j."""
    weights = torch.zeros_like(cross_entropy)
    for block in range(len(cross_entropy)):
        for k in range(cross_entropy.shape[1]):
            if not supervised[block, k]:
                continue
            for j in range(k, cross_entropy.shape[1]):
                if supervised[block, j]:
                    product = 1.0
                    for i in range(j + 1):
                        if supervised[block, i]:
                            product *= (1 - alpha) * math.exp(-cross_entropy[block, i]) + alpha
                    weights[block, k] += product
    return weights


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_dpace_weights_equal_loops(alpha):
    torch.manual_seed(0)
    cross_entropy = 3 * torch.rand(6, 7, dtype=torch.float64)
    supervised = torch.rand(6, 7) < 0.8
    supervised[0], supervised[1] = True, False
    found = dpace_weights(cross_entropy, supervised, alpha)
    assert torch.allclose(found, slow_dpace(cross_entropy, supervised, alpha), atol=1e-12)
    assert (found[1] == 0).all() and (found[0, :-1] > found[0, 1:]).all(), "what comes earlier carries what comes later"
    if alpha == 1:
        assert found[0].tolist() == list(range(7, 0, -1))
