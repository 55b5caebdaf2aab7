"""Export to z-lab's folder format, which vLLM, SGLang and llama.cpp load (DESIGN.md, Exports).

`config.json` says everything that an engine would otherwise guess: layer ids, mask token, RoPE theta at both places
that engines read, window and layer types, and whether blocks are causal.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dflash_lib.drafter.folder import TrainedDrafter, check_fits_target, load_drafter
from dflash_lib.drafter.network import SLIDING
from dflash_lib.files import atomic_path, write_json
from dflash_lib.target.loading import Target


def zlab_config(drafter: TrainedDrafter, dtype: str) -> dict[str, Any]:
    """The export's config.json. dtype: "bfloat16" or "float32", that of the saved tensors."""
    c = drafter.config
    sliding = SLIDING in c.layer_types
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dtype": dtype,
        "block_size": c.block_size, "num_target_layers": c.num_target_layers,
        "dflash_config": {"mask_token_id": c.mask_token_id, "target_layer_ids": list(c.target_layer_ids)},
        "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size, "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_attention_heads, "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim, "hidden_act": "silu", "rms_norm_eps": c.rms_norm_eps,
        "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02,
        "layer_types": list(c.layer_types), "use_sliding_window": sliding,
        "sliding_window": c.sliding_window if sliding else None, "max_window_layers": c.num_layers,
        "rope_theta": c.rope_theta, "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
        "max_position_embeddings": c.max_position_embeddings, "vocab_size": c.vocab_size,
        "tie_word_embeddings": False, "use_cache": True,
    }
    if not sliding:  # with mixed layers the engine decides by layer type, and the key would override that
        config["dflash_config"]["is_causal"] = False
        config["is_causal"] = False
    if drafter.draft_vocab is not None:
        config["draft_vocab_size"] = len(drafter.draft_vocab)
    return config


def export_zlab(drafter_folder: Path | str, target: Target, out: Path | str, dtype: str = "bfloat16") -> dict[str, Any]:
    """Writes `out/config.json` and `out/model.safetensors`; returns the configuration.

    A reduced head adds `lm_head.weight` [draft vocabulary, hidden] (rows of the target's head) and `d2t` int64 offsets
    (target id = draft id + d2t). Raises DrafterError when the folder holds no drafter or one of another target.
    """
    drafter = load_drafter(drafter_folder)
    check_fits_target(drafter, target.identity, str(drafter_folder))
    cast = getattr(torch, dtype)
    tensors = {name: p.detach().to(cast).contiguous() for name, p in drafter.network.named_parameters()}
    if drafter.draft_vocab is not None:
        tensors["lm_head.weight"] = target.head.weight[drafter.draft_vocab].to(cast).contiguous().cpu()
        tensors["d2t"] = drafter.draft_vocab - torch.arange(len(drafter.draft_vocab))
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    with atomic_path(out / "model.safetensors") as path:
        save_file(tensors, path, metadata={"format": "pt", "workbench": json.dumps({"target": drafter.target})})
    config = zlab_config(drafter, dtype)
    write_json(out / "config.json", config)
    return config
