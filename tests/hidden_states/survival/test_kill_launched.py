"""Through real torchrun: the launcher killed, one of two workers killed; a resume gives the undisturbed bytes."""

import os
import signal
import time

import psutil
import pytest

from tests.hidden_states.rows import make_prepared, make_store
from tests.hidden_states.survival.folders import content, num_done
from tests.hidden_states.survival.server import HANGS_S

pytestmark = pytest.mark.slow
NUM_SHARDS = 200
OPTIONS = {"samples_per_shard": 2}


@pytest.fixture(scope="module")
def large(tiny_llama, tmp_path_factory):
    """400 samples in 200 shards: (their folder, their undisturbed store)."""
    folder = tmp_path_factory.mktemp("large")
    rows = make_prepared(tiny_llama, num_samples=2 * NUM_SHARDS)
    rows.save(folder / "prepared")
    make_store(folder / "store", tiny_llama, rows, **OPTIONS)
    return folder / "prepared", folder / "store"


@pytest.fixture
def launched(server, large, tmp_path):
    """A job of two workers that has finished some shards: (child, its processes, its arguments)."""
    job = {"store": tmp_path / "store", "prepared": large[0], "log_dir": tmp_path / "logs", "options": OPTIONS}
    child = server.start("start", num_processes=2, **job)
    end = time.monotonic() + HANGS_S
    while num_done(job["store"]) < 5:
        assert time.monotonic() < end and psutil.pid_exists(child.pid), child.output()
        time.sleep(0.001)
    return child, psutil.Process(child.pid).children(recursive=True), job


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still run after a long time."""
    end = time.monotonic() + HANGS_S
    while time.monotonic() < end and any(map(alive, processes)):
        time.sleep(0.05)
    return [process for process in processes if alive(process)]


def workers_of(processes: list[psutil.Process]) -> list[psutil.Process]:
    """The workers among a job's processes: only to them torchrun gives a rank."""
    return [process for process in processes if "RANK" in process.environ()]


def test_the_whole_job_killed(server, large, launched):
    child, processes, job = launched
    assert len(workers_of(processes)) == 2
    assert child.kill() == -signal.SIGKILL
    assert wait_until_gone(processes) == [], "something of the job outlived its launcher"
    done = num_done(job["store"])
    assert 0 < done < NUM_SHARDS and child.answer() == {}
    assert server.run("start", num_processes=2, **job)["num_shards"] == NUM_SHARDS - done
    assert content(job["store"]) == content(large[1])


def test_one_worker_of_two_killed(server, large, launched):
    child, processes, job = launched
    os.kill(workers_of(processes)[0].pid, signal.SIGKILL)
    kind, text = child.error()
    assert kind == "LaunchError" and "SIGKILL" in text
    assert wait_until_gone(processes) == []
    done = num_done(job["store"])
    assert 0 < done < NUM_SHARDS
    assert server.run("extract", **job)["num_shards"] == NUM_SHARDS - done
    assert content(job["store"]) == content(large[1])


def test_both_workers_cannot_write_any_more(server, large, launched):
    """Their files may not grow past 15 kB from now on: a full disk also where no file system can be mounted."""
    child, processes, job = launched
    for worker in workers_of(processes):
        worker.rlimit(psutil.RLIMIT_FSIZE, (15_000, psutil.RLIM_INFINITY))
    kind, text = child.error()
    assert kind == "LaunchError" and "File too large" in text and "Finished shards are kept" in text, text
    assert "shard-00" in text and "Traceback" not in text
    done = num_done(job["store"])
    assert 0 < done < NUM_SHARDS and not list(job["store"].glob(".*"))
    assert server.run("extract", **job)["num_shards"] == NUM_SHARDS - done
    assert content(job["store"]) == content(large[1])
