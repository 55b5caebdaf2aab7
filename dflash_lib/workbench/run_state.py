"""What a run is doing, seen from another terminal: who holds its locks, its notebooks, its jobs, room on the disk."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_lib.files import human_bytes
from dflash_lib.job_status import ENDED_EARLY, describe_work, disk_free, read_status
from dflash_lib.locks import LOCK_NAME, lock_beside, lock_holder, process_alive
from dflash_lib.progress import human_rate, human_seconds
from dflash_lib.workbench.parameters import read_parameters_file
from dflash_lib.workbench.runs import REPOSITORY, RUN_STATUS, RunError, load_record, notebook_paths, run_folder

ERROR_LINES = 12


@dataclass(frozen=True)
class Work:
    """One kind of work on a run: its lock (folder, name), its status file, its log."""

    what: str
    lock: tuple[Path, str]
    status_file: Path
    log: Path

    @property
    def holder(self) -> dict[str, Any] | None:
        return lock_holder(*self.lock)

    @property
    def status(self) -> dict[str, Any] | None:
        return read_status(self.status_file)


def find_run(given: Path | str) -> Path:
    """The run folder that a user names: the folder itself, a run's name in runs/, or the parameter file of its job.

    Raises RunError when there is none, naming the runs that there are.
    """
    given = Path(given)
    if given.is_file():
        folder = run_folder(read_parameters_file(given), given)
    else:
        places = [given, REPOSITORY / given, REPOSITORY / "runs" / given]
        folder = next((place for place in places if _is_run(place)), given)
    if not _is_run(folder):
        there = sorted(path.parent.name for path in (REPOSITORY / "runs").glob("*/params.yaml"))
        raise RunError(f"{folder}: no run folder (it has no params.yaml)"
                       + (f"; in runs/ there are: {', '.join(there)}" if there else ""))
    return folder.absolute()


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("params.yaml", LOCK_NAME))


def store_of(folder: Path) -> Path:
    """Where the run's hidden states lie: `store_dir`, or states/."""
    params = read_parameters_file(folder / "params.yaml") if (folder / "params.yaml").is_file() else {}
    store = params.get("store_dir")
    return REPOSITORY / Path(store).expanduser() if store else folder / "states"


def works_of(folder: Path) -> list[Work]:
    """The run itself, its extraction and its training."""
    drafter = folder / "drafter"
    return [
        Work("run", (folder, LOCK_NAME), folder / RUN_STATUS, folder / "logs" / "run.log"),
        Work("extraction", (store_of(folder), LOCK_NAME), folder / "logs" / "extraction.status.json",
             folder / "logs" / "extraction_worker.log"),
        Work("training", lock_beside(drafter), drafter / "logs" / "training.status.json",
             drafter / "logs" / "training_job.log")]


def statuses_of(folder: Path) -> list[tuple[Work, dict[str, Any]]]:
    """The status of each work that has one. A job that its run took down with it was stopped, though the notebook's
    kernel may have had no time to say so."""
    found = [(work, status) for work in works_of(folder) if (status := work.status) is not None]
    run = next((status for work, status in found if work.what == "run"), None)
    for _, status in found:
        if status["state"] == "killed" and run is not None and run["state"] == "stopped" and (
                run["began"] <= status["began"] <= run["updated"]):
            status["state"] = "stopped"
    return found


def belongs(work: Work, folder: Path) -> bool:
    """Whether the live holder of a lock works for this run: a store elsewhere may be another run's, too."""
    if work.lock[0].absolute().is_relative_to(folder):
        return True
    status, holder = work.status, work.holder
    return bool(status and holder) and all(status["process"][key] == holder[key] for key in ("pid", "host"))


