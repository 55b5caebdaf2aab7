"""Every layout is read as what was written, and what is damaged is refused with its file's name."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_lib.hidden_states.formats import POST_NORM, PRE_NORM, open_states
from dflash_lib.hidden_states.formats.speculators import state_file
from dflash_lib.hidden_states.schema import StoreError
from tests.hidden_states.formats.layouts import (
    IDS,
    Mark,
    export_both,
    make_random_store,
    model_optimizer_sample,
    read_all,
    save,
    specforge_sample,
    write_model_optimizer,
    write_specforge,
)


@pytest.fixture(scope="module")
def store(tiny_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("states") / "store"
    make_random_store(folder, tiny_llama)
    return folder


@pytest.fixture(scope="module")
def samples(store):
    return read_all(store)


@pytest.fixture(scope="module")
def exported(store, tmp_path_factory):
    return export_both(store, tmp_path_factory.mktemp("exported"))


@pytest.fixture
def copy(exported, tmp_path):
    return shutil.copytree(exported / "bf16", tmp_path / "copy")


class TestWhatIsNoStates:
    def test_an_absent_folder_a_file_and_an_empty_folder(self, tmp_path):
        with pytest.raises(StoreError, match="no such folder"):
            open_states(tmp_path / "none")
        (tmp_path / "file.pt").write_text("x")
        with pytest.raises(StoreError, match="the folder that holds it"):
            open_states(tmp_path / "file.pt")
        (tmp_path / "empty").mkdir()
        with pytest.raises(StoreError, match=r"no hidden states in a known layout; known: .*speculators"):
            open_states(tmp_path / "empty")

    def test_other_files_and_an_unknown_name(self, tmp_path, store):
        (tmp_path / "model.safetensors").write_text("x")
        with pytest.raises(StoreError, match="no hidden states in a known layout"):
            open_states(tmp_path)
        with pytest.raises(StoreError, match=r"'eagle' is not known here; known: store, speculators, specforge"):
            open_states(store, "eagle")

    def test_two_layouts_in_one_folder_must_be_told_apart(self, copy, samples):
        write_model_optimizer(copy, samples[:1])
        with pytest.raises(StoreError, match="looks like speculators and like model-optimizer: say which"):
            open_states(copy)
        assert open_states(copy, "speculators").format == "speculators"

    def test_a_data_set_without_states(self, copy):
        shutil.rmtree(copy / "hidden_states")
        with pytest.raises(StoreError, match=r"hs_0.safetensors: no such file"):
            open_states(copy)

    def test_a_store_without_its_last_shard(self, store, tmp_path):
        broken = shutil.copytree(store, tmp_path / "store")
        (broken / "shard-00001.h5").unlink()
        with pytest.raises(StoreError, match="1 of 3 shards are missing"):
            open_states(broken)


def check_same(source, samples, last):
    """source: opened states; samples: what they were written from; last: what became of the last state, or None."""
    assert len(source) == len(samples) == len(source.names)
    for read, sample in zip(source, samples, strict=True):
        assert read.input_ids.dtype == np.int64 and np.array_equal(read.input_ids, sample.input_ids)
        assert read.loss_mask is None or np.array_equal(read.loss_mask, sample.loss_mask)
        slots = [sample.aux_hidden_states] + ([] if last is None else [last(sample)[:, None]])
        assert torch.equal(read.decoded(), torch.cat(slots, dim=1).float())
        assert read.scales is None and read.note == ""


def halved(sample):
    return sample.last_hidden_state_prenorm / 2


def prenorm(sample):
    return sample.last_hidden_state_prenorm


def test_the_store(store, samples):
    source = open_states(store)
    assert (source.format, source.encoding, source.target_layer_ids, source.last) == ("store", "bf16", IDS, PRE_NORM)
    assert source.names[3] == "sample 3" and "12 samples, outputs of layers [1, 3, 4]" in source.describe()
    check_same(source, samples, prenorm)


@pytest.mark.parametrize("changes", [{}, {"batched": True}, {"gz": True}, {"direct": True}, {"with_last": True},
                                     {"with_last": True, "batched": True, "gz": True}], ids=str)
def test_specforge(samples, tmp_path, changes):
    write_specforge(tmp_path, samples, **changes)
    source = open_states(tmp_path, target_layer_ids=IDS)
    assert (source.format, source.encoding, source.target_layer_ids) == ("specforge", "bf16", IDS)
    assert source.last == (POST_NORM if changes.get("with_last") else None)
    assert source.names[10].endswith("data_10.ckpt" + ".gz" * changes.get("gz", False)), "by number, not by name"
    check_same(source, samples, halved if changes.get("with_last") else None)
    assert open_states(tmp_path, hidden_size=64).read(0).states.shape[1:] == (3 + changes.get("with_last", False), 64)


def test_specforge_must_know_how_wide_a_layer_is(samples, tmp_path):
    write_specforge(tmp_path, samples[:2])
    with pytest.raises(StoreError, match="192 wide, .* give target_layer_ids or hidden_size"):
        open_states(tmp_path)
    with pytest.raises(StoreError, match="does not fit layers of 100, hidden_size 100"):
        open_states(tmp_path, hidden_size=100)
    with pytest.raises(StoreError, match="does not fit layers of 38, target_layer_ids 5"):
        open_states(tmp_path, target_layer_ids=[1, 2, 3, 4, 5])


def test_model_optimizer(samples, tmp_path):
    write_model_optimizer(tmp_path, samples)
    source = open_states(tmp_path)
    assert (source.format, source.last, source.target_layer_ids) == ("model-optimizer", POST_NORM, None)
    assert source.read(2).sample_id == "talk-002" and source.names[2] == "talk-002.pt"
    check_same(source, samples, halved)
    assert open_states(tmp_path, target_layer_ids=IDS).target_layer_ids == IDS


class TestSpeculators:
    def test_with_its_data_set_without_it_and_with_one_elsewhere(self, exported, samples, tmp_path):
        source = open_states(exported / "bf16")
        assert (source.encoding, source.target_layer_ids, source.last) == ("bf16", IDS, PRE_NORM)
        check_same(source, samples, prenorm)
        flat = shutil.copytree(exported / "bf16" / "hidden_states", tmp_path / "flat")
        check_same(open_states(flat), samples, prenorm)
        assert open_states(flat).read(0).loss_mask is None
        with_rows = open_states(flat, dataset=exported / "bf16")
        assert np.array_equal(with_rows.read(1).loss_mask, samples[1].loss_mask)
        with pytest.raises(StoreError, match="no Arrow data set"):
            open_states(flat, dataset=tmp_path)

    def test_without_metadata_the_ids_are_not_known(self, copy):
        path = state_file(copy, 0)
        save_file(load_file(path), path)
        assert open_states(copy).target_layer_ids is None
        assert open_states(copy, target_layer_ids=[0, 2, 5]).target_layer_ids == [0, 2, 5]
        save_file(load_file(path), path, {"aux_hidden_state_layer_ids": "five"})
        with pytest.raises(StoreError, match="is 'five', no list of layer ids"):
            open_states(copy)

    def test_the_fp8_form_against_its_definition(self, exported, samples):
        source = open_states(exported / "fp8")
        assert source.encoding == "fp8"
        read = source.read(4)
        assert read.states.dtype == torch.float8_e4m3fn and read.scales.shape == (len(read.input_ids), 1, 1)
        wanted = torch.cat([samples[4].aux_hidden_states, samples[4].last_hidden_state_prenorm[:, None]], dim=1).float()
        for token, row in enumerate(wanted):  # one scale a token over all slots; round to nearest in 3 mantissa bits
            assert float(read.scales[token]) == pytest.approx(float(row.abs().max()) / 448, rel=1e-6)
            error = (read.decoded()[token] - row).abs()
            assert (error <= row.abs() / 16 + float(row.abs().max()) / 448 * 2**-10).all()

    def test_a_file_that_is_missing_and_one_too_many(self, copy, samples):
        state_file(copy, 3).rename(state_file(copy, 20))
        source = open_states(copy)
        assert (source.missing, source.extra) == (["hs_3.safetensors"], ["hs_20.safetensors"])
        with pytest.raises(StoreError, match="hs_3.safetensors: no such file, though the data set has a row"):
            source.read(3)
        assert np.array_equal(source.read(12).input_ids, samples[3].input_ids) and source.read(12).loss_mask is None

    def test_a_gap_in_the_numbers_without_a_data_set(self, copy):
        state_file(copy, 3).unlink()
        source = open_states(copy / "hidden_states")
        assert source.missing == ["hs_3.safetensors"] and len(source) == 11

    @pytest.mark.parametrize("name, message", [
        ("cut off", "hs_2.safetensors: cut off, or no safetensors file"),
        ("empty", "hs_2.safetensors: cut off, or no safetensors file"),
        ("no token_ids", "hs_2.safetensors: has no tensor token_ids; it holds .*hidden_states"),
        ("no hidden_states", "hs_2.safetensors: has no tensor hidden_states"),
        ("whole numbers", "its states are int32, no floating dtype"), ("float ids", "its token ids are float32"),
        ("flat", r"hidden_states of shape \[\d+, 256\]"), ("two rows of ids", r"input_ids of shape \[2, \d+\]"),
        ("scales beside bf16", "hidden_states_scales is torch.float32 .* beside torch.bfloat16"),
        ("scales of another length", r"hidden_states_scales is torch.float32 \[1, 1, 1\] beside torch.float8"),
    ])
    def test_a_damaged_file_is_named(self, copy, name, message):
        path = state_file(copy, 2)
        tensors = load_file(path)
        states, ids = tensors["hidden_states"], tensors["token_ids"]
        changed = {
            "no token_ids": {"hidden_states": states}, "no hidden_states": {"token_ids": ids},
            "whole numbers": {**tensors, "hidden_states": states.int()},
            "float ids": {**tensors, "token_ids": ids.float()},
            "flat": {**tensors, "hidden_states": states.flatten(1)},
            "two rows of ids": {**tensors, "token_ids": torch.stack([ids, ids])},
            "scales beside bf16": {**tensors, "hidden_states_scales": torch.ones(len(ids), 1, 1)},
            "scales of another length": {**tensors, "hidden_states": states.to(torch.float8_e4m3fn),
                                         "hidden_states_scales": torch.ones(1, 1, 1)}}
        if name in changed:
            save_file(changed[name], path)
        else:
            path.write_bytes(path.read_bytes()[:-100] if name == "cut off" else b"")
        source = open_states(copy)
        source.read(1)
        with pytest.raises(StoreError, match=message):
            source.read(2)

    def test_what_an_audit_must_see_is_handed_out(self, copy):
        """fp16, fp8 without scales, too few rows: faults of the values, not of the file."""
        path = state_file(copy, 2)
        tensors = load_file(path)
        for dtype in (torch.float16, torch.float8_e4m3fn):
            save_file({**tensors, "hidden_states": tensors["hidden_states"][:-1].to(dtype)}, path)
            read = open_states(copy).read(2)
            assert read.states.dtype == dtype and len(read.states) == len(read.input_ids) - 1 and read.scales is None

    def test_ids_that_are_not_the_rows_are_noted(self, copy):
        path = state_file(copy, 2)
        tensors = load_file(path)
        tensors["token_ids"][0] += 1
        save_file(tensors, path)
        assert open_states(copy).read(1).note == ""
        assert "1 of" in open_states(copy).read(2).note and "leaves it out" in open_states(copy).read(2).note

    def test_a_data_set_that_is_cut_off_or_of_other_columns(self, copy):
        from datasets import Dataset

        data = copy / "data-00000-of-00001.arrow"
        data.write_bytes(data.read_bytes()[:200])
        with pytest.raises(StoreError, match="its Arrow data set cannot be read"):
            open_states(copy)
        Dataset.from_dict({"text": ["a"]}).save_to_disk(copy)
        with pytest.raises(StoreError, match="no columns input_ids and loss_mask"):
            open_states(copy)


class TestDamagedTorchFiles:
    @pytest.mark.parametrize("gz", [False, True])
    def test_pickled_objects_are_refused_and_never_run(self, samples, tmp_path, gz):
        write_specforge(tmp_path, samples[:3], direct=True, gz=gz)
        path = tmp_path / f"data_1.ckpt{'.gz' if gz else ''}"
        save({**specforge_sample(samples[1]), "extra": Mark(tmp_path / "ran")}, path, gz)
        source = open_states(tmp_path, target_layer_ids=IDS)
        with pytest.raises(StoreError, match="data_1.ckpt.* holds pickled objects"):
            source.read(1)
        assert not (tmp_path / "ran").exists()

    def test_a_pickle_for_model_optimizer(self, samples, tmp_path):
        save(Mark(tmp_path / "ran"), tmp_path / "a.pt")
        with pytest.raises(StoreError, match="a.pt: holds pickled objects"):
            open_states(tmp_path)
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize("gz", [False, True])
    @pytest.mark.parametrize("keep", [0, 3, 100, -30])
    def test_cut_off(self, samples, tmp_path, gz, keep):
        write_specforge(tmp_path, samples[:3], direct=True, gz=gz)
        path = tmp_path / f"data_1.ckpt{'.gz' if gz else ''}"
        path.write_bytes(path.read_bytes()[:keep])
        source = open_states(tmp_path, target_layer_ids=IDS)
        with pytest.raises(StoreError, match=r"data_1.ckpt.*(cut off|no torch.save file)"):
            source.read(1)

    @pytest.mark.parametrize("change, message", [
        (lambda v: v.pop("input_ids"), "has no 'input_ids'"),
        (lambda v: v.pop("hidden_states"), "has no 'hidden_states'"),
        (lambda v: v.pop("aux_hidden_states"), "has no tensor 'aux_hidden_states'; it holds"),
        (lambda v: v.update(aux_hidden_states=v["aux_hidden_states"][:, :-1]), "191 wide, which does not fit layers"),
        (lambda v: v.update(aux_hidden_states=v["aux_hidden_states"][:-1]), r"aux_hidden_states has \d+ rows, hidden"),
        (lambda v: v.update(aux_hidden_states=v["aux_hidden_states"].long()), "are int64, no floating dtype"),
        (lambda v: v.update(aux_hidden_states=v["aux_hidden_states"][None, None]), "of shape .1, 1, "),
        (lambda v: v.update(loss_mask=v["loss_mask"] * 2), "other values than 0 and 1"),
    ])
    def test_other_content(self, samples, tmp_path, change, message):
        write_model_optimizer(tmp_path, samples[:3])
        value = model_optimizer_sample(samples[1], "talk-001")
        change(value)
        save(value, tmp_path / "talk-001.pt")
        source = open_states(tmp_path, target_layer_ids=IDS)
        assert source.read(0).loss_mask is not None
        with pytest.raises(StoreError, match=message):
            source.read(1)

    def test_not_a_dict_and_a_last_state_in_some_files_only(self, samples, tmp_path):
        write_specforge(tmp_path, samples[:3], direct=True)
        save([1, 2], tmp_path / "data_1.ckpt")
        save(specforge_sample(samples[2], samples[2].last_hidden_state_prenorm), tmp_path / "data_2.ckpt")
        source = open_states(tmp_path, target_layer_ids=IDS)
        with pytest.raises(StoreError, match="data_1.ckpt: holds a list, not a dict"):
            source.read(1)
        with pytest.raises(StoreError, match="data_2.ckpt: has 'target_last_hidden_states', which other files lack"):
            source.read(2)

    def test_one_sample_in_two_files(self, samples, tmp_path):
        write_specforge(tmp_path, samples[:3], direct=True)
        write_specforge(tmp_path, samples[:3], gz=True)
        with pytest.raises(StoreError, match="several files of sample 0"):
            open_states(tmp_path, target_layer_ids=IDS)


def test_metadata_is_theirs(exported):
    """Theirs = ours + 1, the last slot's id being the number of layers."""
    from safetensors import safe_open

    with safe_open(state_file(exported / "bf16", 0), "pt") as file:
        assert json.loads(file.metadata()["aux_hidden_state_layer_ids"]) == [2, 4, 5, 6]
