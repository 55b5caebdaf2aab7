"""A disk that fills up or turns read-only in the middle, a folder without permission: an error in words, finished
shards stay, and a resume gives the bytes of an undisturbed store.

The disk is a real one, in memory, mounted for the job's process alone. Where a system does not let processes do that
(some containers), those tests say so and are skipped; the limit on the size of files, the read-only calls and the
permissions below work everywhere.
"""

import pytest

from tests.hidden_states.survival.folders import content, num_done, state

NUM_SHARDS = 12  # of the medium store
PARTIAL = ".shard-*.partial"
AT_THE_FIFTH = {"op": "create", "name": PARTIAL, "when": "after", "nth": 5}


@pytest.fixture
def job(medium, tmp_path):
    (tmp_path / "disk").mkdir()
    return {"store": tmp_path / "disk" / "store", "prepared": medium[1], "log_dir": tmp_path / "logs"}


@pytest.fixture
def disk(server, tmp_path, job):
    reason = server.run("can_mount", disk=tmp_path / "disk")
    if reason:
        pytest.skip(f"no file system of one's own can be mounted here ({reason}); RLIMIT_FSIZE and seccomp are tested")
    return tmp_path / "disk"


def size_of(store) -> int:
    return sum(path.stat().st_size for path in store.iterdir())


def check_words(kind: str, text: str, reason: str, where: str = "shard-000") -> None:
    assert kind in ("StoreError", "LaunchError"), (kind, text)
    assert reason in text and where in text and "Traceback" not in text
    assert "Finished shards are kept" in text and "start again" in text


def check_resumed(found: dict, truth, done: int | None) -> None:
    """Finished shards stayed, nothing half stayed, the resume did the others, and the store is as it should be."""
    finished = [name for name in found["left"] if name.startswith("shard-")]
    assert sorted(found["left"]) == ["plan.json", *finished], "half a shard was left"
    assert 0 < len(finished) < NUM_SHARDS and done in (None, len(finished))
    assert found["report"]["num_shards"] == NUM_SHARDS - len(finished) and not found["report"]["replaced"]
    assert found["untouched"] and found["content"] == content(truth)


def test_a_disk_that_another_job_fills(server, medium, job, disk):
    found = server.run("on_small_disk", disk=disk, num_bytes=4 * size_of(medium[2]), **job,
                       trouble=("fill", [str(disk), 16 << 10], AT_THE_FIFTH))
    check_words(found["kind"], found["error"], "No space left on device")
    check_resumed(found, medium[2], 4)


def test_a_disk_too_small_for_all_shards_is_refused_before_work(server, medium, job, disk):
    found = server.run("on_small_disk", disk=disk, num_bytes=size_of(medium[2]) // 2, **job)
    assert found["kind"] == "StoreError" and "to extract take at least" in found["error"]
    assert list(found["left"]) == ["plan.json"] and found["content"] == content(medium[2])


def test_a_disk_that_is_full_when_the_plan_is_written(server, medium, job, disk):
    found = server.run("on_small_disk", disk=disk, num_bytes=4 * size_of(medium[2]), **job,
                       trouble=("fill", [str(disk), 0], {"op": "create", "name": ".plan.json*", "when": "after"}))
    assert found["kind"] == "StoreError" and "No space left on device" in found["error"]
    assert "cannot be written" in found["error"] and found["left"] == {}
    assert found["content"] == content(medium[2])


@pytest.mark.slow
@pytest.mark.parametrize("logs", ["elsewhere", "on the same disk"])
def test_a_disk_that_two_workers_fill(server, medium, job, disk, logs):
    """Where the logs are on the same disk, as they are in a run's folder, nothing can be logged either."""
    if logs == "on the same disk":
        job["log_dir"] = disk / "logs"
    found = server.run("on_small_disk", disk=disk, num_bytes=int(0.6 * size_of(medium[2])), check_room=False,
                       launched=True, num_processes=2, **job)
    check_words(found["kind"], found["error"], "No space left on device")
    check_resumed(found, medium[2], None)


def test_a_disk_that_turns_read_only(server, medium, job, disk):
    found = server.run("on_small_disk", disk=disk, num_bytes=64 << 20, **job,
                       trouble=("make_read_only", [str(disk)], {**AT_THE_FIFTH, "op": "replace", "name": "shard-*"}))
    check_words(found["kind"], found["error"], "Read-only file system")
    check_resumed(found, medium[2], None)


@pytest.mark.parametrize("trouble, reason", [
    (("largest_file", [20_000], AT_THE_FIFTH), "File too large"),
    (("read_only_files", [], AT_THE_FIFTH), "Read-only file system"),
    (("read_only_files", [], {**AT_THE_FIFTH, "when": "before"}), "Read-only file system")],
    ids=["files may not grow", "read-only, a shard is open", "read-only between shards"])
def test_trouble_in_the_middle(server, medium, job, trouble, reason):
    """Enforced by the kernel for the child alone; another child resumes."""
    kind, text = server.start("extract", trouble=trouble, **job).error()
    check_words(kind, text, reason)
    left = state(job["store"])
    for name in [name for name in left if name.startswith(".")]:  # what nobody may remove from a read-only disk stays
        assert reason == "Read-only file system"
        left.pop(name)
    report = server.run("extract", **job)
    after = state(job["store"])
    check_resumed({"left": left, "report": report, "content": content(job["store"]),
                   "untouched": {name: after[name] for name in left} == left}, medium[2], 4)


@pytest.mark.parametrize("begun", [False, True])
def test_a_folder_without_permission(server, medium, job, begun):
    """In a child without root's right to ignore permissions."""
    if begun:
        child = server.start("extract", stop={"op": "create", "name": PARTIAL, "nth": 4}, **job)
        assert child.wait() is None and child.kill() < 0 and num_done(job["store"]) == 3
    else:
        job["store"].mkdir()
    before = state(job["store"])
    job["store"].chmod(0o555)
    kind, text = server.start("extract", first=["no_privileges"], **job).error()
    assert kind == "StoreError" and "Permission denied" in text and str(job["store"]) in text
    assert "Choose another store_dir" in text or "fix the folder" in text
    assert state(job["store"]) == before
    job["store"].chmod(0o755)
    server.run("extract", **job)
    assert content(job["store"]) == content(medium[2])


def test_permission_taken_away_in_the_middle(server, medium, job):
    job["store"].mkdir()
    kind, text = server.start("extract", first=["no_privileges"], **job,
                              trouble=("forbid", [str(job["store"])], {**AT_THE_FIFTH, "when": "before"})).error()
    check_words(kind, text, "Permission denied")
    job["store"].chmod(0o755)
    assert num_done(job["store"]) == 4
    server.run("extract", **job)
    assert content(job["store"]) == content(medium[2])
