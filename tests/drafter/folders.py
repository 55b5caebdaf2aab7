"""Folders of exported drafters with something changed in them."""

import json
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor


def edit(folder: Path, change: Callable[[dict], object] | None = None,
         tensors: Callable[[dict[str, Tensor]], object] | None = None) -> Path:
    """The folder, its config.json and its tensors changed in place by `change` and `tensors`."""
    if change is not None:
        config = json.loads((folder / "config.json").read_text())
        change(config)
        (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        held = load_file(folder / "model.safetensors")
        tensors(held)
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, folder / "model.safetensors")
    return folder
