"""Begins a training from a drafter that exists: ours, z-lab's, or the speculators package's.

What the weights' meaning depends on must be the same: the states that they read (target, layers), the shapes, the
positions, what a layer sees, the mask token, and which token a slot says. What they do not depend on may differ and is
recorded: a block of another size (each slot is the same function of its neighbours, which are more or fewer than it was
trained with), another draft vocabulary (the head is the target's), the norms' epsilon, and the longest text.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_lib.drafter.exported import find_drafter, is_exported, open_drafter
from dflash_lib.drafter.folder import DrafterError, TrainedDrafter, check_fits_target
from dflash_lib.drafter.network import SLIDING, DFlashDrafter, DrafterConfig
from dflash_lib.drafter.speculators_folder import is_speculators
from dflash_lib.files import hash_file
from dflash_lib.target.loading import Target

SAME = ("target_layer_ids", "num_target_layers", "vocab_size", "mask_token_id", "sample_from_anchor", "num_layers",
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta")
ALLOWED = ("block_size", "rms_norm_eps", "max_position_embeddings")


@torch.no_grad()
def init_from(network: DFlashDrafter, draft_vocab: Tensor | None, folder: Path | str, target: Target) -> dict[str, Any]:
    """Copies the weights of the drafter in `folder` (a run, its drafter/best, or an export in either format) into
    `network`, and returns what a training is to record of them.

    draft_vocab: int64 target ids of the head that will be trained, None = the full head. Returned, JSON-able: `folder`;
    `sha256` of its weights' file; `format`, "workbench", "z-lab" or "speculators"; `knows_target`, whether the folder
    says which target it was trained for; `differences`, one sentence for each that is allowed. Raises DrafterError for
    a folder that cannot be opened (`open_drafter`), and for one that does not fit, all mismatches by name, before
    anything is copied.
    """
    found = find_drafter(folder)
    drafter = open_drafter(found, target)
    wrong = _mismatches(drafter, network.config, target)
    if wrong:
        raise DrafterError(f"init_from {folder}: this drafter cannot be the beginning of that training: "
                           f"{'; '.join(wrong)}. Train with its values, or without init_from")
    network.load_state_dict(drafter.network.state_dict())
    return {"folder": str(folder), "sha256": weights_hash(found),
            "format": _format(found), "knows_target": bool(drafter.target),
            "differences": _differences(drafter, network.config, draft_vocab)}


def weights_hash(folder: Path | str) -> str:
    """sha256 of the weights' file of the drafter in `folder`. Raises DrafterError for a folder without one."""
    found = find_drafter(folder) / "model.safetensors"
    if not found.is_file():
        raise DrafterError(f"{found.parent}: no model.safetensors; its weights may be still to be downloaded, or in "
                           "several files, which have to be put into one")
    return hash_file(found)


def _mismatches(drafter: TrainedDrafter, config: DrafterConfig, target: Target) -> list[str]:
    wrong = []
    try:
        check_fits_target(drafter, target.identity, "target")
    except DrafterError as error:
        wrong.append(str(error))
    theirs = drafter.config
    wrong += _unequal(theirs, config, SAME)
    if theirs.num_layers == config.num_layers:
        wrong += _unequal(theirs, config, ("layer_types",))
        if SLIDING in theirs.layer_types and SLIDING in config.layer_types:  # else it has no meaning
            wrong += _unequal(theirs, config, ("sliding_window",))
    return wrong


def _unequal(theirs: DrafterConfig, ours: DrafterConfig, names: tuple[str, ...]) -> list[str]:
    def show(value: Any) -> Any:
        return list(value) if isinstance(value, tuple) else value

    return [f"{name} {show(getattr(theirs, name))}, this training has {show(getattr(ours, name))}" for name in names
            if getattr(theirs, name) != getattr(ours, name)]


def _differences(drafter: TrainedDrafter, config: DrafterConfig, draft_vocab: Tensor | None) -> list[str]:
    vocabularies = (drafter.draft_vocab, draft_vocab)
    equal = vocabularies == (None, None) if None in vocabularies else torch.equal(*(v.cpu() for v in vocabularies))
    there, here = ("the full head" if v is None else f"a draft vocabulary of {len(v)} tokens" for v in vocabularies)
    return _unequal(drafter.config, config, ALLOWED) + ([] if equal else [f"{there}, this training has {here}"
                                                        + (" of other ids" if there == here else "")])


def _format(folder: Path) -> str:
    return "speculators" if is_speculators(folder) else "z-lab" if is_exported(folder) else "workbench"
