"""A file system without locks: every lock fails with ENOLCK, by a seccomp filter of the kernel in a child. Extraction,
resuming, verifying and training's reader work as ever."""

import pytest

from tests.hidden_states.survival.folders import content, num_done


def test_the_filter_works(server, tmp_path):
    """flock and both kinds of fcntl locks fail, and HDF5 with its own locking does: so nothing below uses them."""
    found = server.run("locks_that_fail", folder=tmp_path)
    assert found == {"flock": "ENOLCK", "lockf": "ENOLCK", "open file description": "ENOLCK", "HDF5": "OSError"}
    assert server.run("locks_that_fail", folder=tmp_path, first=[]) == {}


def test_extraction_and_resume(server, medium, tmp_path):
    job = {"store": tmp_path / "store", "prepared": medium[1], "log_dir": tmp_path / "logs",
           "first": ["no_file_locking"]}
    child = server.start("extract", stop={"op": "replace", "name": "shard-*", "nth": 6}, **job)
    assert child.wait() is None
    kind, _ = server.start("extract", **job).error()
    assert kind == "Locked", "the store's own lock needs no file locking"
    assert child.kill() < 0 and num_done(tmp_path / "store") == 5
    assert server.run("extract", **job)["num_shards"] == 7
    assert content(tmp_path / "store") == content(medium[2])


def test_verifying_and_reading(server, small):
    assert server.run("check", store=small[2], prepared=small[1], first=["no_file_locking"]) == {}


def test_the_training_reader(server, small):
    batches = [server.run("training_batch", store=small[2], first=first) for first in ([], ["no_file_locking"])]
    assert batches[0] == batches[1] and len(batches[0]) == 64


@pytest.mark.slow
def test_a_launched_job_of_two_workers(server, medium, tmp_path):
    report = server.run("start", store=tmp_path / "store", prepared=medium[1], log_dir=tmp_path / "logs",
                        num_processes=2, first=["no_file_locking"])
    assert report["num_shards"] == 12 and content(tmp_path / "store") == content(medium[2])
