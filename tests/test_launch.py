"""launch: progress arrives, a failing rank's error is raised, and nothing outlives its parent."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from dflash_lib import launch
from dflash_lib.launch import LaunchError, Nodes, run_torchrun

WORKER = "tests.launch_worker"
ROOT = Path(__file__).parent.parent


def wait_until_gone(pids: list[int], seconds: float = 30.0) -> list[int]:
    """The ids among `pids` that still run after `seconds` (a zombie counts as gone)."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        left = [pid for pid in pids if is_running(pid)]
        if not left:
            return []
        time.sleep(0.1)
    return left


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_a_failing_ranks_traceback_is_raised_and_the_others_end(tmp_path):
    pids = []
    with pytest.raises(LaunchError, match="ValueError: the disk of rank one is full") as caught:
        run_torchrun(WORKER, ["fail"], 2, tmp_path, threads=1, on_progress=lambda p: pids.append(p["pid"]))
    assert caught.value.rank == 1 and "in main" in str(caught.value)
    assert len(pids) == 2 and wait_until_gone(pids) == []


def test_only_what_the_library_raised_for_a_user_goes_without_its_traceback():
    frame = f'Traceback (most recent call last):\n  File "{launch.__file__}", line 3, in main\n    f(x)\n    ^^^^\n'
    assert launch._for_the_user(frame + "ValueError: 38 samples; lower it\nor extract more\n") == (
        "38 samples; lower it\nor extract more")
    assert launch._for_the_user(frame + "dflash_lib.hidden_states.store.StoreError: shard 3: truncated") == (
        "shard 3: truncated")
    assert launch._for_the_user(frame + "RuntimeError: shapes differ") == ""
    torch_frame = f'{frame}  File "{torch.__file__}", line 9, in g\n    h()\n'
    assert launch._for_the_user(torch_frame + "ValueError: not for users") == ""
    assert launch._for_the_user("words without a frame") == ""


def test_a_killed_rank_is_reported_with_the_end_of_the_output(tmp_path):
    with pytest.raises(LaunchError, match="rank 0 of 1 was killed by SIGKILL") as caught:
        run_torchrun(WORKER, ["killed"], 1, tmp_path, threads=1)
    assert "SIGKILL" in str(caught.value)


@pytest.mark.parametrize("what, shown", [("empty", "words of a rank whose error file is empty"),
                                         ("cut", '{"message": {"message": "RuntimeError: disk')])
def test_a_cut_error_file_does_not_hide_the_error(tmp_path, what, shown):
    with pytest.raises(LaunchError) as caught:
        run_torchrun(WORKER, [what], 1, tmp_path, threads=1)
    assert shown in str(caught.value) and caught.value.rank == 0
    assert [path.name for path in tmp_path.iterdir()] == ["launch_worker.log"]


def test_a_worker_whose_agent_was_killed_while_it_started_does_not_begin():
    """Its parent is then another process, which lives on: here this test."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    worker = subprocess.run([sys.executable, "-m", WORKER, "work"], cwd=ROOT, capture_output=True, text=True,
                            env={**os.environ, "RANK": "0", "OMP_NUM_THREADS": "1", "DFLASH_AGENT": str(dead.pid)})
    assert worker.returncode != 0 and "the process that started this one has ended" in worker.stderr
    assert worker.stdout == ""


def test_a_worker_is_told_its_agent(tmp_path):
    seen = []
    run_torchrun(WORKER, ["work"], 1, tmp_path, threads=1, on_progress=seen.append)
    assert seen[0]["agent"] == str(seen[0]["parent"])


def test_progress_arrives_output_is_logged_and_nothing_else_is_left(tmp_path):
    seen = []
    run_torchrun(WORKER, ["work"], 1, tmp_path, threads=3, on_progress=seen.append)
    assert [p["rank"] for p in seen] == [0] and seen[0]["threads"] == "3"
    assert [path.name for path in tmp_path.iterdir()] == ["launch_worker.log"]
    text = (tmp_path / "launch_worker.log").read_text()
    assert "plain output of rank 0" in text and "@progress" not in text


@pytest.mark.parametrize("fault", ["No space left on device", "Is a directory"])
def test_a_log_that_cannot_be_written_ends_no_job_and_hides_no_error(tmp_path, capfd, fault):
    log = tmp_path / "launch_worker.log"
    log.mkdir() if fault == "Is a directory" else log.symlink_to("/dev/full")
    seen = []
    run_torchrun(WORKER, ["work"], 2, tmp_path, threads=1, on_progress=seen.append)
    assert sorted(p["rank"] for p in seen) == [0, 1]
    said = capfd.readouterr().err
    assert said.count("the log cannot be written") == 1 and str(log) in said and fault in said
    with pytest.raises(LaunchError, match="ValueError: the disk of rank one is full") as caught:
        run_torchrun(WORKER, ["fail"], 2, tmp_path, threads=1)
    assert caught.value.rank == 1 and "in main" in str(caught.value)


def test_an_exception_in_the_parent_ends_the_job(tmp_path):
    pids = []

    def stop(progress):
        pids.extend([progress["pid"], progress["parent"]])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_torchrun(WORKER, ["sleep"], 1, tmp_path, threads=1, on_progress=stop)
    assert pids and wait_until_gone(pids) == []


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGTERM])
def test_killing_the_parent_leaves_no_orphan(tmp_path, death):
    script = ("import sys; from dflash_lib.launch import run_torchrun; "
              f"run_torchrun('{WORKER}', ['sleep'], 1, sys.argv[1], threads=1, "
              "on_progress=lambda p: print(p['pid'], p['parent'], flush=True))")
    parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True,
                              cwd=ROOT)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(map(is_running, pids))
    os.kill(parent.pid, death)
    parent.wait()
    assert wait_until_gone(pids) == []
    parent.stdout.close()


def test_nodes_are_said_in_an_environment_variable(monkeypatch):
    monkeypatch.delenv("DFLASH_NODES", raising=False)
    assert Nodes.from_environment() == Nodes() == Nodes(1, 0, "")
    nodes = Nodes(4, 3, "10.0.0.1:29500")
    monkeypatch.setenv("DFLASH_NODES", nodes.environment()["DFLASH_NODES"])
    assert Nodes.from_environment() == nodes
    for text in ("4 3", "four 3 host:1", "2 2 host:1", "2 0 host", "0 0 host:1"):
        monkeypatch.setenv("DFLASH_NODES", text)
        with pytest.raises(ValueError, match="(?i)nodes: "):
            Nodes.from_environment()


def test_two_agents_form_one_job(tmp_path):
    """Each follows its own ranks; what they print goes into a log for each machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    seen = {0: [], 1: []}
    agents = [threading.Thread(target=run_torchrun, args=[WORKER, ["work"], 1, tmp_path, 1, seen[rank].append],
                               kwargs={"nodes": Nodes(2, rank, endpoint)}) for rank in (1, 0)]
    for agent in agents:
        agent.start()
    for agent in agents:
        agent.join(120)
        assert not agent.is_alive()
    assert sorted(p["rank"] for reports in seen.values() for p in reports) == [0, 1]
    assert all(len(reports) == 1 for reports in seen.values())
    logs = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert set(logs) == {"launch_worker.log", "launch_worker.node1.log"}
    assert "node 1 of 2" in logs["launch_worker.node1.log"] and "plain output of rank" in logs["launch_worker.log"]


def test_more_variables_for_the_workers(tmp_path):
    seen = []
    run_torchrun(WORKER, ["work"], 1, tmp_path, 1, seen.append, environment={"DFLASH_GPUS": "2,5"})
    assert seen[0]["gpus"] == "2,5"
