"""The launched job under faults: a lost device, memory that does not suffice, a failing rank, a second job."""

import json
import os
import threading
import time

import pytest

from dflash_lib.hidden_states import extraction
from dflash_lib.hidden_states.extraction import start_extraction
from dflash_lib.hidden_states.plan import ExtractionPlan
from dflash_lib.hidden_states.schema import StoreError
from dflash_lib.hidden_states.store import HiddenStateStore, missing_shards
from dflash_lib.hidden_states.verify import require_verified, verify_store
from dflash_lib.job_status import read_status
from dflash_lib.launch import LaunchError
from dflash_lib.locks import Locked, folder_lock
from tests.hidden_states.rows import make_options, make_prepared, make_store


@pytest.fixture(scope="module")
def prepared(tiny_llama):
    return make_prepared(tiny_llama, num_samples=30)


@pytest.fixture(scope="module")
def truth(tmp_path_factory, tiny_llama, prepared):
    folder = tmp_path_factory.mktemp("truth") / "store"
    make_store(folder, tiny_llama, prepared)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def start(tmp_path, tiny_llama, prepared, monkeypatch):
    """Starts the job with a planted fault."""
    prepared.save(tmp_path / "prepared")

    def call(num_processes: int, **fault):
        monkeypatch.setattr(extraction, "WORKER", "tests.hidden_states.faulty_worker")
        monkeypatch.setenv("DFLASH_TEST_FAULT", json.dumps(fault))
        return start_extraction(tmp_path / "store", tiny_llama.path, tmp_path / "prepared", make_options(),
                                tmp_path / "logs", num_processes, show=False)

    return call


@pytest.mark.slow
def test_a_worker_that_loses_its_device_is_replaced_by_the_others(start, tmp_path, truth):
    report = start(2, kind="lost", ranks=[1], seconds=1.5)
    assert {path.name: path.read_bytes() for path in (tmp_path / "store").iterdir()} == truth
    assert report.lost == {"cpu": "CUDA error: unspecified launch failure (planted)"} and report.num_workers == 2
    assert "lost: cpu (CUDA error: unspecified launch failure (planted)); others took its shards" in report.describe()
    assert report.bytes_written == sum(len(data) for name, data in truth.items() if name.startswith("shard"))
    status = read_status(tmp_path / "logs" / "extraction.status.json")
    assert status["state"] == "finished" and status["workers"]["1"]["state"] == "lost"
    assert status["done"] == status["total"], "what the lost worker had not finished is counted once"
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"extraction.status.json", "faulty_worker.log"}


def test_a_device_that_is_lost_before_the_target_is_loaded_is_no_end_either(start, tmp_path, truth):
    report = start(2, kind="load", ranks=[0])
    assert {path.name: path.read_bytes() for path in (tmp_path / "store").iterdir()} == truth
    assert report.lost == {"cpu": "CUDA error: device is lost (planted)"}


@pytest.mark.slow
def test_the_job_fails_when_no_worker_is_left(start, tmp_path):
    with pytest.raises(LaunchError, match="no worker is left: every device was lost") as caught:
        start(2, kind="lost", ranks=[0, 1])
    assert str(caught.value).count("cpu: AcceleratorError: CUDA error: unspecified launch failure") == 2
    assert read_status(tmp_path / "logs" / "extraction.status.json")["state"] == "failed"
    assert start(1, kind="none").num_shards > 0, "and goes on from what was finished"


@pytest.mark.slow
def test_the_failing_rank_is_named_and_the_rest_can_be_done_later(start, tmp_path, truth):
    with pytest.raises(LaunchError, match=r"LookupError: a fault of the worker \(planted\)") as caught:
        start(2, kind="fail", ranks=[1], seconds=1.5)
    assert caught.value.rank == 1 and "rank 1 of 2 failed" in str(caught.value)
    missing, damaged = missing_shards(tmp_path / "store", ExtractionPlan.load(tmp_path / "store"))
    assert missing and not damaged
    assert start(2, kind="none").num_shards == len(missing)
    assert {path.name: path.read_bytes() for path in (tmp_path / "store").iterdir()} == truth


def test_out_of_memory_is_survived_and_reported(start, tmp_path, prepared):
    report = start(1, kind="oom", most=50)
    assert report.num_splits > 0 and f"{report.num_splits} batches were run in parts" in report.describe()
    with HiddenStateStore.open(tmp_path / "store") as store:
        require_verified(verify_store(store, prepared))


def test_too_many_unusable_samples_stop_the_job(start, prepared):
    rows = [prepared.row(index)[0].tolist() for index in (3, 20)]
    for _ in range(2):  # finished shards are kept, and with them what they left out
        with pytest.raises(LaunchError, match="2 of 30 samples have unusable states; at most 1 may be left out"):
            start(1, kind="nan", rows=rows)


def test_too_many_in_finished_shards_stop_it_before_it_begins(start, tmp_path, monkeypatch):
    start(1, kind="none")
    (tmp_path / "store" / "shard-00002.h5").unlink()
    scan = extraction.scan_store

    def two_more(*args):
        found = scan(*args)
        return type(found)(found.missing, found.damaged, 2, ["sample 3 (row-3): nan", "sample 4 (row-4): nan"])

    monkeypatch.setattr(extraction, "scan_store", two_more)
    with pytest.raises(StoreError, match="2 of 30 samples") as caught:
        start(1, kind="none")
    assert "sample 4 (row-4): nan" in str(caught.value)


def test_a_second_writer_is_refused_while_the_first_works(start, tmp_path, tiny_llama, truth):
    results = []
    first = threading.Thread(target=lambda: results.append(start(1, kind="none", seconds=0.1)))
    first.start()
    while not (tmp_path / "logs" / "extraction.status.json").exists():
        assert first.is_alive()
        time.sleep(0.05)
    with pytest.raises(Locked, match="extraction") as caught:
        start_extraction(tmp_path / "store", tiny_llama.path, tmp_path / "prepared", make_options(), tmp_path / "other",
                         show=False)
    assert str(os.getpid()) in str(caught.value)
    first.join()
    assert results[0].num_shards == 6 and not (tmp_path / "store" / ".lock").exists()
    assert {path.name: path.read_bytes() for path in (tmp_path / "store").iterdir()} == truth


def test_a_refused_start_leaves_no_folder(tmp_path, tiny_llama, prepared):
    prepared.save(tmp_path / "prepared")
    with pytest.raises(ValueError, match="target_layer_ids"):
        start_extraction(tmp_path / "store", tiny_llama.path, tmp_path / "prepared",
                         make_options(target_layer_ids=[1, 99]), tmp_path / "logs", show=False)
    assert not (tmp_path / "store").exists()
    (tmp_path / "store").mkdir()
    with folder_lock(tmp_path / "store", "extraction"), pytest.raises(Locked):
        start_extraction(tmp_path / "store", tiny_llama.path, tmp_path / "prepared", make_options(), tmp_path / "logs",
                         show=False)
