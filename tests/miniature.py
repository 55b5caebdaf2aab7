"""Qwen3.6-27B in miniature: its wrapper class, its 64 layers in their real pattern, its tensor names, at a hidden size
of 64 and a vocabulary of 512. Everything that claims to work for the 27B is tested on this.

    python -m tests.miniature DIR [--fp8]

Sharded safetensors with an index, vision tower and multi-token-prediction tensors included, as in the real download:
bf16, A_log in float32. With --fp8 the linear weights that the real FP8 checkpoint quantises are e4m3 in square blocks
(32 here, 128 there) with a bf16 `weight_scale_inv` each. Weights are random. The multi-token-prediction names and
A_log's type were written from memory of the real index, which is not at hand.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig
from transformers.models.qwen3_5 import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from tests.tiny import make_tokenizer

REAL_CONFIG = Path(__file__).parent / "data" / "qwen3.6-27b" / "config.json"
VOCAB_SIZE, NUM_SHARDS, BLOCK = 512, 5, 32
TEXT = {"hidden_size": 64, "intermediate_size": 224, "num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 32,
        "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "vocab_size": VOCAB_SIZE, "max_position_embeddings": 4096, "initializer_range": 0.06, "bos_token_id": None,
        "eos_token_id": 2}
VISION = {"depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "num_position_embeddings": 16,
          "out_hidden_size": 64, "patch_size": 4}
QUANTISED = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj", "gate_proj", "up_proj",
             "down_proj")


def miniature_config() -> dict:
    """The real config.json with sizes and token ids made small; pattern, flags and names stay."""
    config = json.loads(REAL_CONFIG.read_text())
    config["text_config"] |= TEXT
    config["text_config"]["rope_parameters"]["mrope_section"] = [2, 1, 1]
    config["vision_config"] |= VISION
    return config | {"image_token_id": 500, "video_token_id": 501, "vision_start_token_id": 502,
                     "vision_end_token_id": 503}


def random_weights(config: dict, seed: int) -> dict[str, Tensor]:
    """Every tensor of the checkpoint by its name there, bf16 (A_log float32), with norms that are not all alike."""
    torch.manual_seed(seed)
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(**config))
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    layer = "model.language_model.layers.3."  # a full-attention layer: the shape of the multi-token-prediction layer
    tensors |= {"mtp.layers.0." + name.removeprefix(layer): torch.randn_like(tensor) * 0.06
                for name, tensor in list(tensors.items()) if name.startswith(layer)}
    hidden = TEXT["hidden_size"]
    tensors["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden) * 0.06
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{name}.weight"] = torch.zeros(hidden)
    for name, tensor in tensors.items():
        if "norm" in name or name.endswith("dt_bias"):
            tensor += 0.2 * torch.randn_like(tensor)
    return {name: tensor.float() if name.endswith("A_log") else tensor.bfloat16() for name, tensor in tensors.items()}


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in e4m3, and what to multiply each BLOCK x BLOCK block by: bf16 [rows / BLOCK, columns / BLOCK]."""
    rows, columns = weight.shape
    blocks = weight.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scale = (blocks.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max).bfloat16()
    stored = blocks / scale.float()[:, None, :, None]
    return stored.clamp(-448, 448).view(rows, columns).to(torch.float8_e4m3fn), scale


def quantise_all(tensors: dict[str, Tensor], config: dict) -> dict[str, Tensor]:
    """The FP8 variant: tensors with their scales; `config` gets the real checkpoint's kind of quantization_config."""
    found: dict[str, Tensor] = {}
    plain = set()
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if "visual" not in name and module.rpartition(".")[2] in QUANTISED:
            found[name], found[f"{name}_scale_inv"] = quantise(tensor)
        else:
            found[name] = tensor
            if tensor.dim() > 1:
                plain.add(module)
    config["quantization_config"] = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": sorted(plain)}
    return found


def write_sharded(folder: Path, tensors: dict[str, Tensor], num_shards: int = NUM_SHARDS) -> None:
    """Tensors in `num_shards` files of about equal size, in order, with the index."""
    names = [f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors" for i in range(num_shards)]
    total = sum(tensor.nbytes for tensor in tensors.values())
    weight_map, done = {}, 0
    for name, tensor in tensors.items():
        weight_map[name] = names[min(done * num_shards // total, num_shards - 1)]
        done += tensor.nbytes
    for file in names:
        save_file({name: tensors[name].contiguous() for name in tensors if weight_map[name] == file}, folder / file,
                  {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1))


def make_miniature(folder: Path | str, fp8: bool = False, seed: int = 0) -> Path:
    """Writes the miniature (9 MB, a second) to `folder`, with tokenizer and chat template, and returns it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = miniature_config()
    tensors = random_weights(config, seed)
    if fp8:
        tensors = quantise_all(tensors, config)
    write_sharded(folder, tensors)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    GenerationConfig(eos_token_id=2, pad_token_id=2).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Writes Qwen3.6-27B in miniature to a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fp8", action="store_true", help="with e4m3 weights and their scales")
    options = parser.parse_args()
    print(make_miniature(options.folder, options.fp8))
