"""Executes a notebook in a kernel of its own through papermill, and ends the kernel afterwards, whatever happened."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from dflash_lib.launch import AGENT_S, SAVING_GRACE_S, Nodes
from dflash_lib.workbench.runs import PIPELINE_PID, REPOSITORY

JOB_GRACE_S = SAVING_GRACE_S + AGENT_S + 15.0  # at most: an interrupted kernel waits for its job, and answers then
LEFT_ALONE_S = 15.0  # from the request to end, and from the end of its last job, to SIGTERM
STARTS = 3  # Jupyter chooses free ports some milliseconds before the kernel binds them: another process may have them


def execute_notebook(notebook: Path, out: Path, values: dict[str, Any], stream: TextIO, starts: int = STARTS) -> str:
    """Executes `notebook` with papermill into `out`, which is there afterwards even when a cell failed.

    A kernel that dies before it is ready is started again, `starts` times in all: nothing was executed. Returns "" or
    what went wrong: the failing cell's error, or that the kernel died.
    """
    import papermill
    from jupyter_client.kernelspec import NoSuchKernel
    from nbclient.exceptions import DeadKernelError

    out.parent.mkdir(parents=True, exist_ok=True)
    logging.getLogger("papermill").setLevel(logging.ERROR)  # it warns of annotations that it does not understand
    try:
        papermill.execute_notebook(
            notebook, out, values, kernel_name="python3", kernel_manager_class=_manager_class(), language="python",
            cwd=REPOSITORY, progress_bar=False,
            extra_arguments=["--IPKernelApp.log_level=50"],  # else it warns of its TCP transport on every start
            stdout_file=_Indented(stream), stderr_file=_Indented(stream))
    except KeyboardInterrupt:
        for name in ("asyncio", "traitlets", "nbclient"):  # that the kernel ended while they waited for it is no news
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        raise
    except papermill.PapermillExecutionError as error:
        return f"{notebook.stem}: cell {error.cell_index} raised {error.ename}: {error.evalue}"
    except NoSuchKernel as error:
        return f"{notebook.stem}: no Jupyter kernel {error.name!r}; install ipykernel into this environment"
    except RuntimeError as error:
        if starts > 1 and not isinstance(error, DeadKernelError):  # nbclient's word for one that never answered
            stream.write(f"  {error}; starting the notebook's kernel again\n")
            return execute_notebook(notebook, out, values, stream, starts - 1)
        _keep_whole(out)
        return (f"{notebook.stem}: its kernel died ({error}). Most often it ran out of memory: look at `dmesg`, and "
                "lower token_budget or batch_samples. Running again continues from here.")
    return ""


def _manager_class() -> type:
    """The kernel manager class; jupyter_client takes half a second to import, which `status` need not spend."""
    from jupyter_client.manager import AsyncKernelManager

    class KernelManager(AsyncKernelManager):
        """Waits for an interrupted kernel as long as its job saves, and for one without a job some seconds.

        The first, because the next run would find the lock taken or the older checkpoint. The second, because a kernel
        of ipykernel 7.4 now and then does not end when it is asked to: its control thread, which answers, waits for a
        thread that the main thread has ended already, most often for ten seconds, now and then for good.
        """

        shutdown_wait_time = 2 * JOB_GRACE_S  # at half of it jupyter_client sends SIGTERM itself

        async def shutdown_kernel(self, now: bool = False, restart: bool = False) -> None:
            watch = asyncio.ensure_future(self._end_if_left_alone())
            try:
                await super().shutdown_kernel(now=now, restart=restart)
            finally:
                if not watch.cancel():
                    watch.result()  # it has ended by itself: whatever it raised is raised here

        async def _end_if_left_alone(self) -> None:
            last = time.monotonic()
            while time.monotonic() - last < LEFT_ALONE_S:
                await asyncio.sleep(0.2)
                if not self.has_kernel:
                    return
                if _has_job(self.provisioner.pid):
                    last = time.monotonic()
            if self.has_kernel:
                await self.signal_kernel(signal.SIGTERM)

    return KernelManager


def _has_job(kernel: int) -> bool:
    """Whether a process that the kernel started in a session of its own, as launch.run_torchrun does, lives; helpers
    in the kernel's own process group (multiprocessing's resource tracker) end with it."""
    import psutil

    try:
        return any(os.getpgid(child.pid) != kernel and child.status() != psutil.STATUS_ZOMBIE
                   for child in psutil.Process(kernel).children())
    except (psutil.NoSuchProcess, ProcessLookupError):
        return False  # the kernel, or the last child of it, has just ended; the caller looks again


def _keep_whole(out: Path) -> None:
    """papermill saves after every cell; a kernel that died before the first one leaves no file to look at."""
    import nbformat  # half a second or more, which `status` need not spend

    if not out.is_file():
        nbformat.write(nbformat.v4.new_notebook(), out)


class _Indented:
    """Passes a kernel's output on, two spaces in; a live bar's redrawing is left to JupyterLab."""

    def __init__(self, stream: TextIO):
        self.stream, self.at_start = stream, True

    def write(self, text: str) -> None:
        for line in text.splitlines(keepends=True):
            self.stream.write(f"  {line}" if self.at_start else line)
            self.at_start = line.endswith("\n")

    def flush(self) -> None:
        self.stream.flush()


@contextmanager
def kernel_environment(nodes: Nodes) -> Iterator[None]:
    """What the kernels inherit: this package first on the path, this environment's kernel, who started them, and the
    machines that share the job."""
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    values = {PIPELINE_PID: str(os.getpid()), "JUPYTER_PREFER_ENV_PATH": "1", "PYTHONPATH": path,
              **nodes.environment(), "TQDM_DISABLE": "1"}  # other libraries' bars would fill the executed notebooks
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
