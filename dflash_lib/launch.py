"""Starts a library module in one or many processes through torchrun, follows its progress, raises its error.

The chain is parent (a notebook's kernel, a command) -> guard (this module, which becomes torchrun's agent) -> workers.
A process of the chain asks the kernel to end it with the process that started it (PR_SET_PDEATHSIG), so nothing goes
on computing when the parent was killed, not even by SIGKILL. Linux only.

A worker module ends with `if __name__ == "__main__": run_worker(main)` and reports with `report_progress(done=...)`.
"""

import ctypes
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PROGRESS_MARK = "@progress "
PR_SET_PDEATHSIG = 1
AGENT = "DFLASH_AGENT"  # environment variable: the guard's pid, for the workers
GRACE_S = 60.0  # from SIGTERM to SIGKILL: a worker that saves what it has takes its time


class LaunchError(RuntimeError):
    """A launched job that failed. The message carries what the first failing rank raised, with its traceback unless it
    is a fault that the user can cure; `rank` is its number."""

    def __init__(self, message: str, rank: int | None = None):
        super().__init__(message)
        self.rank = rank


def die_with_parent(parent: int | None = None) -> None:
    """Asks for SIGTERM when the process that started this one ends; leaves at once when it has ended already."""
    parent = os.getppid() if parent is None else parent
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        raise SystemExit("the process that started this one has ended")


def report_progress(**fields: Any) -> None:
    """Sends JSON-able fields to the launching process: one line, written at once so that ranks do not interleave."""
    line = PROGRESS_MARK + json.dumps(fields, allow_nan=False) + "\n"
    os.write(sys.stdout.fileno(), line.encode("utf-8"))


def run_worker(main: Callable[[], None]) -> None:
    """What a worker module calls: ends with its agent, and leaves its traceback where the launcher finds it."""
    from torch.distributed.elastic.multiprocessing.errors import record

    # A worker comes here seconds after its start, with PyTorch imported: by then its agent may have been killed, and
    # its parent is another process. So the agent's id comes from the agent.
    die_with_parent(int(os.environ[AGENT]) if AGENT in os.environ else None)
    record(main)()


def _first_failure(error_folder: Path) -> tuple[int, str] | None:
    """Rank and traceback of the rank that failed first, from the error files that torchrun's workers leave.

    A file that is no whole JSON (its writer was killed, the disk is full) counts with its text as it is, "" included.
    """
    found = []
    for path in error_folder.glob("*/attempt_*/*/error.json"):
        text = path.read_text(encoding="utf-8", errors="replace")
        try:
            message = json.loads(text)["message"]
            text = message["extraInfo"]["py_callstack"] if isinstance(message, dict) else str(message)
        except (json.JSONDecodeError, KeyError, TypeError):
            text = text.strip()
        found.append((path.stat().st_mtime_ns, int(path.parent.name), text))
    return min(found)[1:] if found else None


def _terminate(process: subprocess.Popen) -> None:
    """SIGTERM to the agent, which ends its workers; after a grace SIGKILL to its group (workers end with the agent)."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_torchrun(module: str, args: Sequence[str], num_processes: int, log_dir: Path | str, threads: int,
                 on_progress: Callable[[dict], None] | None = None) -> None:
    """Runs `python -m module args` in `num_processes` processes and returns when all have ended well.

    log_dir: gets `<last part of module>.log`, the whole output of all ranks; threads: OMP_NUM_THREADS of each process;
    on_progress: called in this thread with the fields of each `report_progress`. Any exception raised here, Ctrl-C
    and one from on_progress included, ends the job first. Raises LaunchError when a rank failed. The workers get this
    repository and PYTHONPATH as their import path, not what else this process has in `sys.path`.
    """
    log_dir = Path(log_dir)
    log_dir.mkdir(parents=True, exist_ok=True)
    log = log_dir / f"{module.rpartition('.')[2]}.log"
    error_folder = log_dir / f"errors-{uuid.uuid4().hex[:8]}"
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "dflash_lib.launch", str(os.getpid()),
               "--standalone", f"--nproc-per-node={num_processes}", "--max-restarts=0", f"--log-dir={error_folder}",
               "--module", module, *map(str, args)]
    tail: deque[str] = deque(maxlen=120)  # torchrun's own words about a failure take some 50 lines
    process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True)
    try:
        with open(log, "a", encoding="utf-8") as log_file:
            log_file.write(f"# {time.strftime('%Y-%m-%d %H:%M:%S')} {module} in {num_processes} process(es)\n")
            for line in process.stdout:
                if line.startswith(PROGRESS_MARK):
                    if on_progress is not None:
                        on_progress(json.loads(line[len(PROGRESS_MARK):]))
                else:
                    log_file.write(line)
                    log_file.flush()
                    tail.append(line)
        code = process.wait()
    finally:
        _terminate(process)
        process.stdout.close()
        failure = _first_failure(error_folder)
        _remove_tree(error_folder)
    if code == 0:
        return
    if failure is not None and failure[1]:
        rank, traceback = failure  # the log has the traceback, too
        where, raised = f"rank {rank} of {num_processes}", _for_the_user(traceback)
        raise LaunchError(f"{module}: {raised} ({where}; traceback in {log})" if raised else
                          f"{module}: {where} failed (output: {log}):\n{traceback}", rank)
    raise LaunchError(f"{module}: ended with code {code} and left no traceback; was it killed, or out of memory? "
                      f"The end of its output ({log}):\n{''.join(tail)}", failure[0] if failure is not None else None)


def _for_the_user(traceback: str) -> str:
    """The message of the exception at a traceback's end when a user can cure it: the library itself raised it, as a
    ValueError or one of its own errors. "" for any other."""
    found = re.search(r'^  File "([^"]+)", line \d+, in \S+\n(?:    .*\n)*'  # the innermost frame
                      r'(?:ValueError|dflash_lib\.[\w.]+): ((?:.|\n)*)\Z', traceback, re.MULTILINE)
    ours = found is not None and Path(found[1]).is_relative_to(Path(__file__).resolve().parent)
    return found[2].strip() if ours else ""


def _remove_tree(folder: Path) -> None:
    """Removes torchrun's folder of empty logs and error files."""
    for path in sorted(folder.glob("**/*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    if folder.is_dir():
        folder.rmdir()


def _guard(argv: list[str]) -> None:
    """Becomes torchrun's agent, tied to the life of the process that launched it (`argv[0]` is its id)."""
    die_with_parent(int(argv[0]))
    os.environ[AGENT] = str(os.getpid())
    sys.argv = ["torchrun", *argv[1:]]
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _guard(sys.argv[1:])
