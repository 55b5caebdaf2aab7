"""The benchmark of extraction runs: on a tiny target and few rows, every part, and a GPU's in miniature on the CPU.

What it measures is not judged here: times on a busy machine say nothing.
"""

import os
import re
import subprocess
import sys

import pytest

from dflash_lib.workbench.runs import REPOSITORY
from tests import speculators_package
from tests.miniature import make_miniature

SCRIPT = REPOSITORY / "benchmarks" / "extraction.py"


def run(*arguments, **environment) -> str:
    done = subprocess.run([sys.executable, SCRIPT, "--repeats", "1", *map(str, arguments)], text=True,
                          capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


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
