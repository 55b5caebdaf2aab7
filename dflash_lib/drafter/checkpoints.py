"""Training checkpoints: whole folders, the newest used, old ones pruned.

A checkpoint `step-00000400/` holds `state.safetensors` (weights, averaged weights, the optimizers' moments) and
`state.json` (step, best validation, seconds, recent gradient norms, skipped steps, hash of the store's plan, sha256 of
the other file). It is whole whatever number of processes wrote it, and any number goes on from it. It is written as a
hidden folder beside its place and renamed when everything in it is on disk, so a kill leaves the older checkpoint
untouched.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dflash_lib.drafter.folder import DrafterError
from dflash_lib.drafter.parallel import divided_like
from dflash_lib.files import fsync_folder, hash_file, human_bytes, publish, read_json, write_json

NUM_KEPT = 2


def state_tensors(network: nn.Module, averaged: dict[str, Tensor],
                  optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Every tensor that training carries from step to step, under names that say what it is. What is divided among
    processes comes as it is."""
    tensors = {f"weight.{name}": p.detach() for name, p in network.named_parameters()}
    tensors |= {f"averaged.{name}": tensor for name, tensor in averaged.items()}
    for name, p in network.named_parameters():
        for optimizer in optimizers:
            if p in optimizer.state:
                kind = type(optimizer).__name__.lower()
                tensors |= {f"{kind}.{key}.{name}": value for key, value in optimizer.state[p].items()}
    return tensors


@torch.no_grad()
def restore_tensors(path: Path, network: nn.Module, averaged: dict[str, Tensor],
                    optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """The reverse of `state_tensors`, from the checkpoint `path`: each process takes its piece of what is divided among
    processes. Raises SafetensorError for a tensor that is missing."""
    with safe_open(path / "state.safetensors", "pt") as file:
        for name, p in network.named_parameters():
            p.copy_(divided_like(file.get_tensor(f"weight.{name}"), p))
        for name, tensor in averaged.items():
            tensor.copy_(divided_like(file.get_tensor(f"averaged.{name}"), tensor))
        weights = dict(network.named_parameters())
        by_kind = {type(optimizer).__name__.lower(): optimizer for optimizer in optimizers}
        for stored in file.keys():  # noqa: SIM118 (it is no dict)
            kind, key, name = stored.split(".", 2)
            if kind in by_kind:  # none yet before the first step
                p, value = weights[name], file.get_tensor(stored)
                by_kind[kind].state[p][key] = divided_like(value, p) if value.shape == p.shape else value.to(p.device)


def save_checkpoint(folder: Path, step: int, tensors: dict[str, Tensor], meta: dict[str, Any]) -> Path:
    """Writes `folder/step-.../` unless that is there, prunes all but the newest `NUM_KEPT`, returns the path."""
    final = folder / f"step-{step:08d}"
    if final.exists():  # saved once more before another step was taken: whole, or nothing would have gone on from it
        return final
    partial = folder / f".step-{step:08d}.partial"
    for left in folder.glob(".step-*.partial"):  # by kills, of whatever step: of a large drafter 28 GB each
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial / ".state.safetensors")
        publish(partial / ".state.safetensors", partial / "state.safetensors")
        write_json(partial / "state.json", {"step": step, **meta,
                                            "sha256": hash_file(partial / "state.safetensors")})
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk stays as it was before
        free = shutil.disk_usage(folder).free
        raise OSError(f"{folder}: the checkpoint of step {step} cannot be written ({error}); {human_bytes(free)} free "
                      "there. Earlier checkpoints are whole: make room and start again.") from error
    os.rename(partial, final)
    fsync_folder(folder)
    for old in list_checkpoints(folder)[:-NUM_KEPT]:
        shutil.rmtree(old)
    return final


def list_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(folder.glob("step-*")) if folder.is_dir() else []


def load_newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Path and meta of the newest checkpoint whose checksum holds, None when there is none.

    A damaged one is said on stdout, and moved aside to `damaged-...` when an older one is whole; when none is, a
    DrafterError says so: to begin again from step 0 unasked would lose the training without a word.
    """
    damaged: list[tuple[Path, str]] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            meta = read_json(path / "state.json")
            if not isinstance(meta, dict) or not {"step", "sha256"} <= meta.keys():
                raise ValueError("state.json is not a checkpoint's")
            if hash_file(path / "state.safetensors") != meta["sha256"]:
                raise ValueError("state.safetensors is not what was written")
        except (OSError, ValueError) as error:
            print(f"{path}: damaged checkpoint, passed over ({error})", flush=True)
            damaged.append((path, str(error)))
            continue
        for broken, _ in damaged:
            os.rename(broken, broken.with_name(f"damaged-{broken.name}-{os.getpid()}"))
        return path, meta
    if damaged:
        path, reason = damaged[0]
        raise DrafterError(f"{path}: damaged checkpoint ({reason}), and no whole one is left beside it. Remove "
                           f"{folder} to train again from step 0.")
    return None
