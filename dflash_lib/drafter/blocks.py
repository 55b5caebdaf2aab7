"""Anchors, blocks, labels, weights and visibility: what each slot of a block sees and is trained on.

Conventions 5 and 9 of DESIGN.md. A block at anchor a holds token a and block_size - 1 mask tokens at positions
a .. a + block_size - 1; slot k is trained to say token a + k, and the anchor's own slot, 0, nothing. With
`sample_from_anchor` (first_slot 0: DSpark's and DFlash2's convention) slot k says token a + k + 1, slot 0 included.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def anchor_candidates(loss_mask: Tensor) -> Tensor:
    """Positions (int64, ascending) whose own and next token are both supervised; loss_mask uint8 [T]."""
    mask = loss_mask.bool()
    return torch.nonzero(mask[:-1] & mask[1:]).flatten()


def sample_anchors(loss_mask: Tensor, num_anchors: int, generator: torch.Generator) -> Tensor:
    """At most `num_anchors` distinct candidates of one document, uniformly drawn, ascending, int64."""
    candidates = anchor_candidates(loss_mask)
    if len(candidates) <= num_anchors:
        return candidates
    chosen = torch.randperm(len(candidates), generator=generator)[:num_anchors]
    return candidates[chosen.sort().values]


@dataclass(frozen=True)
class Blocks:
    """Blocks of one document: input_ids int64 [A, S]; slots and labels int64, weights float32 [A, M] (0 = no loss), of
    the M slots of each block that are trained."""

    input_ids: Tensor
    slots: Tensor
    labels: Tensor
    weights: Tensor


def slot_weights(block_size: int, gamma: float, first_slot: int = 1) -> Tensor:
    """float32 [S]: exp(-(k - first_slot) / gamma), so that the first drafted slot weighs 1; 0 for slots before it."""
    return torch.tensor([0.0] * first_slot + [math.exp(-k / gamma) for k in range(block_size - first_slot)])


def draw_slots(num_anchors: int, num_slots: int, block_size: int, gamma: float, generator: torch.Generator,
               first_slot: int = 1) -> tuple[Tensor, Tensor]:
    """Slots to train in each block, int64 [A, M], and their weights, float32 [A, M]; M = min(num_slots,
    block_size - first_slot).

    With all of them the weights are `slot_weights`. With fewer, the first is always taken and the others are drawn,
    with replacement, in proportion to their weights, each then weighing the same: the expected loss is that of all
    slots, at the cost of M of them (of gamma 1.5 the last 5 of 7 slots have a quarter of the weight).
    """
    weights = slot_weights(block_size, gamma, first_slot)[first_slot:]
    if num_slots >= len(weights):
        return torch.arange(first_slot, block_size).expand(num_anchors, -1), weights.expand(num_anchors, -1)
    slots, drawn_weights = torch.full((num_anchors, num_slots), first_slot), torch.ones(num_anchors, num_slots)
    if num_slots > 1 and num_anchors:
        later = weights[1:]
        drawn = torch.multinomial(later.expand(num_anchors, -1), num_slots - 1, replacement=True, generator=generator)
        slots[:, 1:], drawn_weights[:, 1:] = drawn + first_slot + 1, later.sum() / (num_slots - 1)
    return slots, drawn_weights


def build_blocks(input_ids: Tensor, loss_mask: Tensor, anchors: Tensor, slots: Tensor, weights: Tensor,
                 block_size: int, mask_token_id: int, first_slot: int = 1) -> Blocks:
    """Blocks of one document.

    input_ids int [T], loss_mask uint8 [T], anchors int64 [A], slots int64 and weights float32 [A, M] of `draw_slots`.
    Slots past the document's end or outside the loss mask carry no loss; their label is 0.
    """
    positions = anchors[:, None] + slots + 1 - first_slot
    inside = positions < len(input_ids)
    clipped = positions.clamp(max=len(input_ids) - 1)
    supervised = inside & loss_mask.bool()[clipped]
    labels = torch.where(supervised, input_ids.long()[clipped], 0)
    tokens = torch.full((len(anchors), block_size), mask_token_id)
    tokens[:, 0] = input_ids.long()[anchors]
    return Blocks(tokens, slots, labels, weights * supervised)


def coverage(loss_mask: Tensor, anchors: Tensor, num_drafts: int) -> tuple[int, int]:
    """(supervised tokens of a document that some block at `anchors` has to say, supervised tokens that any block could
    say: all but an answer's first). loss_mask uint8 [T], anchors int64 [A]."""
    mask = loss_mask.bool()
    said = torch.zeros_like(mask)
    positions = (anchors[:, None] + torch.arange(1, num_drafts + 1)).flatten()
    said[positions[positions < len(mask)]] = True
    could = torch.zeros_like(mask)
    candidates = anchor_candidates(loss_mask)
    could[candidates + 1] = True
    return int((said & could).sum()), int(could.sum())


def dpace_weights(cross_entropy: Tensor, supervised: Tensor, alpha: float) -> Tensor:
    """D-PACE's weight of every slot, [A, M], no gradient (arXiv 2605.18810; checked against the authors' code and
    speculators 0.9.0's `dpace_loss_decay`).

    With q_k = exp(-cross-entropy) the drafter's probability of the right token and s_k = (1 - alpha) q_k + alpha, slot
    k weighs the sum over j >= k of s_1 ... s_j: what the smoothed expected number of accepted drafts owes to it. Slots
    that are not supervised count as factor 1, add nothing and weigh 0. cross_entropy [A, M], of all drafting slots of
    each block in order; supervised bool [A, M].
    """
    smooth = torch.where(supervised, (1 - alpha) * (-cross_entropy.detach()).exp() + alpha, 1.0)
    prefix = smooth.cumprod(dim=-1) * supervised
    return prefix.flip(-1).cumsum(dim=-1).flip(-1) * supervised
