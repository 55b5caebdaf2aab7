"""What the two formats of other tools' drafters share: the tensors' file, fields of the layers, the reduced head, and
the copies of the target's weights that must be the target's."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash_lib.drafter.folder import DrafterError
from dflash_lib.drafter.network import FULL, DrafterConfig

COPY_TOLERANCE = 0.01  # relative: a copy stored in bfloat16 is within 0.4 % of the target's weight


def read_tensors(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of `folder/model.safetensors`, and the identity of the drafter's target: {} where the file does not
    say it, as no other tool's does. Raises DrafterError."""
    try:
        with safe_open(folder / "model.safetensors", "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise DrafterError(f"{folder}: no readable model.safetensors ({error})") from error
    try:
        return tensors, json.loads(metadata.get("workbench", "{}")).get("target", {})
    except (ValueError, AttributeError) as error:
        raise DrafterError(f"{folder}: the workbench's entry in model.safetensors is damaged ({error})") from error


def unlike_layers(c: dict[str, Any]) -> list[str]:
    """What of the layers' fields (Qwen3Config's names) an engine obeys and this network does not compute: evaluated all
    the same, it would be another drafter than the one that is served. Fields of mrope alone change nothing: the
    positions of text are the same in all its sections."""
    rope: dict[str, Any] = {**(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    thetas = {theta for theta in (c.get("rope_theta"), rope.get("rope_theta")) if theta is not None}
    partial = {part for part in (c.get("partial_rotary_factor"), rope.get("partial_rotary_factor")) if part is not None}
    return [text for text, is_wrong in (
        (f"positions of type {kind!r}; only plain RoPE is known here", kind != "default"),
        (f"two values for rope_theta: {sorted(thetas)}", len(thetas) > 1),
        (f"partial_rotary_factor {sorted(partial)}; the whole width is rotated here", bool(partial - {1})),
        (f"hidden_act {c.get('hidden_act')!r}; silu is used here", c.get("hidden_act", "silu") != "silu"),
        ("use_sliding_window without layer_types", bool(c.get("use_sliding_window")) and not c.get("layer_types")),
        ("attention_bias", bool(c.get("attention_bias"))), ("mlp_bias", bool(c.get("mlp_bias")))) if is_wrong]


def layer_fields(c: dict[str, Any]) -> dict[str, Any]:
    """DrafterConfig's fields that both formats say in Qwen3Config's names. Raises KeyError for one that is missing."""
    theta = c.get("rope_theta", (c.get("rope_parameters") or {}).get("rope_theta"))
    if theta is None:
        raise KeyError("rope_theta")
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
             "rms_norm_eps", "max_position_embeddings", "vocab_size")
    return {**{name: c[name] for name in names}, "rope_theta": theta,
            "layer_types": c.get("layer_types") or [FULL] * c["num_hidden_layers"],
            "sliding_window": c.get("sliding_window") if c.get("use_sliding_window") else None}


def refuse(folder: Path, wrong: list[str]) -> None:
    """Raises DrafterError for what `unlike_layers` and its callers found, all at once."""
    if wrong:
        raise DrafterError(f"{folder}/config.json: the workbench cannot evaluate this drafter: {'; '.join(wrong)}")


def draft_vocabulary(folder: Path, offsets: Tensor | None, config: DrafterConfig) -> Tensor | None:
    """int64 target ids of the reduced head, from d2t's offsets (target id = draft id + d2t). Raises DrafterError."""
    if (None if offsets is None else len(offsets)) != config.draft_vocab_size:
        raise DrafterError(f"{folder}: d2t has {'no' if offsets is None else len(offsets)} entries, config.json's "
                           f"draft_vocab_size is {config.draft_vocab_size}")
    if offsets is None:
        return None
    vocab = offsets.long() + torch.arange(len(offsets))
    if vocab.min() < 0 or vocab.max() >= config.vocab_size or len(vocab.unique()) < len(vocab):
        raise DrafterError(f"{folder}: d2t leads to tokens {int(vocab.min())} to {int(vocab.max())}, "
                           f"{len(vocab.unique())} different ones for {len(vocab)} entries; the target has "
                           f"{config.vocab_size} tokens")
    return vocab


def check_copy(folder: Path, name: str, copy: Tensor, own: Tensor, vocab: Tensor | None = None) -> None:
    """Raises DrafterError unless the tensor `name` of a drafter's file is the target's weight `own` (or its rows
    `vocab`), but for rounding: the workbench uses the target's own."""
    own = own.detach().cpu()
    if vocab is not None and vocab.max() >= len(own):
        raise DrafterError(f"{folder}: d2t leads to token {int(vocab.max())}, the target has {len(own)}")
    own = (own if vocab is None else own[vocab]).float()
    if copy.shape != own.shape:
        raise DrafterError(f"{folder}: the drafter is one of another target: its {name} is {list(copy.shape)}, that of "
                           f"the target {list(own.shape)}")
    if not torch.allclose(copy.float(), own, rtol=COPY_TOLERANCE, atol=float(COPY_TOLERANCE * own.abs().mean())):
        raise DrafterError(f"{folder}: {name} is not made of the target's rows: a drafter of another target, or one "
                           "with such weights of its own, which the workbench cannot evaluate")
