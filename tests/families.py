"""A tiny random target of every family that the workbench taps, in the names and files that its real checkpoints have.

Sliding windows are 24 wide, so that a row of 80 tokens passes them, and 80 passes Gated DeltaNet's chunk of 64, too.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3NextConfig,
)
from transformers.models.qwen3_5 import Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig
from transformers.models.qwen3_5_moe import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeTextConfig

from tests.miniature import write_sharded
from tests.tiny import VOCAB_SIZE, make_tokenizer

WINDOW = 24
COMMON = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024, "initializer_range": 0.08,
          "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 2}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
          "linear_value_head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
           "shared_expert_intermediate_size": 48}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "num_position_embeddings": 16,
          "out_hidden_size": 64, "patch_size": 4}
SIGLIP = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 16, "patch_size": 4}
GEMMA = {**COMMON, **SLIDING, "num_hidden_layers": 6, "query_pre_attn_scalar": 16}
TOKENS = {"image_token_id": 380, "video_token_id": 381, "vision_start_token_id": 382, "vision_end_token_id": 383}


def text_only_names(name: str) -> str:
    """Names of a text-only checkpoint that was cut out of a whole one."""
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def gemma_names(name: str) -> str:
    """Names of Gemma 3's published checkpoints with a vision tower."""
    if name.startswith("model.language_model."):
        return name.replace("model.language_model.", "language_model.model.", 1)
    return name.removeprefix("model.")


def experts_apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts one by one, as Qwen3-Next's checkpoints have them."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, projection = name.rpartition(".")
        if not prefix.endswith(".experts"):
            found[name] = tensor
            continue
        parts = ("gate_proj", "up_proj") if projection == "gate_up_proj" else ("down_proj",)
        for expert, weights in enumerate(tensor):
            for part, weight in zip(parts, weights.chunk(len(parts)), strict=True):
                found[f"{prefix}.{expert}.{part}.weight"] = weight.clone()
    return found


def _config(family: str) -> PreTrainedConfig:
    """The configuration; of the whole model where the family is a wrapper."""
    if family in ("llama", "llama_untied"):
        return LlamaConfig(num_hidden_layers=4, tie_word_embeddings=family == "llama", **COMMON)
    if family == "qwen3":
        return Qwen3Config(num_hidden_layers=4, tie_word_embeddings=False, **COMMON)
    if family == "qwen3_5_text":
        return Qwen3_5TextConfig(num_hidden_layers=4, tie_word_embeddings=True, **COMMON, **LINEAR)
    if family == "qwen3_5":
        text = Qwen3_5TextConfig(num_hidden_layers=4, **COMMON, **LINEAR)
        return Qwen3_5Config(text_config=text.to_dict(), vision_config=dict(VISION), **TOKENS)
    if family == "qwen3_5_moe":
        text = Qwen3_5MoeTextConfig(num_hidden_layers=4, **COMMON, **LINEAR, **EXPERTS)
        return Qwen3_5MoeConfig(text_config=text.to_dict(), vision_config=dict(VISION), **TOKENS)
    if family == "qwen3_next":
        return Qwen3NextConfig(num_hidden_layers=4, **COMMON, **LINEAR, **EXPERTS)
    if family == "gemma3_text":
        return Gemma3TextConfig(**GEMMA)
    if family == "gemma3":
        return Gemma3Config(text_config=GEMMA, vision_config=dict(SIGLIP), mm_tokens_per_image=4,
                            boi_token_index=380, eoi_token_index=381, image_token_index=382)
    if family == "gpt_oss":
        return GptOssConfig(num_hidden_layers=4, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW,
                            **COMMON)
    raise ValueError(f"unknown family {family!r}")


WRAPPERS: dict[str, Callable] = {"qwen3_5": Qwen3_5ForConditionalGeneration,
                                 "qwen3_5_moe": Qwen3_5MoeForConditionalGeneration,
                                 "gemma3": Gemma3ForConditionalGeneration}
FAMILIES = ("llama", "llama_untied", "qwen3", "qwen3_5_text", "qwen3_5", "qwen3_5_moe", "qwen3_next", "gemma3_text",
            "gemma3", "gpt_oss")


def make_family(folder: Path | str, family: str, seed: int = 0) -> Path:
    """Writes a tiny random target of `family` to `folder` and returns it.

    llama: tied, one file. llama_untied and gpt_oss: sharded. qwen3_5_text: tied, with `model.language_model.*` names.
    qwen3_5, qwen3_5_moe, gemma3: wrappers with a vision tower. qwen3_next: experts stored one by one.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    config = _config(family)
    model = (WRAPPERS.get(family) or AutoModelForCausalLM.from_config)(config).float()
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for name, tensor in tensors.items():  # as initialised, all norms of a kind are alike, and biases and sinks zero
        if "norm" in name or "bias" in name or "sinks" in name:
            tensor += 0.2 * torch.randn_like(tensor)
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    rename = {"qwen3_5_text": text_only_names, "gemma3": gemma_names}.get(family, str)
    tensors = {rename(name): tensor.contiguous() for name, tensor in tensors.items()}
    if family == "qwen3_next":
        tensors = experts_apart(tensors)
    if family in ("llama_untied", "gpt_oss"):
        write_sharded(folder, tensors, 2)
    else:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def change_config(folder: Path, **values) -> None:
    """Sets keys of a folder's config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
