import os
import shutil
import signal
import subprocess
import sys
import time
from io import StringIO

import nbformat
import psutil
import pytest

from dflash_lib.files import read_json
from dflash_lib.locks import LOCK_NAME, Locked, folder_lock
from dflash_lib.workbench import pipeline
from dflash_lib.workbench.parameters import ParameterError
from dflash_lib.workbench.pipeline import run_pipeline
from dflash_lib.workbench.runs import REPOSITORY, RunError
from tests.workbench.fake_notebooks import finishing, opening, options, write_notebook, write_params

WAIT_S = 120  # for something that takes a second: only a hang reaches it


def run(folder, **changes):
    """States of the stages, the result and what was printed."""
    stream = StringIO()
    result = run_pipeline(options(folder, **changes), stream)
    return [stage.state for stage in result.stages], result, stream.getvalue()


@pytest.fixture
def job(tmp_path):
    """Two notebooks: 01_a writes a product, 02_b reads 01_a's results and its product, and checks y <= 5."""
    notebooks = tmp_path / "notebooks"
    write_notebook(notebooks, "01_a", "x: int = 1\nconversations: str = ''\n", opening("01_a", "x", "conversations"),
                   "print('step 1 of 2')\nif not run.path('product').exists():\n"
                   "    run.path('product').write_text('made')",
                   finishing("{'x': x}"))
    write_notebook(notebooks, "02_b", "y: int = 1\n", opening("02_b", "y"),
                   "results = run.results('01_a')\ntext = run.path('product').read_text()",
                   "run.check('y is small', y, 5, note='made up')", finishing("{'y': y, 'text': text}"))
    write_params(tmp_path, x=2)
    return tmp_path


def test_notebooks_run_in_order_and_a_second_call_repeats_nothing(job):
    states, result, printed = run(job)
    assert states == ["passed", "passed"] and result.error == ""
    assert result.folder == job / "runs" / "job"
    assert "  step 1 of 2\n" in printed and "02_b: passed, 1 checks" in printed
    assert read_json(result.folder / "results" / "02_b.json")["results"] == {"y": 1, "text": "made"}
    assert (result.folder / "params.yaml").read_text() == "x: 2\nconversations: ''\ny: 1\n"
    executed = nbformat.read(result.folder / "notebooks" / "01_a.ipynb", 4)
    assert "step 1 of 2" in str(executed.cells[-2].outputs)
    assert not (result.folder / LOCK_NAME).exists()

    states, _, printed = run(job)
    assert states == ["current", "current"] and printed.count("current, not repeated") == 2


def test_only_from_to_and_force(job):
    assert run(job)[0] == ["passed", "passed"]
    assert run(job, only="01_a", force=True)[0] == ["passed", "not run"]
    assert run(job, start="02_b")[0] == ["not run", "current"]
    assert run(job, start="02_b", force=True)[0] == ["not run", "passed"]
    assert run(job, stop="01_a", force=True)[0] == ["passed", "not run"]
    assert run(job, start="02_b", stop="02_b", force=True)[0] == ["not run", "passed"]
    for bad in ({"only": "03_c"}, {"start": "03_c"}, {"stop": "03_c"}):
        with pytest.raises(RunError, match="03_c: no such notebook; there are: 01_a, 02_b"):
            run(job, **bad)
    for bad in ({"start": "01_a"}, {"stop": "01_a"}):
        with pytest.raises(RunError, match="exclude each other"):
            run(job, only="01_a", **bad)
    with pytest.raises(RunError, match="--from 02_b comes after --to 01_a"):
        run(job, start="02_b", stop="01_a")


def test_what_a_stage_depends_on_makes_it_run_again(job, monkeypatch):
    data = job / "data.jsonl"
    data.write_text("one\n")
    write_params(job, x=2, conversations=str(data))
    assert run(job)[0] == ["passed", "passed"]
    assert run(job)[0] == ["current", "current"]

    write_params(job, x=3, conversations=str(data))  # a parameter of 01_a, whose results 02_b read
    states, result, printed = run(job)
    assert states == ["passed", "passed"]
    assert "01_a: running (changed parameters: x)" in printed
    assert "02_b: running (the results of 01_a changed)" in printed

    data.write_text("two\n")  # the content of a file that a parameter names
    states, _, printed = run(job)
    assert states == ["passed", "current"] and "changed inputs: conversations" in printed

    os.utime(data)  # touched, same content
    assert run(job)[0] == ["current", "current"]

    (result.folder / "product").unlink()  # a product that both used
    states, _, printed = run(job)
    assert states == ["passed", "passed"] and "product changed" in printed

    write_notebook(job / "notebooks", "02_b", "y: int = 1\n", opening("02_b", "y"), finishing())
    states, _, printed = run(job)
    assert states == ["current", "passed"] and "the notebook's source changed" in printed

    monkeypatch.setattr(pipeline, "hash_tree", lambda folder: "another package")
    states, _, printed = run(job)
    assert states == ["passed", "passed"] and "the package's source changed" in printed


