"""SIGKILL from outside at twenty moments: resuming always gives the bytes of a store that nothing disturbed."""

import random
import shutil
import signal
import time

import pytest

from dflash_lib.hidden_states.job import JOB_FILE
from tests.hidden_states.survival.folders import content, num_done, state

NUM_SHARDS = 12  # of the medium store
PLAN, SHARD, PARTIAL = "plan.json", "shard-*.h5", ".shard-*.partial"
EXACT = [  # where the child stops itself, to be killed from outside there; finished shards at that moment
    ("before the store is locked", {"op": "link", "name": ".lock"}, 0),
    ("the lock is placed", {"op": "link", "name": ".lock", "when": "after"}, 0),
    ("before the plan is begun", {"op": "create", "name": ".plan.json*"}, 0),
    ("the plan's file is empty", {"op": "create", "name": ".plan.json*", "when": "after"}, 0),
    ("the plan is written, not synced", {"op": "fsync", "name": ".plan.json*"}, 0),
    ("before the plan's rename", {"op": "replace", "name": PLAN}, 0),
    ("between the plan's rename and the folder's fsync", {"op": "replace", "name": PLAN, "when": "after"}, 0),
    ("before the job file's rename", {"op": "replace", "name": JOB_FILE}, 0),
    ("behind the job file's rename", {"op": "replace", "name": JOB_FILE, "when": "after"}, 0),
    ("a shard's file is empty", {"op": "create", "name": PARTIAL, "when": "after", "nth": 2}, 1),
    ("within the first shard's writes", {"op": "write", "name": PARTIAL, "nth": 5}, 0),
    ("within a later shard's writes", {"op": "write", "name": PARTIAL, "nth": 100}, None),
    ("a shard is written, not synced", {"op": "fsync", "name": PARTIAL, "nth": 4}, 3),
    ("between a shard's fsync and its rename", {"op": "replace", "name": SHARD, "nth": 6}, 5),
    ("between a shard's rename and the folder's fsync", {"op": "replace", "name": SHARD, "when": "after", "nth": 8}, 8),
    ("before the last shard's rename", {"op": "replace", "name": SHARD, "nth": NUM_SHARDS}, NUM_SHARDS - 1),
    ("before the lock is given back", {"op": "unlink", "name": ".lock"}, NUM_SHARDS),
]
NUM_RANDOM = 8


@pytest.fixture
def job(server, medium, tmp_path):
    """Starts an extraction of the medium rows in a child; `store` is where."""
    def start(**more):
        return server.start("extract", store=tmp_path / "store", prepared=medium[1], log_dir=tmp_path / "logs", **more)
    return start


@pytest.fixture(scope="module")
def seconds(server, medium, tmp_path_factory):
    """How long an undisturbed extraction takes in a child, and that it gives the right bytes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    child = server.start("extract", store=folder / "store", prepared=medium[1], log_dir=folder / "logs")
    child.begun()
    began = time.monotonic()
    assert child.result()["num_shards"] == NUM_SHARDS
    elapsed = time.monotonic() - began
    assert content(folder / "store") == content(medium[2])
    return elapsed


def resume_and_compare(start, store, truth, done: int) -> None:
    """Resumes: only what was missing is done, what was there is not touched, and the store is as it should be."""
    before = state(store) if store.exists() else {}
    kept = {name: entry for name, entry in before.items() if name.startswith("shard-")}
    assert start().result()["num_shards"] == NUM_SHARDS - done
    after = state(store)
    assert {name: after[name] for name in kept} == kept
    assert content(store) == content(truth)


@pytest.mark.parametrize("stop, done", [case[1:] for case in EXACT], ids=[case[0] for case in EXACT])
def test_killed_at_an_exact_moment(job, medium, tmp_path, stop, done):
    child = job(stop=stop)
    assert child.wait() is None, f"the moment never came: {child.answer()}"
    assert child.kill() == -signal.SIGKILL
    found = num_done(tmp_path / "store")
    assert found == done if done is not None else 0 < found < NUM_SHARDS
    assert child.answer() == {}, "the job had ended"
    resume_and_compare(job, tmp_path / "store", medium[2], found)


@pytest.mark.parametrize("number", range(NUM_RANDOM))
def test_killed_at_a_random_time(job, medium, tmp_path, seconds, number):
    """Times of a fixed seed, one in each eighth of the duration; sooner when a child ended before it (a busy machine
    measures wrong)."""
    store = tmp_path / "store"
    after = seconds * (number + random.Random(number).random()) / NUM_RANDOM
    for _ in range(8):
        child = job()
        child.begun()
        time.sleep(after)
        if child.kill() == -signal.SIGKILL and num_done(store) < NUM_SHARDS:
            break
        shutil.rmtree(store, ignore_errors=True)
        after *= 0.8
    else:
        pytest.fail("no kill hit the job before its end")
    resume_and_compare(job, store, medium[2], num_done(store))


def test_killed_again_and_again(job, medium, tmp_path, seconds):
    """One store whose every resume is killed, until one gets through: nothing that was done is ever lost."""
    store, dice, done, kills = tmp_path / "store", random.Random(7), 0, 0
    while done < NUM_SHARDS:
        child = job()
        child.begun()
        time.sleep(seconds * dice.uniform(0.3, 0.8))
        kills += child.kill() == -signal.SIGKILL
        now = num_done(store) if store.exists() else 0
        assert now >= done
        done = now
        if done == NUM_SHARDS and kills < 3:  # this machine has become faster than it was when it was measured
            shutil.rmtree(store)
            done, seconds = 0, 0.8 * seconds
        assert kills < 500, "no resume comes any further"
    job().result()
    assert content(store) == content(medium[2])


@pytest.mark.parametrize("name, when", [(PLAN, "after"), (PLAN, "before")])
def test_without_the_rename_a_killed_job_cannot_be_resumed(job, tmp_path, name, when):
    """With the final name written in place the resume above fails: so the tests of this file see that."""
    child = job(mutate=["no_rename"], stop={"op": "write", "name": name, "when": when} if when == "before" else
                {"op": "create", "name": name, "when": when})
    assert child.wait() is None and child.kill() == -signal.SIGKILL
    assert "plan.json: " in job().error()[1]


def test_without_the_rename_a_shard_is_half_there(job, tmp_path):
    child = job(mutate=["no_rename"], stop={"op": "write", "name": SHARD, "nth": 3})
    assert child.wait() is None and child.kill() == -signal.SIGKILL
    assert num_done(tmp_path / "store") == 1
    report = job().result()
    assert list(report["replaced"]) == ["0"], "what was half there counted as finished until its end was looked at"
