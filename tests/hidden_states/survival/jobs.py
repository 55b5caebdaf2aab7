"""What the forked children of the survival tests do: whole extractions of a store, in this process, and readings of it.

Everything but torchrun is the real thing: `start_extraction` with its plan, checks and claims, and the worker's `main`.
"""

import errno
import fcntl
import fnmatch
import hashlib
import json
import signal
import struct
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import h5py
import torch
import torch.distributed as dist

from dflash_lib import locks
from dflash_lib.conversations.prepare import PreparedRows
from dflash_lib.drafter.dataset import TrainingData
from dflash_lib.hidden_states import extraction, extraction_worker
from dflash_lib.hidden_states.claims import Claims
from dflash_lib.hidden_states.job import ExtractionJob
from dflash_lib.hidden_states.schema import StoreError
from dflash_lib.hidden_states.store import HiddenStateStore
from dflash_lib.hidden_states.verify import verify_store
from tests.hidden_states.rows import make_options
from tests.hidden_states.survival import folders, io_events, limits, mutations, targets
from tests.hidden_states.survival.io_events import Event
from tests.hidden_states.survival.power_cut import Journal

F_OFD_SETLK = 37  # Python's fcntl names it from 3.12 on


class At:
    """A listener that does something at the nth time that an event fits.

    op: as in `Event`; name: pattern of the file's name; when: "before" or "after".
    """

    def __init__(self, action, op: str, name: str, when: str = "before", nth: int = 1):
        self.action, self.op, self.name, self.when, self.left = action, op, name, when, nth

    def __call__(self, event: Event) -> None:
        if (event.op, event.when) == (self.op, self.when) and fnmatch.fnmatch(Path(event.path).name, self.name):
            self.left -= 1
            if self.left == 0:
                self.action()


def stop_here() -> None:
    """Stops this process, until it is killed from outside. Sent to this very thread: it does nothing after it, which
    it may when another one takes the signal."""
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def _run_here(target):
    """In the place of `run_torchrun`: the worker's whole loop in this process, with a target that is loaded."""
    def run(module, args, num_processes, log_dir, threads, on_progress, *_nodes_and_environment) -> None:
        assert (module, num_processes) == (extraction.WORKER, 1)
        job = ExtractionJob.load(args[0])
        claims = Claims(dist.HashStore())
        claims.publish(job.todo, job.num_quarantined)
        claims.receive()
        extraction_worker.work(job, target, claims,
                               lambda **fields: on_progress(json.loads(json.dumps(fields))))
    return run


def start(target, *, store, prepared, log_dir, options=None, model=None, dtype="float32", num_processes=1,
          first=()) -> dict:
    """`start_extraction` as it is, torchrun and all, with changed options; returns its report. first: [function of
    `limits`, ...] what is so from the beginning."""
    for name in first:
        getattr(limits, name)()
    report = extraction.start_extraction(store, model or target.path, prepared, make_options(**(options or {})),
                                         log_dir, num_processes=num_processes, dtype=dtype, show=False)
    return {key: asdict(report)[key] for key in ("num_shards", "num_tokens", "num_splits", "replaced")}


def extract(target, *, stop=None, trouble=None, mutate=(), journal=None, spoil=None, hunger=None, **job) -> dict:
    """As `start`, but with the worker in this process, whose target is loaded.

    stop: fields of `At`, where this process stops itself; trouble: (function of `limits`, its arguments, fields of
    `At`), what happens to it in the middle; mutate: names of functions of `mutations` to apply; journal: a file for
    all changes below the folder above the store's parent, which is what a power cut could lose;
    spoil, hunger: arguments of `targets`.
    """
    if spoil:
        targets.spoil(target, PreparedRows.load(job["prepared"]), spoil)
    if hunger:
        targets.make_hungry(target, *hunger)
    heard = [At(stop_here, **stop)] if stop else []
    if trouble:
        what, args, at = trouble
        heard.append(At(lambda: getattr(limits, what)(*args), **at))
    notes = Journal(Path(job["store"]).parents[1]) if journal else None
    if notes or heard:
        io_events.watch(*heard, *([notes] if notes else []))
    for name in mutate:  # after `watch`, which then hears what is left of the protection
        getattr(mutations, name)()
    extraction.run_torchrun = _run_here(target)
    report = start(target, **job)
    if notes:
        notes.save(journal)
    return report


