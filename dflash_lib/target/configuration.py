"""A target's config.json: which model it is, its text tower, and how its weights are quantised."""

import copy
import difflib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
)
from transformers.utils import is_accelerate_available

from dflash_lib.files import read_json
from dflash_lib.target.checkpoint import RENAMINGS, text_name
from dflash_lib.target.errors import TargetError

# The first release of Transformers that knows a model type; partly from memory, not tried on old releases.
KNOWN_SINCE = {"gemma3": "4.50.0", "qwen3": "4.51.0", "qwen3_moe": "4.51.0", "gemma3n": "4.53.0", "gpt_oss": "4.55.0",
               "qwen3_next": "4.57.0", "qwen3_5": "5.2.0", "qwen3_5_moe": "5.2.0"}

LENGTH_BOUND_ROPE = ("dynamic", "longrope")
MOST = 2 ** 24
_QWEN3 = ("vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_LINEAR = ("linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim",
           "linear_conv_kernel_dim")
SIZES = {"num_hidden_layers": 10_000, "hidden_size": MOST, "intermediate_size": MOST, "num_attention_heads": MOST,
         "num_key_value_heads": MOST, "head_dim": MOST, "vocab_size": MOST, "max_position_embeddings": 2 ** 40,
         "mtp_num_hidden_layers": 10_000}


def read_config(path: Path | str, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The model's configuration, of the whole model where a text tower is part of one (`.get_text_config()`).

    trust_remote_code: run the Python files that the folder brings, if config.json names some. Raises TargetError when
    the folder or its config.json is missing or unreadable, for a model type that the installed Transformers does not
    know, and for one that needs the folder's own code.
    """
    path = Path(path)
    if not path.is_dir():
        raise TargetError(f"{path}: no such model folder")
    where = path / "config.json"
    if not where.is_file():
        raise TargetError(f"{path}: no config.json here; a model folder in Hugging Face layout is needed")
    raw = _read(where)
    model_type = raw.get("model_type")
    for part in (raw, raw.get("text_config")):
        _check_sizes(part if isinstance(part, dict) else {}, where)
    if not isinstance(model_type, str | None):
        raise TargetError(f"{where}: model_type is no text, found {model_type!r}")
    if model_type not in CONFIG_MAPPING and not trust_remote_code:
        raise TargetError(f"{where}: {_unknown(model_type, raw)}")
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # each architecture has checks of its own, and those that it lacks fail in their way
        raise TargetError(f"{where}: {_said(error)}") from error


def _said(error: Exception) -> str:
    """An error's text, with its type where that is not one made for users."""
    known = isinstance(error, ValueError | OSError | ImportError | StrictDataclassError) and str(error).strip()
    return str(error) if known else f"{type(error).__name__}: {error}"


def _check_sizes(values: dict[str, Any], where: Path) -> None:
    """Raises TargetError for sizes that no model has: they would be found in the middle of loading, in other words."""
    for name, most in SIZES.items():
        value = values.get(name)
        if isinstance(value, int) and not (0 if name == "mtp_num_hidden_layers" else 1) <= value <= most:
            raise TargetError(f"{where}: {name} is {value}, which no model has. Download it again.")


def check_generation_config(path: Path | str) -> None:
    """Raises TargetError when the folder has a generation_config.json that cannot be read, or whose eos_token_id is no
    token id or list of them: where turns end is taken from there, long after loading."""
    where = Path(path) / "generation_config.json"
    if not where.is_file():
        return
    ends = _read(where).get("eos_token_id")
    if ends is None:
        return
    if ends == [] or not all(type(end) is int and end >= 0 for end in (ends if isinstance(ends, list) else [ends])):
        raise TargetError(f"{where}: eos_token_id must be a token id or a list of them, found {ends!r}")


def _read(where: Path) -> dict[str, Any]:
    try:
        raw = read_json(where)
    except ValueError as error:
        raise TargetError(str(error).replace(f"{where}: ", f"{where}: is ", 1)) from error
    if not isinstance(raw, dict):
        raise TargetError(f"{where}: holds no JSON object")
    if not isinstance(raw.get("quantization_config"), dict | None):  # of config.json
        raise TargetError(f"{where}: quantization_config is no object, found {raw['quantization_config']!r}")
    return raw


def _unknown(model_type: str | None, raw: dict[str, Any]) -> str:
    """Why a model type is not known, and what would know it."""
    here = f"Transformers {transformers.__version__}"
    if model_type is None:
        return "names no model_type. Is the download complete?"
    if raw.get("auto_map"):
        code = ", ".join(sorted({str(value).split(".")[0] + ".py" for value in raw["auto_map"].values()}))
        return (f"{here} does not know the model type {model_type!r}; the folder brings its own code ({code}). Read "
                "it, then load with load_target(..., trust_remote_code=True), which runs it; commands and notebooks "
                "never do")
    since = KNOWN_SINCE.get(str(model_type).removesuffix("_text"))
    if since is not None:
        return f"{here} does not know the model type {model_type!r}: Transformers {since} and later do. Upgrade it."
    near = difflib.get_close_matches(str(model_type), list(CONFIG_MAPPING.keys()), 1)
    saved = raw.get("transformers_version")
    return (f"{here} does not know the model type {model_type!r}: it needs a newer Transformers than that, or it is "
            "misspelled" + (f" ({near[0]!r}?)" if near else "")
            + (f". The file was written by Transformers {saved}." if saved else "."))


@contextmanager
def configuration_faults(path: Path | str) -> Iterator[None]:
    """Turns whatever goes wrong with a configuration's values inside the `with` block into a TargetError: the modelling
    code of Transformers meets a missing or impossible one with any kind of exception."""
    try:
        yield
    except TargetError:
        raise
    except Exception as error:  # noqa: BLE001  see above; nothing is swallowed
        reason = (str(error).strip().splitlines() or ["no message"])[0]
        raise TargetError(f"{path}/config.json: no model can be made of these values ({type(error).__name__}: "
                          f"{reason}). Compare it with the publisher's.") from error


def without_weights(config: PreTrainedConfig, path: Path | str, dtype: torch.dtype | None = None,
                    trust_remote_code: bool = False) -> nn.Module:
    """The model of a text tower's configuration (see `text_tower`) on PyTorch's meta device: real modules, no memory.

    Raises TargetError when its values do not make one, or when width or depth are not named, or for Qwen3 and its
    followers, whose files name them all, anything that decides about shapes or positions: Transformers would fill in
    those of some other model.
    """
    raw = _read(Path(path) / "config.json")
    others = [section for key, section in raw.items() if not re.search("vision|audio", key)]
    sections = [raw["text_config"]] if isinstance(raw.get("text_config"), dict) else [raw, *others]
    for name in ("hidden_size", "num_hidden_layers", *(_QWEN3 if config.model_type.startswith("qwen3") else ()),
                 *(_LINEAR if "linear_attention" in (getattr(config, "layer_types", None) or ()) else ())):
        if name == "intermediate_size" and "moe" in config.model_type:
            name = "moe_intermediate_size"
        names = (name, config.attribute_map.get(name, name))
        if not any(key in section for section in sections if isinstance(section, dict) for key in names):
            raise TargetError(f"{path}/config.json: names no {name}. Is it the whole file of the publisher?")
    if config.model_type.startswith("qwen3") and not any(
            key in section for section in sections if isinstance(section, dict)
            for key in ("rope_theta", "rope_parameters")):  # any base makes a model that works, and is the wrong one
        raise TargetError(f"{path}/config.json: names no rope_parameters (nor rope_theta), the base of its positions. "
                          "Is it the whole file of the publisher?")
    with configuration_faults(path), torch.device("meta"):
        network = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), trust_remote_code=trust_remote_code, **({} if dtype is None else {"dtype": dtype}))
        if not len(network.get_decoder().layers) or not all(p.numel() for p in network.parameters()):
            raise ValueError("a size in it is 0")
    return network


