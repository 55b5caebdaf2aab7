"""Exports (DESIGN.md): z-lab's folder format, which vLLM, SGLang and llama.cpp load, and the speculators package's,
which that package and vLLM load.

Each `config.json` says everything that an engine would otherwise guess: layer ids, mask token, RoPE theta at both
places that engines read, window and layer types, and whether blocks are causal.

`sample_from_anchor` (slot k says token a + k + 1, so a block of S tokens drafts S) is said in both. vLLM 0.32 refuses
such a DFlash drafter by name ("sample_from_anchor=True is not supported for DFlash"); an engine that did not know the
key would take slot k for token a + k, draft every token one place late, and accept next to nothing.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_lib.drafter.exported import open_drafter
from dflash_lib.drafter.folder import DrafterError, TrainedDrafter, check_fits_target, load_drafter
from dflash_lib.drafter.network import FULL, SLIDING, DrafterConfig
from dflash_lib.files import atomic_path, read_json, write_json
from dflash_lib.target.loading import Target

SPECULATORS_VERSION = "0.9.0"  # of the package whose files are written and tested


def _layer_config(drafter: TrainedDrafter) -> dict[str, Any]:
    """What both formats say of the layers, in Qwen3Config's names."""
    c = drafter.config
    sliding = SLIDING in c.layer_types
    return {
        "model_type": "qwen3", "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_attention_heads, "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim, "hidden_act": "silu", "rms_norm_eps": c.rms_norm_eps,
        "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02,
        "layer_types": list(c.layer_types), "use_sliding_window": sliding,
        "sliding_window": c.sliding_window if sliding else None, "max_window_layers": c.num_layers,
        "rope_theta": c.rope_theta, "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
        "max_position_embeddings": c.max_position_embeddings, "vocab_size": c.vocab_size,
        "tie_word_embeddings": False, "use_cache": True,
    }


def serving_note(config: DrafterConfig) -> str:
    """How many tokens a server is to draft with the exports, and which engine is known to refuse them."""
    note = f"num_speculative_tokens: {config.num_drafts}"
    if config.sample_from_anchor:
        note += (" (sample_from_anchor: the anchor's slot drafts, too). vLLM 0.32 refuses such a drafter by name "
                 "(\"sample_from_anchor=True is not supported for DFlash\"); an engine that ignored the key would "
                 "draft every token one place late: look at its acceptance before you believe it")
    return note


def zlab_config(drafter: TrainedDrafter, dtype: str) -> dict[str, Any]:
    """The export's config.json. dtype: "bfloat16" or "float32", that of the saved tensors."""
    c = drafter.config
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"], "dtype": dtype,
        "block_size": c.block_size, "num_target_layers": c.num_target_layers,
        "dflash_config": {"mask_token_id": c.mask_token_id, "target_layer_ids": list(c.target_layer_ids)},
        **_layer_config(drafter),
    }
    if SLIDING not in c.layer_types:  # where some are, the engine decides by layer type; the key would override that
        config["dflash_config"]["is_causal"] = False
        config["is_causal"] = False
    if c.sample_from_anchor:  # only then: engines that do not know the key read all other drafters rightly
        config["dflash_config"]["sample_from_anchor"] = True
    if drafter.draft_vocab is not None:
        config["draft_vocab_size"] = len(drafter.draft_vocab)
    return config


def export_zlab(drafter_folder: Path | str, target: Target, out: Path | str, dtype: str = "bfloat16") -> dict[str, Any]:
    """Writes `out/config.json` and `out/model.safetensors`; returns the configuration. drafter_folder: of any kind
    (`open_drafter`), so that a drafter of the speculators package can be exported, too.

    A reduced head adds `lm_head.weight` [draft vocabulary, hidden] (rows of the target's head) and `d2t` int64 offsets
    (target id = draft id + d2t). Raises DrafterError when the folder holds no drafter or one of another target.
    """
    drafter = open_drafter(drafter_folder, target)
    check_fits_target(drafter, target.identity, str(drafter_folder))
    config = zlab_config(drafter, dtype)
    _write(out, config, _tensors(drafter, target, dtype), drafter)
    return config


