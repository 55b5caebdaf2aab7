"""extraction: the launched job, killed in the middle and resumed, gives the same bytes; what cannot work is refused."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_lib.conversations.prepare import PreparedRows
from dflash_lib.hidden_states import extraction
from dflash_lib.hidden_states.extraction import check_free_space, open_plan, start_extraction
from dflash_lib.hidden_states.extraction_worker import worker_device
from dflash_lib.hidden_states.job import ExtractionJob, scan_store
from dflash_lib.hidden_states.plan import ExtractionPlan
from dflash_lib.hidden_states.schema import StoreError, shard_name
from dflash_lib.hidden_states.store import HiddenStateStore, missing_shards
from dflash_lib.hidden_states.verify import require_verified, verify_store
from dflash_lib.launch import LaunchError, Nodes, run_torchrun
from dflash_lib.target.gpus import GpuChoice
from tests.hidden_states.rows import make_options, make_prepared, make_store

WORKER = "dflash_lib.hidden_states.extraction_worker"
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def prepared(tiny_llama):
    return make_prepared(tiny_llama, num_samples=40)


@pytest.fixture(scope="module")
def prepared_folder(prepared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "prepared"
    prepared.save(folder)
    return folder


@pytest.fixture
def start(tiny_llama_folder, prepared_folder, tmp_path):
    def call(store="store", **options):
        processes = options.pop("num_processes", 1)
        return start_extraction(tmp_path / store, tiny_llama_folder, prepared_folder, make_options(**options),
                                tmp_path / "logs", num_processes=processes, show=False)
    return call


@pytest.fixture(scope="module")
def truth(tiny_llama_folder, prepared_folder, tmp_path_factory):
    """A store that one process extracted without interruption."""
    folder = tmp_path_factory.mktemp("truth")
    start_extraction(folder / "store", tiny_llama_folder, prepared_folder, make_options(), folder, show=False)
    return folder / "store"


def make_job(store: Path, target, prepared_folder: Path) -> ExtractionJob:
    """The job that extracts what is missing in a store whose plan is there."""
    todo = scan_store(store, ExtractionPlan.load(store), PreparedRows.load(prepared_folder).sample_ids).missing
    return ExtractionJob(store=str(store), model=str(target.path), prepared=str(prepared_folder), todo=todo)


def shard_bytes(folder: Path) -> dict[str, bytes]:
    assert not list(folder.glob(".*")), "a partial file was left"
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_other_layers_or_another_target_are_refused_with_the_difference(start, tmp_path, tiny_llama, tiny_llama_folder,
                                                                        tiny_qwen3_5_folder, prepared):
    make_store(tmp_path / "store", tiny_llama, prepared)
    with pytest.raises(StoreError, match=r"target_layer_ids: the store has \[1, 3, 4\], asked for \[0, 3, 4\]"):
        start(target_layer_ids=[0, 3, 4])
    with pytest.raises(StoreError, match='encoding: the store has "bf16", asked for "bf16.zstd"'):
        start(encoding="bf16+zstd")
    with pytest.raises(StoreError, match="target.weights: the store has"):
        open_plan(tmp_path / "store", tiny_qwen3_5_folder, prepared, make_options())
    with pytest.raises(StoreError, match="data.fingerprint"):
        open_plan(tmp_path / "store", tiny_llama_folder, make_prepared(tiny_llama, seed=1), make_options())


def test_a_destination_that_cannot_be_written_is_refused(start, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="cannot be written"):
        start(store="file/store")
    with pytest.raises(StoreError, match="cannot be written"):
        start(store="file")


def test_devices_that_are_not_there_are_refused(tmp_path, tiny_llama_folder, prepared_folder):
    options = make_options()
    with pytest.raises(StoreError, match="gpus: PyTorch sees no CUDA device"):
        start_extraction(tmp_path, tiny_llama_folder, prepared_folder, options, tmp_path, 99, device="cuda")
    with pytest.raises(StoreError, match=r"gpus: \[0, 1\] with device 'cpu'"):
        start_extraction(tmp_path, tiny_llama_folder, prepared_folder, options, tmp_path, gpus=[0, 1])
    with pytest.raises(StoreError, match="device: 'cuda:1'; write cuda"):
        start_extraction(tmp_path, tiny_llama_folder, prepared_folder, options, tmp_path, device="cuda:1", gpus=[0])
    with pytest.raises(StoreError, match="this machine joins it"):
        start_extraction(tmp_path, tiny_llama_folder, prepared_folder, options, tmp_path, nodes=Nodes(2, 1, "host:1"))
    assert not list(tmp_path.iterdir())


def test_each_worker_gets_one_of_the_chosen_devices(monkeypatch):
    note = "GPU 1 was left out"
    monkeypatch.setattr(extraction, "choose_gpus", lambda wanted: GpuChoice(wanted or [0, 2, 5], [note]))
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    job = ExtractionJob(store="", model="", prepared="", device="cuda", todo=[])
    for device, gpus, devices in (("cuda", None, ["cuda:0", "cuda:2", "cuda:5"]),
                                  ("cuda", [3, 1], ["cuda:3", "cuda:1"]), ("cuda:4", None, ["cuda:4"])):
        workers = extraction._choose_workers(device, gpus, 99)
        assert (workers.num, workers.devices) == (len(devices), devices)
        assert workers.notes == [note] and workers.environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        monkeypatch.setenv("DFLASH_GPUS", workers.environment["DFLASH_GPUS"])
        assert [worker_device(job, local) for local in range(workers.num)] == devices
    workers = extraction._choose_workers("cpu", None, 3)
    assert (workers.num, workers.devices) == (3, ["cpu"])
    monkeypatch.setenv("DFLASH_GPUS", workers.environment["DFLASH_GPUS"])  # a machine's GPUs are no CPU job's
    assert worker_device(ExtractionJob(store="", model="", prepared="", todo=[]), 2) == "cpu"


def test_shards_without_a_plan_are_never_overwritten(start, tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / shard_name(0)).write_text("x")
    with pytest.raises(StoreError, match="no plan.json"):
        start()


def test_a_disk_that_is_too_small_is_refused_before_work_begins(tmp_path, tiny_llama, prepared, monkeypatch):
    plan = make_store(tmp_path / "store", tiny_llama, prepared)
    needed = sum(plan.shard_tokens[:2]) * plan.bytes_per_token

    class Stat:
        f_frsize, f_bavail = 1, needed - 1

    monkeypatch.setattr("os.statvfs", lambda _path: Stat)
    with pytest.raises(StoreError, match="the 2 shards to extract take at least"):
        check_free_space(tmp_path / "store", plan, [0, 1])
    Stat.f_bavail = needed
    check_free_space(tmp_path / "store", plan, [0, 1])


def test_killed_in_the_middle_and_resumed_gives_the_same_bytes(start, tmp_path, truth, tiny_llama, prepared_folder):
    (tmp_path / "store").mkdir()
    ExtractionPlan.load(truth).save(tmp_path / "store")
    seen = []

    def kill(fields):
        seen.append(fields["shard"])
        if fields["shard"] == 2:  # the first batch of the third shard is done, its file is half written
            os.kill(fields["pid"], signal.SIGKILL)

    job = make_job(tmp_path / "store", tiny_llama, prepared_folder)
    with pytest.raises(LaunchError, match="SIGKILL"):
        run_torchrun(WORKER, [job.save(tmp_path / "logs")], 1, tmp_path / "logs", 1, kill)
    plan = ExtractionPlan.load(tmp_path / "store")
    missing, _ = missing_shards(tmp_path / "store", plan)
    assert len(plan.shards) == 8 and 0 not in missing and len(missing) >= 4
    os.truncate(tmp_path / "store" / shard_name(0), 5000)  # and one shard was damaged since
    report = start()
    assert list(report.replaced) == [0] and "damaged" in report.replaced[0]
    assert report.num_shards == len(missing) + 1
    assert report.num_tokens == sum(plan.shard_tokens[i] for i in {0, *missing})
    assert shard_bytes(tmp_path / "store") == shard_bytes(truth)
    again = start()
    assert (again.num_shards, again.num_tokens, again.tokens_per_second) == (0, 0, 0.0)


def test_the_largest_missing_shards_come_first(tmp_path, tiny_llama, prepared):
    plan = make_store(tmp_path / "store", tiny_llama, prepared)
    for shard in (1, 4, 6):
        (tmp_path / "store" / shard_name(shard)).unlink()
    os.truncate(tmp_path / "store" / shard_name(3), 100)
    swapped = [100, 1, 3, 7, 100, 100, 7, 100]
    object.__setattr__(plan, "shard_tokens", swapped)
    plan.__dict__["hash"] = ExtractionPlan.load(tmp_path / "store").hash
    scan = scan_store(tmp_path / "store", plan, prepared.sample_ids)
    assert scan.missing == [4, 3, 6, 1] and list(scan.damaged) == [3] and scan.num_quarantined == 0


def test_two_processes_write_the_same_store(start, tmp_path, truth, prepared):
    report = start(num_processes=2)
    assert report.num_tokens == prepared.num_tokens and report.num_shards == 8 and report.tokens_per_second > 0
    assert shard_bytes(tmp_path / "store") == shard_bytes(truth)
    with HiddenStateStore.open(tmp_path / "store") as store:
        require_verified(verify_store(store, prepared))


def test_rows_that_changed_since_the_plan_are_refused_by_the_job(start, tmp_path, tiny_llama, prepared):
    make_store(tmp_path / "store", tiny_llama, prepared)
    make_prepared(tiny_llama, num_samples=40, seed=1).save(tmp_path / "other")
    job = ExtractionJob(store=str(tmp_path / "store"), model=str(tiny_llama.path), prepared=str(tmp_path / "other"),
                        todo=[0])
    with pytest.raises(LaunchError, match="not the rows that"):
        run_torchrun(WORKER, [job.save(tmp_path / "logs")], 1, tmp_path / "logs", 1)


def test_a_disk_that_fills_up_ends_in_words_not_in_a_crash(tmp_path, tiny_llama, prepared):
    """In a process of its own, whose files may not grow past 20 kB: HDF5 alone would end with a segmentation fault."""
    plan = make_store(tmp_path / "store", tiny_llama, prepared)
    largest = max((tmp_path / "store" / shard_name(i)).stat().st_size for i in range(len(plan.shards)))
    assert largest > 20_000
    (tmp_path / "store" / shard_name(0)).unlink()
    prepared.save(tmp_path / "prepared")
    script = ("import sys\n"
              "from dflash_lib.conversations.prepare import PreparedRows\n"
              "from dflash_lib.hidden_states.extraction_worker import extract_shard\n"
              "from dflash_lib.hidden_states.plan import ExtractionPlan\n"
              "from dflash_lib.hidden_states.schema import StoreError\n"
              "from dflash_lib.target.loading import load_target\n"
              "store, model, prepared = sys.argv[1:]\n"
              "try:\n"
              "    plan, prepared = ExtractionPlan.load(store), PreparedRows.load(prepared)\n"
              "    extract_shard(load_target(model), prepared, plan, store, 0)\n"
              "except StoreError as error:\n"
              "    print(error)\n")
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "store", tiny_llama.path, tmp_path / "prepared"], cwd=ROOT, text=True,
        capture_output=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)))
    assert done.returncode == 0, done.stderr
    assert "writing failed" in done.stdout and "File too large" in done.stdout
    assert not list((tmp_path / "store").glob("*shard-00000*"))
