"""Executes the notebooks of a run in order through papermill, each only when something that it depends on changed.

A stage (one notebook) is current when its last execution passed and nothing of this changed since: its declared
parameters, the content of the files that they name, the notebook's source, the package's source, the results that it
read from earlier notebooks, and the files that it used or made in the run. A code change re-executes a notebook; stores
and checkpoints are kept or discarded by their own plan and configuration only.
"""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from dflash_lib.files import hash_file, hash_tree, hash_value, read_json, write_json
from dflash_lib.job_status import JobStatus
from dflash_lib.launch import ONE_MACHINE, Nodes
from dflash_lib.locks import folder_lock
from dflash_lib.workbench.kernels import execute_notebook, kernel_environment
from dflash_lib.workbench.parameters import (
    RUN_DIR,
    Parameter,
    all_declarations,
    read_notebook,
    read_parameters_file,
    resolve_parameters,
)
from dflash_lib.workbench.runs import (
    INPUT_PARAMETERS,
    REPOSITORY,
    RUN_STATUS,
    RunError,
    file_signature,
    input_path,
    load_record,
    notebook_paths,
    run_folder,
    write_params,
)

PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """run_id: None = the parameter file's name, so that a second call continues the first's run. start, stop: first and
    last notebook to look at; only: the one notebook to look at; force: execute even what is current; nodes: the
    machines that share the job, of which this is node 0; runs_dir: None = the job's own, or runs/."""

    params_file: Path
    run_id: str | None = None
    start: str | None = None
    stop: str | None = None
    only: str | None = None
    force: bool = False
    nodes: Nodes = ONE_MACHINE
    notebooks_dir: Path = REPOSITORY / "notebooks"
    runs_dir: Path | None = None


@dataclass(frozen=True)
class Stage:
    """What happened to one notebook: state is "passed", "current" (skipped), "failed" or "not run"."""

    notebook: str
    state: str
    reason: str = ""
    seconds: float = 0.0


@dataclass
class PipelineResult:
    """The run folder, its stages in order, and what stopped the run ("" when nothing did)."""

    folder: Path
    stages: list[Stage] = field(default_factory=list)
    error: str = ""


@dataclass(frozen=True)
class Job:
    """A call that can begin: the notebooks, those of them to look at, what each declares, every parameter's value, and
    the run folder, which may not be there yet."""

    notebooks: list[Path]
    chosen: list[Path]
    declarations: dict[str, dict[str, Parameter]]
    params: dict[str, Any]
    folder: Path


def check_job(options: PipelineOptions) -> Job:
    """Checks what a user may have got wrong; nothing is written. Raises ValueError (ParameterError, RunError) and
    FileNotFoundError."""
    notebooks = notebook_paths(options.notebooks_dir)
    chosen = choose_notebooks(notebooks, options.start, options.stop, options.only)
    declarations = all_declarations(notebooks)
    params = resolve_parameters(read_parameters_file(options.params_file), declarations, str(options.params_file))
    for name in INPUT_PARAMETERS:
        if params.get(name) and not input_path(name, params[name]).exists():
            raise FileNotFoundError(f"{options.params_file}: {name}: {params[name]}: no such file or folder"
                                    + (f" below {REPOSITORY}" if not Path(params[name]).is_absolute() else ""))
    return Job(notebooks, chosen, declarations, params,
               run_folder(params, options.params_file, options.runs_dir, options.run_id))


