"""SideThreads: all the work is done once, at the same time, and nobody is at work when `each` returns."""

import pickle
import threading
import time

import numpy as np
import pytest
import torch

from dflash_lib.hidden_states.schema import StoreError, shard_name
from dflash_lib.hidden_states.side_threads import SideThreads
from dflash_lib.hidden_states.store import HiddenStateStore
from tests.hidden_states.rows import make_prepared, make_store


def num_alive() -> int:
    return sum(thread.name.startswith("chunk reader") for thread in threading.enumerate())


def wait_until_none_is_alive() -> None:
    for _ in range(2000):
        if not num_alive():
            return
        time.sleep(0.005)
    raise AssertionError("threads are left over")


def test_less_than_one_thread_is_refused():
    with pytest.raises(ValueError, match="threads: 0"):
        SideThreads(0)


@pytest.mark.parametrize("num", [1, 2, 3, 8])
@pytest.mark.parametrize("num_items", [0, 1, 2, 7, 100])
def test_each_item_is_worked_on_once_in_runs(num, num_items):
    runs = []
    SideThreads(num).each(lambda run: runs.append(list(run)), list(range(num_items)))
    assert sorted(item for run in runs for item in run) == list(range(num_items))
    assert all(run == list(range(run[0], run[0] + len(run))) for run in runs if run)
    assert len(runs) == max(1, min(num, num_items))


def test_runs_are_worked_on_at_the_same_time():
    together = threading.Barrier(3, timeout=20)
    SideThreads(3).each(lambda _run: together.wait(), [1, 2, 3])


@pytest.mark.parametrize("bad", [{0}, {1}, {2}, {0, 2}, {1, 2}])
def test_what_fails_is_raised_when_all_have_ended(bad):
    ended = []

    def work(run) -> None:
        if run[0] in bad:
            raise OSError(f"run {run[0]}")
        time.sleep(0.05)
        ended.append(run[0])

    with pytest.raises(OSError, match=f"run {min(bad)}"):
        SideThreads(3).each(work, [0, 1, 2])
    assert set(ended) == {0, 1, 2} - bad


def test_its_threads_end_with_it():
    threads = SideThreads(3)
    threads.each(lambda _run: None, [1, 2, 3])
    assert num_alive() > 0
    del threads
    wait_until_none_is_alive()


class TestInAStore:
    @pytest.fixture
    def folder(self, tiny_llama, tmp_path, monkeypatch):
        monkeypatch.setattr("dflash_lib.hidden_states.schema.ZSTD_CHUNK_BYTES", 5 * 3 * 64 * 2)
        make_store(tmp_path / "store", tiny_llama, make_prepared(tiny_llama), encoding="bf16+zstd")
        return tmp_path / "store"

    def test_it_reads_the_same_and_leaves_no_thread(self, folder):
        alone = HiddenStateStore.open(folder)
        with HiddenStateStore.open(folder, decode_threads=3) as store:
            again = pickle.loads(pickle.dumps(store))
            assert again.decode_threads == 3
            for index in store.sample_indices:
                wanted = alone.read(index)
                for sample in (store.read(index), again.read(index)):
                    assert torch.equal(sample.aux_hidden_states, wanted.aux_hidden_states)
                    assert torch.equal(sample.last_hidden_state_prenorm, wanted.last_hidden_state_prenorm)
            assert num_alive() > 0
        again.close()
        wait_until_none_is_alive()

    def test_damage_in_any_of_a_samples_chunks_is_seen(self, folder):
        path, name = folder / shard_name(0), "aux_hidden_states"
        store = HiddenStateStore.open(folder, decode_threads=3)
        row = int(np.argmax(np.diff(store.shards[0].offsets)))
        first, stop = store.shards[0].offsets[row:row + 2].tolist()
        sound, index = path.read_bytes(), int(store.shards[0].sample_index[row])
        parts = store._layout(0).rows[name].parts(first, stop)
        assert len(parts) > 3
        for number, *_ in parts:
            hurt = bytearray(sound)
            hurt[store._layout(0).rows[name].span(number)[0] + 20] ^= 1
            path.write_bytes(hurt)
            with pytest.raises(StoreError, match=f"{name}, chunk {number}: its bytes"):
                store.read(index)
        path.write_bytes(sound)
        assert store.read(index).sample_index == index
