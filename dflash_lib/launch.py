"""Starts a library module in one or many processes through torchrun, follows its progress, raises its error.

The chain is parent (a notebook's kernel, a command) -> guard (this module, which becomes torchrun's agent) -> workers.
A process of the chain asks the kernel to end it with the process that started it (PR_SET_PDEATHSIG), so nothing goes
on computing when the parent was killed, not even by SIGKILL. Linux only.

Several machines that share a file system: each starts its own agent, `Nodes` says how many there are, which one this is
and where node 0 listens; torchrun's c10d rendezvous brings them together.

A worker module ends with `if __name__ == "__main__": run_worker(main)` and reports with `report_progress(done=...)`.
"""

import ctypes
import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRESS_MARK = "@progress "
PR_SET_PDEATHSIG = 1
AGENT = "DFLASH_AGENT"  # environment variable: the guard's pid, for the workers
NODES = "DFLASH_NODES"  # environment variable: `Nodes` as "NUM RANK HOST:PORT", for a notebook's kernel and the workers
KILLED = re.compile(r"failed \(exitcode: -(\d+)\) local_rank: (\d+)")  # torchrun, of the process that failed first
GRACE_S = 30.0  # from SIGTERM to SIGKILL of a worker
SAVING_GRACE_S = 1800.0  # the same of one that writes a checkpoint: tens of GB, to a slow disk
AGENT_S = 30.0  # more for the agent, which waits for its workers
JOIN_S = 24 * 3600  # how long a node waits until all have come: they may be started by hand
CONNECT_S = 600  # how long it looks for node 0


class LaunchError(RuntimeError):
    """A launched job that failed. The message carries what the first failing rank raised, with its traceback unless it
    is a fault that the user can cure; `rank` is its number."""

    def __init__(self, message: str, rank: int | None = None):
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True)
class Nodes:
    """Machines that work on one job: how many, which of them this is (0 leads), and HOST:PORT of node 0 ("" for one
    machine alone)."""

    num: int = 1
    rank: int = 0
    endpoint: str = ""

    def __post_init__(self) -> None:
        if self.num < 1 or not 0 <= self.rank < self.num:
            raise ValueError(f"nodes: {self.num} machines have ranks from 0 to {self.num - 1}, got rank {self.rank}")
        if self.num > 1 and not re.fullmatch(r"\S+:\d+", self.endpoint):
            raise ValueError(f"nodes: {self.num} machines need the address of node 0 as HOST:PORT, got "
                             f"{self.endpoint!r}")

    @classmethod
    def from_environment(cls) -> "Nodes":
        """What DFLASH_NODES says; one machine alone where it is not set. Raises ValueError when it cannot be read."""
        text = os.environ.get(NODES, "")
        if not text:
            return cls()
        parts = text.split()
        if len(parts) != 3 or not (parts[0].isdecimal() and parts[1].isdecimal()):
            raise ValueError(f"{NODES}: NUM RANK HOST:PORT is needed, such as '2 0 10.0.0.1:29500', got {text!r}")
        return cls(int(parts[0]), int(parts[1]), parts[2])

    def environment(self) -> dict[str, str]:
        """The variable that `from_environment` reads."""
        return {NODES: f"{self.num} {self.rank} {self.endpoint}"} if self.num > 1 else {NODES: ""}

    def arguments(self, job: str) -> list[str]:
        """torchrun's options; `job` is the same word on all machines."""
        if self.num == 1:
            return ["--standalone"]
        # is_host: a host name that resolves to several addresses is not always recognised as this machine's own
        settings = f"join_timeout={JOIN_S},read_timeout={CONNECT_S},is_host={int(self.rank == 0)}"
        return [f"--nnodes={self.num}", "--rdzv-backend=c10d", f"--rdzv-endpoint={self.endpoint}", f"--rdzv-id={job}",
                f"--rdzv-conf={settings}"]


ONE_MACHINE = Nodes()


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


class _Log:
    """A context manager: the workers' output in a file, its last lines in `tail`.

    A log that cannot be written (its disk is full, a file server is away) ends no job: that is said once on stderr, and
    `whole` is False from then on.
    """

    def __init__(self, path: Path):
        self.path, self.whole, self.file = path, True, None
        self.tail: deque[str] = deque(maxlen=120)  # torchrun's own words about a failure take some 50 lines

    def __enter__(self) -> "_Log":
        with self._said():
            self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115  closed in __exit__
        return self

    def write(self, line: str) -> None:
        """A line of the workers."""
        self.tail.append(line)
        self.note(line)

    def note(self, line: str) -> None:
        """A line that is no output of theirs."""
        if self.file is not None:
            with self._said():
                self.file.write(line)
                self.file.flush()

    def __exit__(self, *_: Any) -> None:
        if self.file is not None:
            with self._said():
                self.file.close()  # tries once more what could not be written

    @contextmanager
    def _said(self) -> Iterator[None]:
        try:
            yield
        except OSError as failed:  # of what else lies on that disk, the workers find out
            if self.whole:
                print(f"{self.path}: the log cannot be written ({failed}); the job goes on", file=sys.stderr)
            self.whole = False