def test_what_a_later_notebook_writes_is_no_change_of_an_earlier_one(job):
    """As when 07 exports below the folder that 06 trains in, and 06 is executed again after that."""
    write_notebook(job / "notebooks", "01_a", "x: int = 1\n", opening("01_a", "x"),
                   "run.path('drafter').mkdir(exist_ok=True)\nrun.path('drafter', 'best').write_text(str(x))",
                   finishing())
    write_notebook(job / "notebooks", "02_b", "y: int = 1\n", opening("02_b", "y"),
                   "run.path('drafter', 'best').read_text()\nrun.path('drafter', 'export').write_text('e')",
                   finishing())
    assert run(job)[0] == ["passed", "passed"]
    assert run(job)[0] == ["current", "current"]
    assert run(job, force=True)[0] == ["passed", "passed"]
    states, result, printed = run(job)
    assert states == ["current", "current"], printed
    (result.folder / "drafter" / "export").write_text("edited by hand")
    assert run(job)[0] == ["passed", "passed"]


def test_results_written_by_hand_do_not_pass_for_the_pipelines(job):
    _, result, _ = run(job)
    subprocess.run([sys.executable, "-c", f"{opening('02_b')[:-1]}, y=9)\n{finishing()}"
                    .replace("run_dir=run_dir", f"run_dir={str(result.folder)!r}")], cwd=REPOSITORY, check=True,
                   capture_output=True)
    states, _, printed = run(job)
    assert states == ["current", "passed"] and "written by hand" in printed


def test_a_failing_check_stops_the_run_and_is_named(job):
    write_notebook(job / "notebooks", "03_c", "", opening("03_c"), finishing())
    write_params(job, y=7)
    states, result, _ = run(job)
    assert states == ["passed", "failed", "not run"]
    assert "02_b: 1 of 1 checks failed" in result.error
    assert "y is small: measured 7, must be <= 5 (made up)" in result.error
    executed = nbformat.read(result.folder / "notebooks" / "02_b.ipynb", 4)
    assert any(output.get("ename") == "CheckFailed" for cell in executed.cells for output in cell.get("outputs", []))
    assert read_json(result.folder / "results" / "02_b.json")["results"]["y"] == 7
    assert run(job)[0] == ["current", "failed", "not run"]  # a failed stage is never current
    write_params(job, y=5)
    assert run(job)[0] == ["current", "passed", "passed"]


def test_a_failing_cell_and_a_missing_finish_are_named(job):
    write_notebook(job / "notebooks", "02_b", "", opening("02_b"), "raise ValueError('no such store')")
    states, result, _ = run(job)
    assert states == ["passed", "failed"] and "raised ValueError: no such store" in result.error
    assert "no such store" in (result.folder / "notebooks" / "02_b.ipynb").read_text()
    write_notebook(job / "notebooks", "02_b", "", opening("02_b"))
    assert "ended without run.finish" in run(job)[1].error


def test_a_failure_leaves_no_results_of_an_earlier_execution(job):
    assert run(job)[0] == ["passed", "passed"]
    write_notebook(job / "notebooks", "02_b", "", opening("02_b"), "raise ValueError('now broken')")
    _, result, _ = run(job)
    assert not (result.folder / "results" / "02_b.json").exists()


def test_a_kernel_that_dies_is_a_clear_error(job):
    write_notebook(job / "notebooks", "02_b", "", opening("02_b"), "import os\nos.kill(os.getpid(), 9)")
    states, result, _ = run(job)
    assert states == ["passed", "failed"]
    assert "02_b: its kernel died" in result.error and "out of memory" in result.error
    executed = nbformat.read(result.folder / "notebooks" / "02_b.ipynb", 4)
    assert "run folder" in str(executed.cells), "the cells before the death keep their output"


def test_bad_parameters_and_inputs_stop_before_anything_runs(job):
    write_params(job, max_sample=2)
    with pytest.raises(ParameterError, match="no notebook declares the parameter 'max_sample'"):
        run(job)
    write_params(job, conversations="data/none.jsonl")
    with pytest.raises(FileNotFoundError, match="conversations: data/none.jsonl: no such file"):
        run(job)
    assert not (job / "runs").exists()


