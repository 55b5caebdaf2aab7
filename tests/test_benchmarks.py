"""The benchmarks run: on a tiny target and few rows, every part, and a GPU's in miniature on the CPU.

What it measures is not judged here: times on a busy machine say nothing.
"""

import os
import re
import subprocess
import sys

import pytest
import torch

from dflash_lib.workbench.runs import REPOSITORY
from tests import speculators_package
from tests.miniature import make_miniature


def run_script(name: str, *arguments, **environment) -> str:
    done = subprocess.run([sys.executable, REPOSITORY / "benchmarks" / name, *map(str, arguments)], text=True,
                          capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def run(*arguments, **environment) -> str:
    return run_script("extraction.py", "--repeats", "1", *arguments, **environment)


def rows_of(text: str) -> dict[str, list[str]]:
    """The cells of each table row behind its first, by the first."""
    cells = [re.split(r"\s*\|\s*", line.strip("| ")) for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in cells}


@pytest.mark.slow
def test_every_part_runs_on_a_tiny_target(tmp_path):
    """But memory, which tests/hidden_states/test_flat_memory.py runs."""
    parts = ["speed", "padding", "reading", "scaling"]
    text = run("--tiny", "--no-speculators", "--reads", 8, "--work-dir", tmp_path, "--parts", *parts)
    assert re.findall(r"^## (\w+)", text, re.M) == parts
    rows = rows_of(text)
    for name in ("bare forward pass of the same batches, no head",
                 "usual script: one by one, all hidden states, logits, torch.save"):
        assert float(re.fullmatch(r"\*\*([\d.]+)\*\* .*", rows[name][1])[1]) > 0
    assert rows["64"][0] == "6,755" and rows["64"][3] == "**11.1%**"
    assert rows["bf16+zstd, last state supervised"][0] == "random"
    assert rows["make the plan"][3] == "samples" and rows["files"][0] == "12,500 of 12.08 GB"
    assert "What breaks first: " in text and list(tmp_path.iterdir()) == [], "the stores are gone"


def test_the_gpus_part_runs_in_miniature(tmp_path):
    """The 27B's layers and names at a hidden size of 64, random weights, in bfloat16."""
    folder = make_miniature(tmp_path / "miniature")
    rows = rows_of(run("--parts", "speed", "--random-config", folder, "--layers", 8, "--tokens", 48, "--samples", 12,
                       "--token-budget", 192, "--threads", 1))
    assert float(rows["samples/s at 48 tokens"][0].replace(",", "")) > 0
    assert "times what is needed" in rows["this disk writes and syncs"][0]
    assert rows["FLOPs utilisation, extraction"][0].endswith("%")


@pytest.mark.slow
def test_reading_is_compared_with_the_real_speculators(tmp_path):
    speculators_package.install()
    rows = rows_of(run("--tiny", "--parts", "reading", "--reads", 8, "--work-dir", tmp_path))
    for name, cell in (("bf16, last state supervised", 6), ("bf16+zstd, last state supervised", 6)):
        assert float(re.fullmatch(r"\*\*([\d.]+)\*\* .*", rows[name][cell])[1]) > 0
    assert re.fullmatch(r"[\d,]+; \*\*([\d.]+)\*\* .*", rows["fp8+zstd, last state supervised"][4])
    assert re.fullmatch(r"\*\*[\d.]+%\*\*", rows["batches of bf16, last state all"][5])


TINY_TRAINING = ("--tiny", "--layers", 2, "--rounds", 2)
RATIO = r"\*\*([\d.]+)\*\*.*"


def test_a_training_step_is_measured_in_miniature():
    text = run_script("training.py", *TINY_TRAINING, "--losses", "kl", "--no-speculators")
    time, memory = [line.split(" | ") for line in text.splitlines() if line.startswith("| 2 | KL")]
    anchors, slots, milliseconds = time[2:5]
    assert anchors == "8" and 8 * 4 < int(slots) <= 8 * 7 and float(milliseconds) > 0
    state, ours = (int(cell) for cell in memory[2:4])
    assert ours >= state > 0, "gradients and the optimizer's state are among what the steps add"


@pytest.mark.slow
def test_a_training_step_is_compared_with_the_real_speculators():
    """The script itself stops where the two do not train the same slots or come to another loss."""
    speculators_package.install()
    text = run_script("training.py", *TINY_TRAINING)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()
            if line.startswith("| 2 |")]
    assert [row[1] for row in rows] == ["cross-entropy", "KL"] * 2
    assert all(float(re.fullmatch(RATIO, row[10])[1]) > 0 for row in rows[:2])
    assert all(float(re.fullmatch(RATIO, row[5])[1]) > 0 for row in rows[2:])


def test_sides_that_train_other_slots_are_refused():
    from benchmarks import training

    class Side:
        device = torch.device("cpu")

        def __init__(self, loss: float, slots: int):
            self.found = torch.tensor(loss), torch.ones(()), torch.tensor(slots)

        def loss(self):
            return self.found

    assert training.check_same_work({"ours": Side(80.0, 40), "theirs": Side(2.0, 40)}, "kl") == 40
    assert training.check_same_work({"ours": Side(80.0, 40), "theirs": Side(3.0, 40)}, "ce") == 40, "other labels"
    for sides, kind in (((80.0, 40), (2.0, 41)), "ce"), (((80.0, 40), (2.01, 40)), "kl"):
        with pytest.raises(SystemExit, match="do not do the same"):
            training.check_same_work({"ours": Side(*sides[0]), "theirs": Side(*sides[1])}, kind)


@pytest.mark.slow
def test_acceptance_is_compared_with_speculators_trainer(tmp_path):
    """A few steps on few conversations; a second call trains nothing again, and other settings are refused."""
    speculators_package.install()
    arguments = ["--work-dir", tmp_path, "--conversations", 40, "--steps", 6, "--seeds", 0, "--prompts", 1,
                 "--max-new-tokens", 8]
    first = rows_of(run_script("acceptance.py", *arguments))
    ours, theirs = first["ours"], first["speculators, its defaults"]
    assert 1 <= float(ours[0]) <= 8 and 1 <= float(theirs[0]) <= 8
    tokens, steps = ([int(row[place].replace(",", "")) for row in (ours, theirs)] for place in (4, 5))
    assert tokens[1] >= tokens[0] > 0 and steps[1] >= steps[0] == 6, "theirs is shown no less"
    checkpoint = tmp_path / "speculators-its-defaults" / "seed-0" / "last" / "model.safetensors"
    written = checkpoint.stat().st_mtime_ns
    assert rows_of(run_script("acceptance.py", *arguments))["speculators, its defaults"] == theirs
    assert checkpoint.stat().st_mtime_ns == written
    done = subprocess.run([sys.executable, REPOSITORY / "benchmarks" / "acceptance.py", *map(str, [
        *arguments[:4], "--steps", 7, *arguments[6:]])], capture_output=True, text=True)
    assert done.returncode and "other settings" in done.stderr
