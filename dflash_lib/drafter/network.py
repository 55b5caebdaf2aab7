"""The DFlash drafter: z-lab's architecture (arXiv 2602.06036), as DESIGN.md's convention 6 has it.

Shape legend: T context tokens and A blocks of all packed documents together (attention.py), S block_size, M slots of a
block that are asked for, H hidden size, N query heads, G key/value heads, D head_dim, L tapped target layers.

The drafter reads hidden states of the frozen target (the context) and fills a block in one pass. Every layer's context
keys and values come from the same input, `hidden_norm(fc(states))`, which the layers never update; block tokens attend
to the context before their anchor and to their own block.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_lib.drafter.attention import FlexAttention, Packing, SdpaAttention, make_attention

FULL, SLIDING = "full_attention", "sliding_attention"

_WHOLE = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
          "max_position_embeddings", "num_target_layers", "block_size")


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """What defines a drafter's weights and its use.

    num_target_layers: decoder layers of the target; target_layer_ids: tapped layers (id k is the output of layer k);
    vocab_size: rows of the target's embedding; draft_vocab_size: rows of the reduced head, None for the target's own;
    layer_types: "full_attention" or "sliding_attention" for each layer; sample_from_anchor: slot k says token
    a + k + 1, so that the anchor's slot drafts as well (DSpark's and DFlash2's convention), instead of token a + k.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int
    layer_types: tuple[str, ...] = (FULL,)
    sliding_window: int | None = None
    draft_vocab_size: int | None = None
    sample_from_anchor: bool = False

    def __post_init__(self):
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        object.__setattr__(self, "layer_types", tuple(self.layer_types))
        problems = [f"{name} must be a whole number of at least 1, found {value!r}" for name, value in (
            (name, getattr(self, name)) for name in _WHOLE) if type(value) is not int or value < 1]
        if problems or type(self.mask_token_id) is not int:
            raise ValueError("drafter configuration: " + "; ".join(
                problems or [f"mask_token_id must be a token id, found {self.mask_token_id!r}"]))
        if not 0 <= self.mask_token_id < self.vocab_size:
            problems.append(f"mask_token_id {self.mask_token_id} is no row of the target's embedding "
                            f"(0..{self.vocab_size - 1})")
        if type(self.sample_from_anchor) is not bool:
            problems.append(f"sample_from_anchor must be true or false, found {self.sample_from_anchor!r}")
        if self.block_size < 2:
            problems.append(f"block_size {self.block_size} drafts nothing; it counts the anchor, so use 2 or more")
        if not self.target_layer_ids or list(self.target_layer_ids) != sorted(set(self.target_layer_ids)):
            problems.append(f"target_layer_ids {list(self.target_layer_ids)} must be ascending and distinct")
        elif not 0 <= self.target_layer_ids[0] <= self.target_layer_ids[-1] < self.num_target_layers:
            problems.append(f"target_layer_ids {list(self.target_layer_ids)} are not within the target's layers "
                            f"0..{self.num_target_layers - 1}")
        if self.num_attention_heads % self.num_key_value_heads:
            problems.append(f"{self.num_attention_heads} query heads cannot share {self.num_key_value_heads} kv heads")
        if self.head_dim % 2:
            problems.append(f"head_dim {self.head_dim} must be even: rotary positions turn its two halves")
        unknown = set(self.layer_types) - {FULL, SLIDING}
        if unknown or not self.layer_types:
            problems.append(f"layer_types {list(self.layer_types)} must be {FULL} or {SLIDING}, one a layer")
        if SLIDING in self.layer_types and (self.sliding_window or 0) < 1:
            problems.append(f"sliding_attention layers need a sliding_window, found {self.sliding_window}")
        if problems:
            raise ValueError("drafter configuration: " + "; ".join(problems))

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def first_slot(self) -> int:
        """The first slot of a block that is trained and drafts."""
        return 0 if self.sample_from_anchor else 1

    @property
    def num_drafts(self) -> int:
        """Tokens that a block drafts; a verify step has one more."""
        return self.block_size - self.first_slot

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able values."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in float32 or wider (plain weight, as Qwen3 and Llama)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Full-width rotary positions. `inv_freq` is float32 and stays so: rounding it to bfloat16 shifts far positions by
    radians, so it is no buffer that `.to(dtype)` could touch."""

    def __init__(self, head_dim: int, theta: float):
        super().__init__()
        self.inv_freq = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        self.inv_freq = self.inv_freq.float()

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions int [...] -> cos, sin float32 [..., D]."""
        if self.inv_freq.device != positions.device:
            self.inv_freq = self.inv_freq.to(positions.device)
        angles = positions[..., None].float() * self.inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary positions to x [..., D] (half-split pairing, as HF's Llama and Qwen3)."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


def take(x: Tensor, slots: Tensor | None) -> Tensor:
    """The rows `slots` (int64 [A, M], None = all) of each block: x [A, S, ...] -> [A, M, ...]."""
    return x if slots is None else x.gather(1, slots[..., None].expand(*slots.shape, x.shape[-1]))


@dataclass(frozen=True)
class Context:
    """What every layer makes its context keys and values of: x [T, H] and rotary cos and sin [T, D]."""

    x: Tensor
    cos: Tensor
    sin: Tensor


KeysValues = tuple[Tensor, Tensor]  # of the context, [G, T, D] each
Kernel = SdpaAttention | FlexAttention


class Attention(nn.Module):
    """Grouped-query attention of block tokens over the context and their own block."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.num_heads, self.num_kv, self.head_dim = (
            config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.num_kv * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.num_kv * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> KeysValues:
        """x [T, H], cos and sin [T, D] -> keys and values [G, T, D]."""
        shape = (len(x), self.num_kv, self.head_dim)
        keys = self.k_norm(self.k_proj(x).view(shape)).transpose(0, 1)
        values = self.v_proj(x).view(shape).transpose(0, 1)
        return rotate(keys, cos, sin), values

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], context: Context | KeysValues, kernel: Kernel,
                slots: Tensor | None) -> Tensor:
        """The output [A, M, H] of the asked-for slots (int64 [A, M], None = all S).

        x [A, S, H] block tokens and their cos and sin [A, S, D]; context: its states, or its keys and values when they
        are kept; kernel: knows what each slot sees.
        """
        num_blocks, block_size, _ = x.shape
        kept = self.keys_values(context.x, context.cos, context.sin) if isinstance(context, Context) else context
        own = self.keys_values(x.flatten(0, 1), *(part.flatten(0, 1) for part in rotary))
        keys, values = (part.unflatten(1, (num_blocks, block_size)) for part in own)
        asked, (cos, sin) = take(x, slots), (take(part, slots) for part in rotary)
        queries = self.q_proj(asked).unflatten(-1, (self.num_heads, self.head_dim))
        queries = rotate(self.q_norm(queries).movedim(2, 0), cos, sin)
        out = kernel(queries, keys, values.to(keys.dtype), *(part.to(keys.dtype) for part in kept))
        return self.o_proj(out.movedim(0, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DrafterLayer(nn.Module):
    """Pre-norm decoder layer; the norm before attention is for block tokens only."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], context: Context | KeysValues, kernel: Kernel,
                slots: Tensor | None) -> Tensor:
        """As `Attention.forward`: all block tokens come in, the asked-for slots come out."""
        x = take(x, slots) + self.self_attn(self.input_layernorm(x), rotary, context, kernel, slots)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashDrafter(nn.Module):
    """The drafter without embedding and head, which are the target's. Parameter names are those of z-lab's files."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(config.head_dim, config.rope_theta)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, embedded: Tensor, anchors: Tensor, aux_hidden_states: Tensor, positions: Tensor,
                packing: Packing, slots: Tensor | None = None) -> Tensor:
        """Final hidden states of the blocks, [A, S, H] or, of the slots asked for, [A, M, H], ready for the target's
        head.

        embedded [A, S, H]: the target's embedding of anchor and mask tokens; anchors int64 [A]: position of each anchor
        in its document, ascending in each; aux_hidden_states [T, L, H]: target states of the documents one after
        another, layers in ascending order; positions int64 [T], restarting with each document; packing: the documents;
        slots int64 [A, M]: the slots wanted of each block, None = all: the last layer then computes no others. A block
        sees its own document's positions before its anchor only (and, in sliding-window layers, within the window).
        """
        x = self.hidden_norm(self.fc(aux_hidden_states.flatten(1)))
        context = Context(x, *self.rotary(positions))
        return self._blocks(embedded, anchors, [context] * len(self.layers), packing, slots)

    def context(self, aux_hidden_states: Tensor, positions: Tensor) -> list[KeysValues]:
        """Context keys and values of every layer, [G, T, D] each, to be kept while decoding goes on.

        aux_hidden_states: [T, L, H] target states, layers in ascending order; positions: int [T] in the document.
        """
        x = self.hidden_norm(self.fc(aux_hidden_states.flatten(1)))
        cos, sin = self.rotary(positions)
        return [layer.self_attn.keys_values(x, cos, sin) for layer in self.layers]

    def blocks(self, embedded: Tensor, anchors: Tensor, context: list[KeysValues]) -> Tensor:
        """As `forward`, for blocks of one document whose context is kept: [A, S, H]."""
        return self._blocks(embedded, anchors, context, Packing.single(context[0][0].shape[1], len(anchors)), None)

    def _blocks(self, embedded: Tensor, anchors: Tensor, context: Sequence[Context | KeysValues], packing: Packing,
                slots: Tensor | None) -> Tensor:
        block_size = embedded.shape[1]
        every = torch.arange(block_size, device=anchors.device).expand(len(anchors), -1)
        rotary = self.rotary(anchors[:, None] + every)
        kernels: dict[tuple[str, bool], Kernel] = {}
        x, last = embedded, len(self.layers) - 1
        for number, (layer, kind, states) in enumerate(zip(self.layers, self.config.layer_types, context, strict=True)):
            asked = slots if number == last else None
            key = (kind, asked is None)
            if key not in kernels:
                kernels[key] = make_attention(packing, anchors, every if asked is None else asked, block_size,
                                              self.config.sliding_window if kind == SLIDING else None)
            x = layer(x, rotary, states, kernels[key], asked)
        return self.norm(x)
