"""The training loss: cross-entropy on the data's tokens, mixed with the target's own distribution where wanted."""

import torch.nn.functional as F
from torch import Tensor


def weighted_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Sum of weight * -log p(label) over the slots; logits [N, V], labels int64 [N], weights float32 [N]."""
    return (F.cross_entropy(logits.float(), labels, reduction="none") * weights).sum()


def weighted_kl(logits: Tensor, target_logits: Tensor, weights: Tensor) -> Tensor:
    """Sum of weight * KL(target || drafter) over the slots; logits and target_logits [N, V], weights float32 [N]."""
    target_log_probs = target_logits.float().log_softmax(dim=-1)
    divergence = F.kl_div(logits.float().log_softmax(dim=-1), target_log_probs, reduction="none", log_target=True)
    return (divergence.sum(dim=-1) * weights).sum()
