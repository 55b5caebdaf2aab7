"""One run at a time in a run folder: a lock file that names its holder and outlives no one.

The file holds pid, start time and host of the holder. A holder that is gone, or whose pid now belongs to another
process, is set aside by a rename, which exactly one of several waiting processes wins. So is a lock that cannot
be read: a lock appears with its content, so an empty or cut one is what a power failure left.
"""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

LOCK_NAME = ".lock"
START_TOLERANCE_S = 5.0  # psutil derives start times from the boot time, which clock corrections move a little


class RunLocked(ValueError):
    """Another live process holds the run folder."""


def _read(path: Path) -> dict | None:
    """The holder that a lock names; None without a lock, {} when it cannot be read."""
    try:
        holder = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:  # no JSON, no UTF-8
        return {}
    return holder if isinstance(holder, dict) and {"pid", "started", "host"} <= holder.keys() else {}


def _alive(holder: dict) -> bool:
    """Whether the holder still runs. One on another host cannot be asked and counts as alive; {} is dead."""
    if not holder:
        return False
    if holder["host"] != socket.gethostname():
        return True
    try:
        process = psutil.Process(holder["pid"])
        return (process.status() != psutil.STATUS_ZOMBIE
                and abs(process.create_time() - holder["started"]) < START_TOLERANCE_S)
    except psutil.NoSuchProcess:
        return False


def lock_holder(folder: Path) -> int | None:
    """The pid of the live process that holds the run folder, or None."""
    holder = _read(folder / LOCK_NAME)
    return holder["pid"] if holder is not None and _alive(holder) else None


def _set_aside(path: Path, aside: Path, dead: dict) -> None:
    """Removes the lock of the `dead` holder; puts back one that another process placed there in the meantime."""
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return  # another process set it aside first
    if _read(aside) != dead:
        os.link(aside, path)
    aside.unlink()


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Holds the run folder. Raises RunLocked while another live process does; a dead one's lock is taken over."""
    path = folder / LOCK_NAME
    own = path.with_name(f"{LOCK_NAME}.{os.getpid()}")
    try:
        with open(own, "w", encoding="utf-8") as file:
            json.dump({"pid": os.getpid(), "started": psutil.Process().create_time(), "host": socket.gethostname()},
                      file)
            file.flush()
            os.fsync(file.fileno())  # before the link: a power cut must not leave an empty lock
        while True:
            try:
                os.link(own, path)  # atomic, with its content: nobody ever reads an empty lock
                break
            except FileExistsError:
                holder = _read(path)
                if holder is None:
                    continue
                if _alive(holder):
                    raise RunLocked(
                        f"{folder}: process {holder['pid']} on {holder['host']} is working on this run. Wait for it or "
                        f"stop it; if no such process exists on that host, remove {path}") from None
                _set_aside(path, own.with_name(f"{own.name}.stale"), holder)
    finally:
        own.unlink(missing_ok=True)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
