"""`python -m dflash_lib run --plan FILE`: every stage of a job, what it takes, and what would stop it on this machine.

Nothing is written, downloaded, loaded or executed: the parameter file, the target's config.json, the size of the data
and what this machine has free are all that is looked at. Hours are those of the stated rates, or of the rates that an
earlier run of this job measured.
"""

import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dflash_lib.conversations.templates import ChatTemplate
from dflash_lib.decoding.cache import DecodingError, TargetCache
from dflash_lib.decoding.eval_prompts import read_prompts
from dflash_lib.drafter.checkpoints import list_checkpoints
from dflash_lib.drafter.exported import find_drafter
from dflash_lib.drafter.folder import DrafterError
from dflash_lib.files import human_bytes, nearest_existing
from dflash_lib.hidden_states.plan import PLAN_FILE, ExtractionPlan, describe_differences
from dflash_lib.hidden_states.schema import StoreError
from dflash_lib.target.capture import default_layer_ids
from dflash_lib.target.ends import meta_target
from dflash_lib.target.errors import TargetError
from dflash_lib.target.hub import find_cached, is_hub_id
from dflash_lib.target.loading import check_device, load_tokenizer, read_config
from dflash_lib.target.memory import free_memory
from dflash_lib.workbench.capacity import (
    DataSize,
    TargetSize,
    bytes_per_token,
    data_size,
    prepare_options,
    target_size,
)
from dflash_lib.workbench.doctor import RED, version_lines
from dflash_lib.workbench.gpu_plan import Limits, Rates, Work, measured_rates, plan_gpus
from dflash_lib.workbench.parameters import all_declarations, read_parameters_file, resolve_parameters
from dflash_lib.workbench.peak_memory import PeakMemory, capture_memory, fast_kernels_on
from dflash_lib.workbench.pipeline import choose_notebooks
from dflash_lib.workbench.runs import REPOSITORY, notebook_paths, run_folder
from dflash_lib.workbench.training_memory import training_memory
from dflash_lib.workbench.variants import compute_options, train_options

DRAFTER_PARTS = ("drafter", "gradients", "optimizer's moments", "weight average")
ENDS = "target's ends"
DECODINGS = 2  # how often 07_evaluate decodes each prompt, about: plain and speculative


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One notebook: processes and where they run, memory of one of them, bytes read and written, hours (None = no rate
    is known)."""

    notebook: str
    resources: str
    memory: int = 0
    reads: float = 0.0
    writes: float = 0.0
    hours: float | None = None

    def __str__(self) -> str:
        hours = "?" if self.hours is None else duration(self.hours)
        return (f"{self.notebook:<18} {self.resources:<22} {_bytes(self.memory):>10} {_bytes(self.reads):>10} "
                f"{_bytes(self.writes):>10} {hours:>10}")


@dataclass(kw_only=True)
class JobPlan:
    """The stages, facts worth knowing, and what would stop the job here."""

    params_file: str
    folder: Path
    stages: list[StagePlan] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    obstacles: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The whole plan, for a terminal."""
        hours = sum(stage.hours or 0.0 for stage in self.stages)
        head = f"{'stage':<18} {'processes':<22} {'memory':>10} {'reads':>10} {'writes':>10} {'time':>10}"
        lines = [f"plan of {self.params_file}; nothing was executed or written", f"run folder: {self.folder}",
                 *self.facts, "", head, *map(str, self.stages), f"{'together':<74} {duration(hours):>11}", ""]
        lines += ["What would stop it on this machine:", *(f"  - {text}" for text in self.obstacles)] if (
            self.obstacles) else ["Nothing that can be seen from here would stop it on this machine."]
        return "\n".join(lines)


def duration(hours: float) -> str:
    """Hours as a plan shows them: minutes below two hours."""
    return f"{hours:,.1f} h" if hours >= 2 else f"{60 * hours:,.0f} min" if hours >= 1 / 60 else "< 1 min"


def _bytes(num: float) -> str:
    return human_bytes(num) if num else "-"


