"""The training loss: cross-entropy on the data's tokens, mixed with the target's own distribution where wanted."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_lib.hidden_states.store import TopLogits


def weighted_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Sum of weight * -log p(label) over the slots; logits [N, V], labels int64 [N], weights float32 [N]."""
    return (F.cross_entropy(logits.float(), labels, reduction="none") * weights).sum()


def weighted_kl(logits: Tensor, target_logits: Tensor, weights: Tensor) -> Tensor:
    """Sum of weight * KL(target || drafter) over the slots; logits and target_logits [N, V], weights float32 [N]."""
    target_log_probs = target_logits.float().log_softmax(dim=-1)
    divergence = F.kl_div(logits.float().log_softmax(dim=-1), target_log_probs, reduction="none", log_target=True)
    return (divergence.sum(dim=-1) * weights).sum()


def weighted_topk_kl(logits: Tensor, top: TopLogits, rows: Tensor, known: Tensor, weights: Tensor) -> Tensor:
    """Sum of weight * KL(target || drafter) with the tokens outside the target's top k taken together as one.

    logits [N, V]; top: of the target at the same N slots; rows int64 [N, k]: the top tokens' rows in the drafter's
    head, known bool [N, k]: whether it has them; weights float32 [N]. Taking tokens together never raises a KL, so this
    is a lower bound of the whole one, and equal to it for k = V. With a reduced head the target's probabilities are
    divided by what the known tokens and the rest together have: of the rest it is not stored how much the head lacks.
    A head without any token of the rest has none; a slot of which the head has nothing counts 0.
    """
    logits, minus_inf = logits.float(), torch.full_like(top.logits, -torch.inf)
    total = logits.logsumexp(dim=-1, keepdim=True)
    drafter = torch.where(known, logits.gather(1, rows) - total, minus_inf)  # [N, k]
    hit = torch.zeros_like(logits, dtype=torch.bool)
    hit[torch.arange(len(rows), device=rows.device)[:, None].expand_as(rows)[known], rows[known]] = True
    drafter_rest = logits.masked_fill(hit, -torch.inf).logsumexp(dim=-1) - total[:, 0]
    with torch.no_grad():
        log_probs = (top.logits - top.logsumexp[:, None]).double()
        has_rest = known.sum(dim=-1) < logits.shape[-1]
        rest = (1 - log_probs.exp().sum(dim=-1)).clamp(min=0) * has_rest
        part = torch.where(known, log_probs, minus_inf.double()).exp()
        whole = (part.sum(dim=-1) + rest).clamp(min=1e-300)  # 0: nothing that the target may say is in the head
        probs, rest = (part / whole[:, None]).to(logits.dtype), (rest / whole).to(logits.dtype)
        entropy = torch.xlogy(probs, probs).sum(dim=-1) + torch.xlogy(rest, rest)
    # where the target has no probability the drafter's, which may be 0, does not count
    cross = (probs * torch.where(probs > 0, drafter, 0.0)).sum(dim=-1)
    cross = cross + rest * torch.where(rest > 0, drafter_rest, 0.0)
    return ((entropy - cross) * weights).sum()
