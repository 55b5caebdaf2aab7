"""The real speculators 0.9.0 reads what `convert` writes, and trains straight from a store.

Slow: the package is installed into a folder of its own, and runs in subprocesses (tests/speculators_package.py).
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_lib.files import read_json
from dflash_lib.hidden_states.formats import open_states
from dflash_lib.hidden_states.formats.convert import ConvertOptions, convert
from tests import speculators_package
from tests.hidden_states.formats.layouts import IDS, make_random_store, read_all
from tests.hidden_states.rows import make_prepared, make_store
from tests.tiny import VOCAB_SIZE

pytestmark = pytest.mark.slow
WORKER, TRAINER = (Path(__file__).with_name(f"speculators_{name}.py") for name in ("worker", "trainer"))


@pytest.fixture(scope="module")
def environment():
    return speculators_package.environment()


def run(environment, *arguments) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", *map(str, arguments)], env=environment, capture_output=True,
                          text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def store(tiny_llama, tmp_path_factory):
    """States of the tiny target, as it gave them."""
    folder = tmp_path_factory.mktemp("states") / "store"
    make_store(folder, tiny_llama, make_prepared(tiny_llama, num_samples=24, longest=60))
    return folder


@pytest.fixture(scope="module")
def exported(store, tiny_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    make_random_store(folder / "random-store", tiny_llama)
    for source, name, options in [
            (store, "bf16", {}), (store, "fp8", {"encoding": "fp8"}), (store, "rows", {"with_states": False}),
            (folder / "random-store", "random", {}), (folder / "random-store", "random-fp8", {"encoding": "fp8"})]:
        convert(open_states(source), folder / name, ConvertOptions(to="speculators", **options), show=False)
    return folder


@pytest.fixture(scope="module")
def theirs(environment, store, exported, tmp_path_factory):
    """What the package makes of our files: speculators_worker.py."""
    folder = tmp_path_factory.mktemp("theirs")
    run(environment, WORKER, exported, store, folder)
    return folder


@pytest.mark.parametrize("name", ["bf16", "fp8", "store"])
def test_its_data_set_class_collator_and_check_read_our_files(theirs, store, exported, name):
    """Every sample through ArrowDataset and check_hidden_states, and packed by CollateFn: from the files, from the fp8
    files through its FP8Transfer, and from the store through ours, there by a spawned data loader worker, too."""
    samples, fp8 = read_all(store), open_states(exported / "fp8")
    read = torch.load(theirs / f"{name}.pt", weights_only=True)
    assert len(read["samples"]) == len(samples) == 24
    position = 0
    for i, (sample, ours) in enumerate(zip(read["samples"], samples, strict=True)):
        states = torch.cat([ours.aux_hidden_states, ours.last_hidden_state_prenorm[:, None]], dim=1)
        if name == "fp8":  # its own arithmetic: bf16 times the scale rounded to bf16
            stored = fp8.read(i)
            states = stored.states.bfloat16() * stored.scales.bfloat16()
            assert torch.allclose(states.float(), stored.decoded(), rtol=2**-7, atol=0)
        assert torch.equal(sample["hidden_states"], states[:, :-1].flatten(1))
        assert torch.equal(sample["verifier_last_hidden_states"], states[:, -1])
        assert sample["input_ids"].tolist() == ours.input_ids.tolist()
        assert sample["loss_mask"].tolist() == ours.loss_mask.tolist()
        rows = slice(position, position + len(ours.input_ids))
        assert torch.equal(read["packed"]["hidden_states"][0, rows], states[:, :-1].flatten(1)), "packed in a row"
        assert (read["packed"]["document_ids"][0, rows] == i).all()
        position = rows.stop
    assert read["packed"]["error_records"] == 0
    if name == "store":
        assert torch.equal(read["packed"]["hidden_states"], read["from_worker"]["hidden_states"])


def test_our_fp8_form_is_theirs_bit_for_bit(theirs, exported):
    files = sorted((theirs / "theirs").iterdir())
    assert len(files) == 12
    for path in files:
        wanted, ours = load_file(path), load_file(exported / "random-fp8" / "hidden_states" / path.name)
        assert torch.equal(wanted["hidden_states"].view(torch.uint8), ours["hidden_states"].view(torch.uint8))
        assert torch.equal(wanted["hidden_states_scales"], ours["hidden_states_scales"])
        assert torch.equal(wanted["token_ids"], ours["token_ids"])


def test_what_it_must_refuse_it_refuses(theirs):
    """The checks above can fail: a swapped file is not the row's, and a NaN is seen."""
    said = read_json(theirs / "said.json")
    assert said["swapped"] == "SampleUnavailable" and "contain non-finite values" in said["nan"]


def test_it_trains_straight_from_a_store(environment, store, exported, tiny_llama_folder, tmp_path):
    """Its own command line, model, loaders and loss with our backend; nothing but the rows was exported. The loss goes
    down, and the drafter that it saves reads the store's layers."""
    assert not (exported / "rows" / "hidden_states").exists()
    run(environment, TRAINER, tmp_path / "losses.json", "--speculator-type", "dflash",
        "--verifier-name-or-path", tiny_llama_folder, "--data-path", exported / "rows", "--save-path", tmp_path / "out",
        "--hidden-states-backend", "dflash-store", "--dflash-store", store, "--on-missing", "raise",
        "--target-layer-ids", *(k + 1 for k in IDS), "--num-layers", 1, "--block-size", 4, "--max-anchors", 32,
        "--mask-token-id", 3, "--draft-vocab-size", VOCAB_SIZE, "--draft-attn-impl", "sdpa", "--loss-implementation",
        "eager", "--per-position-loss-weight", "fixed-exp-decay", "--hidden-states-dtype", "float32",
        "--total-seq-len", 256, "--num-workers", 0, "--epochs", 8, "--lr", 3e-3, "--optimizer", "adamw")
    losses = read_json(tmp_path / "losses.json")
    assert len(losses) >= 16 and sum(losses[-4:]) < 0.8 * sum(losses[:4]), losses
    assert read_json(tmp_path / "out" / "config.json")["aux_hidden_state_layer_ids"] == [2, 4, 5]
