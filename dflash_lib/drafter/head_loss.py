"""The target's head and the loss in one piece, a chunk of slots at a time: logits of the whole batch never exist.

The head is frozen, so the gradient of a slot's loss in its hidden state is one row that can be formed in the forward
pass, while the slot's logits are there. What is kept for the backward pass is [n, H], whatever the vocabulary; the
weights of the slots, which may depend on their losses (D-PACE), are multiplied in afterwards.

Liger's fused linear cross-entropy is the same idea, but reduces to one number before the gradient is formed: slots
could not be weighted, and a KL has no place in it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dflash_lib.drafter.losses import TopTargets, row_losses

CHUNK_BYTES = {"cpu": 24 << 20, "cuda": 512 << 20}  # of logits at once: near the cache, or enough rows to fill a GPU

Targets = Callable[[slice], Tensor | TopTargets | None]  # of slots: the target's logits [n, V], or its top k


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, kl_weight: float, targets: Targets,
                rows: int) -> tuple[Tensor, Tensor, Tensor]:
        num, wide = len(hidden), torch.promote_types(head.dtype, torch.float32)
        loss, cross_entropy = (torch.empty(num, dtype=wide, device=hidden.device) for _ in range(2))
        best, gradient = torch.empty_like(labels), torch.empty_like(hidden, dtype=wide)
        for first in range(0, num, rows):
            chunk = slice(first, min(first + rows, num))
            logits = (hidden[chunk].to(head.dtype) @ head.T).to(wide)
            found = row_losses(logits, labels[chunk], kl_weight, targets(chunk))
            loss[chunk], cross_entropy[chunk], best[chunk] = found.loss, found.cross_entropy, found.best
            gradient[chunk] = found.gradient.to(head.dtype) @ head
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(cross_entropy, best)
        ctx.dtype = hidden.dtype
        return loss, cross_entropy, best

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradient, = ctx.saved_tensors
        return (gradient * grad_loss[:, None]).to(ctx.dtype), None, None, None, None, None


def chunk_rows(head: Tensor, device_type: str = "") -> int:
    """How many slots' logits are formed at once for a head [V, H]: on its own device, or on one of `device_type`."""
    limit = CHUNK_BYTES.get(device_type or head.device.type, CHUNK_BYTES["cpu"])
    return max(1, limit // (len(head) * torch.promote_types(head.dtype, torch.float32).itemsize))


def head_loss(hidden: Tensor, head: Tensor, labels: Tensor, kl_weight: float, targets: Targets,
              rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, cross-entropy, best row) of each slot, [n] each; only the loss has a gradient, and only in `hidden`.

    hidden [n, H]; head [V, H], frozen, whose dtype is the one of the products (logits are float32 or wider);
    labels int64 [n]; kl_weight and what `targets` returns: as in `losses.row_losses`; rows: slots at once
    (`chunk_rows`). Memory beside the result: a chunk of logits a few times.
    """
    return _HeadLoss.apply(hidden, head, labels, kl_weight, targets, rows)
