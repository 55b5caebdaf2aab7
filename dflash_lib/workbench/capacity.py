"""Does the job fit? Parameters and bytes from the configuration alone, and what this machine has free.

The target is built on PyTorch's meta device, so the counts are those of the very modules that `load_target` fills, and
neither is a weight read nor a byte of memory taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText, PreTrainedConfig

from dflash_lib.conversations.chunks import ERRORS, encode_chunk
from dflash_lib.conversations.formats import ConversationError, RowFormat
from dflash_lib.conversations.prepared_rows import PrepareOptions
from dflash_lib.conversations.rendering import ChatTemplate
from dflash_lib.conversations.sources import count_rows, read_rows
from dflash_lib.files import human_bytes, nearest_existing
from dflash_lib.hidden_states.schema import ENCODINGS, FP8, state_datasets
from dflash_lib.target.checkpoint import Checkpoint
from dflash_lib.target.configuration import configuration_faults, read_config, text_tower, without_weights
from dflash_lib.target.errors import TargetError
from dflash_lib.target.memory import free_memory

PARTS = ("embedding", "attention", "linear attention", "MLP", "experts", "norms", "head")
NOT_LOADED = ("vision", "multi-token prediction")
# What Zstd level 1 (behind shuffle) shrinks real states by: measured, lossless.
ZSTD_GAIN = {torch.bfloat16: 1.4, FP8: 1.15}


@dataclass(frozen=True, kw_only=True)
class TargetSize:
    """Sizes of a target's text tower: parameters by part (each counted once, a tied head with the embedding).

    num_active: parameters that one token passes through: all, but of the experts only those that it is routed to.
    not_loaded: parameters by part of the whole model that the workbench does not load (vision, multi-token prediction).
    """

    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    parameters: dict[str, int]
    num_active: int
    not_loaded: dict[str, int]

    @property
    def num_parameters(self) -> int:
        return sum(self.parameters.values())

    def weight_bytes(self, dtype: torch.dtype | str) -> int:
        """Bytes of the parameters in a torch dtype, or in one named so."""
        return self.num_parameters * _dtype(dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What is free here: bytes of memory on the device, and of disk where the states go; disk_stored: bytes of the
    shards that lie there already; CPU cores and GPU names."""

    memory_free: int
    disk_free: int
    disk_stored: int
    num_cpus: int
    gpus: tuple[str, ...]

    @property
    def disk_for_states(self) -> int:
        """Bytes that the whole store may take: what is free, and what its finished shards take already."""
        return self.disk_free + self.disk_stored


def target_size(model: Path | str) -> TargetSize:
    """Sizes of the target whose config.json lies in the folder `model`; nothing else is needed there.

    A vision tower and multi-token-prediction layers are counted apart. Raises TargetError for a missing or unreadable
    configuration, one that is not of a causal language model, and one whose values make none.
    """
    whole = read_config(model)
    config = text_tower(whole, model)
    network = without_weights(config, model)
    parameters = dict.fromkeys(PARTS, 0)
    for name, parameter in network.named_parameters():  # a tied head comes once, as the embedding
        parameters[_part(name, network)] += parameter.numel()
    with configuration_faults(model):
        idle = 0
        if parameters["experts"]:
            num_experts = getattr(config, "num_experts", None) or config.num_local_experts
            idle = parameters["experts"] * (num_experts - config.num_experts_per_tok) // num_experts
        others = (_vision_parameters(whole, config, network), _mtp_parameters(config, network))
    not_loaded = dict(zip(NOT_LOADED, others, strict=True))
    return TargetSize(model_type=config.model_type, num_layers=config.num_hidden_layers, hidden_size=config.hidden_size,
                      vocab_size=config.vocab_size, parameters={k: v for k, v in parameters.items() if v},
                      num_active=sum(parameters.values()) - idle,
                      not_loaded={k: v for k, v in not_loaded.items() if v})


def _vision_parameters(whole: PreTrainedConfig, text: PreTrainedConfig, language: nn.Module) -> int:
    """Parameters of a wrapper beside its language model: what the two differ by."""
    if whole.get_text_config() is whole or type(whole) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return 0
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(whole)
    return sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in language.parameters())