def log_files(folder: Path) -> list[Path]:
    """The run's logs, the newest last."""
    found = [path for where in (folder / "logs", folder / "drafter" / "logs") for path in where.glob("*.log")]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def describe_run(folder: Path) -> tuple[str, int]:
    """What `status` prints, and its exit code: 0 for a run that is alive or finished, 1 for one that failed or ended
    before its end."""
    works = works_of(folder)
    held = [(work, holder) for work in works if (holder := work.holder) is not None]
    alive = [(work, holder) for work, holder in held if belongs(work, folder)]
    statuses = statuses_of(folder)
    newest = max(statuses, key=lambda pair: pair[1]["updated"], default=None)
    lines = [f"{folder}: {_verdict(alive, newest)}"]
    lines += [f"note: {work.lock[0]} is held by {_who(holder)}, for another run"
              for work, holder in held if not belongs(work, folder)]
    run = next((status for work, status in statuses if work.what == "run"), None)
    stages, failed = _stage_lines(folder, run, works[1:])
    lines += stages
    for work, status in statuses:
        if work.what != "run":
            lines += _job_lines(work, status)
    free = disk_free(store_of(folder))
    lines.append(f"disk: {human_bytes(free) if free is not None else 'unknown room'} free at {store_of(folder)}")
    if not alive and newest is not None and newest[1]["state"] in ENDED_EARLY:
        lines += _error_lines(*newest)
    wrong = not alive and (newest is not None and newest[1]["state"] in ENDED_EARLY or failed)
    return "\n".join(lines), 1 if wrong else 0


def _who(holder: dict[str, Any]) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.get("since", holder["started"])))
    asked = "" if process_alive(holder) else " (which cannot be asked from here; call `status` there)"
    return f"process {holder['pid']} on {holder['host']}{asked}, since {since}"


def _verdict(alive: list[tuple[Work, dict[str, Any]]], newest: tuple[Work, dict[str, Any]] | None) -> str:
    """The first line: alive, or how it ended."""
    if alive:
        return "alive: " + "; ".join(f"{work.what} by {_who(holder)}" for work, holder in alive)
    if newest is None:
        return "nothing is running"
    work, status = newest
    ended = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status["updated"]))
    if status["state"] == "running":  # on another host, and its lock is gone
        return f"unknown: the {work.what} on {status['process']['host']} last reported at {ended}"
    return f"{status['state']}: {work.what}, {'last seen' if status['state'] == 'killed' else 'ended'} {ended}"


def _stage_lines(folder: Path, run: dict[str, Any] | None, jobs: list[Work]) -> tuple[list[str], bool]:
    """A line a notebook: its state from the run folder. Also whether one of them failed its checks."""
    lines, failed = [], False
    for notebook in (path.stem for path in notebook_paths()):
        record = _record(folder, notebook)
        at = run is not None and run.get("stage") == notebook
        if record is not None:
            failed |= not record.get("passed")
            text = f"{'passed' if record.get('passed') else 'FAILED':<8} {record.get('finished', '')[:19]}"
        elif at and run["state"] == "running":
            text = f"running  for {human_seconds(time.time() - run['stage_began'])}"
        elif at and run["state"] in ENDED_EARLY:
            text = run["state"]
        else:
            text = "not run"
        lines.append(f"  {notebook:<18} {text}".rstrip())
    return lines, failed


def _record(folder: Path, notebook: str) -> dict[str, Any] | None:
    """A notebook's results, None when it left none or they are damaged: the pipeline executes it again."""
    try:
        return load_record(folder, notebook)
    except RunError:
        return None


def _job_lines(work: Work, status: dict[str, Any]) -> list[str]:
    """The line of an extraction or a training, and while it runs one a worker."""
    running = status["state"] == "running"
    ago = human_seconds(max(0.0, time.time() - status["updated"]))
    lines = [f"{work.what}: {status['state']}, {describe_work(status)}, {ago} ago"]
    if not running:
        return lines
    for rank, worker in status["workers"].items():
        parts = [worker["device"], f"{human_rate(worker['rate'])} {status['unit']}/s", worker["state"]]
        if worker["shard"] is not None:
            parts.append(f"shard {worker['shard']}")
        if worker["bytes_written"]:
            parts.append(f"{human_bytes(worker['bytes_written'])} written")
        lines.append(f"  worker {rank:<3} {', '.join(filter(None, parts))}")
    return lines


def _error_lines(work: Work, status: dict[str, Any]) -> list[str]:
    """What ended the work, and where to read on."""
    text = status["error"].splitlines()
    if status["state"] == "killed":
        text = [f"the {work.what} was killed (SIGKILL, out of memory, a power cut?) while it was running; the same "
                "command goes on from what is finished"]
    elif status["state"] == "stopped":
        text = ["it was stopped; the same command goes on from what is finished"]
    if len(text) > ERROR_LINES:
        text = [text[0], "  ...", *text[2 - ERROR_LINES:]]
    where = [f"log: {work.log}"] if work.log.is_file() else []
    return ["last error:" if status["state"] == "failed" else "how it ended:", *(f"  {line}" for line in text), *where]
