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

from dflash_lib.conversations.chunks import ERRORS, encode_chunk
from dflash_lib.conversations.formats import ConversationError, RowFormat
from dflash_lib.conversations.prepared_rows import PrepareOptions
from dflash_lib.conversations.rendering import ChatTemplate
from dflash_lib.conversations.sources import read_rows
from dflash_lib.target.checkpoint import Checkpoint
from dflash_lib.target.configuration import read_config, text_tower, without_weights
from dflash_lib.target.errors import TargetError
from dflash_lib.target.memory import free_memory

PARTS = ("embedding", "attention", "linear attention", "MLP", "norms", "head")
STORED_BYTES = 2  # a bfloat16 value
# Plain bf16 divided by this: measured on real states (shuffle and Zstd level 1, lossless).
ENCODING_GAIN = {"bf16": 1.0, "bf16+zstd": 1.4}


@dataclass(frozen=True, kw_only=True)
class TargetSize:
    """Sizes of a target's text tower: parameters by part (each counted once, a tied head with the embedding)."""

    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    parameters: dict[str, int]

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

    A vision tower and multi-token-prediction layers are not counted: the workbench does not load them. Raises
    TargetError for a missing or unreadable configuration, or one that is not of a causal language model.
    """
    config = text_tower(read_config(model), model)
    network = without_weights(config, model)
    parameters = dict.fromkeys(PARTS, 0)
    for name, parameter in network.named_parameters():  # a tied head comes once, as the embedding
        parameters[_part(name, network)] += parameter.numel()
    return TargetSize(model_type=config.model_type, num_layers=config.num_hidden_layers, hidden_size=config.hidden_size,
                      vocab_size=config.vocab_size, parameters={k: v for k, v in parameters.items() if v})


def _part(name: str, network: nn.Module) -> str:
    """The part of the target that a parameter belongs to, by the module that holds it."""
    if network.get_parameter(name) is network.get_input_embeddings().weight:
        return "embedding"
    if name.startswith("lm_head"):
        return "head"
    for module, part in ((".self_attn.", "attention"), (".linear_attn.", "linear attention"), (".mlp.", "MLP")):
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


def bytes_per_token(hidden_size: int, num_aux_layers: int, last: bool = True, encoding: str = "bf16") -> float:
    """Bytes that one token's states take in the store: aux layers and, with `last`, the last hidden state.

    Exact for bf16; for bf16+zstd what real states were measured to take. Raises ValueError for another encoding.
    """
    if encoding not in ENCODING_GAIN:
        raise ValueError(f"encoding {encoding!r} is not known; known: {', '.join(ENCODING_GAIN)}")
    return (num_aux_layers + last) * hidden_size * STORED_BYTES / ENCODING_GAIN[encoding]


@dataclass(frozen=True, kw_only=True)
class DataSize:
    """Conversations that will be used and their tokens (estimated from `num_probed` of them); mean_length: tokens."""

    num_conversations: int
    num_probed: int
    mean_length: float

    @property
    def num_tokens(self) -> int:
        return round(self.num_conversations * self.mean_length)


def data_size(conversations: Path | str, tokenizer, max_samples: int | None, max_length: int,
              num_probes: int = 200, **rendering: Any) -> DataSize:
    """How much there is to extract, from `num_probes` conversations spread over the file.

    rendering: further options of the preparation (too_long, turns, thinking, template_kwargs). Conversations that the
    preparation would refuse (malformed, too long, or without a usable mask) count neither here nor there. Raises
    SourceError or ConversationError for a broken file, and when none of the probes can be used.
    """
    options = PrepareOptions(max_length=max_length, min_supervised=1, **rendering)
    total = sum(1 for _ in read_rows(conversations))
    if not total:
        raise ConversationError(f"{conversations}: holds no conversation")
    step = max(total // num_probes, 1)
    template, row_format = ChatTemplate(tokenizer, options.template), RowFormat()
    lengths, refused, num_probed = [], [], 0
    for i, row in enumerate(read_rows(conversations)):
        if i % step and i != total - 1:
            continue
        chunk = encode_chunk(template, [row], options, row_format)
        if chunk.error is not None:
            raise ERRORS[chunk.error["type"]](chunk.error["message"])
        if i % step == 0:  # else it is the last one, looked at because that is where a file was cut off
            num_probed += 1
            lengths += chunk.lengths.tolist()
            refused += chunk.refused
    if not lengths:
        raise ConversationError(f"{conversations}: none of {num_probed} conversations looked at can be used with "
                                f"max_length {max_length}"
                                + "".join(f". The first: {entry['reason']}" for entry in refused[:1]))
    usable = round(total * len(lengths) / num_probed)
    return DataSize(num_conversations=usable if max_samples is None else min(usable, max_samples),
                    num_probed=num_probed, mean_length=sum(lengths) / len(lengths))


def resources(store: Path | str, device: str = "cpu") -> Resources:
    """What this machine has free; the folder `store` need not exist yet."""
    folder = next(p for p in (Path(store).absolute(), *Path(store).absolute().parents) if p.exists())
    disk = psutil.disk_usage(str(folder))
    stored = sum(path.stat().st_size for path in Path(store).glob("shard-*.h5"))
    gpus = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    if device.startswith("cuda") and not gpus:
        raise TargetError(f"device {device!r} asked for, but PyTorch sees no CUDA device; use device: cpu")
    return Resources(memory_free=free_memory(device), disk_free=disk.free, disk_stored=stored,
                     num_cpus=psutil.cpu_count() or 1, gpus=gpus)


def disk_table(hidden_size: int, num_aux_layers: int, encoding: str, jobs: Sequence[tuple[str, int]]):
    """Disk for the states of several jobs (name, tokens) as a pandas DataFrame of text: tokens and gigabytes."""
    import pandas as pd

    each = bytes_per_token(hidden_size, num_aux_layers, encoding=encoding)
    return pd.DataFrame([[name, f"{tokens:,}", f"{tokens * each / 1e9:,.4g}"] for name, tokens in jobs],
                        columns=["job", "tokens", "disk (GB)"]).set_index("job")


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A torch dtype or the one named so. Raises ValueError for a name that is none."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype {dtype!r} is none of PyTorch's; use float32, bfloat16 or float16")
    return found
