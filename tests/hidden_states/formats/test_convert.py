"""There and back is bit-identical; what cannot be converted is refused; what differs at the end is found."""

import json
import multiprocessing
import os
import resource
import shutil
import sys

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_lib import __main__ as command
from dflash_lib.files import read_json
from dflash_lib.hidden_states.formats import open_states
from dflash_lib.hidden_states.formats.convert import ConvertOptions, convert
from dflash_lib.hidden_states.formats.speculators import state_file
from dflash_lib.hidden_states.plan import ExtractionPlan
from dflash_lib.hidden_states.schema import StoreError
from dflash_lib.hidden_states.store import HiddenStateStore
from dflash_lib.locks import Locked, folder_lock
from tests.hidden_states.formats.layouts import (
    IDS,
    export_both,
    make_random_store,
    read_all,
    write_model_optimizer,
    write_specforge,
)

FORK = multiprocessing.get_context("fork")  # a new interpreter would spend seconds on imports


def files_of(folder, without=("conversion.json",)):
    """Name -> bytes of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name not in without}


def to(source, destination, kind, **options):
    states = {key: options.pop(key) for key in ("target_layer_ids", "dataset") if key in options}
    return convert(open_states(source, **states), destination, ConvertOptions(to=kind, **options), show=False)


@pytest.fixture(scope="module")
def store(tiny_llama, tmp_path_factory):
    """Twelve samples, two of them quarantined, compressed."""
    folder = tmp_path_factory.mktemp("states") / "store"
    make_random_store(folder, tiny_llama, bad=(2, 7), encoding="bf16+zstd")
    return folder


@pytest.fixture(scope="module")
def samples(store):
    return read_all(store)


@pytest.fixture(scope="module")
def exported(store, tmp_path_factory):
    return export_both(store, tmp_path_factory.mktemp("exported"))


def same_samples(ours, theirs, last=True):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert np.array_equal(a.input_ids, b.input_ids) and np.array_equal(a.loss_mask, b.loss_mask)
        assert torch.equal(a.aux_hidden_states, b.aux_hidden_states)
        assert torch.equal(a.last_hidden_state_prenorm, b.last_hidden_state_prenorm) if last else (
            a.last_hidden_state_prenorm is None)


class TestRefusals:
    def test_options(self):
        for options, message in [
                ({"to": "specforge"}, "'specforge'; states are written as store or speculators"),
                ({"to": "store", "encoding": "fp16"}, "not one of a store's here: bf16, bf16.zstd, fp8, fp8.zstd"),
                ({"to": "store", "last_state": "topk"}, "at all tokens, at supervised ones or at none"),
                ({"to": "speculators", "encoding": "bf16+zstd"}, "not one of a speculators's here: bf16, fp8"),
                ({"to": "speculators", "last_state": "none"}, "layout needs every token's"),
                ({"to": "store", "with_states": False}, "a store has no use for it")]:
            with pytest.raises(StoreError, match=message):
                ConvertOptions(**options)

    def test_a_destination_that_is_something_else(self, store, exported, tmp_path, samples):
        (tmp_path / "thesis").mkdir()
        (tmp_path / "thesis" / "thesis.tex").write_text("x")
        with pytest.raises(StoreError, match=r"holds something else \(thesis.tex\); it is left alone"):
            to(store, tmp_path / "thesis", "speculators")
        other = shutil.copytree(store, tmp_path / "other")
        before = files_of(other)
        with pytest.raises(StoreError, match="holds something else"):
            to(exported / "bf16", other, "store")
        assert files_of(other) == before and os.listdir(tmp_path / "thesis") == ["thesis.tex"]
        for inside in (store, store / "spec", store.parent):
            with pytest.raises(StoreError, match="lie in each other"):
                to(store, inside, "speculators")

    def test_a_destination_begun_in_another_way(self, store, exported, tmp_path):
        copy = shutil.copytree(exported / "bf16", tmp_path / "copy")
        before = files_of(copy)
        with pytest.raises(StoreError, match=r'begun as another conversion:\n  encoding: then "bf16", now "fp8"'):
            to(store, copy, "speculators", encoding="fp8")
        with pytest.raises(StoreError, match='source: then .*store.*, now .*speculators'):
            to(exported / "fp8", copy, "speculators", encoding="bf16")
        assert files_of(copy) == before

    def test_one_that_cannot_be_written(self, store, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(StoreError, match="a file; name a folder"):
            to(store, tmp_path / "file", "speculators")
        with pytest.raises(StoreError, match="cannot be written .*Not a directory"):
            to(store, tmp_path / "file" / "below", "speculators")

    def test_one_that_another_process_writes(self, store, tmp_path):
        with folder_lock(tmp_path / "out", "extraction"), pytest.raises(Locked, match="working on this extraction"):
            to(store, tmp_path / "out", "speculators")

    def test_sources_that_are_not_whole(self, exported, tmp_path, tiny_llama_folder):
        copy = shutil.copytree(exported / "bf16", tmp_path / "copy")
        state_file(copy, 4).rename(state_file(copy, 4).with_name("gone"))
        with pytest.raises(StoreError, match="1 samples have no file, though they ought to be there: hs_4"):
            to(copy, tmp_path / "out", "store")
        shutil.copy(state_file(copy, 3), state_file(copy, 4))
        shutil.copy(state_file(copy, 3), state_file(copy, 10))
        with pytest.raises(StoreError, match="1 samples belong to no row of the data set: hs_10"):
            to(copy, tmp_path / "out", "store")
        state_file(copy, 10).unlink()
        with pytest.raises(StoreError, match="hs_4.safetensors: the file's token ids are not those of its row"):
            to(copy, tmp_path / "out", "store")
        flat = shutil.copytree(exported / "bf16" / "hidden_states", tmp_path / "flat")
        with pytest.raises(StoreError, match=r"hs_0.safetensors: has no loss mask.*--dataset DIR"):
            to(flat, tmp_path / "out2", "store", target=str(tiny_llama_folder))

    def test_states_that_do_not_fit(self, exported, tmp_path):
        for name, change, message in [
                ("rows", lambda states: states[:-1], r"hs_5.safetensors: \d+ rows of states for \d+ tokens"),
                ("slots", lambda states: states[:, 1:], "hs_5.safetensors: 3 slots, but layers .1, 3, 4. and the")]:
            copy = shutil.copytree(exported / "bf16", tmp_path / name)
            tensors = load_file(state_file(copy, 5))
            tensors["hidden_states"] = change(tensors["hidden_states"]).contiguous()
            save_file(tensors, state_file(copy, 5))
            with pytest.raises(StoreError, match=message):
                to(copy, tmp_path / f"{name}-out", "store")

    def test_a_last_state_behind_the_norm_is_never_taken_for_one_before(self, samples, tmp_path, tiny_llama_folder):
        write_model_optimizer(tmp_path / "mo", samples)
        told = {"target_layer_ids": IDS, "target": str(tiny_llama_folder)}
        with pytest.raises(StoreError, match="cannot be undone.*--last-state none"):
            to(tmp_path / "mo", tmp_path / "out", "store", **told)
        with pytest.raises(StoreError, match="final norm, which cannot be undone; speculators' layout needs"):
            to(tmp_path / "mo", tmp_path / "out", "speculators", **told)
        write_specforge(tmp_path / "sf", samples)
        with pytest.raises(StoreError, match="it holds no last state; speculators' layout needs"):
            to(tmp_path / "sf", tmp_path / "out", "speculators", **told)
        assert not (tmp_path / "out").exists()

    def test_of_which_model_must_be_known(self, samples, tmp_path, tiny_llama_folder, tiny_qwen3_5_folder):
        write_specforge(tmp_path / "sf", samples, with_last=True)
        out = tmp_path / "out"
        with pytest.raises(StoreError, match="give --target MODEL"):
            to(tmp_path / "sf", out, "store", last_state="none", target_layer_ids=IDS)
        with pytest.raises(StoreError, match="do not say which layers they hold: give --target-layer-ids"):
            to(tmp_path / "sf", out, "store", last_state="none", target=str(tiny_llama_folder))
        with pytest.raises(ValueError, match="does not fit a target of 6 layers"):
            to(tmp_path / "sf", out, "store", last_state="none", target_layer_ids=[1, 3, 6],
               target=str(tiny_llama_folder))
        write_specforge(tmp_path / "six", samples)
        with pytest.raises(StoreError, match="states 32 wide, but .* has hidden size 64"):
            to(tmp_path / "six", out, "store", target_layer_ids=[0, 1, 2, 3, 4, 5], target=str(tiny_llama_folder))

    def test_another_target_than_the_plan_says(self, exported, tmp_path, tiny_qwen3_5_folder):
        with pytest.raises(StoreError, match=r"made with another target than .* \(weights, config differ\)"):
            to(exported / "bf16", tmp_path / "out", "store", target=str(tiny_qwen3_5_folder))

    def test_a_store_without_the_last_state_has_no_place_in_speculators(self, store, tmp_path):
        to(store, tmp_path / "bare", "store", last_state="none")
        with pytest.raises(StoreError, match="it holds no last state"):
            to(tmp_path / "bare", tmp_path / "out", "speculators")

    def test_a_conversion_file_that_no_longer_fits(self, exported, tmp_path):
        copy = shutil.copytree(exported / "bf16", tmp_path / "copy")
        conversion = read_json(copy / "conversion.json")
        conversion["quarantined"].pop()
        (copy / "conversion.json").write_text(json.dumps(conversion))
        with pytest.raises(StoreError, match="10 samples, but its conversion.json speaks of 11"):
            to(copy, tmp_path / "out", "store")
        del conversion["plan"]["target"]
        (copy / "conversion.json").write_text(json.dumps(conversion))
        with pytest.raises(StoreError, match="conversion.json is damaged"):
            to(copy, tmp_path / "out", "store")


class TestThereAndBack:
    @pytest.mark.parametrize("encoding", ["bf16", "bf16+zstd"])
    def test_a_store_comes_back_byte_for_byte(self, tiny_llama, tmp_path, encoding):
        """Plan, shards, their order, quarantine notes and compression included."""
        make_random_store(tmp_path / "store", tiny_llama, bad=(2, 7), encoding=encoding)
        done = to(tmp_path / "store", tmp_path / "spec", "speculators")
        assert (done.num_samples, done.num_written, done.notes) == (10, 10, [])
        done = to(tmp_path / "spec", tmp_path / "back", "store")
        assert (done.num_samples, done.num_written, done.notes) == (12, 3, [])
        assert files_of(tmp_path / "back") == files_of(tmp_path / "store")
        with h5py.File(tmp_path / "back" / "shard-00000.h5") as file:
            assert "quarantined" in file.attrs

    def test_speculators_come_back_byte_for_byte(self, exported, tmp_path):
        to(exported / "bf16", tmp_path / "store", "store")
        to(tmp_path / "store", tmp_path / "back", "speculators")
        assert files_of(tmp_path / "back") == files_of(exported / "bf16")

    def test_without_the_json_beside_it_the_states_come_back_and_the_plan_does_not(
            self, exported, samples, tmp_path, tiny_llama_folder):
        copy = shutil.copytree(exported / "bf16", tmp_path / "copy")
        (copy / "conversion.json").unlink()
        to(copy, tmp_path / "back", "store", target=str(tiny_llama_folder), samples_per_shard=4)
        same_samples(read_all(tmp_path / "back"), samples)
        plan = ExtractionPlan.load(tmp_path / "back")
        assert (plan.num_samples, len(plan.shards), plan.data["converted_from"]) == (10, 3, "speculators bf16")
        assert plan.num_tokens == sum(len(sample.input_ids) for sample in samples)
        assert plan.data["num_supervised"] == sum(int(sample.loss_mask.sum()) for sample in samples)

    def test_a_store_of_another_encoding_and_without_its_last_state(self, store, samples, tmp_path):
        to(store, tmp_path / "raw", "store", encoding="bf16")
        same_samples(read_all(tmp_path / "raw"), samples)
        to(tmp_path / "raw", tmp_path / "back", "store", encoding="bf16+zstd")
        assert files_of(tmp_path / "back") == files_of(store)
        done = to(store, tmp_path / "bare", "store", last_state="none")
        same_samples(read_all(tmp_path / "bare"), samples, last=False)
        assert done.notes == ["the store has no last state: no KL loss can be trained from it"]

    def test_rows_alone(self, store, exported, tmp_path):
        to(store, tmp_path / "rows", "speculators", with_states=False)
        wanted = {name: content for name, content in files_of(exported / "bf16").items() if "safetensors" not in name}
        assert files_of(tmp_path / "rows") == wanted and len(wanted) == 3


class TestFp8:
    def test_what_comes_back_is_the_rounded_states_and_the_plan_says_so(self, store, exported, tmp_path):
        done = to(exported / "fp8", tmp_path / "back", "store")
        assert "the source is fp8" in done.notes[0]
        with HiddenStateStore.open(tmp_path / "back") as back:
            assert back.plan.data["converted_from"] == "speculators fp8"
            assert back.plan.differences(ExtractionPlan.load(store)), "an extraction must not go on with it"
            source = open_states(exported / "fp8")
            for i, index in enumerate(back.sample_indices):
                decoded = source.read(i).decoded().bfloat16()
                stored = back.read(index)
                assert torch.equal(stored.aux_hidden_states, decoded[:, :-1])
                assert torch.equal(stored.last_hidden_state_prenorm, decoded[:, -1])

    def test_fp8_stays_as_it_is_on_the_way_to_fp8(self, exported, tmp_path):
        to(exported / "fp8", tmp_path / "again", "speculators", encoding="fp8")
        assert files_of(tmp_path / "again") == files_of(exported / "fp8")

    def test_the_mark_travels_through_bf16(self, exported, tmp_path):
        to(exported / "fp8", tmp_path / "bf16", "speculators", encoding="bf16")
        to(tmp_path / "bf16", tmp_path / "back", "store")
        assert ExtractionPlan.load(tmp_path / "back").data["converted_from"] == "speculators fp8"


class TestOtherTools:
    @pytest.mark.parametrize("changes", [{}, {"gz": True, "batched": True}], ids=str)
    def test_specforge_into_a_store(self, samples, tmp_path, tiny_llama, tiny_llama_folder, changes):
        write_specforge(tmp_path / "sf", samples, **changes)
        to(tmp_path / "sf", tmp_path / "store", "store", target=str(tiny_llama_folder), target_layer_ids=IDS,
           samples_per_shard=4, encoding="bf16+zstd")
        same_samples(read_all(tmp_path / "store"), samples, last=False)
        with HiddenStateStore.open(tmp_path / "store") as store:
            store.require(target=tiny_llama.identity, target_layer_ids=IDS)  # what training asks
            assert store.plan.data["converted_from"] == "specforge bf16" and len(store.plan.shards) == 3

    def test_model_optimizer_into_a_store(self, samples, tmp_path, tiny_llama_folder):
        write_model_optimizer(tmp_path / "mo", samples)
        done = to(tmp_path / "mo", tmp_path / "store", "store", target=str(tiny_llama_folder), target_layer_ids=IDS,
                  last_state="none")
        same_samples(read_all(tmp_path / "store"), samples, last=False)
        assert "behind the norm, was left out" in done.notes[0]

    def test_unusable_samples_are_left_out_and_counted(self, samples, tmp_path, tiny_llama_folder):
        changed = list(samples)
        changed[3].aux_hidden_states[0, 1] = 0
        write_specforge(tmp_path / "sf", changed)
        done = to(tmp_path / "sf", tmp_path / "store", "store", target=str(tiny_llama_folder), target_layer_ids=IDS)
        assert "1 samples were left out" in done.notes[-1]
        with HiddenStateStore.open(tmp_path / "store") as store:
            assert store.num_quarantined == 1 and 3 not in store.sample_indices


class TestVerification:
    def test_a_second_run_writes_nothing_and_checks_everything(self, store, tmp_path):
        to(store, tmp_path / "spec", "speculators")
        before = files_of(tmp_path / "spec", without=())
        assert to(store, tmp_path / "spec", "speculators").num_written == 0
        assert files_of(tmp_path / "spec", without=()) == before
        path = state_file(tmp_path / "spec", 4)
        tensors = load_file(path)
        tensors["hidden_states"].view(torch.int16)[1, 2, 3] ^= 1  # one bit
        save_file(tensors, path)
        with pytest.raises(StoreError, match="hs_4.safetensors: it differs from .*sample 5.* Remove"):
            to(store, tmp_path / "spec", "speculators")
        path.unlink()
        assert to(store, tmp_path / "spec", "speculators").num_written == 1
        assert files_of(tmp_path / "spec", without=()) == before

    def test_one_bit_of_a_store(self, exported, tmp_path):
        to(exported / "bf16", tmp_path / "store", "store", encoding="bf16")
        before = files_of(tmp_path / "store")
        path = tmp_path / "store" / "shard-00001.h5"
        with h5py.File(path, "r+") as file:
            file["loss_mask"][5] ^= 1
        with pytest.raises(StoreError, match="shard-00001.h5: loss_mask: not what was written. Delete shard-00001.h5"):
            to(exported / "bf16", tmp_path / "store", "store", encoding="bf16")
        path.unlink()
        to(exported / "bf16", tmp_path / "store", "store", encoding="bf16")
        assert files_of(tmp_path / "store") == before

    def test_a_stray_file_among_the_states(self, store, tmp_path):
        to(store, tmp_path / "spec", "speculators")
        shutil.copy(state_file(tmp_path / "spec", 0), state_file(tmp_path / "spec", 33))
        with pytest.raises(StoreError, match="holds hs_33.safetensors, which is no part of this conversion"):
            to(store, tmp_path / "spec", "speculators")

    def test_minus_zero_is_not_zero(self, exported, tmp_path):
        """Bits are compared, not numbers."""
        copy = shutil.copytree(exported / "bf16", tmp_path / "copy")
        tensors = load_file(state_file(copy, 1))
        tensors["hidden_states"][1, 1, 1] = 0.0
        save_file(tensors, state_file(copy, 1), {"aux_hidden_state_layer_ids": "[2, 4, 5, 6]"})
        to(copy, tmp_path / "store", "store")
        tensors["hidden_states"][1, 1, 1] = -0.0
        save_file(tensors, state_file(copy, 1), {"aux_hidden_state_layer_ids": "[2, 4, 5, 6]"})
        with pytest.raises(StoreError, match="differs from"):
            to(copy, tmp_path / "store", "store")


class TestCommand:
    def call(self, *arguments):
        return command.main(["convert", *map(str, arguments)])

    def test_it_says_what_it_saw_and_did(self, store, tmp_path, capsys):
        assert self.call(store, tmp_path / "spec", "--encoding", "fp8") == 0
        printed = capsys.readouterr().out
        assert f"{store}: store, bf16+zstd, 10 samples, outputs of layers [1, 3, 4], last state pre-norm" in printed
        assert "note: fp8 keeps 3 mantissa bits" in printed
        assert "10 samples, the source's, rounded to fp8 (verified); 10 files written now" in printed

    def test_other_tools_options(self, samples, tmp_path, tiny_llama_folder, capsys):
        write_specforge(tmp_path / "sf", samples[:3], with_last=True)
        arguments = [tmp_path / "sf", tmp_path / "out", "--target", tiny_llama_folder, "--target-layer-ids", 1, 3, 4]
        assert self.call(*arguments) == 2
        assert "--last-state none leaves it out" in capsys.readouterr().err
        assert self.call(*arguments, "--last-state", "none") == 0
        assert self.call(tmp_path / "none", tmp_path / "out") == 2

    @pytest.mark.parametrize("kind", ["store", "speculators"])
    def test_a_full_disk_is_one_line_and_what_is_finished_stays(self, store, exported, tmp_path, kind):
        """A limit on the size of files stands in for it: the kernel refuses the write."""
        source = store if kind == "speculators" else exported / "bf16"
        arguments = ["convert", str(source), str(tmp_path / "out"), "--to", kind, "--encoding", "bf16"]
        process = FORK.Process(target=call_with_small_files, args=(arguments, tmp_path / "err"))
        process.start()
        process.join()
        printed = (tmp_path / "err").read_text()
        assert process.exitcode == 2 and printed.startswith("error: "), printed
        assert "writing failed" in printed and "File too large" in printed and "Free on that disk" in printed
        assert "Traceback" not in printed
        assert command.main(arguments) == 0
        if kind == "speculators":
            assert files_of(tmp_path / "out") == files_of(exported / "bf16")
        else:
            same_samples(read_all(tmp_path / "out"), read_all(store))


def call_with_small_files(arguments, err):
    resource.setrlimit(resource.RLIMIT_FSIZE, (14_000, 14_000))
    with open(err, "w") as sys.stderr:
        code = command.main(arguments)
    os._exit(code)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.float64])
def test_one_file_of_another_kind_is_no_part_of_a_conversion(exported, tmp_path, dtype):
    """It would go in with values wrong by a factor, or rounded, and nothing would say so."""
    copy = shutil.copytree(exported / "bf16", tmp_path / "copy")
    tensors = load_file(state_file(copy, 2))
    tensors["hidden_states"] = tensors["hidden_states"].to(dtype)
    save_file(tensors, state_file(copy, 2), {"aux_hidden_state_layer_ids": "[2, 4, 5, 6]"})
    with pytest.raises(StoreError, match="stored as torch.*, the first one as torch.bfloat16"):
        to(copy, tmp_path / "store", "store")
