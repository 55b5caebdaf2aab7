"""One job at a time in a folder: a lock file that names its holder, beats while he lives, and outlives no one.

The file holds pid, start time, host and work of the holder; a thread renews its modification time. No flock: cluster
file systems often have none. On the holder's own host the process is asked. Elsewhere only the heartbeat tells, and
clocks of two hosts are never compared: a lock whose heartbeat is seen to change is alive, one that was watched for
several intervals without a change is dead. Machines that share a folder must have different host names.

A dead lock is removed by the one of several waiting processes that holds a lock for this, `<name>.heir`. So is a lock
that cannot be read: a lock appears with its content, so an empty or cut one is what a power failure left. A holder that
lost its lock says so at its next heartbeat. It is not ended: what the library writes is whole or absent and the same
from every writer, so a second one is waste, not damage.
"""

import errno
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

LOCK_NAME = ".lock"
HEIR = ".heir"
START_TOLERANCE_S = 5.0  # psutil derives start times from the boot time, which clock corrections move a little
STALE_INTERVALS = 4  # heartbeats that must be seen to be missing
LONGEST_INTERVAL_S = 120.0  # a lock that names a longer one is damaged
_held: set[str] = set()  # tokens of the locks that this process holds
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class Locked(ValueError):
    """Another live process holds the folder, or it took this process's lock away."""


def this_process() -> dict[str, Any]:
    """What tells this process from every other one: pid, start time, host, and where its pid counts (boot, namespace of
    process ids: a container may have its host's name and pids of its own)."""
    return {"pid": os.getpid(), "started": psutil.Process().create_time(), "host": socket.gethostname(),
            "boot": _boot(), "pids": _pid_namespace()}


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not every container shows it
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def process_alive(process: dict[str, Any]) -> bool | None:
    """Whether the process that `this_process` described still runs; None when that cannot be asked from here."""
    if process["host"] != socket.gethostname():
        return None
    if process.get("boot", _boot()) != _boot():
        return False  # the machine was started anew since
    if process.get("pids", _pid_namespace()) != _pid_namespace():
        return None
    try:
        found = psutil.Process(process["pid"])
        return (found.status() != psutil.STATUS_ZOMBIE
                and abs(found.create_time() - process["started"]) < START_TOLERANCE_S)
    except psutil.NoSuchProcess:
        return False


def _holder_alive(holder: dict[str, Any]) -> bool | None:
    """`process_alive`, but a lock of this very process that it no longer holds (it could not be removed from a disk
    that had turned read-only) is dead."""
    alive = process_alive(holder)
    ours = alive and holder["pid"] == os.getpid() and "token" in holder
    return False if ours and holder["token"] not in _held else alive


def _read(path: Path) -> tuple[dict[str, Any], int] | None:
    """The holder that a lock names and its newest heartbeat (mtime in ns). None without a lock, {} when it cannot be
    read. The file is opened for that: NFS asks its server then, but may answer a stat from memory."""
    try:
        with open(path, "rb") as file:
            beat, text = os.fstat(file.fileno()).st_mtime_ns, file.read()
    except FileNotFoundError:
        return None
    try:
        holder = json.loads(text)
        whole = (isinstance(holder, dict) and isinstance(holder["pid"], int) and isinstance(holder["host"], str)
                 and isinstance(holder["started"], int | float))
    except (ValueError, KeyError):  # no JSON, no UTF-8, a part of it
        whole = False
    return (holder if whole else {}), beat


def lock_holder(folder: Path | str, name: str = LOCK_NAME) -> dict[str, Any] | None:
    """Who holds the folder: pid, host, started and since (when the process began and when it took the lock, in seconds
    since 1970), what. None when nobody does, or a dead process.

    A holder on another host is believed, whatever its heartbeat; `folder_lock` watches it.
    """
    found = _read(Path(folder) / name)
    if found is None or not found[0] or _holder_alive(found[0]) is False:
        return None
    return found[0]


def lock_beside(folder: Path | str) -> tuple[Path, str]:
    """Folder and name of a lock beside `folder`, for one that may be moved while it is locked."""
    folder = Path(folder)
    return folder.parent, f".{folder.name}.lock"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _place(own: Path, path: Path) -> bool:
    """Makes the lock from the file `own`, in one step with its content: nobody reads an empty one. False when there
    is a lock already."""
    try:
        os.link(own, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        try:  # a file system without hard links; `_read_settled` waits for the content
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        with open(file, "wb") as out:
            out.write(own.read_bytes())
            out.flush()
            os.fsync(out.fileno())
    return True


def _read_settled(path: Path) -> tuple[dict[str, Any], int] | None:
    """`_read`; a lock that cannot be read is given a second to get its content (a file system without hard links)."""
    for _ in range(10):
        found = _read(path)
        if found is None or found[0]:
            return found
        time.sleep(0.1)
    return found


def _remove_dead(path: Path, own: Path, mine: dict[str, Any], dead: dict[str, Any]) -> None:
    """Removes the lock that says `dead`, unless another process did so first. Only the holder of the heir's lock
    removes a dead one, so that nobody takes away what another has placed there since he looked."""
    heir = path.with_name(f"{path.name}{HEIR}")
    try:
        _acquire(heir, own, mine)  # one whose heir was killed at this very moment is inherited in the same way
    except Locked:
        time.sleep(0.01)  # another process is about to remove the dead lock
        return
    try:
        found = _read(path)
        if found is not None and found[0] == dead:
            path.unlink()
    finally:
        heir.unlink()


def _names(holder: dict[str, Any]) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.get("since", holder["started"])))
    return f"process {holder['pid']} on {holder['host']} (since {since})"


