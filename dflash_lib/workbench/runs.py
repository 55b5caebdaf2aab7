"""A run is a folder; a notebook opens it, checks things, saves figures and finishes with its results.

    runs/<run_id>/  params.yaml  results/<notebook>.json  notebooks/*.ipynb (as executed)  figures/<notebook>/*.png
                    report/  stages/ (what a stage was executed with)  logs/  and the stages' own products

A notebook works the same in JupyterLab and under the pipeline. Opened by hand its cell wins over the run's params.yaml,
and every difference is printed and recorded in its results.
"""

import datetime
import io
import math
import os
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from dflash_lib.files import atomic_path, hash_value, read_json, write_json, write_text
from dflash_lib.locks import LOCK_NAME, lock_holder
from dflash_lib.workbench.parameters import RUN_DIR, all_declarations, read_parameters_file, resolve_parameters

REPOSITORY = Path(__file__).resolve().parents[2]
STUDIES = REPOSITORY / "notebooks" / "studies"
PIPELINE_PID = "DFLASH_PIPELINE_PID"  # set in the kernels that the pipeline starts
# hashed by content, pipeline.py
INPUT_PARAMETERS = ("model", "model_config", "conversations", "heldout_prompts", "vllm_reference")
RUN_STATUS = "logs/run.status.json"  # of a run: which notebook the pipeline is at, and how it ended
BOOKKEEPING = ("params.yaml", "results", "notebooks", "figures", "report", "stages", "logs")
OPERATORS = {"<=": lambda a, b: a <= b, ">=": lambda a, b: a >= b, "==": lambda a, b: a == b}


class RunError(ValueError):
    """A run folder that cannot be used as asked; the message says what to do."""


class CheckFailed(RuntimeError):
    """A notebook finished, its results are on disk, and at least one of its checks did not hold."""


@dataclass(frozen=True)
class Check:
    """A named comparison: `value op limit`."""

    name: str
    value: Any
    op: str
    limit: Any
    passed: bool
    note: str = ""

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"{self.name}: {self.value} {self.op} {self.limit} {'holds' if self.passed else 'does NOT hold'}{note}"


class SavedFigure:
    """A figure on disk that shows itself as the last expression of a cell, in JupyterLab and under papermill."""

    def __init__(self, path: Path, caption: str):
        self.path, self.caption = path, caption

    def _repr_png_(self) -> tuple[bytes, dict[str, str]]:
        return self.path.read_bytes(), {"alt": self.caption}

    def __repr__(self) -> str:
        return f"figure {self.path}"


def input_path(parameter: str, value: str | Path) -> Path:
    """Where the file or folder of a parameter lies: an absolute path as it is, a relative one from the repository.

    `model` may be a hub id (`organisation/name` or `organisation/name@revision`): the folder that it was downloaded to,
    downloading it first. Raises TargetError when the hub has to be asked and refuses.
    """
    path = REPOSITORY / Path(value).expanduser()
    if parameter != "model" or path.exists():
        return path
    from dflash_lib.target.hub import find_target, is_hub_id  # imports the hub's client, which few calls need

    name, _, revision = str(value).partition("@")
    return find_target(name, revision or None) if is_hub_id(name) else path


def runs_folder(params: dict[str, Any]) -> Path:
    """Where a job's run folders go: its parameter `runs_dir`, relative to the repository, or runs/."""
    return REPOSITORY / Path(params.get("runs_dir") or "runs").expanduser()


def run_folder(params: dict[str, Any], params_file: Path | str, runs_dir: Path | None = None,
               run_id: str | None = None) -> Path:
    """The folder of a job's run: `run_id`, or the parameter file's name, below `runs_dir`, or the job's own.

    Raises RunError for an id that is no plain name of a folder.
    """
    run_id = Path(params_file).stem if run_id is None else run_id
    if not re.fullmatch(r"[\w.+=,@ -]{1,100}", run_id) or run_id.strip(". ") == "" or run_id != run_id.strip():
        raise RunError(f"run id {run_id[:200]!r}: use a plain name of up to 100 letters, digits and . _ - + = , @; "
                       "--runs-dir says where its folder goes")
    return (runs_dir or runs_folder(params)) / run_id


