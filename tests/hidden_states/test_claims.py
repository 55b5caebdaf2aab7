"""claims: every shard goes to one worker, a lost worker's shards to another, and a dead machine is noticed."""

import threading

import pytest
import torch.distributed as dist

from dflash_lib.hidden_states import claims as module
from dflash_lib.hidden_states.claims import Claims, WorkerFailed


@pytest.fixture
def workers():
    """Makes `num` workers of one job over a list of shards."""

    def make(num: int, todo: list[int], spans_nodes: bool = False) -> list[Claims]:
        store = dist.HashStore()
        made = [Claims(store, rank, num, spans_nodes) for rank in range(num)]
        made[0].publish(todo, 0, {"store": "x"})
        assert all(one.receive() == {"store": "x"} for one in made)
        return made

    return make


def test_shards_are_claimed_in_the_published_order_each_once(workers):
    a, b = workers(2, [7, 2, 5])
    assert [a.next(), b.next(), a.next()] == [7, 2, 5]
    assert (a.held, b.held) == ([7, 5], [2])
    waited = []

    def finish_the_rest() -> None:
        waited.append(True)
        for one, shard in ((b, 2), (a, 5)):
            if shard in one.held:
                one.done(shard)

    a.done(7)
    assert b.next(finish_the_rest) is None and waited
    assert a.next() is None


def test_many_threads_get_every_shard_once(workers):
    made, got = workers(4, list(range(40))), []

    def take(one: Claims) -> None:
        while (shard := one.next()) is not None:
            got.append((one.rank, shard))
            one.done(shard)

    threads = [threading.Thread(target=take, args=[one]) for one in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(shard for _, shard in got) == list(range(40))


def test_a_lost_workers_shards_are_taken_by_another(workers):
    a, b, c = workers(3, [0, 1, 2])
    assert [a.next(), a.next(), b.next()] == [0, 1, 2]
    a.done(0)
    b.done(2)
    assert a.give_back("cuda:0", RuntimeError("gone")), "two are left"
    assert c.next() == 1
    assert c.give_back("cuda:2", RuntimeError("gone, too")), "one is left"
    assert b.next() == 1
    b.done(1)
    assert b.next() is None
    assert not b.give_back("cuda:1", RuntimeError("at last")), "none is left"
    assert [lost["device"] for lost in a.all_lost()] == ["cuda:0", "cuda:1", "cuda:2"]
    assert a.lost_by(0)["shards"] == [1] and a.lost_by(0)["error"] == "RuntimeError: gone"


def test_quarantined_samples_are_counted_over_all_workers_and_those_before(workers):
    store = dist.HashStore()
    a, b = Claims(store, 0, 2), Claims(store, 1, 2)
    a.publish([0], num_quarantined=3)
    assert a.count_quarantined(["one", "two"], 2) == 5 and b.count_quarantined(["three"], 1) == 6
    assert a.count_quarantined(["four"], 1) == 7
    assert b.quarantined() == ["one", "two", "four", "three"]


def test_a_failure_is_told_to_other_machines_only(workers):
    a, b = workers(2, [0, 1], spans_nodes=True)
    with pytest.raises(LookupError), a.failure_told():
        raise LookupError("no such layer")
    with pytest.raises(WorkerFailed, match=r"(?s)rank 0 of 2 failed:.*LookupError: no such layer"):
        b.next()
    with pytest.raises(WorkerFailed), b.failure_told():
        b.check()
    assert "LookupError" in str(pytest.raises(WorkerFailed, a.check).value), "the first failure stays"
    a, b = workers(2, [0, 1])
    with pytest.raises(LookupError), a.failure_told():
        raise LookupError("torchrun's agent tells")
    assert b.next() == 0


def test_a_machine_that_falls_silent_is_noticed(workers, monkeypatch):
    monkeypatch.setattr(module, "SILENCE_S", 0.5)
    monkeypatch.setattr(module, "BEAT_S", 0.05)
    a, b = workers(2, [0, 1], spans_nodes=True)
    assert (a.next(), b.next()) == (0, 1)
    a.done(0)
    with b.heartbeat(), a.heartbeat():
        slow = threading.Timer(1.5, lambda: b.done(1))
        slow.start()
        assert a.next() is None, "slow, but alive"
    a, b = workers(2, [0, 1], spans_nodes=True)
    assert (a.next(), b.next()) == (0, 1)
    a.done(0)
    with a.heartbeat(), pytest.raises(WorkerFailed, match="rank 1 of 2, on another machine, was not heard"):
        a.next()


def test_progress_of_other_machines_reaches_the_one_that_shows_it(workers):
    a, b = workers(2, [0], spans_nodes=True)
    assert a.told_progress() == []
    b.tell_progress({"rank": 1, "tokens": 5})
    b.tell_progress({"rank": 1, "tokens": 9})
    assert a.told_progress() == [{"rank": 1, "tokens": 9}]
