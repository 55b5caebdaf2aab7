"""What a disk may hold after a power cut: a model of files whose content and names become durable by fsync only.

POSIX promises no more than this: an fsync of a file makes its content durable, an fsync of a folder the names in it. So
after a cut a file that was not synced may be empty, cut, or have pages of zeros between others (pages are written back
in any order), and creations, renames and removals that no fsync of their folder followed may be undone, or not.
"""

import base64
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from tests.hidden_states.survival.io_events import REAL_OPEN, Event

PAGE = 4096
FOLDER = "folder"
CONTENTS = ("lost", "zeros", "half", "holes", "kept")
NAMES = ("undone", "done")


class Journal:
    """A listener that keeps all changes below `root`, in their order."""

    def __init__(self, root: Path):
        self.root, self.entries = os.path.abspath(root), []

    def __call__(self, event: Event) -> None:
        if event.when == "after" and event.path.startswith(self.root):
            self.entries.append({"op": event.op, "path": event.path, "source": event.source, "offset": event.offset,
                                 "data": base64.b64encode(event.data).decode(), "size": event.size})

    def save(self, path: Path | str) -> None:
        text = json.dumps({"root": self.root, "entries": self.entries})
        with REAL_OPEN(path, "w") as f:
            f.write(text)


def read_journal(path: Path) -> tuple[str, list[Event]]:
    """The root and the changes that a Journal saved."""
    value = json.loads(path.read_text())
    return value["root"], [Event(**{**entry, "data": base64.b64decode(entry["data"]), "when": "after"})
                           for entry in value["entries"]]


@dataclass
class File:
    """content: as programs see it; durable: what the disk is sure to hold."""

    content: bytearray = field(default_factory=bytearray)
    durable: bytes = b""

    def after_cut(self, contents: str) -> bytes:
        now, before = bytes(self.content), self.durable
        if now == before or contents == "kept":
            return now
        if contents == "lost":
            return before
        if contents == "zeros":
            return bytes(len(now))
        if contents == "half":
            return now[:len(now) // 2]
        pages = [now[i:i + PAGE] for i in range(0, len(now), PAGE)]
        return b"".join(bytes(len(page)) if i % 2 else page for i, page in enumerate(pages))


class Disk:
    """The files below `root`, as programs see them (`names`) and as they are sure to be after a cut (`durable`).
    `root` itself is there and durable."""

    def __init__(self, root: str):
        self.root = root
        self.names: dict[str, File | str] = {}
        self.durable: dict[str, File | str] = {}

    def apply(self, event: Event) -> None:
        """One change. Raises KeyError for one of a file that the journal never saw made: then it is incomplete."""
        path = event.path
        if event.op == "create":
            if path in self.names:
                self.names[path].content.clear()
            else:
                self.names[path] = File()
        elif event.op == "write":
            content = self.names[path].content
            content.extend(bytes(max(0, event.offset - len(content))))
            content[event.offset:event.offset + len(event.data)] = event.data
        elif event.op == "truncate":
            content = self.names[path].content
            content.extend(bytes(max(0, event.size - len(content))))
            del content[event.size:]
        elif event.op == "fsync":
            self.names[path].durable = bytes(self.names[path].content)
        elif event.op == "fsync-folder":
            here = {name: what for name, what in self.names.items() if os.path.dirname(name) == path}
            others = {name: what for name, what in self.durable.items() if os.path.dirname(name) != path}
            self.durable = {**others, **here}
        elif event.op == "replace":
            self.names[path] = self.names.pop(event.source)
        elif event.op == "link":
            self.names[path] = self.names[event.source]
        elif event.op in ("unlink", "rmdir"):
            del self.names[path]
        elif event.op == "mkdir":
            self.names[path] = FOLDER
        else:
            raise AssertionError(event.op)

    def after_cut(self, names: str, contents: str) -> dict[str, bytes | None]:
        """What the disk may hold: path below the root -> content, None for a folder."""
        entries = self.durable if names == "undone" else self.names
        there = {}
        for path in sorted(entries):  # a folder before what is in it
            parent = os.path.dirname(path)
            if parent == self.root or os.path.relpath(parent, self.root) in there:
                what = entries[path]
                there[os.path.relpath(path, self.root)] = None if what == FOLDER else what.after_cut(contents)
        return there


def build(state: dict[str, bytes | None], folder: Path) -> None:
    """Makes `folder` hold the state."""
    folder.mkdir()
    for name, content in state.items():
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)


def states_after_cuts(root: str, events: list[Event], first: int = 0) -> dict[tuple, dict[str, bytes | None]]:
    """Every different state that a cut behind any change from number `first` on may leave, by (number of changes made,
    names, contents) of its first appearance."""
    disk, seen, found = Disk(root), set(), {}
    for made in range(len(events) + 1):
        if made:
            disk.apply(events[made - 1])
        if made < first:
            continue
        for names in NAMES:
            for contents in CONTENTS:
                state = disk.after_cut(names, contents)
                key = hash(tuple(sorted((name, content) for name, content in state.items()
                                        if content is not None))) ^ hash(tuple(sorted(state)))
                if key not in seen:
                    seen.add(key)
                    found[made, names, contents] = state
    return found
