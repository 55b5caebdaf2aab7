"""Looks at a store's folder as a user would who compares two of them."""

import hashlib
from pathlib import Path


def content(folder: Path) -> dict[str, str]:
    """Name -> sha256 of every file, hidden ones included."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def state(folder: Path) -> dict[str, tuple]:
    """Name -> (modification time, inode, sha256) of every file: equal only when nothing was touched."""
    return {name: ((folder / name).stat().st_mtime_ns, (folder / name).stat().st_ino, digest)
            for name, digest in content(folder).items()}


def num_done(folder: Path) -> int:
    """Finished shards."""
    return len(list(folder.glob("shard-*.h5")))
