"""Checkpoints that the speculators package's own trainer wrote, opened by `open_drafter`.

Slow: the package is installed into a folder of its own, and runs in subprocesses (tests/speculators_package.py).
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dflash_lib import __main__ as command
from dflash_lib.files import read_json
from dflash_lib.hidden_states.formats import open_states
from dflash_lib.hidden_states.formats.convert import ConvertOptions, convert
from tests import speculators_package
from tests.hidden_states.rows import make_prepared, make_store
from tests.report.test_evaluation_page import write_prompts

pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("speculators_trained.py")
TRAINER = Path(__file__).parents[1] / "hidden_states" / "formats" / "speculators_trainer.py"
ROUNDING = 2e-6  # as in speculators_side.py
KEPT = sorted({*range(0, 384, 5), *range(100, 150)})
FULL, SLIDING = "full_attention", "sliding_attention"


def run(environment, *arguments) -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", *map(str, arguments)], env=environment, capture_output=True,
                          text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def reduced(folder: Path) -> list:
    """Arguments for a draft vocabulary of KEPT."""
    marks = np.zeros(384, dtype=bool)
    marks[KEPT] = True
    np.save(folder / "t2d.npy", marks)
    np.save(folder / "d2t.npy", np.array(KEPT) - np.arange(len(KEPT)))
    return ["--draft-vocab-size", len(KEPT), "--t2d-path", folder / "t2d.npy", "--d2t-path", folder / "d2t.npy"]


@pytest.mark.parametrize("family, more, kinds", [
    ("tiny_llama", ["--num-layers", 1], [SLIDING]),
    ("tiny_llama", ["--num-layers", 2, "--full-attention-indices", 1, "reduced"], [SLIDING, FULL]),
    ("tiny_qwen3_5", ["--num-layers", 2, "--full-attention-indices", 0, 1, "--sample-from-anchor"], [FULL, FULL])],
    ids=["its default", "mixed layers, reduced head", "hybrid target, from the anchor"])
def test_its_checkpoint_is_its_model(family, more, kinds, request, tmp_path, capsys):
    """Trained by its command line from our store: hidden states and logits of every slot are those of its own model on
    the same documents, to float32 rounding, and what we propose is its argmax. `evaluate` takes the folder as it is."""
    target, environment = request.getfixturevalue(family), speculators_package.environment()
    make_store(tmp_path / "store", target, make_prepared(target, num_samples=12, longest=60))
    convert(open_states(tmp_path / "store"), tmp_path / "rows", ConvertOptions(to="speculators", with_states=False),
            show=False)
    vocabulary = reduced(tmp_path) if "reduced" in more else ["--draft-vocab-size", 384]
    run(environment, TRAINER, tmp_path / "losses.json", "--speculator-type", "dflash", "--verifier-name-or-path",
        target.path, "--data-path", tmp_path / "rows", "--save-path", tmp_path / "out", "--hidden-states-backend",
        "dflash-store", "--dflash-store", tmp_path / "store", "--on-missing", "raise", "--target-layer-ids", 2, 4, 5,
        "--block-size", 4, "--max-anchors", 32, "--mask-token-id", 3, *vocabulary, "--draft-attn-impl", "sdpa",
        "--loss-implementation", "eager", "--hidden-states-dtype", "float32", "--total-seq-len", 256,
        "--num-workers", 0, "--epochs", 3, "--lr", 3e-3, "--optimizer", "adamw", *[a for a in more if a != "reduced"])
    run(environment, WORKER, target.path, tmp_path / "out", tmp_path / "found.json")
    found = read_json(tmp_path / "found.json")
    config, anchored = found["config"], "--sample-from-anchor" in more
    assert (config["target_layer_ids"], config["block_size"], config["mask_token_id"]) == ([1, 3, 4], 4, 3)
    assert config["layer_types"] == kinds and config["sample_from_anchor"] is anchored
    assert found["draft_vocab"] == (KEPT if "reduced" in more else None)
    assert found["hidden"] < ROUNDING and found["logits"] < ROUNDING, found
    print(f"PARITY | {' '.join(map(str, more))} | hidden {found['hidden']:.1e}, logits {found['logits']:.1e} |")
    assert found["same_drafts"] > 0.98 and found["different_drafts"] > 1 and found["blocks"] == 15 + 26, found
    prompts = write_prompts(tmp_path / "prompts.jsonl", "Why?", "How many dogs?")
    assert command.main(["evaluate", "--model", str(target.path), "--out", str(tmp_path / "page"), "--max-new-tokens",
                         "8", "--drafter", str(tmp_path / "out"), "--prompts", f"some={prompts}"]) == 0
    drafter, = read_json(tmp_path / "page" / "results.json")["drafters"]
    assert drafter["name"] == "out (export)" and drafter["block_size"] == 4 + anchored
    assert drafter["sample_from_anchor"] is anchored
    capsys.readouterr()
