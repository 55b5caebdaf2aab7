"""Two machines on one job: here two agents on this one, which share its disk and meet on 127.0.0.1."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_lib.hidden_states import extraction
from dflash_lib.hidden_states.extraction import join_extraction, start_extraction
from dflash_lib.hidden_states.schema import StoreError
from dflash_lib.job_status import read_status
from dflash_lib.launch import LaunchError, Nodes
from tests.hidden_states.rows import make_options, make_prepared, make_store

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def prepared(tiny_llama):
    return make_prepared(tiny_llama, num_samples=40)


@pytest.fixture
def endpoint() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def join_in_a_process(log_dir: Path, endpoint: str, worker: str = extraction.WORKER) -> subprocess.Popen:
    """The second machine, started before the first, as a person would who does not wait."""
    script = ("import sys\nfrom dflash_lib.hidden_states import extraction\nfrom dflash_lib.launch import Nodes\n"
              "extraction.WORKER = sys.argv[3]\n"
              "extraction.join_extraction(sys.argv[1], Nodes(2, 1, sys.argv[2]))\n")
    return subprocess.Popen([sys.executable, "-c", script, log_dir, endpoint, worker], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.mark.slow
def test_two_agents_write_one_store_and_one_shows_both(tmp_path, tiny_llama, prepared, endpoint, monkeypatch):
    make_store(tmp_path / "truth", tiny_llama, prepared)
    prepared.save(tmp_path / "prepared")
    monkeypatch.setattr(extraction, "WORKER", "tests.hidden_states.faulty_worker")
    monkeypatch.setenv("DFLASH_TEST_FAULT", '{"kind": "none", "seconds": 0.1}')
    second = join_in_a_process(tmp_path / "logs", endpoint, "tests.hidden_states.faulty_worker")
    report = start_extraction(tmp_path / "store", tiny_llama.path, tmp_path / "prepared", make_options(),
                              tmp_path / "logs", show=False, nodes=Nodes(2, 0, endpoint))
    output, _ = second.communicate(timeout=60)
    assert second.returncode == 0, output
    assert report.num_workers == 2 and report.num_shards == 8
    stored, truth = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
                     for name in ("store", "truth"))
    assert stored == truth
    status = read_status(tmp_path / "logs" / "extraction.status.json")
    assert status["done"] == status["total"] and all(w["done"] > 0 for w in status["workers"].values()), status
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {
        "faulty_worker.log", "faulty_worker.node1.log", "extraction.status.json"}


@pytest.mark.slow
def test_a_failure_on_one_machine_ends_the_job_on_the_other(tmp_path, tiny_llama, prepared, endpoint, monkeypatch):
    """Its agent alone would not tell: torchrun leaves that to the collectives, which there are none of."""
    prepared.save(tmp_path / "prepared")
    monkeypatch.setattr(extraction, "WORKER", "tests.hidden_states.faulty_worker")
    monkeypatch.setenv("DFLASH_TEST_FAULT", '{"kind": "none", "seconds": 0.2}')
    with monkeypatch.context() as other:
        other.setenv("DFLASH_TEST_FAULT", '{"kind": "fail", "ranks": [0, 1]}')
        second = join_in_a_process(tmp_path / "logs", endpoint, "tests.hidden_states.faulty_worker")
    with pytest.raises(LaunchError, match=r"(?s)rank \d of 2 failed:.*LookupError: a fault of the worker \(planted\)"):
        start_extraction(tmp_path / "store", tiny_llama.path, tmp_path / "prepared", make_options(), tmp_path / "logs",
                         show=False, nodes=Nodes(2, 0, endpoint))
    output, _ = second.communicate(timeout=120)
    assert second.returncode != 0 and "a fault of the worker (planted)" in output


def test_a_machine_that_waits_in_vain_says_so(tmp_path):
    with pytest.raises(StoreError, match="did not appear within 1 s. Start the extraction on node 0"):
        join_extraction(tmp_path, Nodes(2, 1, "127.0.0.1:1"), wait_s=1.0)
    with pytest.raises(StoreError, match="node 0 starts the extraction"):
        join_extraction(tmp_path, Nodes(2, 0, "127.0.0.1:1"))
