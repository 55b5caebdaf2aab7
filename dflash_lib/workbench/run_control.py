"""Steering a run from another terminal: starting it detached, stopping it, reading its logs."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import psutil

from dflash_lib.job_status import describe_work
from dflash_lib.launch import SAVING_GRACE_S
from dflash_lib.locks import Locked, lock_holder, process_alive
from dflash_lib.progress import human_seconds
from dflash_lib.workbench.run_state import Work, belongs, log_files, statuses_of, works_of
from dflash_lib.workbench.runs import REPOSITORY, RunError

BEGIN_S = 120.0  # a detached run that has not taken its lock by then is left to its log
STOP_S = SAVING_GRACE_S + 300.0  # a training's checkpoint is written, and a notebook is saved after that
FOLLOW_S = 0.5
LINE_BYTES = 1000  # of a log, read for each line asked for: a log may be large


def start_detached(folder: Path, arguments: Sequence[str], log_name: str = "run.log", wait: bool = True) -> int:
    """Starts `python -m dflash_lib ARGUMENTS` in a session of its own, which no closed terminal ends, with its output
    in logs/ of the run folder; returns its pid.

    wait: until it holds the run's lock. Raises Locked while another process does, and RunError, with the end of its
    output, when it ended before that.
    """
    holder = lock_holder(folder) if wait else None
    if holder is not None:
        raise Locked(f"{folder}: process {holder['pid']} on {holder['host']} is working on this run. Look at it with "
                     f"`python -m dflash_lib status {folder}`, or stop it")
    log = folder / "logs" / log_name
    log.parent.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    with open(log, "ab") as output:
        begin = output.tell()
        output.write(f"# {time.strftime('%Y-%m-%d %H:%M:%S')} python -m dflash_lib {shlex.join(arguments)}\n".encode())
        output.flush()
        process = subprocess.Popen(
            [sys.executable, "-m", "dflash_lib", *arguments], stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ, "PYTHONPATH": path,
                                                                   "PYTHONUNBUFFERED": "1"})
    end = time.monotonic() + BEGIN_S
    while wait and time.monotonic() < end:
        ended = process.poll()
        holder = lock_holder(folder)
        if ended is None and (holder is None or holder["pid"] != process.pid):
            time.sleep(0.1)
            continue
        if ended:
            with open(log, "rb") as output:
                output.seek(begin)
                text = output.read().decode(errors="replace").strip()
            raise RunError(f"{folder}: the run ended at once with code {ended}:\n{text}")
        break
    return process.pid


def stop_run(folder: Path, out: TextIO) -> int:
    """Ends what works on the run as Ctrl-C would, waits for it, and says how far it got. Returns 0, also when nothing
    was running; 1 when it did not end.

    A run is sent SIGTERM, which it takes as Ctrl-C. A notebook that is executed by hand holds the lock of its job, and
    its kernel is sent SIGINT: the cell ends, the kernel stays. Raises RunError for a holder on another host, and one
    that works for another run.
    """
    held = [(work, holder) for work in works_of(folder) if (holder := work.holder) is not None]
    others = [(work, holder) for work, holder in held if not belongs(work, folder)]
    held = [pair for pair in held if pair not in others]
    if not held:
        if others:
            work, holder = others[0]
            raise RunError(f"{work.lock[0]}: process {holder['pid']} on {holder['host']} works here for another run; "
                           "stop that one")
        out.write(f"{folder}: nothing is running\n")
        return 0
    if held[0][0].what == "run":
        held = held[:1]  # its kernel and its jobs end with it
    commands = [_command(holder) for _, holder in held]
    for work, holder in held:
        _ask_to_end(work, holder, folder)
        out.write(f"{work.what}: asked process {holder['pid']} to end\n")
    out.flush()
    for work, holder in held:
        if not _wait_until_ended(work, holder, out):
            out.write(f"{work.what}: process {holder['pid']} has not ended in {human_seconds(STOP_S)}. It may be "
                      f"waiting for a disk; `kill -9 {holder['pid']}` ends it, and nothing that is finished is lost\n")
            return 1
    for work, status in statuses_of(folder):
        out.write(f"{work.what}: {status['state']} at {describe_work(status)}\n")
    again = commands[0] or "execute the notebook's cell again"
    out.write(f"stopped; what is finished stays, and this goes on from there: {again}\n")
    return 0


def _command(holder: dict[str, Any]) -> str:
    """How the run was called; "" for a notebook's kernel."""
    try:
        words = psutil.Process(holder["pid"]).cmdline()
    except psutil.Error:
        return ""
    if words[1:3] != ["-m", "dflash_lib"]:
        return ""
    return shlex.join(["python", *words[1:]])


def _ask_to_end(work: Work, holder: dict[str, Any], folder: Path) -> None:
    """Sends the signal. Raises RunError when the process is not one of this host, or of another user."""
    if not process_alive(holder):
        raise RunError(f"{work.lock[0]}: the {work.what} runs on {holder['host']} (process {holder['pid']}), which "
                       f"cannot be asked from here. Call it there: python -m dflash_lib stop {folder}")
    try:
        os.kill(holder["pid"], signal.SIGTERM if work.what == "run" else signal.SIGINT)
    except ProcessLookupError:
        return  # it ended by itself
    except PermissionError as error:
        raise RunError(f"process {holder['pid']} belongs to another user, who has to stop it ({error})") from error


def _wait_until_ended(work: Work, holder: dict[str, Any], out: TextIO) -> bool:
    """Waits until a run's process has ended, or a kernel has given the lock of its job back."""
    began = said = time.monotonic()
    while (process_alive(holder) if work.what == "run" else work.holder == holder):
        now = time.monotonic()
        if now - began > STOP_S:
            return False
        if now - said > 5:
            said = now
            out.write(f"{work.what}: still ending after {human_seconds(now - began)} (what it has is saved)\n")
            out.flush()
        time.sleep(0.1)
    return True


def print_logs(folder: Path, num_lines: int, follow: bool, out: TextIO) -> None:
    """The last lines of each of the run's logs, the newest log last; with `follow` then what is added, until the run
    has ended or Ctrl-C."""
    files = log_files(folder)
    if not files and not follow:
        raise RunError(f"{folder}: no logs yet; a run leaves them in {folder / 'logs'} once a job has begun, or when "
                       "it is started with --detach")
    ends = {}
    for path in files:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
        with open(path, "rb") as file:
            ends[path] = file.seek(0, os.SEEK_END)
            file.seek(max(0, ends[path] - num_lines * LINE_BYTES))
            lines = file.read(num_lines * LINE_BYTES).decode(errors="replace").splitlines()
        out.write(f"==> {path} (last written {when}) <==\n")
        out.write("".join(f"{line}\n" for line in lines[-num_lines:]))
    out.flush()
    if follow:
        shown = files[-1] if files else None
        for path, text in _added(folder, ends):
            if path != shown:
                out.write(f"==> {path} <==\n")
                shown = path
            out.write(text)
            out.flush()
        out.write(f"{folder}: nothing is running (any more)\n")


def _added(folder: Path, ends: dict[Path, int]) -> Iterator[tuple[Path, str]]:
    """What is written to the logs from now on, as long as something works on the run."""
    alive = True
    while alive:
        alive = any(work.holder is not None and belongs(work, folder) for work in works_of(folder))
        for path in log_files(folder):
            with open(path, "rb") as file:
                file.seek(ends.get(path, 0))
                content = file.read()
            if content:
                ends[path] = ends.get(path, 0) + len(content)
                yield path, content.decode(errors="replace")
        if alive:
            time.sleep(FOLLOW_S)
