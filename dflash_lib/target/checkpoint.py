"""What lies in a model folder: its tensors' names, types and shapes, read from the headers without the values.

The names of a checkpoint depend on who saved it: `model.language_model.layers...` (Qwen3.5/3.6, whole or text only),
`language_model.model.layers...` (Gemma 3 with its vision tower), `model.layers...`. The text tower has the last ones.
"""

import json
import math
import re
import struct
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash_lib.files import read_json
from dflash_lib.target.errors import TargetError

# Towers of a whole model that the workbench does not load. Patterns of the checkpoint's own names.
OTHER_TOWERS = {
    "vision": r"^(model\.)?(visual|vision_tower|vision_model|embed_vision|multi_modal_projector)\.",
    "audio": r"^(model\.)?(audio_tower|embed_audio)\.",
    "multi-token prediction": r"^(model\.)?mtp\.",
    "rotary buffers": r"\.rotary_emb\.inv_freq$",
}
# Checkpoint name -> text tower name; given to Transformers as `key_mapping`, applied in this order.
RENAMINGS = {
    r"^language_model\.lm_head\.": "lm_head.",
    r"^language_model\.model\.": "model.",
    r"^model\.language_model\.": "model.",
}
_SCALE = re.compile(r"(^|[._])(scale|scales|scale_inv|qscale)(_inv|_weight|_\d+)?$")
_STORED = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
           "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
PLAIN = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file. dtype: safetensors' name of it ("BF16", "F8_E4M3", "U8", ...)."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def is_scale(self) -> bool:
        return is_scale(self.name)

    def rows(self, index: int | slice) -> Tensor:
        """Values along the first axis; nothing else of the file is read."""
        with safe_open(self.file, framework="pt") as f:
            return f.get_slice(self.name)[index]

    def whole(self) -> Tensor:
        with safe_open(self.file, framework="pt") as f:
            return f.get_tensor(self.name)


def weight_files(path: Path | str) -> list[Path]:
    """The safetensors files of a model folder, each checked to be whole (header and length).

    Raises TargetError for no weights, an index that names an absent file or contradicts model.safetensors, several
    files without an index, and a truncated file.
    """
    path = Path(path)
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if index.is_file():
        files = [path / name for name in sorted(set(read_index(index).values()))]
        if single.is_file() and files != [single]:
            raise TargetError(f"{path}: holds model.safetensors and an index that names other files; which of the two "
                              "are the weights? Remove one.")
    else:
        files = [single] if single.is_file() else sorted(path.glob("*.safetensors"))
        if len(files) > 1 or files and files != [single]:
            raise TargetError(f"{path}: holds {len(files)} safetensors files, but neither model.safetensors nor "
                              f"{index.name}. Is the download complete?")
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


def read_index(index: Path) -> dict[str, str]:
    """Which file holds which tensor. Raises TargetError when that is not what the index says."""
    try:
        value = read_json(index)
    except ValueError as error:
        raise TargetError(f"{error} Download it again.") from error
    weight_map = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
        raise TargetError(f"{index}: has no weight_map from tensors to files. Download it again.")
    return weight_map


def read_header(file: Path) -> list[StoredTensor]:
    """The tensors of a safetensors file, from its header: 8 bytes of length (little endian), then JSON."""
    with open(file, "rb") as f:
        header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
    return [StoredTensor(file, name, entry["dtype"], tuple(entry["shape"]))
            for name, entry in header.items() if name != "__metadata__"]


def is_scale(name: str) -> bool:
    """Whether a tensor's name is that of a quantised weight's scale."""
    return bool(_SCALE.search(name))