def plan_job(params_file: Path | str, runs_dir: Path | None = None, run_id: str | None = None, *,
             start: str | None = None, stop: str | None = None, only: str | None = None) -> JobPlan:
    """The plan of a job, or of the notebooks from `start` to `stop` or `only` one. Raises ValueError and
    FileNotFoundError for a parameter file that cannot be used (a mask token that is no row of the embedding, say), and
    TargetError when no config.json of the target can be read without a download.
    """
    params = resolve_parameters(read_parameters_file(params_file), all_declarations(notebook_paths()), str(params_file))
    chosen = [path.stem for path in choose_notebooks(notebook_paths(), start, stop, only)]
    prepare_options(params)  # its options are right
    folder = run_folder(params, params_file, runs_dir, run_id)
    plan = JobPlan(params_file=str(params_file), folder=folder)
    config_folder, here = find_config(params)
    size = target_size(config_folder)
    layer_ids = params["target_layer_ids"] or default_layer_ids(size.num_layers, params["num_aux_layers"])
    weights = size.weight_bytes(params["dtype"])
    data = _data(params, here, plan)
    num_samples, mean_length, num_tokens = data.num_conversations, data.mean_length, data.num_tokens
    each = bytes_per_token(size.hidden_size, len(layer_ids), params["encoding"], params["last_state"], params["topk"],
                           data.supervised_share)
    rates = job_rates(params, folder)
    capture, training = job_memory(config_folder, layer_ids, params)
    store = REPOSITORY / Path(params["store_dir"]).expanduser() if params["store_dir"] else folder / "states"
    device, workers, load = params["device"], num_extracting(params), rates.load_s / 3600
    training_processes = params["num_processes"]
    write, read = (rate * 1e6 / each for rate in (rates.disk_write_mb_s, rates.disk_read_mb_s))
    trained = params["steps"] * params["batch_samples"] * mean_length
    plan.facts += [
        f"target: {size.model_type}, {size.num_parameters / 1e9:.4g} B parameters, {human_bytes(weights)} in "
        f"{params['dtype']}; tapped layers {list(layer_ids)}; last state: {params['last_state']}",
        f"        {_parts(size)}",
        f"drafter: {human_bytes(training.parts['drafter'])} in float32, with gradients and optimizer "
        f"{human_bytes(sum(training.parts[name] for name in DRAFTER_PARTS))} in each training process; beside it the "
        f"target's ends, {human_bytes(training.parts[ENDS])}",
        f"data: {num_samples:,} samples of {mean_length:,.0f} tokens, {num_tokens:,} tokens; "
        f"{params['steps'] * params['batch_samples'] / num_samples:.3g} epochs of training",
        f"store: {store}, {each:,.0f} bytes a token in {params['encoding']}, {human_bytes(num_tokens * each)}",
        f"rates ({rates.source}): {rates.extract_tokens_s:,.0f} tokens/s extracted and {rates.train_tokens_s:,.0f} "
        f"trained a process, disk {rates.disk_write_mb_s:,.0f} MB/s",
        *_gpu_facts(params, rates, num_tokens, each, store)]
    one = f"1 on {device}"
    extracting = num_tokens / min(workers * rates.extract_tokens_s, write) / 3600  # then all is read, to verify it
    num_prompts = _heldout_prompts(params, here, plan) if "07_evaluate" in chosen else 0
    decoded = num_prompts * params["eval_max_new_tokens"] * DECODINGS
    plan.stages = [
        StagePlan(notebook="01_capacity", resources="1 on cpu", hours=0.01),
        StagePlan(notebook="02_layout", resources=one, memory=capture.total, reads=weights, hours=2 * load),
        StagePlan(notebook="03_normalization", resources=one, memory=capture.total, reads=weights, hours=2 * load),
        StagePlan(notebook="04_extract", resources=f"{workers} on {device}", memory=capture.total,
                  reads=weights * (workers + 1), writes=num_tokens * each,  # the audit loads the target once more
                  hours=2 * load + extracting + num_tokens / read / 3600),
        StagePlan(notebook="05_statistics", resources=one, memory=capture.total, hours=load + 0.05,
                  reads=weights + min(num_samples, params["num_statistics_samples"]) * mean_length * each),
        StagePlan(notebook="06_train", resources=f"{training_processes} on {device}", memory=training.total,
                  reads=weights * training_processes + trained * each,  # hashed, of which little is loaded
                  hours=load + trained / min(training_processes * rates.train_tokens_s, read) / 3600),
        StagePlan(notebook="07_evaluate", resources=one, memory=capture.static, reads=weights,
                  hours=load + decoded / params["decode_tokens_s"] / 3600)]
    plan.stages = [stage for stage in plan.stages if stage.notebook in chosen]
    most = getattr(read_config(config_folder).get_text_config(), "max_position_embeddings", None) or math.inf
    if params["max_length"] > most:
        plan.obstacles.append(f"max_length: {params['max_length']} is beyond the target's {most} positions")
    plan.obstacles += [*_missing_inputs(params, here, weights), *_too_few_samples(params, num_samples),
                       *_too_few_devices(params), *_too_little_memory(plan, params),
                       *_disks(store, folder, num_tokens * each),
                       *(_another_store(store, list(layer_ids), params) if "04_extract" in chosen else []),
                       *(_no_drafter(params, folder) if "06_train" in chosen else []),
                       *(_target_obstacles(config_folder, params) if "07_evaluate" in chosen else []),
                       *(f"{line.found}: {line.to_do}" for line in version_lines() if line.level == RED)]
    return plan