def extract_each(target, *, stores, prepared, log_dir, mutate=()) -> list[str]:
    """Resumes one store after another in this process; what it raised for each, "" when it went well."""
    for name in mutate:
        getattr(mutations, name)()
    raised = []
    locks.time = SimpleNamespace(**{**vars(time), "sleep": lambda _seconds: None})  # an empty lock stays empty here
    for store in stores:
        try:
            extract(target, store=store, prepared=prepared, log_dir=log_dir)
            raised.append("")
        except Exception as error:
            raised.append(f"{type(error).__name__}: {error}")
    return raised


def check(target, *, store, prepared, mutate=(), first=()) -> dict[str, str]:
    """Opens, verifies and reads a store: {"open" | "verify" | "read": the fault in words}, without those that found
    nothing; "crash of ..." with an error that is not one in words."""
    for name in mutate:
        getattr(mutations, name)()
    for name in first:
        getattr(limits, name)()
    faults, rows = {}, PreparedRows.load(prepared)
    try:
        opened = HiddenStateStore.open(store)
    except StoreError as error:
        return {"open": str(error)}
    with opened:
        try:
            wrong = [f"{c.name}: {c.first_fault}" for c in verify_store(opened, rows) if not c.ok]
            if wrong:
                faults["verify"] = "\n".join(wrong)
        except Exception as error:
            faults["crash of verify"] = repr(error)
        try:
            for index in range(len(rows)):
                opened.read(index)
        except StoreError as error:
            faults["read"] = str(error)
        except Exception as error:
            faults["crash of read"] = repr(error)
    return faults


def on_small_disk(target, *, disk, num_bytes, trouble=None, launched=False, check_room=True, **job) -> dict:
    """An extraction on a file system in memory of `num_bytes`, mounted at `disk`; when it has failed the trouble is
    taken away and it is resumed. Returns the error, what the store held then, and what it holds in the end."""
    disk, store, before = Path(disk), Path(job["store"]), extraction.check_free_space
    limits.own_mounts()
    limits.mount_memory(disk, num_bytes)
    if not check_room:  # the disk had room when the job looked; another job has taken it since
        extraction.check_free_space = lambda *_: None
    error, kind = "", ""
    try:
        start(target, **job) if launched else extract(target, trouble=trouble, **job)
    except Exception as raised:
        error, kind = str(raised), type(raised).__name__
    left = folders.state(store) if store.exists() else {}
    limits.remount(disk, 64 << 20)
    (disk / limits.BALLAST).unlink(missing_ok=True)
    extraction.check_free_space = before
    report = start(target, **job) if launched else extract(target, **job)
    after = folders.state(store)
    left.pop(".lock", None)  # what nobody may remove from a read-only disk; its holder is done with it
    return {"error": error, "kind": kind, "left": left, "report": report, "content": folders.content(store),
            "untouched": all(after.get(name) == entry for name, entry in left.items())}


def can_mount(target, *, disk) -> str:
    """Why this system does not let a process mount a file system of its own; "" where it does."""
    try:
        limits.own_mounts()
        limits.mount_memory(disk, 1 << 20)
    except OSError as error:
        return str(error)
    return ""


def training_batch(target, *, store, first=()) -> str:
    """sha256 over a batch as the training reads it."""
    for name in first:
        getattr(limits, name)()
    with HiddenStateStore.open(store) as opened:
        data = TrainingData(opened, opened.sample_indices, batch_samples=4, anchors_per_sample=3, slots_per_anchor=3,
                            block_size=4, mask_token_id=3, gamma=4.0, need_last=True, seed=0)
        batch = data.batch(0)
    digest = hashlib.sha256()
    for name, value in sorted(vars(batch).items()):
        raw = value.contiguous().view(torch.uint8).numpy().tobytes() if isinstance(value, torch.Tensor) else b""
        digest.update(name.encode() + raw)
    return digest.hexdigest()


def locks_that_fail(target, *, folder, first=("no_file_locking",)) -> dict[str, str]:
    """Kind of lock -> how it fails."""
    for name in first:
        getattr(limits, name)()
    failed, path = {}, Path(folder) / "locked"
    with open(path, "wb") as file:
        whole = struct.pack("hhqqi", fcntl.F_WRLCK, 0, 0, 0, 0)
        for kind, lock in (("flock", lambda: fcntl.flock(file, fcntl.LOCK_EX)),
                           ("lockf", lambda: fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)),
                           ("open file description", lambda: fcntl.fcntl(file, F_OFD_SETLK, whole))):
            try:
                lock()
                fcntl.lockf(file, fcntl.LOCK_UN)  # or it would be in the way of the next kind
            except OSError as error:
                failed[kind] = errno.errorcode[error.errno]
    try:
        h5py.File(Path(folder) / "locked.h5", "w", locking=True).close()
    except OSError:
        failed["HDF5"] = "OSError"
    return failed
