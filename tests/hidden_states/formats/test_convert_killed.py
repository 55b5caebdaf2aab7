"""A conversion killed at any moment goes on by the same command and ends with the same bytes; memory stays small."""

import os
import random
import signal
import threading
import time

import datasets  # noqa: F401  its import takes 30 MB, which are not the conversion's
import psutil
import pytest

from dflash_lib.hidden_states.formats import open_states
from dflash_lib.hidden_states.formats.convert import ConvertOptions, convert
from tests.hidden_states.formats.layouts import make_random_store
from tests.hidden_states.formats.test_convert import FORK, files_of


@pytest.fixture(scope="module")
def store(tiny_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("states") / "store"
    make_random_store(folder, tiny_llama, num_samples=30, samples_per_shard=2, bad=(5,))
    return folder


def work(source, destination, options):
    convert(open_states(source), destination, options, show=False)


@pytest.mark.parametrize("kind, encoding", [("speculators", "bf16"), ("speculators", "fp8"), ("store", "bf16+zstd")])
def test_killed_at_random_moments_and_resumed(store, tmp_path, kind, encoding):
    options = ConvertOptions(to=kind, encoding=encoding)
    began = time.monotonic()
    work(store, tmp_path / "whole", options)
    seconds = time.monotonic() - began
    generator, num_killed, num_partial = random.Random(1), 0, 0
    for _ in range(6):
        process = FORK.Process(target=work, args=(store, tmp_path / "killed", options))
        process.start()
        process.join(generator.uniform(0.02, 0.6) * seconds)
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            num_killed += 1
        process.join()
        num_partial += files_of(tmp_path / "killed") != files_of(tmp_path / "whole")
    assert num_killed >= 2 and num_partial >= 1, "the kills came too late to prove anything"
    work(store, tmp_path / "killed", options)
    assert files_of(tmp_path / "killed", without=()) == files_of(tmp_path / "whole", without=())


def grow(source, destination, options, queue):
    """Puts the growth of this process's peak memory during a conversion, in bytes."""
    process, peak = psutil.Process(), 0
    before = process.memory_info().rss
    done = threading.Event()

    def watch():
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    work(source, destination, options)
    done.set()
    watcher.join()
    queue.put(peak - before)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_data_set(tiny_llama, tmp_path, monkeypatch):
    """16 and 65 MB of states. A store's reader keeps chunks of the files that it has open: here of one."""
    monkeypatch.setattr("dflash_lib.hidden_states.store.NUM_OPEN_FILES", 1)
    growth, sizes = {}, {}
    for num in (100, 400):
        make_random_store(tmp_path / f"store{num}", tiny_llama, num_samples=num, longest=600, samples_per_shard=50)
        sizes[num] = sum(len(content) for content in files_of(tmp_path / f"store{num}").values())
        for source, destination, kind in [(f"store{num}", f"spec{num}", "speculators"),
                                          (f"spec{num}", f"back{num}", "store")]:
            queue = FORK.Queue()
            process = FORK.Process(target=grow, args=(tmp_path / source, tmp_path / destination,
                                                      ConvertOptions(to=kind), queue))
            process.start()
            growth[num, kind] = queue.get(timeout=300)
            process.join()
        assert files_of(tmp_path / f"back{num}") == files_of(tmp_path / f"store{num}")
    assert sizes[400] - sizes[100] > 40e6
    for kind in ("speculators", "store"):
        assert growth[400, kind] - growth[100, kind] < 15e6, growth