def _mtp_parameters(config: PreTrainedConfig, network: nn.Module) -> int:
    """Parameters of Qwen3.5's multi-token-prediction layers, which Transformers has no modules for: decoder layers with
    full attention, a projection of embedding and state, and three norms."""
    num_layers = getattr(config, "mtp_num_hidden_layers", None) or 0
    if not num_layers:
        return 0
    full = [layer for layer in network.get_decoder().layers if hasattr(layer, "self_attn")][-1]
    own = config.vocab_size * config.hidden_size if getattr(config, "mtp_use_dedicated_embeddings", False) else 0
    return num_layers * sum(p.numel() for p in full.parameters()) + 2 * config.hidden_size**2 + (
        3 * config.hidden_size) + own


def _part(name: str, network: nn.Module) -> str:
    """The part of the target that a parameter belongs to, by the module that holds it."""
    if network.get_parameter(name) is network.get_input_embeddings().weight:
        return "embedding"
    if name.startswith("lm_head"):
        return "head"
    for module, part in ((".self_attn.", "attention"), (".linear_attn.", "linear attention"),
                         (".mlp.experts.", "experts"), (".mlp.", "MLP")):
        if module in name:
            return part
    if "norm" in name:
        return "norms"
    raise TargetError(f"parameter {name} belongs to no known part ({', '.join(PARTS)}): this kind of target is not "
                      "supported yet")


@dataclass(frozen=True, kw_only=True)
class OnDisk:
    """The text tower's parameters in a model folder, tensors of other towers (which are not loaded) counted by tower,
    and the bytes of all weight files."""

    num_parameters: int
    not_loaded: dict[str, int]
    num_bytes: int


def on_disk(model: Path | str) -> OnDisk:
    """What the weight files hold, from their headers. Raises TargetError when there are none or they are damaged."""
    tied = text_tower(read_config(model), model).tie_word_embeddings
    checkpoint = Checkpoint.read(model)
    return OnDisk(num_parameters=checkpoint.num_parameters(tied), not_loaded=checkpoint.skipped,
                  num_bytes=sum(file.stat().st_size for file in checkpoint.files))


def bytes_per_token(hidden_size: int, num_aux_layers: int, encoding: str = "bf16", last_state: str = "all",
                    topk: int = 0, supervised_share: float = 1.0) -> float:
    """Bytes that one token's states take in the store, as `ExtractionOptions` names its forms.

    Exact without zstd, with it what real states were measured to take. supervised_share: of the tokens, for a last
    state that stands at these only. Raises StoreError for an unknown form.
    """
    return sum(stored.row_bytes / (ZSTD_GAIN.get(stored.dtype, 1.0) if stored.zstd else 1.0)
               * (1.0 if stored.per_token else supervised_share)
               for stored in state_datasets(num_aux_layers, hidden_size, encoding, last_state, topk))


@dataclass(frozen=True, kw_only=True)
class DataSize:
    """Conversations that will be used and their tokens (estimated from `num_probed` of them); mean_length: tokens;
    supervised_share: of the tokens."""

    num_conversations: int
    num_probed: int
    mean_length: float
    supervised_share: float = 1.0

    @property
    def num_tokens(self) -> int:
        return round(self.num_conversations * self.mean_length)


