"""The training job: one folder, one job at a time, started through torchrun, resumed where it ended.

A job is known by what its weights depend on: the store's plan, the target's weights and tokenizer, and the options; not
by paths, device, number of threads or of processes. A folder that holds another job is moved aside, never deleted, and
comes back when that job is asked for again.
"""

import glob
import io
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from dflash_lib.drafter import parallel
from dflash_lib.drafter.checkpoints import list_checkpoints
from dflash_lib.drafter.folder import DrafterError, load_drafter
from dflash_lib.drafter.init_from import weights_hash
from dflash_lib.drafter.recipe import Compute, TrainingError, TrainOptions, check_compute, identity
from dflash_lib.drafter.termination import Termination
from dflash_lib.drafter.training import Trainer
from dflash_lib.drafter.warm_start import source_layers
from dflash_lib.files import hash_value, read_json, write_json
from dflash_lib.hidden_states.plan import ExtractionPlan
from dflash_lib.hidden_states.store import HiddenStateStore
from dflash_lib.job_status import JobStatus
from dflash_lib.launch import SAVING_GRACE_S, report_progress, run_torchrun, run_worker
from dflash_lib.locks import folder_lock, lock_beside
from dflash_lib.progress import Progress
from dflash_lib.target.ends import load_ends, meta_target


def open_job(folder: Path, job: dict[str, Any]) -> str:
    """Makes `folder` the place of `job`. Returns "new" (also where nothing was saved yet), "continues" or "finished".

    A folder of another job is moved aside to `<folder>-<hash>`; one of this job that was moved aside earlier comes
    back. Raises DrafterError for a folder with files that are no training job.
    """
    found = read_json(folder / "job.json") if (folder / "job.json").exists() else None
    if found != job:
        if found is not None:
            aside, number = folder.with_name(f"{folder.name}-{hash_value(found)[:8]}"), 1
            while aside.exists():
                number += 1
                aside = folder.with_name(f"{folder.name}-{hash_value(found)[:8]}-{number}")
            os.rename(folder, aside)
        elif folder.exists() and any(not path.name.startswith(".") for path in folder.iterdir()):
            raise DrafterError(f"{folder}: holds files but no job.json, so it is no training folder; choose another")
        named = f"{folder.name}-{hash_value(job)[:8]}"
        earlier = [path for path in (folder.with_name(named), *sorted(folder.parent.glob(f"{glob.escape(named)}-*")))
                   if (path / "job.json").exists() and read_json(path / "job.json") == job]
        if earlier and not folder.exists():
            os.rename(max(earlier, key=_progress), folder)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / "job.json", job)
            return "new"
    if (folder / "summary.json").exists():
        return "finished"
    return "continues" if list_checkpoints(folder / "checkpoints") else "new"


def saved_step(folder: Path) -> int:
    """The step from which the training in `folder` goes on."""
    return max((int(path.name.removeprefix("step-")) for path in list_checkpoints(folder / "checkpoints")), default=0)


def _progress(folder: Path) -> tuple[bool, int]:
    """Orders trainings of the same job by how far they came."""
    return (folder / "summary.json").exists(), saved_step(folder)


def begun_from(folder: Path, options: TrainOptions) -> str:
    """The hash of the weights that `init_from` names, by which the job is known; "" without it. Where that folder is
    gone by now, the hash that the training in `folder` was begun with: it has its own weights since."""
    if not options.init_from:
        return ""
    try:
        return weights_hash(options.init_from)
    except DrafterError:
        if list_checkpoints(folder / "checkpoints") and not Path(options.init_from).exists():
            return read_json(folder / "job.json")["options"]["init_from"]
        raise


