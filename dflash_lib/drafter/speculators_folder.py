"""Reads a DFlash drafter in the speculators package's format (0.9.0): what its trainer saves, and export.py writes.

Their configuration says the same things by other names: `aux_hidden_state_layer_ids` are ours + 1 (the layer that reads
the state), the layers stand in `transformer_layer_config`, a `draft_vocab_size` of the whole vocabulary is the full
head. What the layers see is in the package's mask, not in the configuration: full-attention layers are always
bidirectional in the block, sliding-window layers are causal in it unless `sliding_window_non_causal`, which is not ours
and refused. Three things about such a drafter that no figure shows:

- Sliding windows: the package trains with context from a - W on in every slot, engines serve, and this network
  computes, q - (W - 1) for slot q. With contexts shorter than the window there is no difference.
- vLLM 0.32 takes `sliding_window_non_causal: false`, which is also the package's default, for causal attention in every
  layer. A drafter with full-attention layers is evaluated here as it was trained; export it anew (export.py) before it
  is served.
- The package feeds bare rows of the target's embedding, engines and this network the module's output, which Gemma
  scales by sqrt(hidden).
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_lib.drafter.exported_parts import (
    check_copy,
    draft_vocabulary,
    layer_fields,
    read_tensors,
    refuse,
    unlike_layers,
)
from dflash_lib.drafter.folder import DrafterError, TrainedDrafter, fill_network
from dflash_lib.drafter.network import SLIDING, DFlashDrafter, DrafterConfig
from dflash_lib.files import read_json
from dflash_lib.target.loading import Target


def is_speculators(folder: Path) -> bool:
    """Whether config.json is one of the speculators package."""
    return "speculators_model_type" in read_json(folder / "config.json")


def load_speculators(folder: Path | str, target: Target) -> TrainedDrafter:
    """The drafter, in float32; `target` is {} unless export.py wrote it: the format names a verifier by its folder
    only, so shapes and what copies there are of the target's weights are compared.

    Beside z-lab's tensors there may be, frozen in training and never read by the drafter's own layers: `lm_head` and
    `verifier_lm_head` (the head over the draft vocabulary, for proposing and for the loss), `embed_tokens` (input of
    blocks), `verifier_norm` (the target's final norm, for the loss). Each must be the target's; the target's own are
    used. `d2t` are offsets, `t2d` marks the same tokens. Raises DrafterError for fields or tensors that are missing or
    do not fit, all fields at once, and for another target's weights.
    """
    folder = Path(folder)
    config = _config(folder, target)
    tensors, identity = read_tensors(folder)
    vocab = draft_vocabulary(folder, tensors.pop("d2t", None), config)
    _check_marks(folder, tensors.pop("t2d", None), vocab, config.vocab_size)
    copies = {name: tensors.pop(name) for name in ("lm_head.weight", "verifier_lm_head.weight", "embed_tokens.weight",
                                                   "verifier_norm.weight") if name in tensors}
    network = DFlashDrafter(config)
    fill_network(network, tensors, folder)
    for name, copy in copies.items():
        own = (target.embedding if name.startswith("embed") else target.final_norm if "norm" in name
               else target.head).weight
        check_copy(folder, name, copy, own, vocab if "lm_head" in name else None)
    return TrainedDrafter(network, vocab, identity, {})


def _config(folder: Path, target: Target) -> DrafterConfig:
    c = read_json(folder / "config.json")
    try:
        kind = c["speculators_model_type"]
        if kind != "dflash":
            raise DrafterError(f"{folder}/config.json: a drafter of kind {kind!r} of the speculators package; only its "
                               "dflash is known here")
        for name in ("transformer_layer_config", "aux_hidden_state_layer_ids", "draft_vocab_size"):
            if c.get(name) is None:
                raise KeyError(name)
        layers: dict[str, Any] = c["transformer_layer_config"]
        ids: list[int] = c["aux_hidden_state_layer_ids"]
        sliding = SLIDING in (layers.get("layer_types") or ())
        other_size = c.get("target_hidden_size")
        refuse(folder, unlike_layers(layers) + [text for text, is_wrong in (
            ("sliding_window_non_causal true for sliding-window layers, which are causal in the block here",
             bool(c.get("sliding_window_non_causal")) and sliding),
            ("layer id 0 in aux_hidden_state_layer_ids: the embedding, which is no layer's output", 0 in ids),
            (f"target_hidden_size {other_size}, unlike the drafter's hidden_size {layers.get('hidden_size')}",
             other_size not in (None, layers.get("hidden_size")))) if is_wrong])
        return DrafterConfig(
            **layer_fields(layers), num_target_layers=target.num_layers, target_layer_ids=[k - 1 for k in ids],
            block_size=c["block_size"], mask_token_id=c["mask_token_id"],
            draft_vocab_size=None if c["draft_vocab_size"] == layers["vocab_size"] else c["draft_vocab_size"],
            sample_from_anchor=c.get("sample_from_anchor", False))
    except KeyError as error:
        raise DrafterError(f"{folder}/config.json: {error.args[0]} is missing; a drafter of the speculators package "
                           "has it") from error
    except DrafterError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise DrafterError(f"{folder}/config.json: {error}") from error


def _check_marks(folder: Path, marks: Tensor | None, vocab: Tensor | None, vocab_size: int) -> None:
    """t2d bool [V], True where a token is in the draft vocabulary, against d2t's: the head's rows are in its order."""
    if marks is None:
        return
    marked = marks.bool().nonzero().flatten()
    if len(marks) != vocab_size or vocab is None or not torch.equal(marked, vocab):
        raise DrafterError(f"{folder}: t2d marks {len(marked)} of {len(marks)} tokens, which are not those that d2t "
                           f"leads to, ascending ({'none' if vocab is None else len(vocab)} of {vocab_size})")