def export_differences(drafter_folder: Path | str, target: Target, exported: Path | str) -> list[str]:
    """What in an export (z-lab's format) is not what `export_zlab` writes for the drafter: fields of config.json and
    tensors, by name; [] when nothing is. An engine that accepts few drafts may have loaded such a one."""
    drafter, exported = load_drafter(drafter_folder), Path(exported)
    try:
        found = read_json(exported / "config.json")
        tensors = load_file(exported / "model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        return [f"it cannot be read ({error})"]
    if not isinstance(found, dict) or found.get("dtype") not in ("bfloat16", "float32"):
        return ["config.json is not what export_zlab writes"]
    config, own = zlab_config(drafter, found["dtype"]), _tensors(drafter, target, found["dtype"])
    wrong = [f"config.json: {key} {found.get(key)!r}, not {config.get(key)!r}" for key in {**config, **found}
             if found.get(key) != config.get(key)]
    return wrong + [f"model.safetensors: {name}" for name in {**own, **tensors} if name not in own
                    or name not in tensors or not torch.equal(own[name], tensors[name])]


def speculators_config(drafter: TrainedDrafter, dtype: str, verifier: str,
                       verifier_architectures: list[str]) -> dict[str, Any]:
    """The speculators export's config.json. verifier: the target, as the package shall find it.

    `sliding_window_non_causal` is said for full-attention drafters, too: vLLM takes the package's default, false, for
    causal attention in every layer. It is one key for all layers, so a drafter of sliding-window layers alone can be
    expressed (false: causal, as ours are), one that mixes them with full attention cannot. Raises DrafterError for it.
    """
    c = drafter.config
    if {*c.layer_types} == {FULL, SLIDING}:
        raise DrafterError("a drafter that mixes sliding-window and full attention cannot be exported in speculators' "
                           "format: its one key sliding_window_non_causal makes vLLM treat all layers as causal or all "
                           "as not, and ours are causal in sliding-window layers only. Export it with export_zlab")
    return {
        "architectures": ["DFlashDraftModel"], "dtype": dtype, "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_VERSION, "block_size": c.block_size, "mask_token_id": c.mask_token_id,
        "draft_vocab_size": c.draft_vocab_size or c.vocab_size, "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [k + 1 for k in c.target_layer_ids],  # theirs name a layer's input
        "sliding_window_non_causal": FULL in c.layer_types, "sample_from_anchor": c.sample_from_anchor,
        "tie_word_embeddings": False,
        "transformer_layer_config": _layer_config(drafter),
        "speculators_config": {
            "algorithm": "dflash", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": c.num_drafts,
                                  "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": verifier, "architectures": verifier_architectures}},
    }


def export_speculators(drafter_folder: Path | str, target: Target, out: Path | str, dtype: str = "bfloat16",
                       verifier: str | None = None) -> dict[str, Any]:
    """Writes the same weights in the speculators package's format; returns the configuration.

    A reduced head adds `t2d` bool [V] to the tensors of `export_zlab`. The package reads the target's embedding, head
    and norm from `verifier`, a folder or a hub name (None = the target's folder). Raises DrafterError as `export_zlab`,
    and for a drafter that the format cannot express.
    """
    drafter = open_drafter(drafter_folder, target)
    check_fits_target(drafter, target.identity, str(drafter_folder))
    architectures = read_json(target.path / "config.json").get("architectures") or []
    config = speculators_config(drafter, dtype, verifier or str(target.path.resolve()), architectures)
    tensors = _tensors(drafter, target, dtype)
    if drafter.draft_vocab is not None:
        tensors["t2d"] = torch.zeros(drafter.config.vocab_size, dtype=torch.bool)
        tensors["t2d"][drafter.draft_vocab] = True
    _write(out, config, tensors, drafter)
    return config


def _tensors(drafter: TrainedDrafter, target: Target, dtype: str) -> dict[str, Tensor]:
    cast = getattr(torch, dtype)
    tensors = {name: p.detach().to(cast).contiguous() for name, p in drafter.network.named_parameters()}
    if drafter.draft_vocab is not None:
        tensors["lm_head.weight"] = target.head.weight[drafter.draft_vocab].to(cast).contiguous().cpu()
        tensors["d2t"] = drafter.draft_vocab - torch.arange(len(drafter.draft_vocab))
    return tensors


def _write(out: Path | str, config: dict[str, Any], tensors: dict[str, Tensor], drafter: TrainedDrafter) -> None:
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    with atomic_path(out / "model.safetensors") as path:
        save_file(tensors, path, metadata={"format": "pt", "workbench": json.dumps({"target": drafter.target})})
    write_json(out / "config.json", config)