def _refuse(path: Path, holder: dict[str, Any]) -> None:
    raise Locked(f"{path.parent}: {_names(holder)} is working on this {holder.get('what', 'folder')}. Wait for it or "
                 f"stop it; if no such process exists on that host, remove {path}")


def _beats(path: Path, holder: dict[str, Any], beat: int) -> bool:
    """Watches the lock of a holder that cannot be asked. True when its heartbeat changed, False when it did not for
    several intervals, or the lock is gone or another's by now."""
    interval = holder.get("heartbeat_s")
    interval = interval if isinstance(interval, int | float) and 0 < interval <= LONGEST_INTERVAL_S else 10.0
    seconds = STALE_INTERVALS * interval
    _say(f"{path}: the lock of {_names(holder)}, which cannot be asked from here. Watching its heartbeat for up to "
         f"{seconds:.0f} s. If you know that this process has ended, remove the file")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(min(interval / 4, 1.0))
        found = _read(path)
        if found is None or found[0] != holder:
            return False
        if found[1] != beat:
            return True
    _say(f"{path}: no heartbeat in {seconds:.0f} s, so its holder is gone; the lock is taken over")
    return False


def _acquire(path: Path, own: Path, mine: dict[str, Any]) -> None:
    """Makes `path` this process's lock. Raises Locked while another live process has it."""
    while not _place(own, path):
        found = _read_settled(path)
        if found is None:
            continue
        holder, beat = found
        if holder == mine:
            return  # NFS: the link was made, and its answer was lost
        alive = _holder_alive(holder) if holder else False
        if alive or alive is None and _beats(path, holder, beat):
            _refuse(path, holder)
        _remove_dead(path, own, mine, holder)


def _remove_leftovers(path: Path) -> None:
    """Removes what processes of this host left that were killed while they took or gave back this lock."""
    start = f"{path.name}.{socket.gethostname()}."
    for name in os.listdir(path.parent):
        pid = name.removeprefix(start).partition(".")[0] if name.startswith(start) else ""
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            path.with_name(name).unlink(missing_ok=True)


class _Heartbeat:
    """Renews the lock of this process in a thread, and notices when it is this process's no more (`lost`)."""

    def __init__(self, path: Path, mine: dict[str, Any], seconds: float):
        self.path, self.mine, self.seconds = path, mine, seconds
        self.lost = ""
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name=f"heartbeat of {path}", daemon=True)

    def _run(self) -> None:
        unable = False
        while not self.ended.wait(self.seconds):
            try:
                if self.look():
                    _say(self.lost)
                    return
                os.utime(self.path)
                unable = False
            except FileNotFoundError:
                continue  # removed between the two lines: found out at the next beat
            except OSError as error:  # a file server that is away for a while
                if not unable:
                    _say(f"{self.path}: the heartbeat cannot be renewed ({error}); trying on. Another host may take "
                         "this lock over")
                unable = True

    def look(self) -> bool:
        """Whether the lock is lost."""
        found = _read(self.path)
        if not self.lost and (found is None or found[0] != self.mine):
            now = (f"{_names(found[0])} took it over" if found and found[0] else "another file is in its place"
                   if found else "it was removed")
            self.lost = (f"{self.path}: the lock of this {self.mine['what']} is lost while it works: {now}. Another "
                         "process may do the same work twice; the files stay whole. Let one of the two end the other")
        return bool(self.lost)


@contextmanager
def folder_lock(folder: Path | str, what: str, name: str = LOCK_NAME, heartbeat_s: float = 10.0) -> Iterator[None]:
    """Holds `folder` (made when it is not there) for `what`: "run", "extraction", "training". The file is gone when the
    block ends.

    Raises Locked, naming holder, host and file, while another live process holds it; a dead one's lock is taken over.
    A holder on another host is watched first for up to STALE_INTERVALS heartbeats, and this is said on stderr. Raises
    Locked at the end, too, when this lock was removed or taken over meanwhile, which is said on stderr at once.
    """
    path = Path(folder).absolute() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    token = uuid.uuid4().hex[:12]
    mine = {**this_process(), "what": what, "since": time.time(), "heartbeat_s": heartbeat_s, "token": token}
    mine = json.loads(json.dumps(mine))  # as it is read
    own = path.with_name(f"{name}.{socket.gethostname()}.{os.getpid()}.{token}")
    beat = _Heartbeat(path, mine, heartbeat_s)
    try:
        with open(own, "w", encoding="utf-8") as file:
            json.dump(mine, file)
            file.flush()
            os.fsync(file.fileno())  # before the link: a power cut must not leave an empty lock
        _held.add(token)  # before it is placed: another thread may look
        _acquire(path, own, mine)
        own.unlink()
        _remove_leftovers(path)
        beat.thread.start()
        yield
        if beat.look():
            raise Locked(beat.lost)
    finally:
        beat.ended.set()
        _held.discard(token)
        if os.getpid() == mine["pid"]:  # not in a forked child that leaves through here
            _give_back(path, own, mine)


def _give_back(path: Path, own: Path, mine: dict[str, Any]) -> None:
    """Removes this process's lock, if it has it still. One that cannot be removed is said, not raised: it would hide
    what ended the work, and is dead with this process."""
    try:
        own.unlink(missing_ok=True)
        found = _read(path)
        if found is not None and found[0] == mine:
            path.unlink()
    except OSError as error:
        _say(f"{path}: the lock cannot be removed ({error}); it ends with this process")
