"""The live state of one launched job in a small JSON file, for other terminals: `<log_dir>/<what>.status.json`.

The launcher feeds it with what its workers report, and shows `note()` behind its progress line. The file is replaced at
most once a second and at the end. It is not fsynced (on a disk that the job itself fills, that could take seconds), so
a power cut may leave it empty: then there is no status, and nothing else depends on it.
"""

import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_lib.files import human_bytes, nearest_existing
from dflash_lib.locks import process_alive, this_process
from dflash_lib.progress import human_rate, human_seconds

WRITE_S = 1.0  # seconds between two versions of the file
RECENT_S = 60.0  # a worker's rate is that of its last minute
SILENT_S = 120.0  # a worker at work that has not reported for so long is said to be silent
NUM_SHOWN = 3  # more workers than these are shown as a group
ERROR_CHARS = 4000
WORKING = "working"
ENDED_EARLY = ("failed", "killed", "stopped")


@dataclass
class _Worker:
    """What a rank reported last; `points` are (seconds, done) of its last minute."""

    done: int = 0
    kept: int = 0
    seconds: float = 0.0
    device: str = ""
    bytes_written: int = 0
    shard: int | None = None
    state: str = WORKING
    heard: float = 0.0  # seconds since 1970
    points: deque[tuple[float, int]] = field(default_factory=lambda: deque([(0.0, 0)]))

    @property
    def rate(self) -> float:
        (began, before), (now, done) = self.points[0], self.points[-1]
        return (done - before) / (now - began) if now > began else 0.0


class JobStatus:
    """Collects what the workers of one job report and keeps `path` up to date.

    total, start: units of the whole job, and how many of them earlier calls had done; disk: a path on the disk that is
    being filled. A context manager: leaving it writes the last state, "finished", "failed" (with the error) or
    "stopped" (KeyboardInterrupt, SystemExit). A status that cannot be written is said once on stderr and ends no job.

    error: set by a job that failed without an exception; stage: what a job without workers is at (`at`).
    """

    def __init__(self, path: Path | str, what: str, total: int, unit: str, start: int = 0,
                 disk: Path | str | None = None):
        self.path, self.what, self.total, self.unit, self.start = Path(path), what, total, unit, start
        self.disk = None if disk is None else Path(disk)
        self.process, self.began = this_process(), time.time()
        self.workers: dict[int, _Worker] = {}
        self.written = -WRITE_S
        self.complained = False
        self.error = self.stage = ""
        self.stage_began, self.passed = self.began, 0

    def at(self, stage: str, passed: int) -> None:
        """What a job without workers is doing now, and how many units of this call are behind it."""
        self.stage, self.passed, self.stage_began = stage, passed, time.time()
        self._write("running")

    def worker(self, rank: int, *, done: int, kept: int, seconds: float, device: str = "", bytes_written: int = 0,
               shard: int | None = None, state: str = WORKING) -> None:
        """What a worker reports: `done` units of this call, how many of them would be `kept` if it ended now, and the
        `seconds` that it took for them, bytes on the disk, the shard at hand; `state` is "working", "done", "lost", or
        what else it has to say."""
        worker = self.workers.setdefault(rank, _Worker())
        worker.done, worker.kept, worker.seconds, worker.bytes_written = done, kept, seconds, bytes_written
        worker.device, worker.shard, worker.state, worker.heard = device or worker.device, shard, state, time.time()
        worker.points.append((seconds, done))
        while len(worker.points) > 2 and worker.points[1][0] < seconds - RECENT_S:
            worker.points.popleft()
        self._write_now_and_then()

    def stands_at(self, done: int) -> None:
        """Of a job that ends early: what is kept, from which it goes on; its workers may have come farther."""
        self.start, self.passed = done, 0
        for worker in self.workers.values():
            worker.done = worker.kept = 0

    @property
    def done(self) -> int:
        """Units that are done, those of earlier calls included."""
        return self.start + self.passed + sum(worker.done for worker in self.workers.values())

    @property
    def kept(self) -> int:
        """Units from which the job would go on if it ended now."""
        return self.start + self.passed + sum(worker.kept for worker in self.workers.values())

    def note(self) -> str:
        """Workers, bytes written, room on the disk: "cuda:0 2,310/s, cuda:1 2,290/s (lost), 61.20 GB written"."""
        return describe_workers(self._state("running", ""))

    def _state(self, state: str, error: str) -> dict[str, Any]:
        """All that the file holds."""
        workers = {str(rank): {
            "device": w.device, "done": w.done, "seconds": w.seconds, "rate": w.rate, "bytes_written": w.bytes_written,
            "shard": w.shard, "state": w.state, "heard": w.heard} for rank, w in sorted(self.workers.items())}
        return {"what": self.what, "state": state, "error": error[-ERROR_CHARS:], "process": self.process,
                "began": self.began, "updated": time.time(), "total": self.total, "unit": self.unit,
                "start": self.start, "done": self.done, "kept": self.kept, "workers": workers,
                "rate": sum(w.rate for w in self.workers.values() if w.state == WORKING),
                "bytes_written": sum(w.bytes_written for w in self.workers.values()),
                "disk_free": None if self.disk is None else disk_free(self.disk), "stage": self.stage,
                "stage_began": self.stage_began}

    def _write_now_and_then(self) -> None:
        now = time.monotonic()
        if now - self.written >= WRITE_S:
            self.written = now
            self._write("running")

    def _write(self, state: str, error: str = "") -> None:
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}.partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(self._state(state, error)) + "\n", encoding="utf-8")
            os.replace(partial, self.path)
        except OSError as failed:  # the disk is full: that is for the job to find out, with what it writes
            if not self.complained:
                print(f"{self.path}: the job's status cannot be written ({failed}); the job goes on", file=sys.stderr)
            self.complained = True

    def __enter__(self) -> "JobStatus":
        self._write("running")
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        state = "failed" if self.error else "finished"
        if error is not None:
            state = "failed" if isinstance(error, Exception) else "stopped"
            self.error = str(error) or type(error).__name__
        self._write(state, self.error)


