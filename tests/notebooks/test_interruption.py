"""A run of the real notebooks that is killed again and again ends as one that was left alone."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from dflash_lib.files import hash_tree
from dflash_lib.workbench.pipeline import run_pipeline
from dflash_lib.workbench.runs import REPOSITORY, load_record

WAIT_S = 1800  # only a hang reaches it


def started_there(folder):
    """Live processes that name the run folder in their command line, as the jobs of a notebook do."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(folder) in line and process.info["pid"] != os.getpid() and process.info["status"] != "zombie":
            found.append(f"{process.info['pid']}: {line}")
    return found


def wait_for(condition, what):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.02)


@pytest.mark.slow
def test_killed_while_extracting_and_while_training_it_continues(tiny_job, tiny_run):
    """SIGKILL to the pipeline when the store has its first shard and when the training has its first checkpoint."""
    runs = tiny_job.runs_dir.parent / "killed runs"
    folder = runs / tiny_job.params_file.stem
    command = [sys.executable, "-m", "dflash_lib", "run", str(tiny_job.params_file), "--runs-dir", str(runs)]
    for sign in ("states/shard-*.h5", "drafter/checkpoints/step-*"):
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_for(lambda p=process, sign=sign: p.poll() is not None or any(folder.glob(sign)), lambda: "no sign")
            assert process.poll() is None, f"ended before {sign} was there"
        finally:
            process.send_signal(signal.SIGKILL)
        assert process.wait(WAIT_S) == -signal.SIGKILL
        wait_for(lambda: not started_there(folder), lambda: f"orphans: {started_there(folder)}")
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "01_capacity: current" in result.stdout
    assert hash_tree(folder / "states", "*.h5") == hash_tree(tiny_run.folder / "states", "*.h5")
    killed, alone = (load_record(where, "07_evaluate")["results"] for where in (folder, tiny_run.folder))
    assert killed["acceptance_length"] == alone["acceptance_length"]


@pytest.mark.slow
def test_forcing_a_finished_run_discards_neither_store_nor_drafter(tiny_job, tiny_run):
    before = {path: path.stat().st_mtime_ns for path in tiny_run.folder.glob("states/*.h5")}
    assert run_pipeline(replace(tiny_job, force=True)).error == ""
    assert before and {path: path.stat().st_mtime_ns for path in tiny_run.folder.glob("states/*.h5")} == before