def find_config(params: dict[str, Any]) -> tuple[Path, Path | None]:
    """The folder whose config.json describes the target, and the folder of the target itself (None = not on this
    machine). Only what is here is looked at."""
    given = REPOSITORY / Path(params["model"]).expanduser()
    here = given if given.is_dir() else find_cached(params["model"])
    if params["model_config"]:
        return REPOSITORY / Path(params["model_config"]).expanduser(), here
    if here is None:
        raise TargetError(f"model: {params['model']} is not on this machine, and --plan downloads nothing. Give a "
                          "folder with its config.json as model_config.")
    return here, here


def job_rates(params: dict[str, Any], folder: Path) -> Rates:
    """The stated rates, with those in their place that this job's run, or else the run `rates_from`, measured."""
    stated = stated_rates(params, params["disk_mb_s"] or 500.0)
    if params["rates_from"]:
        stated = measured_rates(REPOSITORY / Path(params["rates_from"]).expanduser(), stated)
    return measured_rates(folder, stated) if (folder / "params.yaml").is_file() else stated


def stated_rates(params: dict[str, Any], disk_mb_s: float) -> Rates:
    """Rates as a parameter file has them."""
    return Rates(extract_tokens_s=params["extract_tokens_s"], train_tokens_s=params["train_tokens_s"],
                 disk_write_mb_s=disk_mb_s, disk_read_mb_s=disk_mb_s, load_s=params["load_s"])


