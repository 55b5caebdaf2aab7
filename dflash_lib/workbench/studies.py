"""Studies: notebooks beside the pipeline that compare ways to do one thing, on a run that has what they need."""

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
    with sigterm_interrupts(), folder_lock(run, "run"), kernel_environment(ONE_MACHINE):
        (run / "results" / f"{name}.json").unlink(missing_ok=True)
        began = time.monotonic()
        error = execute_notebook(notebook, run / "notebooks" / notebook.name, values, stream)
    record = load_record(run, name)
    if not error and record is None:
        error = f"{name}: ended without run.finish(...), so it has no results"
    if not error:
        stream.write(f"{name}: passed, {len(record['checks'])} checks, {time.monotonic() - began:.0f} s\n")
    return error
