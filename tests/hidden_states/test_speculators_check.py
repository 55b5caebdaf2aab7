"""speculators' layout: read back field by field as its own data set class does, and each planted fault found."""

import json
import shutil

import numpy as np
import pytest
import torch
from datasets import load_from_disk
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dflash_lib.hidden_states.formats.speculators import speculators_layer_ids, state_file
from dflash_lib.hidden_states.formats.speculators_check import (
    NAMES,
    capture_samples,
    check_speculators,
    write_speculators,
)
from dflash_lib.hidden_states.schema import StoreError
from dflash_lib.hidden_states.store import HiddenStateStore, StoredSample
from tests.hidden_states.rows import make_prepared, make_store

IDS = [1, 3, 4]


@pytest.fixture(scope="module")
def samples(tiny_llama, tmp_path_factory) -> list[StoredSample]:
    folder = tmp_path_factory.mktemp("states") / "store"
    make_store(folder, tiny_llama, make_prepared(tiny_llama))
    store = HiddenStateStore.open(folder)
    return [store.read(i) for i in range(5)]


@pytest.fixture(scope="module")
def written(samples, tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "speculators"
    write_speculators(folder, samples, IDS, 6)
    return folder


def test_what_cannot_be_written_is_refused(samples, tmp_path):
    with pytest.raises(StoreError, match="last hidden state"):
        write_speculators(tmp_path, [], IDS, 6)
    bare = StoredSample(0, samples[0].input_ids, samples[0].loss_mask, samples[0].aux_hidden_states, None)
    with pytest.raises(StoreError, match="last hidden state"):
        write_speculators(tmp_path, [bare], IDS, 6)


def test_an_export_can_be_repeated_but_nothing_else_is_removed(samples, tmp_path):
    for num in (5, 3):
        write_speculators(tmp_path / "export", samples[:num], IDS, 6)
        assert all(check.ok for check in check_speculators(tmp_path / "export", samples[:num], IDS, 6))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    with pytest.raises(StoreError, match="left alone"):
        write_speculators(tmp_path / "other", samples, IDS, 6)
    assert (tmp_path / "other" / "thesis.tex").read_text() == "x"


def test_captured_samples_are_what_the_store_holds(tiny_llama, samples):
    prepared = make_prepared(tiny_llama)
    for ours, stored in zip(capture_samples(tiny_llama, prepared, IDS), samples, strict=False):
        assert np.array_equal(ours.input_ids, stored.input_ids) and np.array_equal(ours.loss_mask, stored.loss_mask)
        difference = (ours.aux_hidden_states.float() - stored.aux_hidden_states.float()).abs().max()
        assert difference <= 0.02 * stored.aux_hidden_states.abs().max()  # another batch may flip a rounding
        assert ours.last_hidden_state_prenorm.dtype == torch.bfloat16


def test_it_reads_as_speculators_reads_it(samples, written):
    assert speculators_layer_ids([1, 16, 31, 46, 61]) == [2, 17, 32, 47, 62]
    rows = load_from_disk(str(written))
    assert list(rows.with_format(None)["seq_len"]) == [len(sample.input_ids) for sample in samples]
    for i, sample in enumerate(samples):
        loaded = load_file(written / "hidden_states" / f"hs_{i}.safetensors")
        assert torch.equal(loaded["token_ids"], rows[i]["input_ids"])  # its own check, types included
        assert rows[i]["loss_mask"].dtype == torch.int64
        assert torch.equal(loaded["hidden_states"][:, :-1].flatten(1),
                           sample.aux_hidden_states.flatten(1))  # layers side by side, ascending
        assert torch.equal(loaded["hidden_states"][:, -1], sample.last_hidden_state_prenorm)
        with safe_open(state_file(written, i), "pt") as file:
            assert json.loads(file.metadata()["aux_hidden_state_layer_ids"]) == [2, 4, 5, 6]


def test_a_sound_export_passes_every_check(samples, written):
    checks = check_speculators(written, samples, IDS, 6)
    assert [check.name for check in checks] == NAMES and all(check.ok for check in checks)


def damage(folder, name):
    path = state_file(folder, 2)
    tensors = load_file(path)
    metadata = {"aux_hidden_state_layer_ids": "[2, 4, 5, 6]"}
    states = tensors["hidden_states"]
    if name == "layer ids + 1, last slot behind":
        metadata = {"aux_hidden_state_layer_ids": "[1, 3, 4, 6]"}
    elif name == "dtypes and shapes":
        tensors["token_ids"] = tensors["token_ids"].int()
    elif name == "field names":
        tensors["loss_mask"] = tensors["token_ids"].clone()
    elif name == "token ids in file":
        tensors["token_ids"][0] += 1
    elif name == "aux hidden states":
        tensors["hidden_states"] = torch.cat([states[:, :-1].flip(1), states[:, -1:]], dim=1)
    elif name == "last slot before the norm":
        states[0, -1, 0] += 1
    elif name == "files and rows":
        shutil.copy(path, state_file(folder, 9))
    save_file(tensors, path, metadata)


@pytest.mark.parametrize("name", [n for n in NAMES if "data set" not in n])
def test_each_fault_in_a_file_is_found_under_its_name(samples, written, tmp_path, name):
    shutil.copytree(written, tmp_path / "copy")
    damage(tmp_path / "copy", name)
    assert [c.name for c in check_speculators(tmp_path / "copy", samples, IDS, 6) if not c.ok] == [name]


@pytest.mark.parametrize("name, change", [
    ("input_ids in data set", {"input_ids": 1}), ("loss_mask in data set", {"loss_mask": 1})])
def test_each_fault_in_the_data_set_is_found_under_its_name(samples, written, name, change):
    field = next(iter(change))
    changed = [StoredSample(s.sample_index, s.input_ids.copy(), s.loss_mask.copy(), s.aux_hidden_states,
                            s.last_hidden_state_prenorm) for s in samples]
    getattr(changed[1], field)[0] ^= change[field]
    failed = [c.name for c in check_speculators(written, changed, IDS, 6) if not c.ok]
    assert name in failed and set(failed) <= {name, "token ids in file"}
    assert isinstance(changed[1].input_ids, np.ndarray)