def test_one_run_at_a_time(job):
    (job / "runs" / "job").mkdir(parents=True)
    with folder_lock(job / "runs" / "job", "run"), pytest.raises(Locked, match="is working on this run"):
        run(job)
    assert run(job)[0] == ["passed", "passed"]


def test_a_notebook_opened_by_hand_waits_for_the_pipeline(job):
    from dflash_lib.workbench import open_run

    run(job)
    with folder_lock(job / "runs" / "job", "run"), pytest.raises(RunError, match="pipeline .* is working on this run"):
        open_run(__notebook_name__="01_a", run_dir=str(job / "runs" / "job"))


SLEEPER = """
import os, subprocess, sys, time
job = subprocess.Popen([sys.executable, "-c", "import ctypes, time; ctypes.CDLL(None).prctl(1, 15); time.sleep(600)"])
run.path("pids").write_text(f"{os.getpid()} {job.pid}")
time.sleep(600 if not run.path("again").exists() else 0)
job.kill()
"""


def interrupted(job, signal_number):
    """Starts the job in another process, sends it the signal while 02_b sleeps; its exit code and the pids it left."""
    write_notebook(job / "notebooks", "02_b", "", opening("02_b"), SLEEPER, finishing())
    # a shell's background job ignores SIGINT, and what it starts inherits that
    code = ("import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "from tests.workbench.fake_notebooks import options\nfrom pathlib import Path\n"
            "from dflash_lib.workbench.pipeline import run_pipeline\n"
            f"run_pipeline(options(Path({str(job)!r})))")
    process = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stderr=subprocess.DEVNULL,
                               stdout=subprocess.DEVNULL)
    pids = job / "runs" / "job" / "pids"
    wait_for(lambda: process.poll() is not None or pids.exists() and len(pids.read_text().split()) == 2)
    assert process.poll() is None
    process.send_signal(signal_number)
    return process.wait(WAIT_S), [int(pid) for pid in pids.read_text().split()]


def wait_for(condition):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)


def gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_leaves_no_orphans_and_goes_on(job, signal_number):
    code, pids = interrupted(job, signal_number)
    assert code == (-signal.SIGKILL if signal_number == signal.SIGKILL else -signal.SIGINT)
    wait_for(lambda: all(map(gone, pids)))
    (job / "runs" / "job" / "again").touch()
    assert run(job)[0] == ["current", "passed"]


def test_the_jobs_own_runs_dir(tmp_path):
    """The parameter decides where run folders go, unless the caller does."""
    write_notebook(tmp_path / "notebooks", "01_a", "runs_dir: str = ''\n", opening("01_a", "runs_dir"), finishing())
    write_params(tmp_path, runs_dir=str(tmp_path / "scratch"))
    _, result, _ = run(tmp_path, runs_dir=None)
    assert result.folder == tmp_path / "scratch" / "job" and (result.folder / "params.yaml").is_file()
    _, result, _ = run(tmp_path)
    assert result.folder == tmp_path / "runs" / "job"


def test_a_copied_run_is_judged_by_its_own_files(job):
    write_notebook(job / "notebooks", "02_b", "y: int = 1\n", opening("02_b", "y"),
                   "run.path('states').mkdir(exist_ok=True)\nrun.path('states', 'shard').write_text('s')", finishing())
    _, result, _ = run(job)
    copy = job / "moved"
    shutil.copytree(job / "runs", copy)  # keeps modification times
    assert run(job, runs_dir=copy)[0] == ["current", "current"]
    (copy / result.folder.name / "states" / "shard").unlink()
    states, _, printed = run(job, runs_dir=copy)
    assert states == ["current", "passed"] and "changed" in printed
    assert run(job)[0] == ["current", "current"]


@pytest.mark.parametrize("text", ["{}", "[]", "null", "{", '{"PATH": {}}'])
@pytest.mark.parametrize("file", ["stages/02_b.json", "stages/hashes.json", "results/02_b.json"])
def test_damaged_bookkeeping_repeats_a_stage_at_most(job, file, text):
    _, result, _ = run(job)
    (result.folder / file).write_text(text)
    states, result, printed = run(job)
    assert states == ["current", "current" if "hashes" in file else "passed"], printed
    assert run(job)[0] == ["current", "current"]


@pytest.mark.parametrize("run_id", ["../x", ".", "..", "", " ", "/abs", "a/b", "a\nb", "x" * 101, " x", "a\x00"])
def test_a_run_id_that_is_no_plain_name(job, run_id):
    with pytest.raises(RunError, match="run id"):
        run(job, run_id=run_id)
    assert not (job / "x").exists() and not list(job.glob("runs/*"))
