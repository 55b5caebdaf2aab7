"""Tells listeners of every change that this process makes to files: what a test stops at, records, or lets fail.

`watch` replaces open, os.open, os.fsync, os.replace, os.rename, os.unlink, os.mkdir, ... in this process. It is for
forked children of the tests only and is never undone. Writes that bypass Python's files (memory maps, C libraries that
open files themselves) are not seen; `power_cut` compares what it saw with the folder, so such writes would show.
"""

import builtins
import io
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass

REAL_OPEN = io.open


@dataclass(frozen=True)
class Event:
    """op: create, write, truncate, fsync, fsync-folder, replace, link, unlink, mkdir or rmdir; when: "before" or
    "after" it was done; path: absolute (of a rename or link the new name); the others as far as the op has them."""

    op: str
    path: str
    when: str
    source: str = ""
    offset: int = 0
    data: bytes = b""
    size: int = 0


Listener = Callable[[Event], None]
_listeners: list[Listener] = []


def _tell(op: str, path, action: Callable, **fields):
    path = os.path.abspath(os.fsdecode(path))
    for listener in _listeners:
        listener(Event(op, path, "before", **fields))
    value = action()
    for listener in _listeners:
        listener(Event(op, path, "after", **fields))
    return value


def _path_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")


class WatchedFile(io.FileIO):
    """An unbuffered file that tells of its writes."""

    def write(self, data) -> int:
        offset = os.fstat(self.fileno()).st_size if "a" in self.mode else self.tell()
        return _tell("write", _path_of(self.fileno()), lambda: super(WatchedFile, self).write(data), offset=offset,
                     data=bytes(data))

    def truncate(self, size=None) -> int:
        size = self.tell() if size is None else size
        return _tell("truncate", _path_of(self.fileno()), lambda: super(WatchedFile, self).truncate(size), size=size)


def _open(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, closefd=True, opener=None):
    """`open`, whose files for writing are watched."""
    if not set(mode) & set("wax+"):
        return REAL_OPEN(file, mode, buffering, encoding, errors, newline, closefd, opener)
    kind = mode.replace("b", "").replace("t", "")

    def make() -> WatchedFile:
        return WatchedFile(file, kind, closefd, opener)

    makes = not isinstance(file, int) and ("w" in kind or not os.path.exists(file))
    raw = _tell("create", file, make) if makes else make()
    if buffering == 0:
        return raw
    buffered = io.BufferedRandom(raw) if "+" in kind else io.BufferedWriter(raw)
    return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline, buffering == 1)


def watch(*listeners: Listener) -> None:
    """Lets `listeners` hear every change from now on, in the order given, before and after it is done."""
    first = not _listeners
    _listeners.extend(listeners)
    if not first:
        return
    real = {name: getattr(os, name) for name in ("open", "write", "fsync", "fdatasync", "replace", "unlink", "mkdir",
                                                 "rmdir", "ftruncate", "truncate", "link")}

    def os_open(path, flags, mode=0o777, *, dir_fd=None):
        def action():
            return real["open"](path, flags, mode, dir_fd=dir_fd)
        makes = flags & os.O_TRUNC or flags & os.O_CREAT and not os.path.exists(path)
        return _tell("create", path, action) if makes and dir_fd is None else action()

    def write(fd, data):
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return real["write"](fd, data)
        offset = os.lseek(fd, 0, os.SEEK_CUR)
        return _tell("write", _path_of(fd), lambda: real["write"](fd, data), offset=offset, data=bytes(data))

    def syncs(name):
        def sync(fd):
            number = fd if isinstance(fd, int) else fd.fileno()
            op = "fsync-folder" if stat.S_ISDIR(os.fstat(number).st_mode) else "fsync"
            return _tell(op, _path_of(number), lambda: real[name](fd))
        return sync

    def replace(source, target, **more):
        return _tell("replace", target, lambda: real["replace"](source, target, **more),
                     source=os.path.abspath(os.fsdecode(source)))

    def link(source, target, **more):
        return _tell("link", target, lambda: real["link"](source, target, **more),
                     source=os.path.abspath(os.fsdecode(source)))

    def on_path(op):
        def call(path, *args, dir_fd=None, **more):
            if dir_fd is not None:
                path = os.path.join(_path_of(dir_fd), path)
            return _tell(op, path, lambda: real[op](path, *args, **more))
        return call

    def ftruncate(fd, size):
        return _tell("truncate", _path_of(fd), lambda: real["ftruncate"](fd, size), size=size)

    def truncate(path, size):
        if isinstance(path, int):
            return ftruncate(path, size)
        return _tell("truncate", path, lambda: real["truncate"](path, size), size=size)

    builtins.open = io.open = _open
    os.open, os.write, os.fsync, os.fdatasync = os_open, write, syncs("fsync"), syncs("fdatasync")
    os.replace = os.rename = replace
    os.link = link
    os.unlink = os.remove = on_path("unlink")
    os.mkdir, os.rmdir, os.ftruncate, os.truncate = on_path("mkdir"), on_path("rmdir"), ftruncate, truncate