def disk_free(path: Path | str) -> int | None:
    """Bytes that are left where `path` is, or would be made; None when its file system does not say."""
    try:
        stat = os.statvfs(nearest_existing(path))
    except OSError:  # a file server that is away
        return None
    return stat.f_bavail * stat.f_frsize


def read_status(path: Path | str) -> dict[str, Any] | None:
    """What a job's status file says; None without one, or with one that a power cut emptied.

    A job that is "running" whose launcher has ended is "killed". One on another host cannot be asked: its word stands.
    Of a job that ended early, `done` is what is kept: a worker may have been in the middle of a shard, or past its last
    checkpoint.
    """
    try:
        status = json.loads(Path(path).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(status, dict) or not {"state", "process", "workers", "done", "total"} <= status.keys():
        return None
    if status["state"] == "running" and process_alive(status["process"]) is False:
        status["state"] = "killed"
    if status["state"] in ENDED_EARLY:
        status["done"] = status.get("kept", status["done"])  # which versions before 2026-12 did not write
    return status


def describe_work(status: dict[str, Any]) -> str:
    """How far a job is, in one line: "61,234/1,000,000 tokens (6 %), 2,310 tokens/s, 7 min left"."""
    done, total, unit = status["done"], status["total"], status["unit"]
    text = f"{done:,}/{total:,} {unit}" + (f" ({100 * done // total} %)" if total else "")
    if status["state"] != "running":
        return text
    if status["rate"] > 0:
        text += f", {human_rate(status['rate'])} {unit}/s"
        if done < total:
            text += f", {human_seconds((total - done) / status['rate'])} left"
    return text


def describe_workers(status: dict[str, Any]) -> str:
    """The workers of a status in a few words: each of them up to NUM_SHOWN, otherwise those that work as a group and
    the others by name; then bytes written and room on the disk."""
    parts, now = [], status["updated"]
    named = [_Named(rank, worker, now) for rank, worker in status["workers"].items()]
    if len(named) <= NUM_SHOWN:
        parts += [f"{one.name} {one.rate:,.0f}/s" + (f" ({one.trouble})" if one.trouble else "") for one in named]
    else:
        well = [one for one in named if not one.trouble]
        if well:
            low, high = (f"{bound(one.rate for one in well):,.0f}" for bound in (min, max))
            kind = "GPUs" if all(one.name.startswith("cuda") for one in well) else "workers"
            kind = kind if len(well) > 1 else kind[:-1]
            parts.append(f"{len(well)} {kind} {low}/s{' each' if len(well) > 1 else ''}" if low == high else
                         f"{len(well)} {kind} {low} to {high}/s each")
        troubles: dict[str, list[str]] = {}
        for one in named:
            if one.trouble:
                troubles.setdefault(one.trouble, []).append(one.name)
        parts += [f"{_some(names)} {trouble}" for trouble, names in troubles.items()]
    if status["bytes_written"]:
        parts.append(f"{human_bytes(status['bytes_written'])} written")
    if status["disk_free"] is not None:
        parts.append(f"{human_bytes(status['disk_free'])} free")
    return ", ".join(parts)


class _Named:
    """A worker of a status: what it is called, and what keeps it from working."""

    def __init__(self, rank: str, worker: dict[str, Any], now: float):
        self.name, self.rate = worker["device"], worker["rate"]
        if ":" not in self.name:  # "cpu" is the name of all of them
            self.name = f"worker {rank}"
        silent = now - worker["heard"]
        self.trouble = worker["state"] if worker["state"] != WORKING else (
            f"silent for {human_seconds(silent)}" if silent >= SILENT_S else "")


def _some(names: Iterable[str]) -> str:
    """The first two names and how many more."""
    names = list(names)
    return " and ".join(names) if len(names) <= 2 else f"{names[0]} and {len(names) - 1} more"
