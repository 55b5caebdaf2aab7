"""Starts and resumes an extraction: makes the plan, checks the disk, runs `extraction_worker` through torchrun.

`start_extraction` runs in a notebook's kernel or a command; the target is loaded by the workers only, one process a
device. Resuming is doing the shards that are missing.
"""

import io
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_lib.conversations.prepare import PreparedRows
from dflash_lib.files import human_bytes, make_folder
from dflash_lib.hidden_states.plan import ExtractionOptions, ExtractionPlan, describe_differences, make_plan
from dflash_lib.hidden_states.schema import StoreError, get_encoding
from dflash_lib.hidden_states.shards import remove_dead_partials
from dflash_lib.hidden_states.store import missing_shards
from dflash_lib.launch import run_torchrun
from dflash_lib.progress import Progress
from dflash_lib.target.loading import read_config, target_identity


@dataclass(frozen=True)
class ExtractionReport:
    """What one start did: shards and tokens extracted now, seconds of the whole job and of the passes alone (longest
    rank), damaged shards that were replaced (with reasons)."""

    num_shards: int
    num_tokens: int
    seconds: float
    extraction_seconds: float
    replaced: dict[int, str]

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second while extracting, without loading; 0 when there was nothing to do."""
        return self.num_tokens / self.extraction_seconds if self.extraction_seconds else 0.0


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
                     show: bool = True) -> ExtractionReport:
    """Extracts what is missing in `store`, in `num_processes` processes, and returns when it is complete.

    device: "cpu", or "cuda": process r then works on device r. show: print a progress line. Raises StoreError for a
    store that does not fit, more processes than CUDA devices, a disk that is too small or not writable; LaunchError
    with a failing rank's traceback.
    """
    store, began = Path(store), time.monotonic()
    if device == "cuda" and num_processes > torch.cuda.device_count():
        raise StoreError(f"num_workers: {num_processes} processes, one a device, but PyTorch sees "
                         f"{torch.cuda.device_count()} CUDA devices")
    prepared = PreparedRows.load(prepared_folder)
    plan = open_plan(store, model, prepared, options, dtype)
    remove_dead_partials(store)
    todo, damaged = missing_shards(store, plan)
    if not todo:
        return ExtractionReport(0, 0, time.monotonic() - began, 0.0, {})
    check_free_space(store, plan, todo)
    num_todo = sum(plan.shard_tokens[i] for i in todo)
    done, seconds = {}, {}
    with Progress(plan.num_tokens, "extract", "tokens", start=plan.num_tokens - num_todo,
                  stream=None if show else io.StringIO()) as progress:

        def follow(fields: dict) -> None:
            if not done:
                progress.began = time.monotonic()  # the rate is that of extracting, not of loading the target
            done[fields["rank"]], seconds[fields["rank"]] = fields["tokens"], fields["seconds"]
            progress.set(plan.num_tokens - num_todo + sum(done.values()))

        run_torchrun("dflash_lib.hidden_states.extraction_worker",
                     ["--store", str(store.resolve()), "--model", str(Path(model).resolve()),
                      "--prepared", str(Path(prepared_folder).resolve()), "--dtype", dtype, "--device", device],
                     num_processes, log_dir, options.threads, follow)
    left, _ = missing_shards(store, plan)
    if left:
        raise StoreError(f"{store}: the job ended, but shards {left[:5]} are missing or damaged")
    return ExtractionReport(len(todo), num_todo, time.monotonic() - began, max(seconds.values()), damaged)
