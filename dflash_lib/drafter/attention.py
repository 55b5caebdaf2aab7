"""Attention of block tokens over the target's states and their own block, for documents packed one after another.

Shape legend (see network.py): T context tokens and A blocks of all documents together, S block_size, M slots of a block
that are asked for, N query heads, G key/value heads, D head_dim.

A block sees its own document's context before its anchor and itself, nothing else (`attention_mask`, DESIGN.md's
convention 5). `SdpaAttention` never forms what cannot be seen: it takes the documents apart and, in each, a few blocks
at a time. `FlexAttention` gives the whole packed row to PyTorch's compiled kernel with a block mask, on CUDA.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCKS_AT_ONCE = 64  # of one document: each then scores 64 * S keys of other blocks for nothing


@dataclass(frozen=True)
class Packing:
    """Documents of a packed batch, in order: context tokens and blocks of each."""

    num_context: tuple[int, ...]
    num_blocks: tuple[int, ...]

    @classmethod
    def single(cls, num_context: int, num_blocks: int) -> "Packing":
        """One document."""
        return cls((num_context,), (num_blocks,))

    def groups(self) -> Iterator[tuple[slice, slice]]:
        """(context rows, blocks) of at most BLOCKS_AT_ONCE blocks of one document at a time."""
        token = block = 0
        for num_context, num_blocks in zip(self.num_context, self.num_blocks, strict=True):
            for first in range(block, block + num_blocks, BLOCKS_AT_ONCE):
                yield slice(token, token + num_context), slice(first, min(first + BLOCKS_AT_ONCE, block + num_blocks))
            token, block = token + num_context, block + num_blocks


def attention_mask(anchors: Tensor, slots: Tensor, block_size: int, num_context: int,
                   sliding_window: int | None) -> Tensor:
    """bool [A, M, T + S], True where a slot may look: first the context of its document, then its own block.

    anchors int [A], slots int [A, M]. Full attention (sliding_window None): context positions p < a, all of the block.
    Sliding window W, for the query at q = a + j: q - (W - 1) <= p < a, and causal inside the block (vLLM's and
    SpecForge's bounds).
    """
    anchors, slots = anchors[:, None, None], slots[..., None]
    context = torch.arange(num_context, device=anchors.device)
    own = torch.arange(block_size, device=anchors.device)
    over_context = (context < anchors).expand(-1, slots.shape[1], -1)
    if sliding_window is None:
        return torch.cat([over_context, torch.ones_like(slots, dtype=torch.bool).expand(-1, -1, block_size)], dim=-1)
    over_context = over_context & (context >= anchors + slots - (sliding_window - 1))
    return torch.cat([over_context, (own <= slots) & (own > slots - sliding_window)], dim=-1)


class SdpaAttention:
    """Attention of one batch through scaled_dot_product_attention, for layers of one kind.

    packing: the documents; anchors int64 [A] positions in their documents, ascending in each; slots int64 [A, M].
    """

    def __init__(self, packing: Packing, anchors: Tensor, slots: Tensor, block_size: int, sliding_window: int | None):
        self.groups = []
        for context, blocks in packing.groups():
            group_anchors, group_slots = anchors[blocks], slots[blocks]
            if anchors.device.type == "cpu":  # what lies behind the last anchor nobody sees
                last = int(group_anchors.max())
                context = slice(context.start, min(context.stop, context.start + max(1, last)))
            num_context, (num_blocks, num_slots) = context.stop - context.start, group_slots.shape
            visible = attention_mask(group_anchors, group_slots, block_size, num_context, sliding_window)
            over_blocks = torch.zeros(num_blocks, num_slots, num_blocks, block_size, dtype=torch.bool,
                                      device=anchors.device)
            each = torch.arange(num_blocks, device=anchors.device)
            over_blocks[each, :, each] = visible[..., num_context:]
            mask = torch.cat([visible[..., :num_context].flatten(0, 1), over_blocks.flatten(2).flatten(0, 1)], dim=-1)
            self.groups.append((context, blocks, mask))

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, context_keys: Tensor,
                 context_values: Tensor) -> Tensor:
        """queries [N, A, M, D]; keys, values of the blocks [G, A, S, D], of the context [G, T, D] -> [N, A, M, D]."""
        parts = []
        for number, (context, blocks, mask) in enumerate(self.groups):
            if mask.dtype == torch.bool:  # what the kernels would make of it, once for all layers
                mask = torch.zeros_like(mask, dtype=queries.dtype).masked_fill_(~mask, -torch.inf)
                self.groups[number] = (context, blocks, mask)
            group = queries[:, blocks]
            out = F.scaled_dot_product_attention(
                group.flatten(1, 2)[None],
                torch.cat([context_keys[:, context], keys[:, blocks].flatten(1, 2)], dim=1)[None],
                torch.cat([context_values[:, context], values[:, blocks].flatten(1, 2)], dim=1)[None],
                attn_mask=mask, enable_gqa=queries.shape[0] != keys.shape[0])
            parts.append(out[0].view(group.shape))
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def flex_mask(packing: Packing, anchors: Tensor, slots: Tensor, block_size: int,
              sliding_window: int | None) -> tuple[Callable[..., Tensor], int, int]:
    """(mask function for FlexAttention, number of queries A * M, of keys T + A * S): `attention_mask` on a packed row,
    keys being the whole context and then every block."""
    device = anchors.device
    num_context, num_slots = sum(packing.num_context), slots.shape[1]
    numbers = torch.arange(len(packing.num_context), device=device)
    lengths = torch.tensor(packing.num_context, device=device)
    context_doc = numbers.repeat_interleave(lengths)
    block_doc = numbers.repeat_interleave(torch.tensor(packing.num_blocks, device=device))
    context_position = torch.arange(num_context, device=device) - (lengths.cumsum(0) - lengths)[context_doc]
    flat_slots = slots.flatten()

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block, slot = query // num_slots, flat_slots[query]
        anchor, in_context = anchors[block], key < num_context
        row = torch.where(in_context, key, 0)
        position, own = context_position[row], torch.where(in_context, 0, key - num_context)
        own_slot = own % block_size
        over_context = in_context & (context_doc[row] == block_doc[block]) & (position < anchor)
        over_block = ~in_context & (own // block_size == block)
        if sliding_window is not None:
            over_context = over_context & (position >= anchor + slot - (sliding_window - 1))
            over_block = over_block & (own_slot <= slot) & (own_slot > slot - sliding_window)
        return over_context | over_block

    return visible, slots.numel(), num_context + len(anchors) * block_size


class FlexAttention:
    """As `SdpaAttention`, through FlexAttention with a block mask: one kernel for the packed row, on CUDA.

    When PyTorch cannot compile it (known from users: NoValidChoicesError at some shape), that is said once and SDPA
    does this and every later batch of the process. What is compiled is compiled for the first length of a batch and,
    when a second one comes, for all: either time the backward pass is tried at once, beside the training's own.

    Class attributes: `off`, SDPA takes its place from now on (set it to have that from the start); `tried`, (sliding
    window, number of keys) of the batches that were tried.
    """

    compiled: Any = None
    off = False
    tried: ClassVar[set[tuple[int | None, int]]] = set()

    def __init__(self, packing: Packing, anchors: Tensor, slots: Tensor, block_size: int, sliding_window: int | None):
        from torch.nn.attention.flex_attention import create_block_mask

        self.fallback = lambda: SdpaAttention(packing, anchors, slots, block_size, sliding_window)
        visible, num_queries, num_keys = flex_mask(packing, anchors, slots, block_size, sliding_window)
        self.mask = create_block_mask(visible, None, None, num_queries, num_keys, device=anchors.device)
        self.shape = (sliding_window, num_keys)

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, context_keys: Tensor,
                 context_values: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        if not FlexAttention.off:
            if FlexAttention.compiled is None:
                FlexAttention.compiled = torch.compile(flex_attention)
            packed = (queries.flatten(1, 2)[None], torch.cat([context_keys, keys.flatten(1, 2)], dim=1)[None],
                      torch.cat([context_values, values.flatten(1, 2)], dim=1)[None])
            try:
                self._try_backward(packed)
                return self._compute(packed)[0].view(queries.shape)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # the compiler raises what it likes
                fall_back(error)
        return self.fallback()(queries, keys, values, context_keys, context_values)

    def _compute(self, packed: tuple[Tensor, ...]) -> Tensor:
        queries, keys, _ = packed
        return FlexAttention.compiled(*packed, block_mask=self.mask, enable_gqa=queries.shape[1] != keys.shape[1])

    def _try_backward(self, packed: tuple[Tensor, ...]) -> None:
        """Computes gradients that nobody needs, of the first two lengths: once the training has begun its own backward
        pass, it could not turn to SDPA any more."""
        before = [shape for shape in FlexAttention.tried if shape[0] == self.shape[0]]
        if not torch.is_grad_enabled() or self.shape in before or len(before) >= 2:
            return
        leaves = [tensor.detach().requires_grad_() for tensor in packed]
        out = self._compute(leaves)
        torch.autograd.grad(out, leaves, torch.ones_like(out))
        FlexAttention.tried.add(self.shape)


def fall_back(error: Exception) -> None:
    """Lets SDPA do what FlexAttention cannot, from now on, and says so."""
    FlexAttention.off = True
    warnings.warn(f"FlexAttention cannot be compiled here ({type(error).__name__}: {str(error).splitlines()[0]}); "
                  "scaled_dot_product_attention takes its place: the same numbers, slower", stacklevel=2)


def make_attention(packing: Packing, anchors: Tensor, slots: Tensor, block_size: int,
                   sliding_window: int | None) -> SdpaAttention | FlexAttention:
    """FlexAttention on CUDA unless it is off, where there is something to train; else SDPA."""
    flex = anchors.is_cuda and torch.is_grad_enabled() and not FlexAttention.off
    return (FlexAttention if flex else SdpaAttention)(packing, anchors, slots, block_size, sliding_window)
