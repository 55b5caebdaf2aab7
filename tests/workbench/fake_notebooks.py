"""Cheap notebooks for the pipeline's own tests: a kernel start each, no torch."""

from pathlib import Path

import nbformat
import yaml

from dflash_lib.workbench.pipeline import PipelineOptions

PARAMETERS = 'run_dir: str = ""  # the run\n'
OPEN = "from dflash_lib.workbench import open_run\n"


def write_notebook(folder: Path, name: str, parameters: str, *cells: str) -> Path:
    """Writes `folder`/`name`.ipynb with a title, a parameters cell of these lines and further code cells."""
    folder.mkdir(parents=True, exist_ok=True)
    notebook = nbformat.v4.new_notebook()
    tagged = nbformat.v4.new_code_cell(PARAMETERS + parameters)
    tagged.metadata["tags"] = ["parameters"]
    notebook.cells = [nbformat.v4.new_markdown_cell(f"# {name}"), tagged, *map(nbformat.v4.new_code_cell, cells)]
    nbformat.write(notebook, folder / f"{name}.ipynb")
    return folder / f"{name}.ipynb"


def opening(name: str, *parameters: str) -> str:
    """The cell that opens the run with these declared parameters."""
    keywords = "".join(f", {parameter}={parameter}" for parameter in parameters)
    return f'{OPEN}run = open_run(__notebook_name__="{name}", run_dir=run_dir{keywords})'


def finishing(results: str = "{}") -> str:
    """The cell that finishes the run with results written as a Python expression."""
    return f'run.finish(question="Why?", outcome="So.", results={results})'


def write_params(folder: Path, **values) -> Path:
    """Writes `folder`/job.yaml."""
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def options(folder: Path, **changes) -> PipelineOptions:
    """Options of a run of the notebooks in `folder`/notebooks with `folder`/job.yaml into `folder`/runs/job."""
    return PipelineOptions(**{"params_file": folder / "job.yaml", "notebooks_dir": folder / "notebooks",
                              "runs_dir": folder / "runs", **changes})
