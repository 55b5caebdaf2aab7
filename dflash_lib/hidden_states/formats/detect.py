"""Opens a folder of hidden states in whatever layout it is."""

from collections.abc import Sequence
from pathlib import Path

from dflash_lib.files import read_json
from dflash_lib.hidden_states.formats.hdf5 import StoreSource
from dflash_lib.hidden_states.formats.reading import Samples
from dflash_lib.hidden_states.formats.speculators import SpeculatorsSource, is_row_set, state_folder
from dflash_lib.hidden_states.formats.torch_files import ModelOptimizerSource, SpecForgeSource, find_ckpt
from dflash_lib.hidden_states.plan import PLAN_FILE
from dflash_lib.hidden_states.schema import StoreError

FORMATS = ("store", "speculators", "specforge", "model-optimizer")
CONVERSION_FILE = "conversion.json"
LAYOUTS = ("a store (plan.json, shard-*.h5), speculators (hidden_states/hs_*.safetensors), SpecForge "
           "(rows_*/data_*.ckpt or .ckpt.gz), Model-Optimizer (*.pt)")


def detect_formats(path: Path) -> list[str]:
    """The layouts whose files a folder holds."""
    found = {"store": (path / PLAN_FILE).is_file() or any(path.glob("shard-*.h5")),
             "speculators": state_folder(path) is not None or is_row_set(path),
             "specforge": bool(find_ckpt(path)), "model-optimizer": any(path.glob("*.pt"))}
    return [name for name in FORMATS if found[name]]


def open_states(path: Path | str, format: str | None = None, *, target_layer_ids: Sequence[int] | None = None,
                hidden_size: int | None = None, dataset: Path | str | None = None) -> Samples:
    """Opens the hidden states in a folder; the result's `format` and `describe()` say which layout was seen.

    format: one of FORMATS, None = by the files. target_layer_ids: ours, in stored order, for layouts that do not say;
    hidden_size: for SpecForge's files without a last state; dataset: folder of speculators' Arrow data set, when it is
    not the same. Raises StoreError for a folder that is absent, empty, of no known layout, or of several.
    """
    path = Path(path)
    if not path.is_dir():
        raise StoreError(f"{path}: " + ("a file; the folder that holds it is needed" if path.exists()
                                        else "no such folder"))
    if format is None:
        seen = detect_formats(path)
        if len(seen) != 1:
            raise StoreError(f"{path}: " + (f"looks like {' and like '.join(seen)}: say which (format)" if seen else
                                            f"holds no hidden states in a known layout; known: {LAYOUTS}"))
        format = seen[0]
    if format == "store":
        return StoreSource(path)
    if format == "speculators":
        return SpeculatorsSource(path, dataset, target_layer_ids, _conversion(path))
    if format == "specforge":
        return SpecForgeSource(path, target_layer_ids, hidden_size)
    if format == "model-optimizer":
        return ModelOptimizerSource(path, target_layer_ids, hidden_size)
    raise StoreError(f"format: {format!r} is not known here; known: {', '.join(FORMATS)}")


def _conversion(path: Path) -> dict | None:
    file = path / CONVERSION_FILE
    return read_json(file) if file.is_file() else None
