"""The status of a launched job: what other terminals read, and the note of the progress line."""

import json
import subprocess
import sys

import pytest

from dflash_lib import job_status
from dflash_lib.job_status import JobStatus, describe_workers, read_status


@pytest.fixture
def path(tmp_path):
    return tmp_path / "logs" / "extraction.status.json"


def test_the_file_says_what_the_workers_reported(path, tmp_path):
    with JobStatus(path, "extraction", 1000, "tokens", start=100, disk=tmp_path) as status:
        assert read_status(path)["state"] == "running" and read_status(path)["done"] == 100
        status.written = -9.0
        status.worker(0, done=200, kept=0, seconds=2.0, device="cuda:0", bytes_written=10, shard=3)
        status.worker(1, done=300, kept=0, seconds=2.0, device="cuda:1", bytes_written=20, shard=4)  # too early
        assert len(read_status(path)["workers"]) == 1
    found = read_status(path)
    assert (found["state"], found["done"], found["total"], found["bytes_written"]) == ("finished", 600, 1000, 30)
    assert found["workers"]["1"]["shard"] == 4 and found["rate"] == 250.0 and found["disk_free"] > 0
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(("error", "state", "text"), [
    (ValueError("rank 1: out of memory"), "failed", "rank 1: out of memory"),
    (KeyboardInterrupt(), "stopped", "KeyboardInterrupt")])
def test_how_the_job_ended(path, error, state, text):
    with pytest.raises(type(error)), JobStatus(path, "extraction", 10, "tokens"):
        raise error
    found = read_status(path)
    assert (found["state"], found["error"]) == (state, text)


@pytest.mark.parametrize("ending", [ValueError("no memory"), KeyboardInterrupt()])
def test_of_a_job_that_ended_early_what_is_kept_counts(path, ending):
    with pytest.raises(type(ending)), JobStatus(path, "extraction", 1000, "tokens", start=100) as status:
        status.worker(0, done=230, kept=200, seconds=2.0)
        status.worker(1, done=15, kept=0, seconds=2.0)
        status.written = -9.0
        status.worker(1, done=20, kept=0, seconds=2.5)
        assert read_status(path)["done"] == 350
        raise ending
    assert read_status(path)["done"] == 300


def test_a_job_whose_launcher_was_killed(path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    with JobStatus(path, "extraction", 10, "tokens") as status:
        status.worker(0, done=7, kept=4, seconds=1.0)
    assert read_status(path)["done"] == 7
    status = json.loads(path.read_text())
    path.write_text(json.dumps({**status, "state": "running", "process": {**status["process"], "pid": dead.pid}}))
    assert (read_status(path)["state"], read_status(path)["done"]) == ("killed", 4)
    path.write_text(json.dumps({**status, "state": "running", "process": {**status["process"], "host": "elsewhere"}}))
    assert read_status(path)["state"] == "running", "it cannot be asked from here"


@pytest.mark.parametrize("content", [None, b"", b'{"state": "run', b"[]", b"{}", b"\xff"])
def test_no_status_and_what_a_power_cut_left_of_one(path, content):
    path.parent.mkdir()
    if content is not None:
        path.write_bytes(content)
    assert read_status(path) is None


def test_a_status_that_cannot_be_written_is_said_and_ends_no_job(path, capsys):
    path.parent.write_text("a file where the folder should be")
    with JobStatus(path, "extraction", 10, "tokens") as status:
        status.worker(0, done=1, kept=0, seconds=1.0)
    assert capsys.readouterr().err.count("cannot be written") == 1


def reported(path, rates, **changes):
    status = JobStatus(path, "extraction", 10 ** 9, "tokens")
    for rank, rate in enumerate(rates):
        status.worker(rank, done=rate, kept=0, seconds=1.0, device=f"cuda:{rank}", **changes)
    return status


def test_few_workers_are_named(path):
    status = reported(path, [2310, 2290])
    status.worker(1, done=2290, kept=0, seconds=1.0, device="cuda:1", state="lost", bytes_written=61_200_000_000)
    assert status.note() == "cuda:0 2,310/s, cuda:1 2,290/s (lost), 61.20 GB written"


def test_many_workers_are_a_group_and_those_in_trouble_are_named(path, monkeypatch):
    status = reported(path, [2250, 2310, *[2300] * 6])
    assert status.note() == "8 GPUs 2,250 to 2,310/s each"
    status.worker(3, done=2300, kept=0, seconds=1.0, state="lost")
    status.workers[5].heard -= 200
    assert status.note() == "6 GPUs 2,250 to 2,310/s each, cuda:3 lost, cuda:5 silent for 3 min"
    status = reported(path, [100] * 8)
    for rank in range(8):
        status.worker(rank, done=100, kept=0, seconds=1.0, device="cpu", state="done" if rank else "working")
    assert status.note() == "1 worker 100/s, worker 1 and 6 more done"


def test_the_line_of_eight_gpus_and_millions_of_tokens_is_readable(path):
    from dflash_lib.progress import Progress

    status = reported(path, [2250, 2310, *[2300] * 6], bytes_written=7_560_000_000_000)
    status.disk = path.parent
    progress = Progress(2_457_600_000, "extract", "tokens")
    progress.began -= 3600
    progress.done, progress.note = 66_240_000, status.note()
    line = progress.line()
    assert len(line) <= 160 and "18,400 tokens/s, 36 h 6 min left, 8 GPUs 2,250 to 2,310/s each" in line


def test_a_rate_is_that_of_the_last_minute(path):
    status = JobStatus(path, "extraction", 10 ** 6, "tokens")
    for second in range(0, 201, 10):
        done = 100 * second if second <= 100 else 10_000 + 10 * (second - 100)
        status.worker(0, done=done, kept=0, seconds=float(second))
    assert status.workers[0].rate == 10.0 and len(status.workers[0].points) <= 8
    assert "worker 0 10/s" in describe_workers(status._state("running", ""))
    assert job_status.RECENT_S == 60.0