class Run:
    """One notebook's view of a run folder. Made by `open_run`.

    params: the declared parameters as this notebook uses them; differences: those that differ from the run's
    params.yaml, name -> [the run's value, this notebook's value].
    """

    def __init__(self, folder: Path, notebook: str, params: dict[str, Any], differences: dict[str, list]):
        self.folder, self.notebook, self.params, self.differences = folder, notebook, params, differences
        self.checks: list[Check] = []
        self.figures: list[dict[str, str]] = []
        self.began, self.began_ns = time.monotonic(), time.time_ns()
        self._touched: set[Path] = set()
        self._read_results: dict[str, str] = {}

    @property
    def job(self) -> dict[str, Any]:
        """Every parameter of the run, whichever notebook declares it."""
        return read_parameters_file(self.folder / "params.yaml")

    def path(self, *parts: str) -> Path:
        """A path below the run folder. The pipeline repeats this notebook when what it found there has changed."""
        path = self.folder.joinpath(*parts)
        if parts and Path(*parts).parts[0] not in BOOKKEEPING:
            self._touched.add(path)
        return path

    def resolve(self, path: str | Path) -> Path:
        """`input_path`: the working directory does not matter, and `model` may be a hub id."""
        parameter = next((name for name in INPUT_PARAMETERS if str(self.params.get(name)) == str(path)), "")
        resolved = input_path(parameter, path)
        if not parameter:
            self._touched.add(resolved)
        return resolved

    def check(self, name: str, value: Any, limit: Any, op: str = "<=", note: str = "") -> bool:
        """Records whether `value op limit` holds, and returns it. NaN never passes."""
        if op not in OPERATORS:
            raise ValueError(f"check {name!r}: op must be one of {', '.join(OPERATORS)}, found {op!r}")
        if any(check.name == name for check in self.checks):
            raise ValueError(f"check {name!r}: recorded already; give every check its own name")
        value, limit = _scalar(value), _scalar(limit)
        passed = bool(OPERATORS[op](value, limit))
        self.checks.append(Check(name, to_json(value), op, to_json(limit), passed, note))
        return passed

    def checks_table(self):
        """The checks so far as a pandas DataFrame, for display."""
        import pandas as pd  # here, not above: half a second that most users of this module need not spend

        rows = [[c.name, show(c.value), f"{c.op} {show(c.limit)}", "pass" if c.passed else "FAIL", c.note]
                for c in self.checks]
        return pd.DataFrame(rows, columns=["check", "value", "limit", "result", "note"]).set_index("check")

    def figure(self, figure, name: str, caption: str = "") -> SavedFigure:
        """Saves a matplotlib Figure as figures/<notebook>/<name>.png and returns it, to be a cell's last expression.

        The image is reduced to 256 colours: a third of the size, and no difference that an eye finds in a plot.
        """
        from matplotlib import pyplot
        from PIL import Image

        path = self.folder / "figures" / self.notebook / f"{name}.png"
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=figure.dpi, facecolor="white")
        pyplot.close(figure)  # a pyplot figure would be shown a second time at the end of the cell
        with atomic_path(path) as partial:
            Image.open(buffer).convert("RGB").quantize(256).save(partial, format="png", optimize=True)
        self.figures = [f for f in self.figures if f["name"] != name] + [{"name": name, "caption": caption}]
        return SavedFigure(path, caption)

    def results(self, notebook: str) -> dict[str, Any]:
        """The results of an earlier notebook of this run.

        Raises RunError, naming what to run, when they are missing. Says so when a check of that notebook failed.
        """
        record = load_record(self.folder, notebook)
        if record is None:
            raise RunError(f"run {self.folder} has no results of {notebook} yet. Run that notebook first: "
                           f'`python -m dflash_lib run PARAMS --run-id {self.folder.name} --only {notebook}`, or open '
                           f'it with run_dir = "{self.folder}"')
        if not record["passed"]:
            print(f"note: a check of {notebook} failed; its results are used all the same")
        self._read_results[notebook] = hash_value(record["results"])
        return record["results"]

    def finish(self, *, question: str, outcome: str, headline_figure: str = "",
               results: dict[str, Any] | None = None):
        """Writes results/<notebook>.json, then raises CheckFailed if a check failed.

        question, outcome: one sentence each, for the report. headline_figure: the name of a saved figure. Returns the
        single numbers and words among `results` as a DataFrame for the last cell.
        """
        import pandas as pd

        if headline_figure and headline_figure not in [f["name"] for f in self.figures]:
            raise ValueError(f"headline_figure {headline_figure!r} was not saved; saved: "
                             f"{[f['name'] for f in self.figures]}")
        results = to_json(results or {}, "results")
        files = {self._recorded(path): file_signature(path) for path in sorted(self._touched)}
        written = [str(Path(path) / file) for path, signature in files.items()
                   for file, (_, mtime_ns) in signature.items() if mtime_ns >= self.began_ns]
        failed = [check for check in self.checks if not check.passed]
        write_json(self.folder / "results" / f"{self.notebook}.json", {
            "notebook": self.notebook, "passed": not failed, "question": question, "outcome": outcome,
            "headline_figure": headline_figure, "figures": self.figures, "checks": [asdict(c) for c in self.checks],
            "results": results, "parameters": self.params, "differences": self.differences,
            "seconds": round(time.monotonic() - self.began, 2),
            "finished": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "read_results": self._read_results, "files": files, "written": written,
        })
        if failed:
            raise CheckFailed(f"{self.notebook}: {len(failed)} of {len(self.checks)} checks failed: "
                              + "; ".join(map(str, failed)))
        rows = {name: show(value) for name, value in results.items() if not isinstance(value, dict | list)}
        return pd.DataFrame({"value": rows.values()}, index=pd.Index(rows.keys(), name=self.notebook))


    def _recorded(self, path: Path) -> str:
        """A path as results hold it: relative below the run folder, so that a copied run is judged by its own files."""
        return str(path.relative_to(self.folder)) if path.is_relative_to(self.folder) else str(path)


