"""The training losses of rows of logits, each with its gradient in closed form.

Cross-entropy on the data's tokens, mixed with the KL divergence to the target's own distribution: whole, or what its
stored top-k logits say of it. The functions work in place on logits that nobody else needs: of a vocabulary of 248,320
tokens each copy of a thousand rows is a gigabyte.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_lib.hidden_states.store import TopLogits


@dataclass(frozen=True)
class TopTargets:
    """The target's top-k logits of n slots: top; rows int64 [n, k]: the top tokens' rows in the drafter's head; known
    bool [n, k]: whether it has them."""

    top: TopLogits
    rows: Tensor
    known: Tensor

    def __getitem__(self, index: slice) -> "TopTargets":
        return TopTargets(self.top[index], self.rows[index], self.known[index])


@dataclass(frozen=True)
class RowLosses:
    """Of n slots: loss, cross_entropy [n] in nats, best int64 [n] (row of the highest logit), gradient [n, V] of each
    slot's loss in its logits."""

    loss: Tensor
    cross_entropy: Tensor
    best: Tensor
    gradient: Tensor


def row_losses(logits: Tensor, labels: Tensor, kl_weight: float, target: Tensor | TopTargets | None) -> RowLosses:
    """(1 - kl_weight) * -log p(label) + kl_weight * KL(target || drafter) of each row.

    logits [n, V] float32 or float64, overwritten; labels int64 [n]; target: the target's logits [n, V] (overwritten),
    or its top k (`TopTargets`); it is not read where kl_weight is 0.

    From the top k, the tokens outside are taken together as one: that never raises a KL, so it is a lower bound of the
    whole one, and equal to it for k = V. With a reduced head the target's probabilities are divided by what the known
    tokens and the rest together have: of the rest it is not stored how much the head lacks. A head without any token of
    the rest has none; a slot of which the head has nothing counts 0.
    """
    best = logits.argmax(dim=-1)
    log_probs = torch.log_softmax(logits, dim=-1, out=logits)
    cross_entropy = -log_probs.gather(1, labels[:, None])[:, 0]
    if kl_weight == 0:
        loss, gradient = cross_entropy, log_probs.exp_()
    elif isinstance(target, TopTargets):
        kl, gradient = _top_kl(log_probs, target)
        loss = torch.lerp(cross_entropy, kl, kl_weight)
        gradient.mul_(kl_weight).add_(log_probs, alpha=1 - kl_weight)  # by now log_probs holds probabilities
    elif target is None:
        raise ValueError("a KL loss needs the target's last state or its top logits, and this batch has neither")
    else:
        target_log_probs = torch.log_softmax(target, dim=-1, out=target)
        probs = target_log_probs.exp()
        kl = torch.bmm(probs[:, None], target_log_probs.sub_(log_probs)[:, :, None]).flatten()
        loss = torch.lerp(cross_entropy, kl, kl_weight)
        gradient = log_probs.exp_().sub_(probs, alpha=kl_weight)
    if kl_weight < 1:
        gradient.scatter_add_(1, labels[:, None], torch.full_like(cross_entropy[:, None], kl_weight - 1))
    return RowLosses(loss, cross_entropy, best, gradient)


def _top_kl(log_probs: Tensor, target: TopTargets) -> tuple[Tensor, Tensor]:
    """KL [n] to the target's top k and the rest, and its gradient [n, V] in the drafter's logits. Leaves the drafter's
    probabilities in log_probs [n, V]."""
    rows, known = target.rows, target.known
    drafter = log_probs.gather(1, rows)  # [n, k]; of unknown tokens some other row's, which never counts
    probs = log_probs.exp_()
    outside = probs.clone()
    outside[torch.arange(len(rows), device=rows.device)[:, None].expand_as(rows)[known], rows[known]] = 0
    drafter_rest = outside.sum(dim=-1).clamp(min=torch.finfo(probs.dtype).tiny)
    # in float64: the rest is 1 minus what the top k have
    target_log_probs = (target.top.logits - target.top.logsumexp[:, None]).double()
    has_rest = known.sum(dim=-1) < log_probs.shape[-1]
    rest = (1 - target_log_probs.exp().sum(dim=-1)).clamp(min=0) * has_rest
    part = torch.where(known, target_log_probs.exp(), 0.0)
    whole = part.sum(dim=-1) + rest
    scale = torch.where(whole > 0, 1 / whole.clamp(min=1e-300), 0.0)  # 0: nothing that it may say is in the head
    part, rest = (part * scale[:, None]).to(probs.dtype), (rest * scale).to(probs.dtype)
    kl = (torch.xlogy(part, part) - torch.where(known, part * drafter, 0.0)).sum(dim=-1)
    kl = kl + torch.xlogy(rest, rest) - rest * drafter_rest.log()
    # d/dlogit_j: drafter_j * (all that the target has) - target_j; the rest shares its probability as the drafter does
    total = part.sum(dim=-1) + rest
    gradient = torch.mul(probs, total[:, None]).sub_(outside.mul_((rest / drafter_rest)[:, None]))
    gradient.scatter_add_(1, rows, -part)  # unknown tokens have part 0
    return kl, gradient