def run_pipeline(options: PipelineOptions, stream: TextIO | None = None) -> PipelineResult:
    """Runs the job and returns what happened; a failing notebook ends it and is in the result, not raised.

    Raises ValueError (ParameterError, RunError, Locked) and FileNotFoundError, before anything is executed, for what
    the user can put right, and KeyboardInterrupt on Ctrl-C or SIGTERM, with the kernel and its jobs stopped.
    """
    stream = stream or sys.stdout
    job = check_job(options)
    result = PipelineResult(job.folder)
    with (sigterm_interrupts(), folder_lock(job.folder, "run"), kernel_environment(options.nodes),
          JobStatus(job.folder / RUN_STATUS, "run", len(job.chosen), "notebooks") as status):
        _say_changed(job.folder, job.params, stream)
        write_params(job.folder, job.params)
        for notebook in job.notebooks:
            if notebook not in job.chosen or status.error:
                result.stages.append(Stage(notebook.stem, "not run"))
                continue
            status.at(notebook.stem, job.chosen.index(notebook))
            declared = job.declarations[notebook.stem]
            stage, status.error = _run_stage(notebook, declared, job.params, job.folder, options.force, stream)
            result.stages.append(stage)
        if not status.error:
            status.at("", len(job.chosen))
        result.error = status.error
    return result


def _say_changed(folder: Path, params: dict[str, Any], stream: TextIO) -> None:
    """Says which parameters of an earlier call on this run folder are others now."""
    if not (folder / "params.yaml").is_file():
        return
    before = read_parameters_file(folder / "params.yaml")
    changed = [f"{name} {before.get(name)!r} -> {params.get(name)!r}" for name in {**before, **params}
               if before.get(name) != params.get(name)]
    if changed:
        _say(stream, f"{folder}: run before with other parameters: {', '.join(changed)}")


def choose_notebooks(notebooks: list[Path], start: str | None = None, stop: str | None = None,
                     only: str | None = None) -> list[Path]:
    """The notebooks from `start` to `stop`, or `only` one, by their names. Raises RunError for names that are none, and
    when nothing is left."""
    names = [notebook.stem for notebook in notebooks]
    for option, name in (("--from", start), ("--to", stop), ("--only", only)):
        if name is not None and name not in names:
            raise RunError(f"{option} {name}: no such notebook; there are: {', '.join(names)}")
    if only and (start or stop):
        raise RunError(f"--only and {'--from' if start else '--to'} exclude each other")
    first, last = names.index(only or start or names[0]), names.index(only or stop or names[-1])
    if first > last:
        raise RunError(f"--from {start} comes after --to {stop}: there is nothing to run")
    return notebooks[first:last + 1]


def _run_stage(notebook: Path, declared: dict[str, Parameter], params: dict[str, Any], folder: Path, force: bool,
               stream: TextIO) -> tuple[Stage, str]:
    """Executes one notebook unless it is current. Returns the stage and, when it failed, what to tell the user."""
    name = notebook.stem
    key = stage_key(notebook, {key: params[key] for key in declared if key != RUN_DIR}, folder)
    reason = "forced" if force else why_stale(folder, name, key)
    if not reason:
        _say(stream, f"{name}: current, not repeated (--force repeats it)")
        return Stage(name, "current"), ""
    _say(stream, f"{name}: running ({reason})")
    began = time.monotonic()
    record_file = folder / "results" / f"{name}.json"
    for old in (record_file, folder / "stages" / f"{name}.json"):
        old.unlink(missing_ok=True)  # nothing of an earlier execution passes for this one's
    values = {**{key: params[key] for key in declared if key != RUN_DIR}, RUN_DIR: str(folder.resolve())}
    error = execute_notebook(notebook, folder / "notebooks" / notebook.name, values, stream)
    seconds = time.monotonic() - began
    record = load_record(folder, name)
    if record is not None and not record["passed"]:
        failed = [c for c in record["checks"] if not c["passed"]]
        error = "\n".join([f"{name}: {len(failed)} of {len(record['checks'])} checks failed", *[
            f"  {c['name']}: measured {c['value']}, must be {c['op']} {c['limit']}"
            + (f" ({c['note']})" if c["note"] else "") for c in failed]])
    elif not error and record is None:
        error = f"{name}: ended without run.finish(...), so it has no results; call it in the last cell"
    if error:
        error += f"\nThe notebook as executed: {folder / 'notebooks' / notebook.name}"
        return Stage(name, "failed", reason, seconds), error
    write_json(folder / "stages" / f"{name}.json", {**key, "results_file": hash_file(record_file)})
    _say(stream, f"{name}: passed, {len(record['checks'])} checks, {seconds:.0f} s")
    return Stage(name, "passed", reason, seconds), ""


