"""`log.jsonl` of a training: a row a step and a row a validation. On resume it is cut back to the checkpoint, so that
no step stands in it twice."""

import json
from pathlib import Path
from typing import Any

from dflash_lib.files import write_text


def cut_log(path: Path, step: int) -> None:
    """Drops log rows after `step`, and a last line that a kill cut short."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n") and json.loads(line)["step"] <= step:
            kept.append(line)
    write_text(path, "".join(kept))


def read_log(folder: Path | str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Step rows and validation rows of a training folder's log."""
    rows = [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if "loss" in row], [row for row in rows if "validation" in row]
