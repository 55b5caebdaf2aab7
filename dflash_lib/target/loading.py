"""Loads the frozen target: a folder in Hugging Face layout, on one device, without accelerate."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from dflash_lib.conversations.templates import tokenizer_hash
from dflash_lib.files import hash_file, hash_value, read_json


class TargetError(ValueError):
    """A target that cannot be loaded or used; the message says what is missing and what to do."""


@dataclass(frozen=True)
class Target:
    """A frozen target and the modules that the workbench taps.

    model: the whole causal language model in eval mode, no gradients; tokenizer: its tokenizer; identity: what a store
    records (name; hashes of weights, config and tokenizer; dtype; Transformers' version).
    """

    path: Path
    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    identity: dict[str, str]

    @property
    def config(self):
        """The text tower's configuration."""
        return self.model.config.get_text_config()

    @property
    def decoder(self) -> nn.Module:
        """The module that owns `embed_tokens`, `layers` and `norm`."""
        return self.model.get_decoder()

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers; layer id k is `layers[k]`."""
        return self.decoder.layers

    @property
    def final_norm(self) -> nn.Module:
        """The norm between the last layer and the head. Its own module: Qwen3.5 and Gemma scale by (1 + weight)."""
        return self.decoder.norm

    @property
    def embedding(self) -> nn.Module:
        """The input embedding as a module (Gemma's scales by sqrt(hidden))."""
        return self.model.get_input_embeddings()

    @property
    def head(self) -> nn.Linear:
        """The output head, [vocabulary, hidden]."""
        return self.model.get_output_embeddings()

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model folder, each checked to be whole (header and length).

    Raises TargetError for no weights, an index that names an absent file, or a truncated file.
    """
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not weight_map:
            raise TargetError(f"{index}: has no weight_map. Download it again.")
        files = [path / name for name in sorted(set(weight_map.values()))]
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        raise TargetError(f"{path}: no *.safetensors weights here. Is the download complete? "
                          "Pickled .bin weights are not loaded; convert them to safetensors.")
    for file in files:
        if not file.is_file():
            raise TargetError(f"{path}: {index.name} names {file.name}, which is missing. Download it again.")
        try:
            with safe_open(file, framework="pt") as f:
                f.keys()
        except (SafetensorError, OSError) as error:
            raise TargetError(f"{file}: truncated or damaged ({error}). Download it again.") from error
    return files


def read_config(path: Path | str):
    """The model's configuration. Raises TargetError when the folder or its config.json is missing or unreadable."""
    path = Path(path)
    if not path.is_dir():
        raise TargetError(f"{path}: no such model folder")
    if not (path / "config.json").is_file():
        raise TargetError(f"{path}: no config.json here; a model folder in Hugging Face layout is needed")
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise TargetError(f"{path}/config.json: {error}") from error


def load_tokenizer(path: Path | str) -> PreTrainedTokenizerBase:
    """The folder's tokenizer. Raises TargetError when there is none."""
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise TargetError(f"{path}: no usable tokenizer here ({error})") from error


def weights_hash(files: list[Path]) -> str:
    """sha256 over the weight files' names and bytes."""
    return hash_value([[file.name, hash_file(file)] for file in files])


def target_identity(path: Path | str, dtype: torch.dtype | str = torch.float32) -> dict[str, str]:
    """What a store records of a target, without loading its weights: name, hashes, dtype, Transformers' version.

    Reads every weight file once to hash it. Raises TargetError as `load_target` does for an incomplete folder.
    """
    path = Path(path)
    read_config(path)
    return _identity(path, weight_files(path), load_tokenizer(path), dtype)


def _identity(path: Path, files: list[Path], tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype | str) -> dict:
    import transformers

    return {
        "name": path.name, "weights": weights_hash(files), "config": hash_file(path / "config.json"),
        "tokenizer": tokenizer_hash(tokenizer), "dtype": str(dtype).removeprefix("torch."),
        "transformers": transformers.__version__,
    }


def parse_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A floating dtype from itself or its name. Raises TargetError for anything else."""
    parsed = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(parsed, torch.dtype) or not parsed.is_floating_point:
        raise TargetError(f"dtype: {dtype!r} is no floating dtype of PyTorch; use float32, bfloat16 or float16")
    return parsed


def check_device(device: str) -> None:
    """Raises TargetError unless PyTorch can put a tensor on `device`."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise TargetError(f"device {device!r} asked for, but PyTorch cannot use it ({reason}). "
                          f"It sees {torch.cuda.device_count()} CUDA devices; device: cpu always works.") from error


def load_target(path: Path | str, dtype: torch.dtype | str = torch.float32, device: str = "cpu",
                attn_implementation: str = "sdpa") -> Target:
    """Loads a causal language model, frozen and in eval mode, with its tokenizer.

    path: a folder with config.json, safetensors and tokenizer files. dtype: a torch dtype or its name; on a CPU float32
    is right (bfloat16 is several times slower there). Raises TargetError for a missing folder, configuration, weights
    or tokenizer, for damaged weight files, for weights that the checkpoint lacks (Transformers would initialise them
    at random), and for a device that is not there.
    """
    path = Path(path)
    dtype = parse_dtype(dtype)
    check_device(device)
    config = read_config(path)
    files = weight_files(path)
    tokenizer = load_tokenizer(path)
    transformers_logging.disable_progress_bar()  # a bar on stderr, which an executed notebook shows as an error
    model, report = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=dtype, attn_implementation=attn_implementation, local_files_only=True,
        use_safetensors=True, ignore_mismatched_sizes=True, output_loading_info=True)  # reported below, by name
    bad = {name: sorted(map(str, report[name]))[:5] for name in ("missing_keys", "mismatched_keys") if report[name]}
    if bad:
        raise TargetError(f"{path}: the weights do not fit the configuration; what is missing would be random: {bad}")
    model.eval().requires_grad_(False).to(device)
    return Target(path, model, tokenizer, _identity(path, files, tokenizer, dtype))
