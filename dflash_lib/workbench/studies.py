"""Studies: notebooks beside the pipeline that compare ways to do one thing, on a run that has what they need."""

import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from dflash_lib.launch import ONE_MACHINE
from dflash_lib.locks import folder_lock
from dflash_lib.workbench.kernels import execute_notebook, kernel_environment
from dflash_lib.workbench.parameters import RUN_DIR, ParameterError, convert, declared_parameters
from dflash_lib.workbench.pipeline import sigterm_interrupts
from dflash_lib.workbench.runs import STUDIES, RunError, load_record, study_names


def run_study(name: str, run: Path, changes: dict[str, Any], stream: TextIO | None = None) -> str:
    """Executes notebooks/studies/<name>.ipynb on a run folder; returns "" or what went wrong.

    The page is `notebooks/unfinished/<name>.ipynb` of the run until the study has results. One that ends before leaves
    the page and the results of an earlier one as they were: those may have taken hours.

    changes: parameters of the study that are not to be its defaults. Raises RunError for a study or run that there is
    not, ParameterError for parameters that the study does not declare or values that they cannot have, Locked while
    another process works on the run, and KeyboardInterrupt on Ctrl-C or SIGTERM.
    """
    stream, notebook = stream or sys.stdout, STUDIES / f"{name}.ipynb"
    if name not in study_names():
        raise RunError(f"study {name!r}: no such notebook; there are: {', '.join(study_names())}")
    if not (run / "params.yaml").is_file():
        raise RunError(f"{run}: no params.yaml, so this is not a run folder")
    declared, values = declared_parameters(notebook), {RUN_DIR: str(run.resolve())}
    for key, value in changes.items():
        if key not in declared or key == RUN_DIR:
            raise ParameterError(f"{key}: the study {name} has no such parameter; it has: "
                                 f"{', '.join(sorted(set(declared) - {RUN_DIR}))}")
        values[key] = convert(value, declared[key], f"study {name}")
    page, results = run / "notebooks" / notebook.name, run / "results" / f"{name}.json"
    unfinished = page.parent / "unfinished" / page.name
    with sigterm_interrupts(), folder_lock(run, "run"), kernel_environment(ONE_MACHINE):
        before, began = _version(results), time.monotonic()
        error = execute_notebook(notebook, unfinished, values, stream)
        has_results = _version(results) != before
        if not error and not has_results:
            error = f"{name}: ended without run.finish(...), so it has no results"
        if has_results or before is None:
            os.replace(unfinished, page)
        else:
            error += f"\nIts page is {unfinished}; {page} and its results are those of an earlier study."
    if not error:
        num_checks = len(load_record(run, name)["checks"])
        stream.write(f"{name}: passed, {num_checks} checks, {time.monotonic() - began:.0f} s\n")
    return error


def _version(path: Path) -> tuple[int, int] | None:
    """Differs when a file was written anew, by renaming or in place."""
    if not path.is_file():
        return None
    stat = path.stat()
    return stat.st_ino, stat.st_mtime_ns
