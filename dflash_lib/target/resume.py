"""Long jobs of a target that write JSON lines as they go: a second call goes on where a killed one was.

`OUT.partial` grows line by line; `OUT.partial.json` beside it says with which settings, and a call with others is
refused. Both are gone once `OUT` is there.
"""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dflash_lib.files import nearest_existing, read_json, write_json
from dflash_lib.locks import Locked, folder_lock


class PartialFile:
    """The lines of a job that is not finished, open for appending; a context manager.

    settings: what the lines depend on, as JSON; defaults: of settings that files begun by earlier versions lack. Raises
    ValueError when `out` is there already, when another process writes it, and when the lines were begun with other
    settings, or with unknown ones.
    """

    def __init__(self, out: Path, settings: dict[str, Any], defaults: dict[str, Any] | None = None):
        refuse_existing(out)
        self.path, self.settings_path = Path(f"{out}.partial"), Path(f"{out}.partial.json")
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ValueError(f"{out}: {nearest_existing(out.parent)} is a file, so no folder can be made there") \
                from error
        self.open = ExitStack()
        try:
            self.open.enter_context(folder_lock(out.parent, "file", f".{self.path.name}.lock"))
        except Locked as error:
            raise ValueError(f"{self.path}: another process is writing it. Wait for it, or choose another name. {error}"
                             ) from error
        is_begun = self.path.exists()
        try:
            self.file = self.open.enter_context(open(self.path, "ab"))
            if is_begun:
                self._check(settings, defaults or {})
            write_json(self.settings_path, settings)
        except BaseException:
            if not is_begun:
                self.path.unlink(missing_ok=True)
            self.open.close()
            raise

    def _check(self, settings: dict[str, Any], defaults: dict[str, Any]) -> None:
        if not self.settings_path.exists():
            raise ValueError(f"{self.path}: its settings file {self.settings_path.name} is missing, so what wrote it "
                             "is not known. Remove it to start anew.")
        before = read_json(self.settings_path)
        if not isinstance(before, dict):
            raise ValueError(f"{self.settings_path}: damaged, so with which settings {self.path.name} was begun is not "
                             "known. Remove both to start anew.")
        before = defaults | before
        changed = {key: [before.get(key), settings[key]] for key in settings if before.get(key) != settings[key]}
        if changed:
            raise ValueError(f"{self.path}: begun with other settings: {changed} (before, now). Remove it to start "
                             "anew.")

    def __enter__(self) -> "PartialFile":
        return self

    def __exit__(self, *raised: Any) -> None:
        self.open.__exit__(*raised)

    def rows(self, kind: type) -> Iterator[tuple[int, Any]]:
        """(position, value) of each whole line, each a JSON value of `kind`. A line that a kill cut short is taken off
        the file behind them; any other that is damaged is a ValueError that names it."""
        whole = 0
        with open(self.path, "rb") as f:
            for number, line in enumerate(f, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    value = json.loads(line)
                except ValueError:
                    value = None
                if not isinstance(value, kind):
                    raise ValueError(f"{self.path}, line {number}: damaged. Remove the lines from this one on (head -n "
                                     f"{number - 1}); what they held is made again.")
                yield whole, value
                whole += len(line)
        os.truncate(self.path, whole)

    def append(self, line: str) -> int:
        """Writes a line; returns its position. `keep` makes it durable."""
        position = self.file.seek(0, os.SEEK_END)
        self.file.write(line.encode("utf-8") + b"\n")
        return position

    def keep(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())

    def remove(self) -> None:
        """Ends the job; `out` is there."""
        self.path.unlink()
        self.settings_path.unlink()


def refuse_existing(out: Path) -> None:
    """Raises ValueError when `out` is there already: it may have cost hours."""
    if out.exists():
        raise ValueError(f"{out}: is there already. Move it away, or choose another name.")
