"""The trial of a job: what it says when all is well, and a diagnosis for everything that is not."""

import json

import pytest
import yaml

from dflash_lib import __main__ as command
from dflash_lib.launch import LaunchError
from dflash_lib.workbench import trial as trial_module
from dflash_lib.workbench.doctor import GREEN, RED
from dflash_lib.workbench.trial import diagnose, run_trial

SMALL = {"dtype": "float32", "device": "cpu", "threads": 1, "max_length": 96, "num_aux_layers": 3, "token_budget": 256,
         "block_size": 4}


@pytest.fixture
def job(tiny_llama_folder, tmp_path):
    """A parameter file of 12 conversations, of which the trial takes 5; changes go in by keyword."""
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"id": f"c{i}", "messages": [
        {"role": "user", "content": "What is rain?"},
        {"role": "assistant", "content": "A battery is a device. " * (1 + i % 3)}]}) + "\n" for i in range(12)))

    def write(**changes):
        values = {**SMALL, "model": str(tiny_llama_folder), "conversations": str(tmp_path / "c.jsonl"),
                  "runs_dir": str(tmp_path / "runs"), **changes}
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(values))
        return tmp_path / "job.yaml"

    return write


def test_a_job_that_runs(job, tmp_path, capsys):
    assert command.main(["trial", str(job())]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[:2] for line in printed.splitlines()[:5]] == [
        [GREEN, name] for name in ("disk", "target", "preparation", "extraction", "verification")]
    assert "5 conversations" in printed and "tokens/s" in printed and printed.endswith("The job runs here.\n")
    assert list((tmp_path / "runs").iterdir()) == [], "a trial that passed leaves nothing"


def test_a_job_that_does_not_ends_in_a_diagnosis(job, tmp_path, capsys):
    """A batch that fails in the worker: its last words, what to do, and where the log is."""
    assert command.main(["trial", str(job(target_layer_ids=[1, 99]))]) == 1
    caught = capsys.readouterr()
    assert "Traceback" not in caught.out + caught.err
    assert "red    extraction" in caught.out and "does not fit a target of 6 layers" in caught.out
    assert (tmp_path / "runs" / "job-trial").is_dir(), "what failed can be looked at"
    assert command.main(["trial", str(job())]) == 0, "and is in nobody's way"


@pytest.mark.parametrize(("changes", "stage", "words"), [
    ({"conversations": "nowhere.jsonl"}, "preparation", "nowhere.jsonl"),
    ({"model": "nowhere"}, "target", "no such model folder"),
    ({"max_length": 3}, "preparation", "conversations were refused"),
])
def test_what_is_wrong_with_the_job(changes, stage, words, job, tmp_path):
    trial = run_trial(job(**changes), tmp_path / "other")
    assert not trial.passed and trial.lines[-1].what == stage and words in trial.lines[-1].found
    assert trial.lines[-1].to_do


def test_a_store_that_is_not_as_it_should_be(job, monkeypatch):
    from dflash_lib.hidden_states.verify import StoreCheck

    monkeypatch.setattr(trial_module, "verify_store", lambda *_: [StoreCheck("token ids", 3, "sample 1")])
    line = run_trial(job()).lines[-1]
    assert (line.level, line.what) == (RED, "verification") and "token ids: 3 faults" in line.found


def test_failures_of_a_worker_get_their_remedy(tmp_path):
    for text, remedy in (("rank 0 failed:\n File x\ntorch.OutOfMemoryError: CUDA out of memory.", "lower token_budget"),
                         ("ended with code -9 and left no traceback; killed?", "dmesg"),
                         ("rank 0 failed:\nModuleNotFoundError: No module named 'h5py'", "doctor"),
                         ("rank 0 failed:\nOSError: [Errno 28] No space left on device", "free space")):
        line = diagnose("extraction", LaunchError(text), tmp_path)
        assert line.level == RED and remedy in line.to_do and line.found == text.splitlines()[-1]
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "extraction_worker.log").write_text("")
    line = diagnose("extraction", RuntimeError("?"), tmp_path)
    assert "not a known failure" in line.to_do and "extraction_worker.log" in line.to_do
    assert line.found == "RuntimeError: ?"


def test_a_folder_in_the_way_is_not_removed(job, tmp_path, capsys):
    (tmp_path / "runs" / "job-trial").mkdir(parents=True)
    (tmp_path / "runs" / "job-trial" / "mine.txt").write_text("")
    assert command.main(["trial", str(job())]) == 2
    assert "is in the way" in capsys.readouterr().err
    assert (tmp_path / "runs" / "job-trial" / "mine.txt").exists()