def stage_key(notebook: Path, params: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What decides, apart from the run's own files, whether a stage is current. Hashes of big inputs are remembered
    by size and modification time in stages/hashes.json."""
    cells = [[cell["cell_type"], "".join(cell["source"])] for cell in read_notebook(notebook)["cells"]]
    inputs = {}
    memory_file = folder / "stages" / "hashes.json"
    memory = _noted(memory_file)
    for name in INPUT_PARAMETERS:
        if isinstance(params.get(name), str) and params[name]:
            path = input_path(name, params[name])
            signature = file_signature(path)
            known = memory.get(str(path))
            if not isinstance(known, dict) or known.get("signature") != signature or "sha256" not in known:
                known = {"signature": signature, "sha256": hash_value(
                    [[file, hash_file(path / file)] for file in sorted(signature)])}
                memory[str(path)] = known
            inputs[name] = known["sha256"]
    write_json(memory_file, memory)
    return {"parameters": params, "inputs": inputs, "notebook": hash_value(cells), "package": hash_tree(PACKAGE)}


def _noted(path: Path) -> dict[str, Any]:
    """A file of stages/, {} when it is absent or damaged: whatever it says can be found out again."""
    try:
        value = read_json(path) if path.is_file() else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _readable_record(folder: Path, name: str) -> dict[str, Any] | None:
    """A notebook's results, None when it left none or they are damaged: then it is executed again."""
    try:
        record = load_record(folder, name)
    except RunError:
        return None
    whole = record is not None and {"read_results", "files", "written", "passed", "checks"} <= record.keys()
    return record if whole else None


def why_stale(folder: Path, name: str, key: dict[str, Any]) -> str:
    """Why the stage has to be executed, or "" when it is current."""
    stage = _noted(folder / "stages" / f"{name}.json")
    record = _readable_record(folder, name)
    if record is None or not {*key, "results_file"} <= stage.keys():
        return "not finished before"
    if stage["results_file"] != hash_file(folder / "results" / f"{name}.json"):
        return "its results were written by hand since"
    for what, now in key.items():
        before = stage[what]
        if before == now:
            continue
        if isinstance(now, dict) and isinstance(before, dict):
            changed = [k for k in {**before, **now} if before.get(k, ...) != now.get(k, ...)]
            return f"changed {what}: {', '.join(changed)}"
        return f"the {what}'s source changed"
    for other, before in record["read_results"].items():
        theirs = _readable_record(folder, other)
        if theirs is None or hash_value(theirs["results"]) != before:
            return f"the results of {other} changed"
    rewritten = _written_later(folder, name)
    for path, before in record["files"].items():
        now = file_signature(folder / path)  # below the run folder where it is relative
        for file, signature in before.items():
            if now.get(file) != signature and (now.get(file) is None
                                               or rewritten.get(str(Path(path) / file)) != now[file]):
                return f"{path} changed"
    return ""


def _written_later(folder: Path, name: str) -> dict[str, list[int]]:
    """Files that later notebooks wrote, with their signatures: an export below the drafter's folder is no change of
    what the training left there."""
    found = {}
    for path in sorted((folder / "results").glob("*.json")):
        record = _readable_record(folder, path.stem) if path.stem > name else None
        for touched, signatures in (record or {"files": {}})["files"].items():
            found |= {file: signature for part, signature in signatures.items()
                      if (file := str(Path(touched) / part)) in record["written"]}
    return found


def _say(stream: TextIO, text: str) -> None:
    stream.write(f"[{time.strftime('%H:%M:%S')}] {text}\n")
    stream.flush()


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Makes SIGTERM end the work as Ctrl-C does, kernel and all. Outside the main thread nothing is changed."""

    def interrupt(*_) -> None:
        raise KeyboardInterrupt

    try:
        before: Callable | int | None = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
