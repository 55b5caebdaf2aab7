"""Files that are whole or absent: atomic writes, hashes, JSON and JSONL with errors that name the line.

A write goes to a hidden neighbour, is flushed and fsynced, renamed over the target, and the folder is fsynced, so a
kill or a power cut leaves either the old file or the new one.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

UMASK = os.umask(0o022)  # it can only be read by setting it: here, before there is a second thread
os.umask(UMASK)


def fsync_folder(folder: Path) -> None:
    """Makes a rename inside `folder` durable (POSIX asks for an fsync of the directory itself)."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(path: Path | str) -> None:
    """Makes `path` and what is missing above it, durably: a power cut would otherwise take a new folder with all that
    was fsynced in it."""
    path = Path(path)
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        fsync_folder(folder.parent)
    path.mkdir(exist_ok=True)  # raises FileExistsError where a file is in the way


def publish(partial: Path, final: Path) -> None:
    """fsyncs `partial`, renames it to `final` (same folder) and fsyncs the folder.

    It gets the mode that the umask leaves to a new file: safetensors makes files that their owner alone may read, and a
    server often runs as another user.
    """
    with open(partial, "rb+") as f:
        os.fchmod(f.fileno(), 0o666 & ~UMASK)
        os.fsync(f.fileno())
    os.replace(partial, final)
    fsync_folder(final.parent)


@contextmanager
def atomic_path(path: Path | str) -> Iterator[Path]:
    """Yields a hidden partial path beside `path`; publishes it on a clean exit, removes it on an exception."""
    path = Path(path)
    make_folder(path.parent)
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        publish(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_atomic(path: Path | str, write: Callable[[Any], None]) -> None:
    """Calls `write(file)` on a binary file that becomes `path` only when it returned.

    An OSError that names no file, as that of a full disk does, gets this one's name.
    """
    try:
        with atomic_path(path) as partial, open(partial, "wb") as f:
            write(f)
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def write_text(path: Path | str, text: str) -> None:
    """Writes UTF-8 `text` to `path`, whole or not at all."""
    write_atomic(path, lambda f: f.write(text.encode("utf-8")))


def write_json(path: Path | str, value: Any) -> None:
    """Writes `value` as indented JSON, whole or not at all. NaN and infinity are refused: they are not JSON."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path | str) -> Any:
    """Reads a JSON file. Raises ValueError that names file, line and column when it is not JSON."""
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}). Was it cut off while being written?") from error


def read_jsonl(path: Path | str) -> Iterator[tuple[int, Any]]:
    """Yields (line number from 1, value) of each non-blank line.

    Raises FileNotFoundError when absent and ValueError, with file and line, for a line that is not JSON.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    with open(path, "rb") as f:
        for number, raw in enumerate(f, 1):
            if not raw.strip():
                continue
            try:
                yield number, json.loads(raw.decode("utf-8"))
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"{path}, line {number}: not valid JSON ({error})") from error


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: one text for one value, to be hashed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def hash_value(value: Any) -> str:
    """sha256 (hex) of a JSON-able value."""
    return hashlib.sha256(canonical_json(value).encode("utf-8")).hexdigest()


def hash_file(path: Path | str) -> str:
    """sha256 (hex) of a file's bytes."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def hash_tree(folder: Path | str, pattern: str = "**/*.py") -> str:
    """sha256 over the names and bytes of the files below `folder` that match `pattern`, in sorted order."""
    folder = Path(folder)
    files = sorted(p for p in folder.glob(pattern) if p.is_file())
    return hash_value([[str(p.relative_to(folder)), hash_file(p)] for p in files])


def nearest_existing(path: Path | str) -> Path:
    """`path` itself, made absolute, or the nearest folder above it that exists: where it would be made."""
    path = Path(path).absolute()
    return next(p for p in (path, *path.parents) if os.path.exists(p))  # False, not an error, where nobody may look


def human_bytes(num_bytes: float) -> str:
    """Bytes in decimal units, as disks are sold: 53.79 GB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(num_bytes) < 1000 or unit == "TB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1000
    raise AssertionError("unreachable")
