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
    """Blocks of one document: input_ids, labels int64 [A, S] and weights float32 [A, S] (0 = no loss)."""

    input_ids: Tensor
    labels: Tensor
    weights: Tensor


def slot_weights(block_size: int, gamma: float) -> Tensor:
    """float32 [S]: 0 for the anchor's slot, then exp(-(k - 1) / gamma), so that the first drafted slot weighs 1."""
    return torch.tensor([0.0] + [math.exp(-(k - 1) / gamma) for k in range(1, block_size)])


def build_blocks(input_ids: Tensor, loss_mask: Tensor, anchors: Tensor, block_size: int, mask_token_id: int,
                 gamma: float) -> Blocks:
    """Blocks of one document.

    input_ids int [T], loss_mask uint8 [T], anchors int64 [A]. Slots past the document's end or outside the loss mask
    carry no loss; their label is 0.
    """
    positions = anchors[:, None] + torch.arange(block_size)
    inside = positions < len(input_ids)
    clipped = positions.clamp(max=len(input_ids) - 1)
    supervised = inside & loss_mask.bool()[clipped]
    labels = torch.where(supervised, input_ids.long()[clipped], 0)
    tokens = torch.full_like(positions, mask_token_id)
    tokens[:, 0] = input_ids.long()[anchors]
    return Blocks(tokens, labels, slot_weights(block_size, gamma) * supervised)


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
