"""Takes things away from this process by the kernel's own means, as no mock could: locks, a writable disk, memory.

For forked children only: none of it can be undone. Linux on x86-64 and arm64.
"""

import ctypes
import errno
import os
import platform
import resource
from pathlib import Path

from tests.hidden_states.survival import io_events

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_REC, MS_PRIVATE = 1, 32, 16384, 1 << 18
PR_SET_NO_NEW_PRIVS, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC = 38, 1, 1
LOAD, EQUALS, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06  # BPF: ld word absolute, jeq, jset, ret constant
ALLOW, FAIL_WITH = 0x7FFF0000, 0x00050000
NUMBER_AT, MACHINE_AT, ARGUMENTS_AT = 0, 4, 16  # in struct seccomp_data
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CALLS = {  # system call numbers: x86_64, aarch64 (None: that machine has no such call)
    "flock": (73, 32), "fcntl": (72, 25), "open": (2, None), "creat": (85, None), "openat": (257, 56),
    "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "unlink": (87, None), "unlinkat": (263, 35),
    "mkdir": (83, None), "mkdirat": (258, 34), "truncate": (76, 45), "seccomp": (317, 277),
}
SET_LOCKS = (6, 7, 37, 38)  # F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW
BALLAST = "ballast"
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("if_true", ctypes.c_uint8), ("if_false", ctypes.c_uint8),
                ("value", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction))]


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _fail_calls(rules: list[tuple[str, int | None, int, tuple[int, ...]]], code: int) -> None:
    """Lets system calls fail with errno `code`. A rule: name of the call, the argument that decides (None: always
    fails), how it is compared (EQUALS or ANY_BIT), and with which values."""
    machine = platform.machine()
    column = list(MACHINES).index(machine)
    fail = (RETURN, 0, 0, FAIL_WITH | code)
    program = [(LOAD, 0, 0, MACHINE_AT), (EQUALS, 1, 0, MACHINES[machine]), (RETURN, 0, 0, ALLOW)]
    for name, argument, compare, values in rules:
        number = CALLS[name][column]
        if number is None:
            continue
        body = [fail]
        if argument is not None:
            body = [(LOAD, 0, 0, ARGUMENTS_AT + 8 * argument)]  # the lower half: both machines are little-endian
            for value in values:
                body += [(compare, 0, 1, value), fail]
            body.append((RETURN, 0, 0, ALLOW))
        program += [(LOAD, 0, 0, NUMBER_AT), (EQUALS, 0, len(body), number), *body]
    program.append((RETURN, 0, 0, ALLOW))
    instructions = (_Instruction * len(program))(*(_Instruction(*line) for line in program))
    whole = _Program(len(program), ctypes.cast(instructions, ctypes.POINTER(_Instruction)))
    _check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    _check(LIBC.syscall(CALLS["seccomp"][column], SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC,
                        ctypes.byref(whole)), "seccomp")  # for all threads


def no_file_locking() -> None:
    """flock and fcntl's locks fail with ENOLCK from now on, here and in every process started from here: what a file
    system without a lock server does."""
    _fail_calls([("flock", None, EQUALS, ()), ("fcntl", 1, EQUALS, SET_LOCKS)], errno.ENOLCK)


def read_only_files() -> None:
    """Nothing can be opened for writing, created, renamed or removed from now on (EROFS): what a file system does that
    the kernel remounted read-only after an error. Files that are open stay writable."""
    _fail_calls([("open", 1, ANY_BIT, (WRITE_FLAGS,)), ("openat", 2, ANY_BIT, (WRITE_FLAGS,)),
                 *((name, None, EQUALS, ()) for name in ("creat", "rename", "renameat", "renameat2", "unlink",
                                                         "unlinkat", "mkdir", "mkdirat", "truncate"))], errno.EROFS)


def own_mounts() -> None:
    """Gives this process a view of its own on what is mounted. Raises OSError where the system does not let it."""
    uid, gid = os.geteuid(), os.getegid()
    if LIBC.unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    else:
        _check(LIBC.unshare(CLONE_NEWNS), "unshare")
    _check(LIBC.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "mount --make-rprivate /")


def mount_memory(folder: Path, num_bytes: int) -> None:
    """Mounts a file system of `num_bytes` in memory, seen by this process and its children alone."""
    _check(LIBC.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={num_bytes}".encode()), f"mount {folder}")


def remount(folder: Path, num_bytes: int, read_only: bool = False) -> None:
    """Changes the size of what `mount_memory` mounted, or makes it read-only."""
    _check(LIBC.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", MS_REMOUNT | (MS_RDONLY if read_only else 0),
                      f"size={num_bytes}".encode()), f"remount {folder}")


def fill(disk: str, leave: int) -> None:
    """Fills a file system up to `leave` bytes, as another job would."""
    stat = os.statvfs(disk)
    with open(Path(disk) / BALLAST, "wb") as f:
        os.posix_fallocate(f.fileno(), 0, stat.f_bavail * stat.f_frsize - leave)


def make_read_only(disk: str) -> None:
    """Remounts what `mount_memory` mounted, at the first moment when no file on it is open for writing."""
    def attempt(_event=None) -> None:
        try:
            remount(Path(disk), 64 << 20, read_only=True)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
        else:
            if attempt in io_events._listeners:
                io_events._listeners.remove(attempt)

    io_events._listeners.append(attempt)
    attempt()


def forbid(folder: str) -> None:
    """Takes the permission to write into a folder."""
    os.chmod(folder, 0o555)


class _CapHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


def no_privileges() -> None:
    """Gives up root's right to ignore the permissions of files (all capabilities); nothing changes for other users."""
    header, empty = _CapHeader(0x20080522, 0), (ctypes.c_uint32 * 6)()
    _check(LIBC.capset(ctypes.byref(header), ctypes.byref(empty)), "capset")


def largest_file(num_bytes: int) -> None:
    """No file may grow past this from now on (EFBIG, "File too large"; Python ignores the signal that comes, too)."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def more_memory(num_bytes: int) -> None:
    """This process may get no more than `num_bytes` beyond the address space that it has."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, resource.RLIM_INFINITY))