def open_run(*, __notebook_name__: str, run_dir: str = "", **parameters: Any) -> Run:
    """Opens the run of a notebook; every declared parameter is passed by keyword.

    run_dir: the run folder (relative: from the repository); "" starts a new run of notebooks/params/demo.yaml. Raises
    RunError for a folder that is not a run and while the pipeline works on that run.
    """
    if run_dir:
        folder = REPOSITORY / Path(run_dir).expanduser()
    else:
        folder = REPOSITORY / "runs" / f"demo-by-hand-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    if not (folder / "params.yaml").is_file():
        if folder.exists() and any(folder.iterdir()):
            raise RunError(f"{folder}: no params.yaml, so this is not a run folder")
        _start_demo_run(folder)
    holder = lock_holder(folder)
    if holder is not None and str(holder["pid"]) != os.environ.get(PIPELINE_PID):
        raise RunError(f"{folder}: the pipeline (process {holder['pid']} on {holder['host']}) is working on this run; "
                       f"wait for it, or stop it: `python -m dflash_lib stop {folder}`; if no such process exists on "
                       f"that host, remove {folder / LOCK_NAME}")
    wanted = read_parameters_file(folder / "params.yaml")
    parameters = to_json(parameters, "parameters")
    of_pipeline = __notebook_name__[:1].isdigit()  # a study's own parameters are no job's
    differences = {name: [wanted.get(name, "(not set)"), value] for name, value in parameters.items()
                   if (name in wanted or of_pipeline) and wanted.get(name, ...) != value}
    _show_whole_texts()
    print(f"run folder: {folder}")
    for name, (theirs, ours) in differences.items():
        print(f"note: {name} = {ours!r} here, {theirs!r} in the run's params.yaml; this notebook's value is used")
    return Run(folder, __notebook_name__, parameters, differences)


def _show_whole_texts() -> None:
    """Tables on a page show their texts whole: pandas cuts them at 50 characters, in HTML, too."""
    import pandas as pd

    pd.set_option("display.max_colwidth", None)


def study_names() -> list[str]:
    """The notebooks beside the pipeline, in notebooks/studies."""
    return sorted(path.stem for path in STUDIES.glob("*.ipynb"))


def notebook_paths(folder: Path | str = REPOSITORY / "notebooks") -> list[Path]:
    """The pipeline's notebooks in order: `NN_name.ipynb`. Raises RunError when there are none."""
    paths = sorted(Path(folder).glob("[0-9][0-9]_*.ipynb"))
    if not paths:
        raise RunError(f"{folder}: no notebooks named NN_name.ipynb here; run from a checkout of the repository, "
                       "installed with `pip install -e .`")
    return paths


def write_params(folder: Path, params: dict[str, Any]) -> None:
    """Writes the run's params.yaml: every parameter of the job."""
    write_text(folder / "params.yaml", yaml.safe_dump(params, sort_keys=False, allow_unicode=True))


def load_record(folder: Path, notebook: str) -> dict[str, Any] | None:
    """What a notebook's `finish` wrote, or None. Raises RunError when the file is not that."""
    path = folder / "results" / f"{notebook}.json"
    if not path.is_file():
        return None
    try:
        record = read_json(path)
    except ValueError as error:
        raise RunError(f"{error} Run {notebook} again.") from error
    if not isinstance(record, dict) or not isinstance(record.get("results"), dict):
        raise RunError(f"{path}: these are not the results of a notebook. Run {notebook} again.")
    return record


def file_signature(path: Path) -> dict[str, list[int]]:
    """Size in bytes and modification time in ns of the file `path`, or of each file below the folder `path`."""
    files = [path] if path.is_file() else [p for p in sorted(path.rglob("*")) if p.is_file()] if path.is_dir() else []
    return {str(file.relative_to(path)): [(s := file.stat()).st_size, s.st_mtime_ns] for file in files}


def to_json(value: Any, where: str = "value") -> Any:
    """`value` in JSON's own types: arrays as lists, paths as text, NaN and infinities as "nan", "inf", "-inf".

    Raises TypeError, naming the place, for anything else.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): to_json(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # NumPy scalars and arrays, tensors
        return to_json(value.tolist(), where)
    raise TypeError(f"{where}: {type(value).__name__} cannot be written as JSON; pass numbers, text, lists and dicts")


def show(value: Any) -> str:
    """A value for a table: numbers short, the rest as text."""
    return f"{value:.6g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def _scalar(value: Any) -> Any:
    """NumPy scalars and one-element tensors as Python numbers, so that comparing gives one bool."""
    return value.item() if hasattr(value, "item") else value


def _start_demo_run(folder: Path) -> None:
    demo = REPOSITORY / "notebooks" / "params" / "demo.yaml"
    params = resolve_parameters(read_parameters_file(demo), all_declarations(notebook_paths()), str(demo))
    assert RUN_DIR not in params
    folder.mkdir(parents=True, exist_ok=True)
    write_params(folder, params)
