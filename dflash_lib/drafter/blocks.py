"""Anchors, blocks, labels, weights and visibility: what each slot of a block sees and is trained on.

Conventions 5 and 9 of DESIGN.md. A block at anchor a holds token a and block_size - 1 mask tokens at positions
a .. a + block_size - 1; slot k is trained to say token a + k.
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


def slot_weights(block_size: int, gamma: float) -> Tensor:
    """float32 [S]: 0 for the anchor's slot, then exp(-(k - 1) / gamma), so that the first drafted slot weighs 1."""
    return torch.tensor([0.0] + [math.exp(-(k - 1) / gamma) for k in range(1, block_size)])


def draw_slots(num_anchors: int, num_slots: int, block_size: int, gamma: float,
               generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Slots to train in each block, int64 [A, M], and their weights, float32 [A, M]; M = min(num_slots,
    block_size - 1).

    With all of them M is block_size - 1 and the weights are `slot_weights`. With fewer, slot 1 is always taken and the
    others are drawn, with replacement, in proportion to their weights, each then weighing the same: the expected loss
    is that of all slots, at the cost of M of them (of gamma 1.5 the last 5 of 7 slots have a quarter of the weight).
    """
    weights = slot_weights(block_size, gamma)
    if num_slots >= block_size - 1:
        return torch.arange(1, block_size).expand(num_anchors, -1), weights[1:].expand(num_anchors, -1)
    slots, drawn_weights = torch.ones(num_anchors, num_slots, dtype=torch.int64), torch.ones(num_anchors, num_slots)
    if num_slots > 1 and num_anchors:
        later = weights[2:]
        drawn = torch.multinomial(later.expand(num_anchors, -1), num_slots - 1, replacement=True, generator=generator)
        slots[:, 1:], drawn_weights[:, 1:] = drawn + 2, later.sum() / (num_slots - 1)
    return slots, drawn_weights


def build_blocks(input_ids: Tensor, loss_mask: Tensor, anchors: Tensor, slots: Tensor, weights: Tensor,
                 block_size: int, mask_token_id: int) -> Blocks:
    """Blocks of one document.

    input_ids int [T], loss_mask uint8 [T], anchors int64 [A], slots int64 and weights float32 [A, M] of `draw_slots`.
    Slots past the document's end or outside the loss mask carry no loss; their label is 0.
    """
    positions = anchors[:, None] + slots
    inside = positions < len(input_ids)
    clipped = positions.clamp(max=len(input_ids) - 1)
    supervised = inside & loss_mask.bool()[clipped]
    labels = torch.where(supervised, input_ids.long()[clipped], 0)
    tokens = torch.full((len(anchors), block_size), mask_token_id)
    tokens[:, 0] = input_ids.long()[anchors]
    return Blocks(tokens, slots, labels, weights * supervised)


def attention_mask(anchors: Tensor, block_size: int, num_context: int, sliding_window: int | None) -> Tensor:
    """bool [B, A, S, T + S], True where a slot may look: first the context, then the own block.

    anchors int [B, A]. Full attention (sliding_window None): context positions p < a, all of the block. Sliding window
    W, for the query at q = a + j: q - (W - 1) <= p < a, and causal inside the block (vLLM's and SpecForge's bounds).
    """
    context_positions = torch.arange(num_context, device=anchors.device)
    slots = torch.arange(block_size, device=anchors.device)
    anchors = anchors[..., None, None]
    over_context = (context_positions < anchors).expand(-1, -1, block_size, -1)
    over_block = torch.ones(block_size, block_size, dtype=torch.bool, device=anchors.device)
    if sliding_window is not None:
        queries = anchors + slots[:, None]
        over_context = over_context & (context_positions >= queries - (sliding_window - 1))
        distance = slots[:, None] - slots
        over_block = (distance >= 0) & (distance < sliding_window)
    over_block = over_block.expand(*over_context.shape[:2], -1, -1)
    return torch.cat([over_context, over_block], dim=-1)
