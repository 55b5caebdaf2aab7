"""A trained drafter at rest: a folder with `config.json` and `model.safetensors`.

config.json: `drafter` (DrafterConfig), `target` (identity of the target that it was trained for), `training` (what is
known of its training), `sha256` (of the other file). model.safetensors: z-lab's parameter names in float32, and
`draft_vocab` int64 [draft vocabulary] (ascending target ids) when the head is reduced. Embedding and head are the
target's and not in it.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_lib.drafter.network import DFlashDrafter, DrafterConfig
from dflash_lib.files import atomic_path, hash_file, read_json, write_json


class DrafterError(ValueError):
    """A drafter folder that cannot be used; the message says what does not fit."""


@dataclass
class TrainedDrafter:
    """network: the drafter in eval mode; draft_vocab: int64 target ids of the reduced head, None = the full head;
    target: identity of its target; training: provenance, free-form."""

    network: DFlashDrafter
    draft_vocab: Tensor | None
    target: dict[str, str]
    training: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> DrafterConfig:
        return self.network.config


def save_drafter(folder: Path | str, drafter: TrainedDrafter) -> None:
    """Writes the folder's two files, each whole or not at all."""
    folder = Path(folder)
    tensors = {name: p.detach().float().cpu().contiguous() for name, p in drafter.network.named_parameters()}
    if drafter.draft_vocab is not None:
        tensors["draft_vocab"] = drafter.draft_vocab
    with atomic_path(folder / "model.safetensors") as path:
        save_file(tensors, path, metadata={"format": "pt"})
        sha256 = hash_file(path)
    write_json(folder / "config.json", {"drafter": drafter.config.to_dict(), "target": drafter.target,
                                        "training": drafter.training, "sha256": sha256})


def load_drafter(folder: Path | str) -> TrainedDrafter:
    """Reads a drafter folder. Raises DrafterError when files are missing, damaged or do not fit each other."""
    folder = Path(folder)
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise DrafterError(f"{folder}: no {name}; this is not a drafter folder, or its training has not finished")
    meta = read_json(folder / "config.json")
    try:
        if "sha256" in meta and meta["sha256"] != hash_file(folder / "model.safetensors"):
            raise DrafterError(f"{folder}: damaged drafter: model.safetensors is not what was written with "
                               "config.json. Take it from a copy, or train again")
        tensors = load_file(folder / "model.safetensors")
        network = DFlashDrafter(DrafterConfig(**meta["drafter"]))
    except (SafetensorError, KeyError, TypeError) as error:
        raise DrafterError(f"{folder}: damaged drafter ({type(error).__name__}: {error})") from error
    draft_vocab = tensors.pop("draft_vocab", None)
    fill_network(network, tensors, folder)
    if (None if draft_vocab is None else len(draft_vocab)) != network.config.draft_vocab_size:
        raise DrafterError(f"{folder}: draft_vocab has not the {network.config.draft_vocab_size} ids of config.json")
    return TrainedDrafter(network, draft_vocab, meta["target"], meta["training"])


def fill_network(network: DFlashDrafter, tensors: dict[str, Tensor], folder: Path) -> None:
    """Puts the tensors of a folder's file into the network, for use only. Raises DrafterError, naming tensors, unless
    they are exactly the network's."""
    expected = {name: tuple(p.shape) for name, p in network.named_parameters()}
    found = {name: tuple(t.shape) for name, t in tensors.items()}
    wrong = [f"{name}: {found.get(name, 'missing')} instead of {expected.get(name, 'nothing')}"
             for name in sorted(expected.keys() | found.keys()) if expected.get(name) != found.get(name)]
    if wrong:
        raise DrafterError(f"{folder}: weights do not fit config.json: {'; '.join(wrong[:5])}")
    broken = [name for name, t in tensors.items() if not torch.isfinite(t).all() or not t.any()]
    if broken:
        raise DrafterError(f"{folder}: weights that are not finite, or all zero: {', '.join(broken[:5])}")
    network.load_state_dict(tensors)
    network.eval().requires_grad_(False)


def check_fits_target(drafter: TrainedDrafter, identity: dict[str, str], where: str) -> None:
    """Raises DrafterError unless the drafter was trained for the target with this identity (weights and tokenizer).

    A drafter that knows no target (another tool's export) passes: only its shapes can be compared.
    """
    if not drafter.target:
        return
    differs = {key: (drafter.target.get(key), identity[key]) for key in ("weights", "tokenizer")
               if drafter.target.get(key) != identity[key]}
    if differs:
        raise DrafterError(f"{where}: the drafter was trained for another target, "
                           f"{drafter.target.get('name')}, not {identity['name']}: {differs} (drafter's, target's)")