def text_tower(config: PreTrainedConfig, path: Path | str) -> PreTrainedConfig:
    """The configuration to load the text tower with, a copy; a wrapper's tie and quantisation are carried over.

    Quantised weights (FP8 in blocks, MXFP4) are marked to be dequantised at loading: FP8 and 4-bit kernels also
    quantise activations or come from the hub, and hidden states are to be those of the weights, in one dtype, on every
    machine. Raises TargetError when there is no causal language model of this kind, for positions that depend on the
    length of the text, for quantisation schemes that cannot be dequantised so, and for FP8 without the package
    accelerate, which Transformers asks for there.
    """
    path = Path(path)
    raw = _read(path / "config.json")
    text = copy.deepcopy(config.get_text_config())
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING and "AutoModelForCausalLM" not in (raw.get("auto_map") or {}):
        raise TargetError(f"{path}/config.json: {config.model_type!r} is not a causal language model, nor does it wrap "
                          "one that Transformers can load by itself")
    if config.get_text_config() is not config and "tie_word_embeddings" in raw:
        text.tie_word_embeddings = raw["tie_word_embeddings"]  # the whole model's rule, where the two differ
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)}
    if kinds & set(LENGTH_BOUND_ROPE):
        raise TargetError(f"{path}/config.json: rope_type {min(kinds & set(LENGTH_BOUND_ROPE))!r} turns a token by an "
                          "angle that depends on how long the whole text is, so its hidden states in a batch are not "
                          "those of decoding. The workbench does not take such targets.")
    scheme = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    if scheme is not None:
        text.quantization_config = _dequantising(scheme, path)
    return text


def _dequantising(scheme: dict[str, Any], path: Path) -> dict[str, Any]:
    """A quantisation scheme with `dequantize` set and its module names as the text tower has them."""
    method = scheme.get("quant_method")
    if method not in ("fp8", "mxfp4"):
        raise TargetError(f"{path}/config.json: the weights are quantised by {method!r}, of which the workbench cannot "
                          "take hidden states. Use the unquantised checkpoint (or FP8 in blocks, or MXFP4).")
    if method == "fp8" and not is_accelerate_available():
        raise TargetError(f"{path}: FP8 weights, for which Transformers needs the package accelerate: "
                          "pip install accelerate. Or use the bf16 checkpoint.")
    block = scheme.get("weight_block_size")
    if block is not None and not (isinstance(block, list | tuple) and len(block) == 2 and
                                  all(isinstance(side, int) and side > 0 for side in block)):
        raise TargetError(f"{path}/config.json: quantization_config.weight_block_size is {block!r}; two numbers above "
                          "0 are needed, such as [128, 128]. Download it again.")
    kept = [_module_name(name) for name in scheme.get("modules_to_not_convert") or scheme.get("ignored_layers") or []]
    return {**scheme, "dequantize": True, "modules_to_not_convert": [name for name in kept if name is not None]}


def _module_name(name: str) -> str | None:
    """A module's name as the text tower has it; None for one of another tower."""
    renamed = text_name(f"{name}.")
    return None if renamed is None else renamed.removesuffix(".")


def key_mapping(names: list[str]) -> dict[str, str] | None:
    """What Transformers has to rename so that a checkpoint's names fit the text tower; None when nothing."""
    needed = {pattern: new for pattern, new in RENAMINGS.items() if any(re.search(pattern, name) for name in names)}
    return needed or None
