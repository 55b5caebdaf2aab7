"""shard_stream: the same bytes as without a thread, bounded memory, errors unchanged and at once, nothing hangs."""

import threading
import time

import pytest

from dflash_lib.hidden_states.encode import encode_sample
from dflash_lib.hidden_states.extraction_worker import extract_shard
from dflash_lib.hidden_states.plan import make_plan
from dflash_lib.hidden_states.schema import StoreError, shard_name
from dflash_lib.hidden_states.shard_stream import QUEUED, ShardStream
from dflash_lib.hidden_states.shards import ShardWriter
from dflash_lib.target.capture import capture_batch
from tests.hidden_states.rows import make_options, make_prepared


@pytest.fixture(scope="module")
def prepared(tiny_llama):
    return make_prepared(tiny_llama, num_samples=12)


@pytest.fixture(scope="module")
def plan(tiny_llama, prepared):
    return make_plan(tiny_llama.identity, tiny_llama.config, prepared, make_options())


@pytest.fixture
def no_threads_left():
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def write_serially(target, prepared, plan, folder, shard) -> None:
    """One shard without a thread: capture, encode, add, sample after sample."""
    masks = [prepared.row(index)[1] for index in plan.samples_of(shard)]
    with ShardWriter(folder, plan, shard, masks) as writer:
        for batch in plan.shards[shard]:
            rows = [prepared.row(index) for index in batch]
            samples = capture_batch(target, [ids for ids, _ in rows], plan.target_layer_ids)
            for index, (ids, mask), sample in zip(batch, rows, samples, strict=True):
                writer.add(index, ids, mask, encode_sample(target, plan, mask, sample))


def test_the_bytes_are_those_of_the_serial_way(tmp_path, tiny_llama, prepared, plan, no_threads_left):
    for name in ("serial", "stream"):
        (tmp_path / name).mkdir()
    for shard in range(len(plan.shards)):
        write_serially(tiny_llama, prepared, plan, tmp_path / "serial", shard)
        extract_shard(tiny_llama, prepared, plan, tmp_path / "stream", shard)
        name = shard_name(shard)
        assert (tmp_path / "serial" / name).read_bytes() == (tmp_path / "stream" / name).read_bytes()


def test_at_most_a_few_batches_wait(tmp_path, prepared, plan, no_threads_left):
    """The disk is stuck: the side that computes is held up once the queue is full."""
    stuck, queued = threading.Event(), []

    def compute(stream: ShardStream) -> None:
        for _ in range(20):
            stream.write(0, lambda _writer: stuck.wait())
            queued.append(True)

    with pytest.raises(StoreError, match="0 different samples were added"), (
            ShardStream(tmp_path, plan, prepared)) as stream:
        thread = threading.Thread(target=compute, args=[stream])
        thread.start()
        time.sleep(0.5)
        assert len(queued) == QUEUED + 1, "one is being written"
        stuck.set()
        thread.join()
        stream.finish(0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("when", ["next write", "finish", "check", "drain", "end of the block"])
def test_an_error_of_the_thread_comes_unchanged(tmp_path, prepared, plan, when, no_threads_left):
    error = OSError(5, "the disk is gone")

    def fail(_writer) -> None:
        raise error

    with pytest.raises(OSError, match="the disk is gone") as caught, ShardStream(tmp_path, plan, prepared) as stream:
        stream.write(0, fail)
        if when == "next write":
            while True:
                stream.write(0, lambda _writer: None)
        if when == "finish":
            while True:
                stream.finish(0)
        if when == "check":
            while True:
                stream.check()
        if when == "drain":
            stream.drain()
            raise AssertionError("drain returned")
    assert caught.value is error and not list(tmp_path.iterdir())


def test_an_error_outside_drops_what_is_queued_and_the_unfinished_file(tmp_path, tiny_llama, prepared, plan,
                                                                       no_threads_left):
    done, began = [], threading.Event()

    def slow(_writer) -> None:
        began.set()
        time.sleep(0.3)
        done.append(True)

    with pytest.raises(KeyboardInterrupt), ShardStream(tmp_path, plan, prepared) as stream:
        for _ in range(QUEUED + 1):
            stream.write(0, slow)
        began.wait()
        raise KeyboardInterrupt
    assert len(done) == 1 and not list(tmp_path.iterdir())


def test_a_shard_may_be_refused_before_it_is_published(tmp_path, tiny_llama, prepared, plan, no_threads_left):
    def refuse(_writer) -> None:
        raise StoreError("not this one")

    with pytest.raises(StoreError, match="not this one"), (
            ShardStream(tmp_path, plan, prepared, before_publishing=refuse)) as stream:
        stream.write(0, lambda _writer: None)
        stream.finish(0)
    assert not list(tmp_path.iterdir())