def _terminate(process: subprocess.Popen, grace_s: float) -> None:
    """SIGTERM to the agent, which ends its workers; after a grace SIGKILL to its group (workers end with the agent)."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(grace_s + AGENT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _start_agent(args: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen:
    """Starts this module as torchrun's agent; its stdout carries what all workers print."""
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen([sys.executable, "-m", "dflash_lib.launch", str(os.getpid()), *args],
                            env={**os.environ, **environment, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path},
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            errors="replace", start_new_session=True)


def run_torchrun(module: str, args: Sequence[str], num_processes: int, log_dir: Path | str, threads: int,
                 on_progress: Callable[[dict], None] | None = None, nodes: Nodes = ONE_MACHINE,
                 environment: Mapping[str, str] | None = None, grace_s: float = GRACE_S) -> None:
    """Runs `python -m module args` in `num_processes` processes and returns when all have ended well.

    log_dir: gets `<last part of module>.log`, the whole output of all ranks of this machine (`.node1.log` and so on for
    machines behind the first); threads: OMP_NUM_THREADS of each process; on_progress: called in this thread with the
    fields of each `report_progress` of this machine's ranks; environment: more variables for the workers; grace_s: from
    SIGTERM to SIGKILL, for a worker that saves what it has when the job is ended or another rank has failed.

    Any exception raised here, Ctrl-C and one from on_progress included, ends the job first. Raises LaunchError when a
    rank failed. The workers get this repository and PYTHONPATH as their import path, not what else this process has in
    `sys.path`.
    """
    log_dir = Path(log_dir)
    log_dir.mkdir(parents=True, exist_ok=True)
    path = log_dir / f"{module.rpartition('.')[2]}{f'.node{nodes.rank}' if nodes.rank else ''}.log"
    # The error files are not in log_dir: what fails may be its disk.
    with tempfile.TemporaryDirectory(prefix="dflash-errors-") as errors, _Log(path) as log:
        process = _start_agent([*nodes.arguments(module.rpartition(".")[2]), f"--nproc-per-node={num_processes}",
                                "--max-restarts=0", f"--log-dir={errors}", "--module", module, *map(str, args)],
                               {**nodes.environment(), **(environment or {}), "OMP_NUM_THREADS": str(threads),
                                "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(grace_s))})
        try:
            of = f", node {nodes.rank} of {nodes.num}" if nodes.num > 1 else ""
            log.note(f"# {time.strftime('%Y-%m-%d %H:%M:%S')} {module} in {num_processes} process(es){of}\n")
            for line in process.stdout:
                if line.startswith(PROGRESS_MARK):
                    if on_progress is not None:
                        on_progress(json.loads(line[len(PROGRESS_MARK):]))
                else:
                    log.write(line)
            code = process.wait()
        finally:
            _terminate(process, grace_s)
            process.stdout.close()
            failure = _first_failure(Path(errors))
    if code == 0:
        return
    end = "".join(log.tail)
    machine = f" on node {nodes.rank} of {nodes.num}" if nodes.num > 1 else ""
    killed = KILLED.search(end)
    if killed is not None:  # what the others raise then ("connection reset") is not the cause
        name, rank = signal.Signals(int(killed[1])).name, int(killed[2]) + nodes.rank * num_processes
        why = ": the system may have run out of memory" if name == "SIGKILL" else ""
        raise LaunchError(f"{module}: rank {rank} of {num_processes * nodes.num}{machine} was killed by {name}{why}. "
                          f"The end of its output ({path}):\n{end}", rank)
    if failure is not None and failure[1]:
        rank, traceback = failure  # the log has the traceback, too
        where = f"rank {rank} of {num_processes}{machine}"
        raised = _for_the_user(traceback)
        raise LaunchError(f"{module}: {raised} ({where}{f'; traceback in {path}' if log.whole else ''})" if raised else
                          f"{module}: {where} failed (output: {path}):\n{traceback}", rank)
    raise LaunchError(f"{module}: ended with code {code} and left no traceback; was it killed, or out of memory? "
                      f"The end of its output ({path}):\n{end}", failure[0] if failure is not None else None)


def _for_the_user(traceback: str) -> str:
    """The message of the exception at a traceback's end when a user can cure it: the library itself raised it, as a
    ValueError or one of its own errors. "" for any other."""
    found = re.search(r'^  File "([^"]+)", line \d+, in \S+\n(?:    .*\n)*'  # the innermost frame
                      r'(?:ValueError|dflash_lib\.[\w.]+): ((?:.|\n)*)\Z', traceback, re.MULTILINE)
    ours = found is not None and Path(found[1]).is_relative_to(Path(__file__).resolve().parent)
    return found[2].strip() if ours else ""


def _guard(argv: list[str]) -> None:
    """Becomes torchrun's agent, tied to the life of the process that launched it (`argv[0]` is its id)."""
    die_with_parent(int(argv[0]))
    os.environ[AGENT] = str(os.getpid())
    sys.argv = ["torchrun", *argv[1:]]
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _guard(sys.argv[1:])
