"""Finds the drafter in whatever folder holds one, and reads z-lab's folder format back (export.py writes it)."""

from pathlib import Path
from typing import Any

from dflash_lib.drafter.exported_parts import (
    check_copy,
    draft_vocabulary,
    layer_fields,
    read_tensors,
    refuse,
    unlike_layers,
)
from dflash_lib.drafter.folder import DrafterError, TrainedDrafter, fill_network, load_drafter
from dflash_lib.drafter.network import SLIDING, DFlashDrafter, DrafterConfig
from dflash_lib.drafter.speculators_folder import is_speculators, load_speculators
from dflash_lib.files import read_json
from dflash_lib.target.loading import Target


def find_drafter(path: Path | str) -> Path:
    """The folder itself, or `drafter/best` of a run folder. Raises DrafterError for a folder without a drafter."""
    path = Path(path)
    if not path.is_dir():
        raise DrafterError(f"{path}: no such drafter folder")
    if (path / "config.json").is_file():
        return path
    best = path / "drafter" / "best"
    if (best / "config.json").is_file():
        return best
    if (path / "params.yaml").is_file():
        raise DrafterError(f"{path}: this run has no trained drafter yet (no drafter/best); run it up to 06_train")
    raise DrafterError(f"{path}: no config.json; expected a drafter folder (a run's drafter/best), an exported one, or "
                       "a run folder")


def open_drafter(path: Path | str, target: Target) -> TrainedDrafter:
    """The drafter of a run folder, of its drafter/best, or of an exported folder: z-lab's format or the speculators
    package's. Raises DrafterError."""
    folder = find_drafter(path)
    if is_speculators(folder):
        return load_speculators(folder, target)
    if is_exported(folder):
        return load_exported(folder, target)
    return load_drafter(folder)


def is_exported(folder: Path) -> bool:
    """Whether config.json is an engine's (z-lab's format, or the speculators package's), not the workbench's own."""
    return "dflash_config" in read_json(folder / "config.json") or is_speculators(folder)


def load_exported(folder: Path | str, target: Target) -> TrainedDrafter:
    """A drafter in z-lab's format, in float32; `target` is {} where the export does not say which it was trained for.

    The workbench proposes over the target's own head: a head that is in the export must be the target's rows. Raises
    DrafterError for fields or tensors that are missing or do not fit, and for another head.
    """
    folder = Path(folder)
    config = _config(folder)
    tensors, identity = read_tensors(folder)
    head, vocab = tensors.pop("lm_head.weight", None), draft_vocabulary(folder, tensors.pop("d2t", None), config)
    network = DFlashDrafter(config)
    fill_network(network, tensors, folder)
    if head is not None:
        check_copy(folder, "lm_head.weight", head, target.head.weight, vocab)
    return TrainedDrafter(network, vocab, identity, {})


def _config(folder: Path) -> DrafterConfig:
    c = read_json(folder / "config.json")
    try:
        dflash: dict[str, Any] = c["dflash_config"]
        causal = {c.get("is_causal"), dflash.get("is_causal")} - {None}
        sizes = {c.get("block_size"), dflash.get("block_size")} - {None}  # newer ones of z-lab say it among the latter
        if not sizes:
            raise KeyError("block_size")
        anchored = {c.get("sample_from_anchor"), dflash.get("sample_from_anchor")} - {None}
        sliding = SLIDING in (c.get("layer_types") or ()) and c.get("use_sliding_window")
        refuse(folder, unlike_layers(c) + [text for text, is_wrong in (
            ("is_causal true; blocks are bidirectional here", True in causal),
            ("is_causal false for sliding-window layers, which are causal here", bool(sliding) and False in causal),
            (f"two values for block_size: {sorted(sizes)}", len(sizes) > 1),
            ("two values for sample_from_anchor", len(anchored) > 1)) if is_wrong])
        return DrafterConfig(
            **layer_fields(c), num_target_layers=c["num_target_layers"], target_layer_ids=dflash["target_layer_ids"],
            block_size=sizes.pop(), mask_token_id=dflash["mask_token_id"],
            draft_vocab_size=c.get("draft_vocab_size"), sample_from_anchor=next(iter(anchored), False))
    except KeyError as error:
        raise DrafterError(f"{folder}/config.json: {error.args[0]} is missing; an exported drafter has it") from error
    except DrafterError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise DrafterError(f"{folder}/config.json: {error}") from error
