"""Loads the frozen target, its text tower only, on one device, and audits what was loaded.

Sources: a folder in Hugging Face layout or a hub id (hub.py); names and headers of the files (checkpoint.py);
config.json (configuration.py); whether it fits (memory.py); whether it is what the files say (audit.py).
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from dflash_lib.conversations.templates import tokenizer_hash
from dflash_lib.files import hash_file, hash_value
from dflash_lib.target.audit import (
    DEPTHS,
    LoadReport,
    bad_values,
    compare_with_files,
    default_max_perplexity,
    perplexity,
    sort_unexpected,
    wrong_dtypes,
)
from dflash_lib.target.checkpoint import Checkpoint, weight_files
from dflash_lib.target.configuration import (
    check_generation_config,
    key_mapping,
    read_config,
    text_tower,
    without_weights,
)
from dflash_lib.target.errors import LoadRefused, TargetError
from dflash_lib.target.hub import find_target, hub_name
from dflash_lib.target.memory import check_memory

__all__ = ["LoadRefused", "LoadReport", "Target", "TargetError", "check_device", "find_target", "load_target",
           "load_tokenizer", "parse_dtype", "read_config", "target_identity", "weight_files", "weights_hash"]


@dataclass(frozen=True)
class Target:
    """A frozen target and the modules that the workbench taps.

    model: the causal language model in eval mode, no gradients, without vision tower; tokenizer: its tokenizer;
    report: what loading found.
    """

    path: Path
    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    report: LoadReport

    @cached_property
    def identity(self) -> dict[str, str]:
        """What a store records: see `target_identity`. Reads the weight files once, to hash them, when first asked."""
        return _identity(self.path, self.tokenizer, self.report.dtype)

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


def load_tokenizer(path: Path | str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The folder's tokenizer. Raises TargetError when there is none, when it needs the folder's own code, and for a
    broken generation_config.json, which says with which tokens turns end."""
    check_generation_config(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
        if not len(tokenizer):
            raise ValueError("its vocabulary is empty")
        return tokenizer
    except Exception as error:  # a damaged tokenizer.json raises whatever its parser does, even plain Exception
        lacks = "" if (Path(path) / "tokenizer.json").is_file() else "no tokenizer.json; is the download complete? "
        raise TargetError(f"{path}: no usable tokenizer here ({lacks}{type(error).__name__}: {error})") from error


def weights_hash(files: list[Path]) -> str:
    """sha256 over the weight files' names and bytes."""
    return hash_value([[file.name, hash_file(file)] for file in files])


def target_identity(path: Path | str, dtype: torch.dtype | str = torch.float32) -> dict[str, str]:
    """What a store records of a target, without loading its weights: name, hashes of weights, configuration and
    tokenizer, dtype, Transformers' version; of a hub download also its revision (the commit).

    Reads every weight file once to hash it. Raises TargetError as `load_target` does for an incomplete folder.
    """
    path = find_target(path)
    read_config(path)
    return _identity(path, load_tokenizer(path), dtype)


def _identity(path: Path, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype | str) -> dict[str, str]:
    name, revision = hub_name(path)
    return {
        "name": name, **({} if revision is None else {"revision": revision}),
        "weights": weights_hash(weight_files(path)), "config": hash_file(path / "config.json"),
        "tokenizer": tokenizer_hash(tokenizer), "dtype": str(dtype).removeprefix("torch."),
        "transformers": transformers.__version__,
    }


def parse_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A floating dtype from itself or its name. Raises TargetError for anything else."""
    parsed = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(parsed, torch.dtype) or not parsed.is_floating_point or parsed.itemsize < 2:
        raise TargetError(f"dtype: {dtype!r} is no floating dtype to compute in; use float32, bfloat16 or float16")
    return parsed


def check_device(device: str) -> None:
    """Raises TargetError unless PyTorch can put a tensor on `device`."""
    try:
        if torch.empty(1, device=device).is_meta:
            raise NotImplementedError("it holds no values")
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise TargetError(f"device {device!r} asked for, but PyTorch cannot use it ({reason}). "
                          f"It sees {torch.cuda.device_count()} CUDA devices; device: cpu always works.") from error


def load_target(path_or_hub_id: Path | str, dtype: torch.dtype | str = torch.float32, device: str = "cpu",
                attn_implementation: str | None = None, *, revision: str | None = None,
                trust_remote_code: bool = False, audit: str = "full", max_perplexity: float | str | None = "auto",
                **unknown: Any) -> Target:
    """Loads a causal language model's text tower, frozen and in eval mode, with its tokenizer, and audits it.

    path_or_hub_id: a folder with config.json, safetensors and tokenizer files, or a hub id (`revision`: branch, tag or
    commit). dtype: a torch dtype or its name; on a CPU float32 is right (bfloat16 is several times slower there);
    quantised weights are dequantised to it. attn_implementation: None = sdpa where the model has it, else eager.
    audit: "full", or "quick" for worker processes that load a target which was audited before (audit.py). Without
    quick, the files are hashed here, too. max_perplexity: limit for a short English text; "auto" = a twentieth of the
    vocabulary but at least 4,000, None = computed, not judged (untrained targets).

    Vision, audio and multi-token-prediction weights are never read. accelerate is needed for FP8 files only. Raises
    LoadRefused (a TargetError, with the `report`) when what was loaded is not what the files say, and TargetError for a
    missing folder, hub repository, configuration, weights or tokenizer, damaged files, an unknown model type or one
    that needs trust_remote_code, a device that is not there, and too little memory (before anything is loaded).
    """
    _refuse_unknown(unknown)
    if audit not in DEPTHS:
        raise TargetError(f"audit: {audit!r} is not one of {', '.join(DEPTHS)}")
    if max_perplexity not in ("auto", None) and not isinstance(max_perplexity, int | float):
        raise TargetError(f"max_perplexity: {max_perplexity!r} is no number, \"auto\" or None")
    dtype = parse_dtype(dtype)
    check_device(device)
    path = find_target(path_or_hub_id, revision, trust_remote_code)
    config, checkpoint = open_checkpoint(path, trust_remote_code)
    scheme = getattr(config, "quantization_config", None)
    tied = bool(getattr(config, "tie_word_embeddings", False))
    if audit == "full":
        _refuse_other_size(path, config, checkpoint, tied, trust_remote_code)
    _, free = check_memory(str(path), checkpoint.num_parameters(tied), dtype, device, checkpoint.is_converted(dtype))
    tokenizer = load_tokenizer(path, trust_remote_code)
    model, info = _from_pretrained(path, config, checkpoint, dtype, attn_implementation, trust_remote_code)
    if scheme is not None:  # older Transformers leave what is beside FP8 as stored, and dequantise 4 bits to bf16
        for parameter in wrong_dtypes(model, dtype).values():
            if parameter.dtype.itemsize > 1:  # 8 bits: a scale was not applied, which the audit must see
                parameter.data = parameter.data.to(dtype)
    check_end_of_turn(path, model)
    model.eval().requires_grad_(False).to(device)
    report = load_report(path, model, tokenizer, checkpoint, info, config, dtype, device, free, audit, max_perplexity)
    report.refuse_if_bad()
    target = Target(path, model, tokenizer, report)
    if audit == "full":
        _ = target.identity  # hashed now, while the files are those that were loaded
    return target


def open_checkpoint(path: Path, trust_remote_code: bool = False) -> tuple[PreTrainedConfig, Checkpoint]:
    """The text tower's configuration and the files' headers, as far as they can be judged without a weight. Raises
    TargetError as `load_target` does."""
    config = text_tower(read_config(path, trust_remote_code), path)
    checkpoint = Checkpoint.read(path)
    scheme = getattr(config, "quantization_config", None)
    checkpoint.check_stored_dtypes(quantised=scheme is not None)
    checkpoint.check_scales((scheme or {}).get("weight_block_size"))
    return config, checkpoint


def check_end_of_turn(path: Path, model: nn.Module) -> None:
    """Raises TargetError when the tokens that end a turn are no rows of the embedding."""
    ends = model.generation_config.eos_token_id
    rows = model.get_input_embeddings().weight.shape[0]
    if ends is not None and max(ends if isinstance(ends, list) else [ends]) >= rows:
        raise TargetError(f"{path}/generation_config.json: eos_token_id {ends} is no row of the embedding, which has "
                          f"{rows}: no turn would ever end")


def _refuse_other_size(path: Path, config: PreTrainedConfig, checkpoint: Checkpoint, tied: bool,
                       trust_remote_code: bool) -> None:
    """Raises TargetError for the configuration of a much larger model than the files hold: what they lack would be
    made of random numbers, in memory that nobody looked for."""
    promised = sum(p.numel() for p in without_weights(config, path, None, trust_remote_code).parameters())
    held = checkpoint.num_parameters(tied)
    if promised > 2 * held:
        raise TargetError(f"{path}: config.json describes {promised:,} parameters, the weight files hold {held:,}. Is "
                          "it another model's? Nothing was loaded.")


def _refuse_unknown(unknown: dict[str, Any]) -> None:
    """Names that other libraries' loaders take get an answer of their own."""
    if "torch_dtype" in unknown:
        raise TargetError(f"load_target takes dtype, not torch_dtype: dtype={unknown['torch_dtype']!r} (Transformers "
                          "renamed it, too)")
    if "device_map" in unknown:
        raise TargetError("load_target takes device, not device_map: the target is put on one device as a whole, "
                          "without accelerate; several devices are several processes")
    if unknown:
        raise TypeError(f"load_target() got unexpected arguments: {', '.join(sorted(unknown))}")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Transformers' bars and warnings off: its load report is read here, and stderr of a notebook looks like errors."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def _from_pretrained(path: Path, config: PreTrainedConfig, checkpoint: Checkpoint, dtype: torch.dtype,
                     attn_implementation: str | None, trust_remote_code: bool) -> tuple[nn.Module, dict]:
    """Model and Transformers' loading info. Mismatched shapes do not raise here: they are reported by name."""
    more = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    try:
        with quiet_transformers():
            return AutoModelForCausalLM.from_pretrained(
                path, config=config, dtype=dtype, local_files_only=True, use_safetensors=True,
                trust_remote_code=trust_remote_code, key_mapping=key_mapping(list(checkpoint.tensors)),
                ignore_mismatched_sizes=True, output_loading_info=True, **more)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # each architecture fails in its own way
        raise TargetError(f"{path}: Transformers {transformers.__version__} could not load it: "
                          f"{type(error).__name__}: {error}") from error


