"""Run folders and parameters, the papermill pipeline, capacity."""

from dflash_lib.workbench.runs import CheckFailed, Run, RunError, open_run

__all__ = ["CheckFailed", "Run", "RunError", "open_run"]
