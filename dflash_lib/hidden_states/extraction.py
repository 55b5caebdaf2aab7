"""Starts and resumes an extraction: makes the plan, checks the disk, runs `extraction_worker` through torchrun.

`start_extraction` runs in a notebook's kernel or a command; the target is loaded by the workers only, one process a
device. Resuming is doing the shards that are missing. A lock in the store's folder keeps a second job out; nothing here
or in the store uses flock, and HDF5's own locking is off, since cluster file systems often have neither.
"""

import io
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_lib.conversations.prepare import PreparedRows
from dflash_lib.files import human_bytes, make_folder
from dflash_lib.hidden_states.extraction_worker import GPUS
from dflash_lib.hidden_states.job import JOB_FILE, ExtractionJob, check_quarantined, scan_store
from dflash_lib.hidden_states.plan import ExtractionOptions, ExtractionPlan, describe_differences, make_plan
from dflash_lib.hidden_states.schema import StoreError, get_encoding
from dflash_lib.hidden_states.shards import remove_dead_partials
from dflash_lib.hidden_states.store import missing_shards
from dflash_lib.job_status import JobStatus
from dflash_lib.launch import JOIN_S, ONE_MACHINE, Nodes, run_torchrun
from dflash_lib.locks import folder_lock
from dflash_lib.progress import Progress
from dflash_lib.target.errors import TargetError
from dflash_lib.target.gpus import choose_gpus
from dflash_lib.target.loading import read_config, target_identity

WORKER = "dflash_lib.hidden_states.extraction_worker"
SETTLE_S = 60.0  # a shared file system may show another machine's files that late


