"""Five samples through preparation, extraction and verification on one device: the cheapest answer to "will it run?".

It ends in a diagnosis: what passed, what it measured, and for the stage that failed its reason and what to do. The
folder of a failed trial is kept, with the job's log; that of a passed one is removed.
"""

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from dflash_lib.conversations.prepare import PreparedRows, prepare
from dflash_lib.files import human_bytes, write_json
from dflash_lib.hidden_states import ExtractionOptions, HiddenStateStore, open_plan, start_extraction, verify_store
from dflash_lib.launch import LaunchError
from dflash_lib.target.capture import default_layer_ids
from dflash_lib.target.gpus import choose_gpus
from dflash_lib.target.loading import load_tokenizer, read_config
from dflash_lib.workbench.capacity import prepare_options
from dflash_lib.workbench.doctor import GREEN, RED, Line, disk_line, model_lines
from dflash_lib.workbench.parameters import all_declarations, read_parameters_file, resolve_parameters
from dflash_lib.workbench.runs import RunError, input_path, notebook_paths, runs_folder

NUM_SAMPLES = 5
MARK = "trial.json"
# What stands in a failed job's words -> what to do. The first that is found counts.
REMEDIES = {
    "OutOfMemoryError": "lower token_budget: 01_capacity has the largest batch; or give the device more memory",
    "out of memory": "lower token_budget: 01_capacity has the largest batch; or give the device more memory",
    "left no traceback": "most often it was killed for memory: see `dmesg`, lower token_budget, or use dtype: bfloat16",
    "PyTorch cannot use it": "set device: cpu, or run `python -m dflash_lib doctor` for what is wrong with the GPU",
    "No space left on device": "free space, or set store_dir and runs_dir to another disk",
    "ModuleNotFoundError": "install what is missing: `python -m dflash_lib doctor` compares every version",
}


@dataclass
class Trial:
    """What was found, line by line; rate: tokens a second of extraction with one process (0 = it did not get there)."""

    folder: Path
    lines: list[Line] = field(default_factory=list)
    rate: float = 0.0

    @property
    def passed(self) -> bool:
        return all(line.level != RED for line in self.lines)


def run_trial(params_file: Path | str, runs_dir: Path | None = None, stream: TextIO | None = None) -> Trial:
    """Runs the trial of a job. Raises ValueError and FileNotFoundError for a parameter file that cannot be used."""
    stream = stream or sys.stdout
    params = resolve_parameters(read_parameters_file(params_file), all_declarations(notebook_paths()), str(params_file))
    trial = Trial((runs_dir or runs_folder(params)) / f"{Path(params_file).stem}-trial")
    if trial.folder.exists() and not (trial.folder / MARK).is_file():
        raise RunError(f"{trial.folder}: is in the way and no earlier trial's; move it")
    shutil.rmtree(trial.folder, ignore_errors=True)
    trial.folder.mkdir(parents=True)
    write_json(trial.folder / MARK, params)

    def say(line: Line) -> None:
        trial.lines.append(line)
        stream.write(f"{line}\n")
        stream.flush()

    rows: list[PreparedRows] = []
    stages: dict[str, Callable[[], str]] = {
        "disk": lambda: _found(disk_line(trial.folder)),
        "target": lambda: _target(params),
        "preparation": lambda: _prepare(params, trial, rows),
        "extraction": lambda: _extract(params, trial, rows[0]),
        "verification": lambda: _verify(trial, rows[0]),
    }
    for name, work in stages.items():
        try:
            say(Line(GREEN, name, work()))
        except Exception as error:  # noqa: BLE001  whatever it is, the user gets a diagnosis, and the log is kept
            say(diagnose(name, error, trial.folder))
            break
    if trial.passed:
        shutil.rmtree(trial.folder)
    return trial


def diagnose(stage: str, error: BaseException, folder: Path) -> Line:
    """A failed stage as one red line: the last words of what went wrong, and what to do about it."""
    words = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    reason = words[-1] if isinstance(error, LaunchError) else words[0]
    if not isinstance(error, ValueError | LaunchError):
        reason = f"{type(error).__name__}: {reason}"
    remedy = next((to_do for sign, to_do in REMEDIES.items() if sign in f"{type(error).__name__} {error}"), None)
    if remedy is None:
        remedy = ("do what it says, and try again" if isinstance(error, ValueError | OSError) else
                  "not a known failure: the log has all of it")
    logs = sorted((folder / "logs").glob("*.log"))
    return Line(RED, stage, reason[:500], remedy + (f". Log: {logs[-1]}" if logs else ""))


def _found(line: Line) -> str:
    if line.level == RED:
        raise OSError(f"{line.found}; {line.to_do}")
    return line.found


def _target(params: dict[str, Any]) -> str:
    folder = input_path("model", params["model"])
    line = model_lines(str(folder), params["dtype"], params["device"])[0]
    if line.level == RED:
        raise RunError(f"{line.found}: {line.to_do}")
    return line.found


def _prepare(params: dict[str, Any], trial: Trial, rows: list[PreparedRows]) -> str:
    model = input_path("model", params["model"])
    options = prepare_options({**params, "max_samples": NUM_SAMPLES})
    rows.append(prepare(input_path("conversations", params["conversations"]), load_tokenizer(model), options,
                        work_dir=trial.folder / "preparing", num_workers=1))
    rows[0].save(trial.folder / "prepared")
    return f"{len(rows[0])} conversations, {rows[0].num_tokens:,} tokens, {rows[0].supervised_share:.0%} supervised"


def _extract(params: dict[str, Any], trial: Trial, prepared: PreparedRows) -> str:
    model = input_path("model", params["model"])
    num_layers = read_config(model).get_text_config().num_hidden_layers
    options = ExtractionOptions(
        target_layer_ids=params["target_layer_ids"] or default_layer_ids(num_layers, params["num_aux_layers"]),
        encoding=params["encoding"], last_state=params["last_state"], topk=params["topk"],
        token_budget=params["token_budget"], samples_per_shard=params["samples_per_shard"], threads=params["threads"])
    open_plan(trial.folder / "states", model, prepared, options, params["dtype"])
    report = start_extraction(trial.folder / "states", model, trial.folder / "prepared", options, trial.folder / "logs",
                              1, params["dtype"], params["device"], show=False, gpus=_one_gpu(params))
    trial.rate = report.tokens_per_second
    size = sum(path.stat().st_size for path in (trial.folder / "states").glob("shard-*.h5"))
    return (f"{report.num_tokens:,} tokens with one process on {params['device']}: {trial.rate:,.0f} tokens/s, the "
            f"first batch's slowness included; {report.seconds:.0f} s with loading; {human_bytes(size)}")


def _one_gpu(params: dict[str, Any]) -> list[int] | None:
    """The first GPU that the job would extract on."""
    return choose_gpus(params["gpus"]).numbers[:1] if params["device"] == "cuda" else None


def _verify(trial: Trial, prepared: PreparedRows) -> str:
    with HiddenStateStore.open(trial.folder / "states") as store:
        failed = [check for check in verify_store(store, prepared) if not check.ok]
        num_quarantined = store.num_quarantined
    if failed:
        raise RunError("; ".join(f"{c.name}: {c.num_faults} faults, first: {c.first_fault}" for c in failed))
    return f"every token id, value and checksum is as it should be; {num_quarantined} samples quarantined"