def load_report(path: Path, model: nn.Module, tokenizer: PreTrainedTokenizerBase, checkpoint: Checkpoint, info: dict,
                config: PreTrainedConfig, dtype: torch.dtype, device: str, free: int, audit: str,
                max_perplexity: float | str | None) -> LoadReport:
    """The load report of a model that was just loaded, good or bad; what of it is on the meta device was not."""
    compared, differing = compare_with_files(model, checkpoint)
    problems = {
        "missing": sorted(map(str, info["missing_keys"])),
        "wrong shape": sorted(f"{name} {list(stored)} in the files, {list(wanted)} in the model"
                              for name, stored, wanted in info["mismatched_keys"]),
        **sort_unexpected([str(name) for name in info["unexpected_keys"]]),
        "not as in the files": differing,
        "wrong dtype": [f"{name} ({str(parameter.dtype).removeprefix('torch.')})"
                        for name, parameter in wrong_dtypes(model, dtype).items()],
    }
    measured = limit = None
    if audit != "quick":
        problems |= bad_values(model)
        tie = checkpoint.differing_tie() if getattr(config, "tie_word_embeddings", False) else None
        problems["tied, yet different"] = [] if tie is None else [tie]
        if audit == "full" and not any(problems.values()):  # else what is wrong is known; a broken model need not run
            with quiet_transformers():  # that fast kernels are missing is in the report
                measured = perplexity(model, tokenizer)
            vocab_size = model.get_input_embeddings().weight.shape[0]
            limit = default_max_perplexity(vocab_size) if max_perplexity == "auto" else max_perplexity
    scheme = getattr(config, "quantization_config", None)
    parameters = [parameter for parameter in model.parameters() if not parameter.is_meta]
    return LoadReport(
        path=str(path), model_class=type(model).__name__, dtype=str(dtype).removeprefix("torch."), device=str(device),
        depth=audit, num_files=len(checkpoint.files), num_tensors=len(checkpoint.text),
        num_parameters=sum(p.numel() for p in parameters), num_parameters_named=len(parameters),
        weight_bytes=sum(p.numel() * p.itemsize for p in parameters), memory_free=free,
        num_compared=len(compared), skipped=checkpoint.skipped, stored_dtypes=checkpoint.stored_dtypes,
        narrowed=len(checkpoint.narrowed(dtype)),
        quantisation="" if scheme is None else
        f"{scheme['quant_method']}, dequantised to {str(dtype).removeprefix('torch.')}",
        fast_linear_attention=importlib.util.find_spec("fla") is not None
        if "linear_attention" in (getattr(config, "layer_types", None) or []) else None,
        problems=problems, perplexity=measured, perplexity_limit=limit)