@dataclass(frozen=True, kw_only=True)
class ExtractionReport:
    """What one start did: shards and tokens extracted now, bytes of those shards, seconds of the whole job and of the
    passes alone (longest worker, from its first batch), workers, batches that were split for want of memory, damaged
    shards that were replaced and devices that were lost (with reasons), notes on the choice of GPUs. devices: those of
    this machine that work, such as cuda:2, at least one."""

    num_shards: int = 0
    num_tokens: int = 0
    bytes_written: int = 0
    seconds: float = 0.0
    extraction_seconds: float = 0.0
    num_workers: int = 0
    num_splits: int = 0
    replaced: dict[int, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of all workers while extracting, without loading; 0 when there was nothing to do."""
        return self.num_tokens / self.extraction_seconds if self.extraction_seconds else 0.0

    def describe(self) -> str:
        """All of it, a line each."""
        lines = [f"{self.num_tokens:,} tokens extracted now in {self.extraction_seconds:.0f} s by {self.num_workers} "
                 f"worker{'' if self.num_workers == 1 else 's'} ({self.tokens_per_second:,.0f} tokens/s), "
                 f"{human_bytes(self.bytes_written)} written" if self.num_shards else "the store was complete already"]
        if self.num_splits:
            lines.append(f"out of memory: {self.num_splits} batches were run in parts, as their shards note; lower "
                         "token_budget for the next store")
        lines += [f"lost: {device} ({reason}); others took its shards" for device, reason in self.lost.items()]
        return "\n".join([*lines, *self.notes, *(f"replaced: {reason}" for reason in self.replaced.values())])


def plan_extraction(model: Path | str, prepared: PreparedRows, options: ExtractionOptions,
                    dtype: str = "float32") -> ExtractionPlan:
    """The plan for a model folder, without loading its weights (they are hashed)."""
    return make_plan(target_identity(model, dtype), read_config(model).get_text_config(), prepared, options)


def open_plan(store: Path | str, model: Path | str, prepared: PreparedRows, options: ExtractionOptions,
              dtype: str = "float32") -> ExtractionPlan:
    """The store's plan: made and written when there is none yet, otherwise compared with what is asked for now.

    Raises StoreError, with every difference shown, when the store was begun from another target, other layer ids, other
    rows or other options, and when the folder cannot be written.
    """
    store = Path(store)
    plan = plan_extraction(model, prepared, options, dtype)
    try:
        if (store / "plan.json").exists():
            before = ExtractionPlan.load(store)
            found = before.differences(plan)
            if found:
                what = "Choose another store_dir, or remove this one."
                if "converted_from" in before.data:
                    what = ("It was converted or repaired: to train from it, begin behind the extraction (run PARAMS "
                            "--from 06_train).")
                raise StoreError(f"{store}: begun with other settings, and a store is never mixed:\n"
                                 f"{describe_differences(found, 'the store has', 'asked for')}\n{what}")
            return before
        make_folder(store)
        if any(store.glob("shard-*.h5")):
            raise StoreError(f"{store}: holds shards but no plan.json; choose another store_dir, or remove them")
        plan.save(store)
    except OSError as error:
        raise StoreError(f"{store}: cannot be written ({error}). Choose another store_dir.") from error
    return plan


def check_free_space(store: Path | str, plan: ExtractionPlan, shards: list[int]) -> None:
    """Raises StoreError when the disk has less room than the shards will take at the least."""
    stat = os.statvfs(store)
    free = stat.f_bavail * stat.f_frsize
    needed = sum(plan.shard_tokens[i] for i in shards) * plan.bytes_per_token * get_encoding(plan.encoding).least_share
    if needed > free:
        raise StoreError(f"{store}: {human_bytes(free)} free, but the {len(shards)} shards to extract take at least "
                         f"{human_bytes(needed)} in {plan.encoding}. Free space, choose another store_dir, or lower "
                         "max_samples.")


def start_extraction(store: Path | str, model: Path | str, prepared_folder: Path | str, options: ExtractionOptions,
                     log_dir: Path | str, num_processes: int = 1, dtype: str = "float32", device: str = "cpu",
                     show: bool = True, gpus: Sequence[int] | None = None,
                     nodes: Nodes = ONE_MACHINE) -> ExtractionReport:
    """Extracts what is missing in `store` with several workers, and returns when it is complete.

    device: "cpu" with `num_processes` workers, or "cuda" with one on each of `gpus` (None = all that nobody else is
    using). nodes: with more than one, this is node 0, and the others call `join_extraction`. show: print a progress
    line. log_dir gets the workers' output, the job file while the job runs, and `extraction.status.json`.

    Raises Locked while another job writes into the store, StoreError for a store that does not fit, devices that are
    not there, a disk that is too small or not writable, too many unusable samples; LaunchError with the error of the
    worker that failed first. A worker whose device is lost is no error while another is left.
    """
    store, log_dir, began = Path(store), Path(log_dir), time.monotonic()
    if nodes.rank != 0:
        raise StoreError(f"node {nodes.rank}: extraction is started on node 0; this machine joins it (join_extraction)")
    workers = _choose_workers(device, gpus, num_processes)
    prepared = PreparedRows.load(prepared_folder)
    with _locked(store):
        plan = open_plan(store, model, prepared, options, dtype)
        remove_dead_partials(store)
        scan = scan_store(store, plan, prepared.sample_ids)
        if not scan.missing and nodes.num == 1:
            return ExtractionReport(seconds=time.monotonic() - began, notes=workers.notes, devices=workers.devices)
        check_quarantined(scan.num_quarantined, scan.quarantined, plan.num_samples)
        check_free_space(store, plan, scan.missing)
        job = ExtractionJob(
            store=str(store.resolve()), model=str(Path(model).resolve()), prepared=str(Path(prepared_folder).resolve()),
            dtype=dtype, device=device, threads=plan.threads, todo=scan.missing, num_quarantined=scan.num_quarantined,
            quarantined=scan.quarantined)
        seen = _run(job, plan, log_dir, workers, nodes, show)
        left = _left_at_the_end(store, plan, SETTLE_S if nodes.num > 1 else 0.0)
        if left:
            raise StoreError(f"{store}: the job ended, but shards {left[:5]} are missing or damaged")
    lost = {fields["device"]: fields["error"] for fields in seen.values() if fields["state"] == "lost"}
    return ExtractionReport(
        num_shards=len(scan.missing), num_tokens=sum(plan.shard_tokens[i] for i in scan.missing),
        bytes_written=sum(fields["bytes_written"] for fields in seen.values()), seconds=time.monotonic() - began,
        extraction_seconds=max((fields["seconds"] for fields in seen.values()), default=0.0), num_workers=len(seen),
        num_splits=sum(fields["num_splits"] for fields in seen.values()), replaced=scan.damaged,
        lost=lost, notes=workers.notes, devices=[name for name in workers.devices if name not in lost] or ["cpu"])


def join_extraction(log_dir: Path | str, nodes: Nodes, gpus: Sequence[int] | None = None, num_processes: int = 1,
                    wait_s: float = JOIN_S) -> None:
    """Works on the job that node 0 started, with this machine's GPUs (or `num_processes` on a CPU), until it ends.

    log_dir: the same folder as on node 0, on a shared file system; waits there `wait_s` seconds for the job file.
    Raises StoreError when none comes and for devices that are not there, LaunchError when a worker failed.
    """
    path, end = Path(log_dir) / JOB_FILE, time.monotonic() + wait_s
    if nodes.rank == 0:
        raise StoreError("node 0 starts the extraction (start_extraction); the others join it")
    while not path.exists():
        if time.monotonic() > end:
            raise StoreError(f"{path}: did not appear within {wait_s:.0f} s. Start the extraction on node 0; the "
                             "folder must be on a file system that both machines see.")
        time.sleep(0.5)
    job = ExtractionJob.load(path)
    workers = _choose_workers(job.device, gpus, num_processes)
    run_torchrun(WORKER, [str(path.resolve())], workers.num, log_dir, job.threads, nodes=nodes,
                 environment=workers.environment)


@dataclass(frozen=True)
class _Workers:
    """num: workers of this machine; devices: their names, each once; environment: tells them; notes: what was left out,
    and why."""

    num: int
    devices: list[str]
    environment: dict[str, str]
    notes: list[str]


def _choose_workers(device: str, gpus: Sequence[int] | None, num_processes: int) -> _Workers:
    """One worker a GPU, or `num_processes`. Raises StoreError for devices that are not there."""
    if not device.startswith("cuda"):
        if gpus is not None:
            raise StoreError(f"gpus: {list(gpus)} with device {device!r}; set device: cuda, or leave gpus out (null)")
        return _Workers(num_processes, [device], {GPUS: ""}, [])
    if device != "cuda":  # one device by name
        number = device.removeprefix("cuda:")
        if gpus is not None or not number.isdecimal():
            raise StoreError(f"device: {device!r}; write cuda, and the devices as a list in gpus")
        gpus = [int(number)]
    try:
        choice = choose_gpus(gpus)
    except TargetError as error:
        raise StoreError(str(error)) from error
    # CUDA would number unlike cards by their speed; nvidia-smi, and so the list of those in use, by their slots.
    order = {"CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")}
    return _Workers(len(choice.numbers), [f"cuda:{number}" for number in choice.numbers],
                    {GPUS: ",".join(map(str, choice.numbers)), **order}, choice.notes)


@contextmanager
def _locked(store: Path) -> Iterator[None]:
    """The store's folder, made and held. Raises StoreError when it cannot be written, Locked while another job has
    it."""
    with ExitStack() as stack:
        try:
            made = not store.exists()
            make_folder(store)
            if made:
                stack.callback(_remove_empty, store)
            stack.enter_context(folder_lock(store, "extraction"))
        except OSError as error:
            raise StoreError(f"{store}: cannot be written ({error}). Choose another store_dir.") from error
        yield


def _remove_empty(folder: Path) -> None:
    """Removes a store's folder in which nothing was begun."""
    with suppress(OSError):
        folder.rmdir()


def _run(job: ExtractionJob, plan: ExtractionPlan, log_dir: Path, workers: _Workers, nodes: Nodes,
         show: bool) -> dict[int, dict[str, Any]]:
    """Runs torchrun to the job's end; returns the last report of each worker by rank."""
    start = plan.num_tokens - sum(plan.shard_tokens[i] for i in job.todo)
    seen: dict[int, dict[str, Any]] = {}
    path = job.save(log_dir)
    try:
        with (JobStatus(log_dir / "extraction.status.json", "extraction", plan.num_tokens, "tokens", start=start,
                        disk=job.store) as status,
              Progress(plan.num_tokens, "extract", "tokens", start=start,
                       stream=None if show else io.StringIO()) as progress):

            def follow(fields: dict[str, Any]) -> None:
                if not seen:
                    progress.restart(start)  # the rate is that of extracting, not of loading the target
                seen[fields["rank"]] = fields
                status.worker(fields["rank"], done=fields["tokens"], kept=fields["written_tokens"],
                              seconds=fields["seconds"], device=fields["device"],
                              bytes_written=fields["bytes_written"],
                              shard=fields["shard"] if fields["shard"] >= 0 else None, state=fields["state"])
                progress.set(status.done, status.note())

            run_torchrun(WORKER, [str(path.resolve())], workers.num, log_dir, plan.threads, follow, nodes,
                         workers.environment)
    finally:
        with suppress(OSError):  # where nothing can be removed any more, the job has failed for that reason
            path.unlink(missing_ok=True)
    return seen


def _left_at_the_end(store: Path, plan: ExtractionPlan, patience_s: float) -> list[int]:
    """Shards that are not there, looked for during `patience_s` seconds."""
    end = time.monotonic() + patience_s
    while (left := missing_shards(store, plan)[0]) and time.monotonic() < end:
        time.sleep(1.0)
    return left