def data_size(conversations: Path | str, tokenizer, options: PrepareOptions, num_probes: int = 200) -> DataSize:
    """How much there is to extract, from `num_probes` conversations spread over the file, prepared with these options.

    Of a job that takes the first `max_samples`, these alone are looked at. Conversations that the preparation would
    refuse (malformed, too long, or without a usable mask) count neither here nor there, and one that it would cut
    counts as cut. Raises FileNotFoundError, SourceError and ConversationError for a broken file, and ConversationError
    when none of the probes can be used.
    """
    total = count_rows(conversations)
    if total is None:
        total = sum(1 for _ in read_rows(conversations))
    reach = min(total, options.max_samples or total)
    step = max(reach // num_probes, 1)
    probes, last = [], None
    for i, row in enumerate(read_rows(conversations)):
        if i < reach and i % step == 0:
            probes.append(row)
        elif i == total - 1:
            last = row  # looked at because that is where a file was cut off; it counts as no probe
    if not probes:
        raise ConversationError(f"{conversations}: holds no conversation")
    template, row_format = ChatTemplate(tokenizer, options.template), RowFormat()
    chunk = encode_chunk(template, probes, options, row_format)
    tail = chunk if last is None or chunk.error is not None else encode_chunk(template, [last], options, row_format)
    if tail.error is not None:
        raise ERRORS[tail.error["type"]](tail.error["message"])
    if not len(chunk.lengths):
        raise ConversationError(f"{conversations}: none of {len(probes)} conversations looked at can be used; the "
                                f"first: {chunk.refused[0]['reason']}")
    usable = round(total * len(chunk.lengths) / len(probes))
    return DataSize(num_conversations=min(usable, options.max_samples or usable), num_probed=len(probes),
                    mean_length=float(chunk.lengths.mean()), supervised_share=float(chunk.loss_mask.mean()))


def prepare_options(params: dict[str, Any]) -> PrepareOptions:
    """How a job's parameters have conversations prepared. Raises ValueError for values that cannot be."""
    return PrepareOptions(
        max_samples=params["max_samples"], max_length=params["max_length"], too_long=params["too_long"],
        min_supervised=params["block_size"], turns=params["turns"], thinking=params["thinking"],
        template_kwargs=params["template_kwargs"] or {})


def resources(store: Path | str, device: str = "cpu") -> Resources:
    """What this machine has free; the folder `store` need not exist yet. Raises TargetError for a device that PyTorch
    cannot use."""
    disk = psutil.disk_usage(str(nearest_existing(store)))
    stored = sum(path.stat().st_size for path in Path(store).glob("shard-*.h5"))
    gpus = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return Resources(memory_free=free_memory(device), disk_free=disk.free, disk_stored=stored,
                     num_cpus=psutil.cpu_count() or 1, gpus=gpus)


@dataclass(frozen=True, kw_only=True)
class DecodingState:
    """Bytes that a target keeps of one sequence while decoding: keys and values (growing with its length, up to the
    window in sliding layers), and recurrent and convolution states of linear attention (of one size)."""

    kv_cache: int
    recurrent: int


def decoding_state(model: Path | str, num_tokens: int, dtype: torch.dtype | str = "bfloat16") -> DecodingState:
    """What one sequence of `num_tokens` tokens keeps. Recurrent states are float32 in Transformers' fallback. Raises
    TargetError for a configuration that makes no target."""
    config, itemsize = text_tower(read_config(model), model), _dtype(dtype).itemsize
    with configuration_faults(model):
        return _decoding_state(config, num_tokens, itemsize)


def _decoding_state(config: PreTrainedConfig, num_tokens: int, itemsize: int) -> DecodingState:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    kv_cache = recurrent = 0
    for kind in kinds:
        if kind == "linear_attention":
            keys = config.linear_num_key_heads * config.linear_key_head_dim
            values = config.linear_num_value_heads * config.linear_value_head_dim
            recurrent += config.linear_key_head_dim * values * 4
            recurrent += (2 * keys + values) * config.linear_conv_kernel_dim * itemsize
        else:  # a sliding cache keeps the window less the token that comes next
            kept = min(num_tokens, config.sliding_window - 1) if kind == "sliding_attention" else num_tokens
            kv_cache += 2 * config.num_key_value_heads * head_dim * kept * itemsize
    return DecodingState(kv_cache=kv_cache, recurrent=recurrent)


def disk_table(hidden_size: int, num_aux_layers: int, jobs: Sequence[tuple[str, int]], last_state: str = "all",
               topk: int = 0, supervised_share: float = 1.0):
    """Disk for the states of several jobs (name, tokens) in every encoding, as a pandas DataFrame of text. The others
    are `bytes_per_token`'s."""
    import pandas as pd

    each = {name: bytes_per_token(hidden_size, num_aux_layers, name, last_state, topk, supervised_share)
            for name in ENCODINGS}
    rows = [[name, f"{tokens:,}", *(human_bytes(tokens * size) for size in each.values())] for name, tokens in jobs]
    return pd.DataFrame(rows, columns=["job", "tokens", *each]).set_index("job")


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A torch dtype or the one named so. Raises ValueError for a name that is none."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype {dtype!r} is none of PyTorch's; use float32, bfloat16 or float16")
    return found
