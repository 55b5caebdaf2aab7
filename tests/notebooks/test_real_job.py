"""The parameter file of the real job, on the 27B in miniature: the same file, with nothing but paths, the device and
sizes replaced, plans and runs notebooks 01 to 06."""

import json
import subprocess
import sys

import pytest
import yaml

from dflash_lib.hidden_states.store import HiddenStateStore
from dflash_lib.workbench.parameters import read_notebook, read_parameters_file
from dflash_lib.workbench.runs import REPOSITORY, load_record, notebook_paths
from tests.miniature import make_miniature

REAL = REPOSITORY / "notebooks" / "params" / "qwen3_6_27b_8gpu.yaml"
PLACES = ("model", "model_config", "device", "runs_dir", "store_dir", "conversations", "heldout_prompts")
# A row of a vocabulary of 512 for the mask, two processes for eight GPUs, dozens of short rows, narrow heads, few
# steps; and the stated rates, so that the plan's hours are those of a machine like this.
SIZES = {"threads": 1, "max_samples": 24, "max_length": 96, "mask_token_id": 3, "num_workers": 2, "token_budget": 384,
         "samples_per_shard": 8, "sliding_window": 32, "num_drafter_heads": 8, "num_drafter_kv_heads": 2,
         "drafter_head_dim": 16, "num_processes": 2, "batch_samples": 2, "steps": 80, "warmup_steps": 4,
         "validation_samples": 4, "validation_interval": 40, "num_gpus": 2, "epochs": 8,
         "extract_tokens_s": 100.0, "train_tokens_s": 100.0, "load_s": 5.0, "disk_mb_s": 100.0,
         "max_disk_tb": 0.001}
STAGES = [path.stem for path in notebook_paths()][:6]


def write_conversations(path, num):
    """Answers that a drafter can learn within a few steps: one sentence again and again, of a length of their own."""
    path.write_text("".join(json.dumps({"id": f"c{i}", "messages": [
        {"role": "user", "content": f"What is rain? Explain it {i} times."},
        {"role": "assistant", "content": "A battery is a device. " * (2 + i % 4)}]}) + "\n" for i in range(num)))


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The real job's file for the miniature, in a folder of its own."""
    folder = tmp_path_factory.mktemp("real job")
    make_miniature(folder / "target")
    write_conversations(folder / "conversations.jsonl", 24)
    real = read_parameters_file(REAL)
    places = {"model": str(folder / "target"), "model_config": str(folder / "target"), "device": "cpu",
              "runs_dir": str(folder / "runs"), "store_dir": str(folder / "scratch" / "states"),
              "conversations": str(folder / "conversations.jsonl"), "heldout_prompts": real["heldout_prompts"]}
    assert set(places) == set(PLACES) and {*places, *SIZES} <= set(real), "replaced is what is there, nothing is added"
    (folder / "miniature.yaml").write_text(yaml.safe_dump({**real, **places, **SIZES}, sort_keys=False))
    return folder


def workbench(*arguments):
    return subprocess.run([sys.executable, "-m", "dflash_lib", *map(str, arguments)], cwd=REPOSITORY,
                          capture_output=True, text=True)


@pytest.mark.slow
def test_the_real_jobs_file_plans_and_runs_on_the_miniature(job):
    done = workbench("run", "--plan", job / "miniature.yaml", "--to", "06_train")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tapped layers [1, 16, 31, 46, 61]" in done.stdout and "07_evaluate" not in done.stdout
    assert sorted(path.name for path in job.iterdir()) == ["conversations.jsonl", "miniature.yaml", "target"]

    done = workbench("run", job / "miniature.yaml", "--to", "06_train")
    assert done.returncode == 0, done.stdout + done.stderr
    run = job / "runs" / "miniature"
    records = {name: load_record(run, name) for name in STAGES}
    assert all(record is not None and record["passed"] for record in records.values())
    assert load_record(run, "07_evaluate") is None and "not run" in done.stdout
    for name in STAGES:
        executed = run / "notebooks" / f"{name}.ipynb"
        assert executed.stat().st_size < 1_000_000
        outputs = [output for cell in read_notebook(executed)["cells"] for output in cell.get("outputs", [])]
        assert [o["text"] for o in outputs if o.get("name") == "stderr"] == []
    assert not (run / "states").exists(), "the store is where store_dir says"
    with HiddenStateStore.open(job / "scratch" / "states") as store:
        assert store.target_layer_ids == [1, 16, 31, 46, 61] and store.num_samples == 24
        assert store.plan.target["dtype"] == "bfloat16"
    planned, measured = records["01_capacity"]["results"], records["04_extract"]["results"]
    assert planned["estimated_tokens"] == measured["num_tokens"], "every conversation was looked at"
    assert records["06_train"]["results"]["validation_acceptance_best"] > 2, "it learned to draft the sentence"

    done = workbench("run", "--plan", job / "miniature.yaml", "--to", "06_train")
    assert "measured in miniature (04_extract, 06_train)" in done.stdout, "what was measured is the next plan's rate"
    done = workbench("run", job / "miniature.yaml", "--to", "06_train")
    assert done.returncode == 0 and done.stdout.count(": current, not repeated") == 6
