"""A notebook's kernel: it waits for its job when it is interrupted, for nothing else, and starts in spite of a port
that another process took."""

import os
from io import StringIO

import nbformat
import psutil
import pytest

from dflash_lib.launch import ONE_MACHINE
from dflash_lib.workbench import kernels
from dflash_lib.workbench.pipeline import sigterm_interrupts


@pytest.fixture
def execute(tmp_path):
    """Executes a notebook of one cell; what went wrong and what was printed."""

    def execute(source: str, **changes) -> tuple[str, str]:
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)]), tmp_path / "n.ipynb")
        stream = StringIO()
        with kernels.kernel_environment(ONE_MACHINE):
            error = kernels.execute_notebook(tmp_path / "n.ipynb", tmp_path / "out" / "n.ipynb", {}, stream, **changes)
        return error, stream.getvalue()

    return execute


STOPPED = """
import os, signal, subprocess, sys, time
job = subprocess.Popen([sys.executable, "-c", {saving!r}], start_new_session=True)
try:
    os.kill({parent}, signal.SIGTERM)
    time.sleep(60)
except KeyboardInterrupt:
    job.wait()
    open({seen!r}, "w").close()
"""


def test_a_run_that_is_stopped_ends_after_its_job_has_saved(execute, tmp_path, monkeypatch):
    """Not some seconds after the signal, as kernels are wont to: the next run would find an older checkpoint, and the
    job's processes still there."""
    monkeypatch.setattr(kernels, "LEFT_ALONE_S", 1.5)
    saving = f"import time; time.sleep(8); open({str(tmp_path / 'saved')!r}, 'w').close()"
    source = STOPPED.format(parent=os.getpid(), saving=saving, seen=str(tmp_path / "seen"))
    with pytest.raises(KeyboardInterrupt), sigterm_interrupts():
        execute(source)
    assert (tmp_path / "saved").exists() and (tmp_path / "seen").exists()


@pytest.mark.parametrize("helper", [False, True], ids=["alone", "with a process of its own group"])
def test_a_kernel_that_does_not_end_is_ended(execute, tmp_path, monkeypatch, helper):
    """CI waited an hour for two that hung after their last cell, when the patience for a job was everybody's."""
    monkeypatch.setattr(kernels, "LEFT_ALONE_S", 1.5)
    source = ("import atexit, os, subprocess, sys, time\n"
              f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
              f"atexit.register(lambda: (time.sleep(90), open({str(tmp_path / 'by itself')!r}, 'w').close()))\n")
    if helper:
        source += "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
    assert execute(source)[0] == ""
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text())) and not (tmp_path / "by itself").exists()


def dying_before_it_is_ready(folder, times, monkeypatch):
    """The environment of the next kernels: so many of them die while they start."""
    (folder / "sitecustomize.py").write_text(
        "import os, sys\nfrom pathlib import Path\n"
        "if 'ipykernel_launcher' in sys.orig_argv:\n"
        f"    died = Path({str(folder / 'died')!r})\n"
        "    count = len(died.read_text()) if died.exists() else 0\n"
        f"    if count < {times}:\n        died.write_text('x' * (count + 1))\n        os._exit(1)\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_a_kernel_that_dies_before_it_is_ready_is_started_again(execute, tmp_path, monkeypatch):
    dying_before_it_is_ready(tmp_path, kernels.STARTS - 1, monkeypatch)
    error, printed = execute("print('executed')")
    assert error == "" and printed.count("executed") == 1
    assert printed.count("starting the notebook's kernel again") == kernels.STARTS - 1


def test_one_that_always_dies_is_reported(execute, tmp_path, monkeypatch):
    dying_before_it_is_ready(tmp_path, 100, monkeypatch)
    error, _ = execute("print('executed')")
    assert "its kernel died" in error and len((tmp_path / "died").read_text()) == kernels.STARTS
    assert [cell.outputs for cell in nbformat.read(tmp_path / "out" / "n.ipynb", 4).cells] == [[]]


def test_a_kernel_that_dies_in_a_cell_is_not_started_again(execute, tmp_path):
    error, printed = execute(f"open({str(tmp_path / 'times')!r}, 'a').write('x'); import os; os._exit(1)")
    assert "its kernel died" in error and (tmp_path / "times").read_text() == "x" and "again" not in printed