def start_training(folder: Path | str, *, store: Path | str, model: Path | str, dtype: str, device: str, threads: int,
                   options: TrainOptions, compute: Compute | None = None, show: bool = True,
                   on_row: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
    """Trains in `folder` through torchrun, or goes on where a stopped run ended; returns the summary, with `job` saying
    which: "new", "continues" or "finished".

    dtype: of the target's modules (the drafter's weights are float32); device: "cuda" is one GPU a process; compute:
    how many processes and how each step is divided, which may be another when a stopped run goes on; show: print a
    progress line; on_row: gets each row of log.jsonl as it is written. Raises Locked while another process trains in
    the folder, LaunchError with the worker's traceback when it fails, TrainingError when only the workers were sent
    SIGTERM, and saved.
    """
    folder, plan, compute = Path(folder).resolve(), ExtractionPlan.load(store), compute or Compute()
    check_compute(options, compute)  # before another job's folder is moved aside for it
    job = {"store": plan.hash, "target": {key: plan.target[key] for key in ("weights", "tokenizer")}, "dtype": dtype,
           "options": identity(replace(options, init_from=begun_from(folder, options)))}
    parent, lock = lock_beside(folder)  # `open_job` may move it aside
    with folder_lock(parent, "training", lock):
        state = open_job(folder, job)
        if state != "finished":
            with (Progress(options.steps, "train", "steps", stream=None if show else io.StringIO()) as progress,
                  JobStatus(folder / "logs" / "training.status.json", "training", options.steps, "steps",
                            saved_step(folder), disk=folder) as status):
                try:
                    run_torchrun("dflash_lib.drafter.training_job",
                                 [folder, Path(store).resolve(), Path(model).resolve(), device, threads,
                                  json.dumps(asdict(compute)), options.init_from], compute.num_processes,
                                 folder / "logs", threads, follow(progress, status, folder, device, on_row),
                                 grace_s=SAVING_GRACE_S)
                except BaseException:
                    status.stands_at(saved_step(folder))
                    raise
    if not (folder / "summary.json").exists():  # SIGTERM to the workers, not to this process
        raise TrainingError(f"{folder}: its workers were asked to stop (SIGTERM) and have saved the step that they "
                            "were at, see logs/training_job.log there. Start it again: it goes on from that step")
    return {**read_json(folder / "summary.json"), "job": state}


def follow(progress: Progress, status: JobStatus, folder: Path, device: str,
           on_row: Callable[[dict[str, Any]], None] | None = None) -> Callable[[dict[str, Any]], None]:
    """What takes the first worker's log rows of the training in `folder`, shows them and notes them for other
    terminals; the rate counts from the first step seen, not from step 0."""
    began: float | None = None

    def take(row: dict[str, Any]) -> None:
        nonlocal began
        if began is None:
            progress.restart(row["step"])
            status.start, began = row["step"], time.monotonic()
        status.worker(0, done=row["step"] - status.start, kept=saved_step(folder) - status.start,
                      seconds=time.monotonic() - began, device=device)
        validation = row.get("validation")
        progress.set(row["step"], f"validation acceptance {validation['acceptance_length']:.3f}" if validation else "")
        if on_row:
            on_row(row)

    return take


def report_step(row: dict[str, Any]) -> None:
    """Sends a log row to the launcher. One that has ended reads no more; that it ended comes as SIGTERM, too."""
    with suppress(BrokenPipeError):
        report_progress(**row)


def main() -> None:
    """Entry of a torchrun worker: FOLDER STORE MODEL DEVICE THREADS COMPUTE (JSON) INIT_FROM. summary.json is the last
    thing written, by the first worker.

    On SIGTERM all save a checkpoint and end with code 0; the same call goes on from there, with any number of workers.
    """
    folder, store, model, device, threads, compute, begin = sys.argv[1:]
    job = read_json(Path(folder) / "job.json")
    torch.set_num_threads(int(threads))
    with Termination() as stopping, parallel.process_group(torch.device(device)) as own_device:
        options = replace(TrainOptions(**job["options"]), init_from=begin)  # job.json knows it by its weights
        copied = (source_layers(meta_target(model, job["dtype"]), options.num_layers)
                  if options.warm_start and not options.init_from else ())
        target = load_ends(model, job["dtype"], str(own_device), copied)
        trainer = Trainer(HiddenStateStore.open(store), target, Path(folder), options, Compute(**json.loads(compute)))
        stopping.saving = trainer.is_saving
        summary = trainer.run(report_step, stopping)
        if parallel.rank() == 0 and summary is None:
            print(f"SIGTERM: stopped and saved at step {trainer.step}", flush=True)
        elif parallel.rank() == 0:
            load_drafter(Path(folder) / "best")  # what was written can be read
            write_json(Path(folder) / "summary.json", summary)


if __name__ == "__main__":
    run_worker(main)
