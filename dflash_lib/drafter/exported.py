"""Reads z-lab's folder format back (export.py writes it), and finds the drafter in whatever folder holds one."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash_lib.drafter.folder import DrafterError, TrainedDrafter, fill_network, load_drafter
from dflash_lib.drafter.network import FULL, DFlashDrafter, DrafterConfig
from dflash_lib.files import read_json
from dflash_lib.target.loading import Target

HEAD_TOLERANCE = 0.01  # relative: a head stored in bfloat16 is within 0.4 % of the target's


def find_drafter(path: Path | str) -> Path:
    """The folder itself, or `drafter/best` of a run folder. Raises DrafterError for a folder without a drafter."""
    path = Path(path)
    if not path.is_dir():
        raise DrafterError(f"{path}: no such drafter folder")
    if (path / "config.json").is_file():
        return path
    best = path / "drafter" / "best"
    if (best / "config.json").is_file():
        return best
    if (path / "params.yaml").is_file():
        raise DrafterError(f"{path}: this run has no trained drafter yet (no drafter/best); run it up to 06_train")
    raise DrafterError(f"{path}: no config.json; expected a drafter folder (a run's drafter/best), an exported one, or "
                       "a run folder")


def open_drafter(path: Path | str, target: Target) -> TrainedDrafter:
    """The drafter of a run folder, of its drafter/best, or of an exported folder. Raises DrafterError."""
    folder = find_drafter(path)
    if "speculators_model_type" in read_json(folder / "config.json"):
        raise DrafterError(f"{folder}: a drafter in speculators' format, which is written only; give the run folder or "
                           "an export in z-lab's format (export/zlab)")
    if is_exported(folder):
        return load_exported(folder, target)
    return load_drafter(folder)


def is_exported(folder: Path) -> bool:
    """Whether config.json is an engine's (z-lab's format), not the workbench's own."""
    return "dflash_config" in read_json(folder / "config.json")


def load_exported(folder: Path | str, target: Target) -> TrainedDrafter:
    """A drafter in z-lab's format, in float32; `target` is {} where the export does not say which it was trained for.

    The workbench proposes over the target's own head: a head that is in the export must be the target's rows. Raises
    DrafterError for fields or tensors that are missing or do not fit, and for another head.
    """
    folder = Path(folder)
    config = _config(folder)
    try:
        with safe_open(folder / "model.safetensors", "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise DrafterError(f"{folder}: no readable model.safetensors ({error})") from error
    head, vocab = tensors.pop("lm_head.weight", None), _draft_vocab(folder, tensors.pop("d2t", None), config)
    network = DFlashDrafter(config)
    fill_network(network, tensors, folder)
    if head is not None:
        _check_head(folder, head, vocab, target)
    try:
        identity = json.loads(metadata.get("workbench", "{}")).get("target", {})
    except (ValueError, AttributeError) as error:
        raise DrafterError(f"{folder}: the workbench's entry in model.safetensors is damaged ({error})") from error
    return TrainedDrafter(network, vocab, identity, {})


def _refuse_unlike(folder: Path, c: dict[str, Any]) -> None:
    """Raises DrafterError for what an engine obeys and this network does not compute: evaluated all the same, it would
    be another drafter than the one that is served."""
    rope: dict[str, Any] = {**(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    thetas = {theta for theta in (c.get("rope_theta"), rope.get("rope_theta")) if theta is not None}
    partial = {part for part in (c.get("partial_rotary_factor"), rope.get("partial_rotary_factor")) if part is not None}
    causal = {c.get("is_causal"), c["dflash_config"].get("is_causal")} - {None}
    sliding = "sliding_attention" in (c.get("layer_types") or ()) and c.get("use_sliding_window")
    wrong = [text for text, is_wrong in (
        (f"positions of type {kind!r}; only plain RoPE is known here", kind != "default"),
        (f"two values for rope_theta: {sorted(thetas)}", len(thetas) > 1),
        (f"partial_rotary_factor {sorted(partial)}; the whole width is rotated here", bool(partial - {1})),
        ("is_causal true; blocks are bidirectional here", True in causal),
        ("is_causal false for sliding-window layers, which are causal here", bool(sliding) and False in causal),
        (f"hidden_act {c.get('hidden_act')!r}; silu is used here", c.get("hidden_act", "silu") != "silu"),
        ("attention_bias", bool(c.get("attention_bias"))), ("mlp_bias", bool(c.get("mlp_bias")))) if is_wrong]
    if wrong:
        raise DrafterError(f"{folder}/config.json: the workbench cannot evaluate this drafter: {'; '.join(wrong)}")


def _config(folder: Path) -> DrafterConfig:
    c = read_json(folder / "config.json")
    try:
        dflash: dict[str, Any] = c["dflash_config"]
        _refuse_unlike(folder, c)
        num_layers = c["num_hidden_layers"]
        theta = c.get("rope_theta", (c.get("rope_parameters") or {}).get("rope_theta"))
        if theta is None:
            raise KeyError("rope_theta")
        return DrafterConfig(
            hidden_size=c["hidden_size"], intermediate_size=c["intermediate_size"],
            num_attention_heads=c["num_attention_heads"], num_key_value_heads=c["num_key_value_heads"],
            head_dim=c["head_dim"], rms_norm_eps=c["rms_norm_eps"], rope_theta=theta,
            max_position_embeddings=c["max_position_embeddings"], vocab_size=c["vocab_size"],
            num_target_layers=c["num_target_layers"], target_layer_ids=dflash["target_layer_ids"],
            block_size=c["block_size"], mask_token_id=dflash["mask_token_id"],
            layer_types=c.get("layer_types") or [FULL] * num_layers,
            sliding_window=c.get("sliding_window") if c.get("use_sliding_window") else None,
            draft_vocab_size=c.get("draft_vocab_size"))
    except KeyError as error:
        raise DrafterError(f"{folder}/config.json: {error.args[0]} is missing; an exported drafter has it") from error
    except DrafterError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise DrafterError(f"{folder}/config.json: {error}") from error


def _draft_vocab(folder: Path, offsets: Tensor | None, config: DrafterConfig) -> Tensor | None:
    """int64 target ids of the reduced head, from d2t's offsets."""
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


def _check_head(folder: Path, head: Tensor, vocab: Tensor | None, target: Target) -> None:
    own = target.head.weight.detach().cpu()
    if vocab is not None and vocab.max() >= len(own):
        raise DrafterError(f"{folder}: d2t leads to token {int(vocab.max())}, the target has {len(own)}")
    own = (own if vocab is None else own[vocab]).float()
    if head.shape != own.shape:
        raise DrafterError(f"{folder}: the drafter is one of another target: its head is {list(head.shape)}, that of "
                           f"the target {list(own.shape)}")
    if not torch.allclose(head.float(), own, rtol=HEAD_TOLERANCE, atol=float(HEAD_TOLERANCE * own.abs().mean())):
        raise DrafterError(f"{folder}: its head (lm_head.weight) is not made of the target's rows: a drafter of "
                           "another target, or one with a head of its own, which the workbench cannot evaluate")