def job_memory(model: Path | str, layer_ids: Sequence[int],
               params: dict[str, Any]) -> tuple[PeakMemory, PeakMemory]:
    """Peak memory of one extracting process (a full batch of the longest rows) and of one training process (documents
    of max_length, the worst step)."""
    num_rows = max(1, params["token_budget"] // params["max_length"])
    capture = capture_memory(model, layer_ids, num_rows, params["max_length"], dtype=params["dtype"],
                             fast_kernels=fast_kernels_on(params["device"]))
    return capture, training_memory(model, layer_ids, train_options(params), params["max_length"],
                                    dtype=params["dtype"], device=params["device"], compute=compute_options(params))


def _data(params: dict[str, Any], here: Path | None, plan: JobPlan) -> DataSize:
    """Samples and their tokens: looked at where data and tokenizer are here, else the most that it can be."""
    path = REPOSITORY / Path(params["conversations"]).expanduser()
    if path.exists() and here is not None:
        try:
            return data_size(path, load_tokenizer(here), prepare_options(params))
        except (ValueError, OSError) as error:  # broken conversations or no tokenizer: it stops the job, not the plan
            plan.obstacles.append(f"conversations: {error}")
    if params["max_samples"] is None:
        reason = "cannot be counted without the target's tokenizer" if path.exists() else "no such file or folder"
        raise FileNotFoundError(f"conversations: {path}: {reason}; to plan without it all the same, set max_samples")
    plan.facts.append("data: not counted here, so max_samples of max_length tokens each, which is the most it can be")
    return DataSize(num_conversations=params["max_samples"], num_probed=0, mean_length=float(params["max_length"]))


def _missing_inputs(params: dict[str, Any], here: Path | None, weights: int) -> list[str]:
    found = []
    if here is None and is_hub_id(params["model"].partition("@")[0]):
        from huggingface_hub import constants

        free = shutil.disk_usage(nearest_existing(constants.HF_HUB_CACHE)).free
        if constants.HF_HUB_OFFLINE:
            found.append(f"model: {params['model']} is not here, and HF_HUB_OFFLINE=1 forbids to download it")
        elif free < weights:
            found.append(f"model: {params['model']} has to be downloaded first ({human_bytes(weights)}), but "
                         f"{human_bytes(free)} are free in {constants.HF_HUB_CACHE}; set HF_HOME")
    elif here is None:
        found.append(f"model: {params['model']}: no such folder")
    for name in ("conversations", "heldout_prompts"):
        path = REPOSITORY / Path(params[name]).expanduser()
        if not path.exists():
            found.append(f"{name}: {path}: no such file or folder")
    return found


def _no_drafter(params: dict[str, Any], folder: Path) -> list[str]:
    """`init_from` without a drafter in it; a training that has begun needs it no more."""
    if not params["init_from"] or list_checkpoints(folder / "drafter" / "checkpoints"):
        return []
    try:
        find_drafter(REPOSITORY / Path(params["init_from"]).expanduser())
    except DrafterError as error:
        return [f"init_from: {error}"]
    return []


def _heldout_prompts(params: dict[str, Any], here: Path | None, plan: JobPlan) -> int:
    """How many prompts 07_evaluate takes. What it would refuse in them, hours from now, becomes an obstacle; they are
    read where prompts and tokenizer are here."""
    path = REPOSITORY / Path(params["heldout_prompts"]).expanduser()
    if here is not None and path.exists():  # else it is said already
        try:
            template = ChatTemplate(load_tokenizer(here), prepare_options(params).template)
            return len(read_prompts(path, template, params["eval_prompts"]))
        except (ValueError, OSError) as error:
            plan.obstacles.append(f"heldout_prompts: {error}")
    return params["eval_prompts"] or 0


def _too_few_devices(params: dict[str, Any]) -> list[str]:
    if not params["device"].startswith("cuda"):
        try:
            check_device(params["device"])
        except TargetError as error:
            return [str(error)]
        return []
    num = torch.cuda.device_count()
    if num == 0:
        return [f"device: {params['device']}, but PyTorch sees no CUDA device (python -m dflash_lib doctor says why)"]
    absent = [number for number in params["gpus"] or [] if number >= num]
    found = [f"gpus: there is no device {absent[0]}; PyTorch sees {num}, from 0 to {num - 1}"] if absent else []
    if params["num_processes"] > num:
        found.append(f"num_processes: {params['num_processes']} train, each on a GPU of its own; PyTorch sees {num}")
    return found


def num_extracting(params: dict[str, Any]) -> int:
    """Workers of 04_extract: `gpus`, or all that are here (`num_gpus` where none is), or `num_workers` on a CPU."""
    if not params["device"].startswith("cuda"):
        return params["num_workers"]
    if params["device"] != "cuda":
        return 1
    return len(params["gpus"] or []) or torch.cuda.device_count() or params["num_gpus"]


def _too_little_memory(plan: JobPlan, params: dict[str, Any]) -> list[str]:
    """Stages whose memory is more than what is free: of each GPU, or of main memory for all processes together."""
    on_gpu = params["device"].startswith("cuda")
    if on_gpu and torch.cuda.device_count() == 0:
        return []  # said already
    try:
        free = free_memory(params["device"])
    except TargetError as error:
        return [str(error)]
    found = []
    for stage in plan.stages:
        together = {"04_extract": num_extracting(params), "06_train": params["num_processes"]}
        needed = stage.memory * (1 if on_gpu else together.get(stage.notebook, 1))
        if needed > free:
            found.append(f"{stage.notebook}: takes {human_bytes(needed)} of memory, {human_bytes(free)} are free on "
                         f"{params['device']}; lower token_budget (04) or anchors_per_sample and draft_vocab_size, or "
                         "raise accumulate (06)")
    return found


def _parts(size: TargetSize) -> str:
    """Parameters by part, largest first, then what is not loaded."""
    parts = sorted(size.parameters.items(), key=lambda part: -part[1])
    text = ", ".join(f"{name} {num / 1e9:.4g} B" for name, num in parts)
    if size.num_active < size.num_parameters:
        text += f"; {size.num_active / 1e9:.4g} B work on a token"
    others = ", ".join(f"{name} {num / 1e9:.3g} B" for name, num in size.not_loaded.items())
    return text + (f"; not loaded: {others}" if others else "")


def _gpu_facts(params: dict[str, Any], rates: Rates, num_tokens: int, each: float, store: Path) -> list[str]:
    """The GPU plan's winner, beside what the workbench does (01_capacity shows all of it)."""
    limit = params["max_disk_tb"]
    disk = shutil.disk_usage(nearest_existing(store)).free if limit is None else limit * 1e12
    work = Work(num_tokens=num_tokens, epochs=params["epochs"], bytes_per_token=each)
    plan = plan_gpus(params["num_gpus"], work, rates, Limits(disk_bytes=disk, hours=params["max_hours"]))
    ours = f" C takes {plan.outcomes['C'].gpu_hours:,.3g} GPU-hours." if plan.winner != "C" else ""
    each_a = "GPUs" if params["device"].startswith("cuda") else "processes"
    return [f"cheapest way to extract and then train {params['epochs']} epochs on {params['num_gpus']} {each_a} with "
            f"{disk / 1e12:.3g} TB of disk (parameters num_gpus, epochs; not this job's stages, which stand below): "
            f"{plan.sentence()}{ours} The workbench does as C: extract with all, then train, in "
            f"{params['num_processes']} {'process' if params['num_processes'] == 1 else 'processes'}."]


def _disks(store: Path, folder: Path, needed: float) -> list[str]:
    found = []
    for name, path in (("store_dir", store), ("runs_dir", folder)):
        there = nearest_existing(path)
        if not there.is_dir():
            found.append(f"{name}: {there} is a file, so {path} cannot be made")
        elif not os.access(there, os.W_OK):
            found.append(f"{name}: {there} cannot be written, so {path} cannot be made")
    stored = sum(file.stat().st_size for file in store.glob("shard-*.h5")) if store.is_dir() else 0
    free = shutil.disk_usage(nearest_existing(store)).free + stored
    if needed > free:
        found.append(f"store_dir: the hidden states take {human_bytes(needed)}, {human_bytes(free)} are free for them "
                     f"at {nearest_existing(store)}; lower max_samples, or take another disk or encoding")
    return found


def _too_few_samples(params: dict[str, Any], num_samples: int) -> list[str]:
    if params["validation_samples"] < num_samples:
        return []
    return [f"validation_samples: {params['validation_samples']} of {num_samples} samples leave none to train on; "
            "lower it, or use more conversations"]


def _another_store(store: Path, layer_ids: list[int], params: dict[str, Any]) -> list[str]:
    """A store that was begun with other settings: 04 would refuse it. Target and rows are compared there."""
    if not (store / PLAN_FILE).is_file():
        return []
    try:
        before = ExtractionPlan.load(store)
    except StoreError as error:
        return [f"store_dir: {error}"]
    asked = {"target_layer_ids": layer_ids, **{name: params[name] for name in (
        "encoding", "last_state", "topk", "token_budget", "samples_per_shard")}}
    found = {name: (getattr(before, name), value) for name, value in asked.items() if getattr(before, name) != value}
    return [f"store_dir: {store} was begun with other settings, and a store is never mixed:\n"
            f"{describe_differences(found, 'the store has', 'asked for')}\n    Choose another store_dir, or remove it."
            ] if found else []


def _target_obstacles(config_folder: Path, params: dict[str, Any]) -> list[str]:
    try:
        TargetCache(meta_target(config_folder, params["dtype"]))
    except DecodingError as error:
        return [f"07_evaluate: {error}"]
    return []