def text_name(name: str) -> str | None:
    """A checkpoint's tensor name as the text tower has it; None for tensors of other towers."""
    if any(re.search(pattern, name) for pattern in OTHER_TOWERS.values()):
        return None
    for pattern, replacement in RENAMINGS.items():
        name = re.sub(pattern, replacement, name)
    return name


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a model folder, by their names in the files. `Checkpoint.read` checks them against the index."""

    path: Path
    files: tuple[Path, ...]
    tensors: dict[str, StoredTensor]

    @classmethod
    def read(cls, path: Path | str) -> "Checkpoint":
        """Reads the headers. Raises TargetError as `weight_files` does, for a tensor that the index promises in a file
        that lacks it, and for one that two files have."""
        path = Path(path)
        files = weight_files(path)
        tensors: dict[str, StoredTensor] = {}
        for file in files:
            for tensor in read_header(file):
                if tensor.name in tensors:
                    raise TargetError(f"{path}: both {tensors[tensor.name].file.name} and {file.name} hold "
                                      f"{tensor.name}. Files of two downloads? Download it again.")
                tensors[tensor.name] = tensor
        index = path / "model.safetensors.index.json"
        if index.is_file():
            absent = [f"{name} ({file})" for name, file in read_index(index).items()
                      if name not in tensors or tensors[name].file.name != file]
            if absent:
                raise TargetError(f"{path}: {index.name} promises tensors that their files lack: {some(absent)}. Files "
                                  "of two downloads? Download it again.")
        return cls(path, tuple(files), tensors)

    @cached_property
    def text(self) -> dict[str, StoredTensor]:
        """The text tower's tensors, scales included, by their names in the text tower. Raises TargetError when two
        tensors of the files would be one there."""
        found: dict[str, StoredTensor] = {}
        for tensor in self.tensors.values():
            name = text_name(tensor.name)
            if name in found:
                raise TargetError(f"{self.path}: {found[name].name} and {tensor.name} are one tensor of the text tower "
                                  "under two names; the files were merged wrongly")
            if name is not None:
                found[name] = tensor
        return found

    @cached_property
    def skipped(self) -> dict[str, int]:
        """Tensors that are not loaded, counted by tower."""
        return dict(Counter(tower for name in self.tensors for tower, pattern in OTHER_TOWERS.items()
                            if re.search(pattern, name)))

    @cached_property
    def stored_dtypes(self) -> dict[str, int]:
        """Tensors of the text tower, counted by the type that they are stored in."""
        return dict(Counter(tensor.dtype for tensor in self.text.values()))

    def num_parameters(self, tied: bool = False) -> int:
        """Parameters that the text tower will have: a 4-bit pair counts as two, scales as none, a tied head as none."""
        return sum(tensor.num_values * (2 if name.endswith("_blocks") and tensor.dtype == "U8" else 1)
                   for name, tensor in self.text.items()
                   if not tensor.is_scale and not (tied and name == "lm_head.weight"))

    def is_converted(self, dtype: torch.dtype) -> bool:
        """Whether any tensor is stored in another type than `dtype`."""
        return any(_STORED.get(tensor.dtype) != dtype for tensor in self.text.values())

    def narrowed(self, dtype: torch.dtype) -> list[str]:
        """Tensors stored in a wider floating type than `dtype`: they are rounded."""
        return [name for name, tensor in self.text.items()
                if tensor.dtype in PLAIN and not tensor.is_scale and _STORED[tensor.dtype].itemsize > dtype.itemsize]

    def check_stored_dtypes(self, quantised: bool) -> None:
        """Raises TargetError when weights are stored in a type that only a quantisation scheme explains, and the
        configuration names none: they would be read as plain numbers."""
        odd = [f"{name} ({tensor.dtype})" for name, tensor in self.text.items() if tensor.dtype not in PLAIN]
        if odd and not quantised:
            scales = [name for name, tensor in self.text.items() if tensor.is_scale]
            raise TargetError(f"{self.path}: {len(odd)} tensors are stored quantised, but config.json has no "
                              "quantization_config, so they would be read as plain numbers"
                              + (f" and their {len(scales)} scale tensors be dropped" if scales else "")
                              + f": {some(odd)}. Download config.json again.")

    def scale_of(self, tensor: StoredTensor) -> StoredTensor | None:
        """The scale of a quantised weight, under one of the names that Transformers reads for FP8; None without."""
        module = tensor.name.rpartition(".")[0]
        names = (f"{tensor.name}_scale_inv", f"{module}.scale", f"{module}.qscale_weight")
        return next((self.tensors[name] for name in names if name in self.tensors), None)

    def check_scales(self, block: tuple[int, int] | None) -> None:
        """Raises TargetError when an FP8 weight has no scale of any name, when its scales are not one for each `block`
        (rows, columns; None = one a weight), or when a block is cut off at the edge of a weight that has several:
        Transformers spreads scales evenly over the weight."""
        with_scale = {name.rpartition(".")[0] for name, tensor in self.text.items() if tensor.is_scale}
        quantised = {name: tensor for name, tensor in self.text.items() if tensor.dtype in ("F8_E4M3", "F8_E5M2")}
        bare = [tensor.name for name, tensor in quantised.items() if name.rpartition(".")[0] not in with_scale]
        if bare:
            raise TargetError(f"{self.path}: {len(bare)} quantised weights have no scale, and would be read as plain "
                              f"numbers: {some(bare)}. Download it again.")
        for weight in quantised.values():
            scale = self.scale_of(weight)
            if block is None or scale is None or len(weight.shape) < 2:
                continue
            sides = list(zip(weight.shape[-2:], block, strict=True))
            grid = tuple(math.ceil(size / each) for size, each in sides)
            if scale.shape[-2:] != grid or any(size % each and size > each for size, each in sides):
                raise TargetError(f"{self.path}: {weight.name} {list(weight.shape)} has scales {list(scale.shape)}, "
                                  f"which Transformers cannot apply in blocks of {block[0]} x {block[1]}. Use the bf16 "
                                  "checkpoint.")

    def differing_tie(self) -> str | None:
        """What is wrong with a head that the configuration ties to the embedding: None unless the files hold both and
        they differ."""
        head, embedding = self.text.get("lm_head.weight"), self.text.get("model.embed_tokens.weight")
        if head is None or embedding is None:
            return None
        if head.shape != embedding.shape:
            return f"lm_head.weight {list(head.shape)}, model.embed_tokens.weight {list(embedding.shape)}"
        a, b = head.whole(), embedding.whole()  # mapped from the files, not copied
        for start in range(0, len(a), 4096):
            if not torch.equal(a[start:start + 4096], b[start:start + 4096]):
                return f"lm_head.weight differs from model.embed_tokens.weight (from row {start} on)"
        return None


def some(names: list[str], limit: int = 5) -> str:
    """The first few of many names, and how many there are."""
    more = f", ... ({len(names)} in all)" if len(names) > limit else ""
    return ", ".join(sorted(names)[:limit]) + more
