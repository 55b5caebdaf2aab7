"""The training job: what it refuses, that it learns, that it goes on bit for bit after a kill."""

import errno
import os
import shutil
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from dflash_lib.drafter import (
    Compute,
    DrafterError,
    DrafterProposer,
    checkpoints,
    load_drafter,
    read_log,
    start_training,
    training_job,
)
from dflash_lib.drafter.blocks import anchor_candidates
from dflash_lib.drafter.checkpoints import list_checkpoints
from dflash_lib.drafter.dataset import TrainingData, draft_vocabulary, split_samples
from dflash_lib.drafter.objective import TargetEnds, propose_everywhere
from dflash_lib.drafter.recipe import TrainingError, TrainOptions, identity, learning_rate
from dflash_lib.drafter.training import Trainer
from dflash_lib.drafter.training_job import open_job
from dflash_lib.files import read_json, write_json
from dflash_lib.hidden_states.schema import StoreError
from dflash_lib.hidden_states.store import HiddenStateStore
from dflash_lib.job_status import read_status
from dflash_lib.launch import LaunchError
from dflash_lib.locks import Locked, folder_lock, lock_beside
from dflash_lib.target.loading import load_target
from tests.drafter.running import OPTIONS, tensors_of


def data_of(store, samples, **changes):
    return TrainingData(store, samples, **{
        "batch_samples": 2, "anchors_per_sample": 4, "slots_per_anchor": 2, "block_size": 4, "mask_token_id": 3,
        "gamma": 4.0, "need_last": True, "seed": 1, **changes})


def test_batches_hold_the_samples_own_states_and_tokens(tiny_store):
    split = split_samples(tiny_store, 2, seed=0)
    assert len(split.train) == 10 and not set(split.train) & set(split.validation)
    data = data_of(tiny_store, split.train)
    for number in range(8):
        batch = data.batch(number)
        start = block = 0
        for row, index in enumerate(batch.sample_indices):
            sample = tiny_store.read(index)
            own = slice(start, start + len(sample.input_ids))
            assert batch.packing.num_context[row] == len(sample.input_ids)
            assert torch.equal(batch.positions[own], torch.arange(len(sample.input_ids))), "they restart"
            assert torch.equal(batch.aux_hidden_states[own], sample.aux_hidden_states)
            assert torch.equal(batch.last_hidden_state_prenorm[own], sample.last_hidden_state_prenorm)
            for number in range(block, block + batch.packing.num_blocks[row]):
                a = batch.anchors[number].item()
                assert batch.starts[number] == start and sample.loss_mask[a] and sample.loss_mask[a + 1]
                for column, k in enumerate(batch.slots[number].tolist()):
                    if batch.weights[number, column] > 0:
                        assert batch.labels[number, column] == sample.input_ids[a + k]
            start, block = own.stop, block + batch.packing.num_blocks[row]
        assert start == len(batch.aux_hidden_states) and block == len(batch.anchors)


def test_an_epoch_takes_every_sample_once_and_draws_anchors_anew(tiny_store):
    split = split_samples(tiny_store, 2, seed=0)
    data = data_of(tiny_store, split.train)
    first = [i for number in range(5) for i in data.batch(number).sample_indices]
    second = [i for number in range(5, 10) for i in data.batch(number).sample_indices]
    assert sorted(first) == sorted(second) == list(split.train) and first != second
    assert data_of(tiny_store, split.train).batch(7).sample_indices == data.batch(7).sample_indices
    anchors = [{(index, anchor) for number in range(start, start + 5) for batch in [data.batch(number)]
                for index, count in zip(batch.sample_indices, batch.packing.num_blocks, strict=True)
                for anchor in batch.anchors[:count].tolist()}
               for start in (0, 5)]
    assert anchors[0] != anchors[1]


def test_draft_vocabulary_is_the_most_frequent_supervised_tokens(tiny_store):
    counts = {}
    for index in tiny_store.sample_indices:
        ids, mask = tiny_store.read_tokens(index)
        for token, supervised in zip(ids.tolist(), mask.tolist(), strict=True):
            counts[token] = counts.get(token, 0) + supervised
    samples = tiny_store.sample_indices
    vocab = draft_vocabulary(tiny_store, samples, 20, [2], 384).tolist()
    assert len(vocab) == 20 and vocab == sorted(vocab) and 2 in vocab
    assert min(counts[t] for t in vocab if t != 2) >= max(n for t, n in counts.items() if t not in vocab)
    occurring = {t for t, n in counts.items() if n} | {2}
    filled = draft_vocabulary(tiny_store, samples, len(occurring) + 9, [2], 384).tolist()
    assert set(filled) == occurring | set(sorted(set(range(384)) - occurring)[:9])
    with pytest.raises(ValueError, match="draft_vocab_size 385"):
        draft_vocabulary(tiny_store, samples, 385, [2], 384)


@pytest.fixture(scope="module")
def forms(tiny_store, tiny_llama, tmp_path_factory):
    """The same samples with the last state stored in other forms, and as fp8."""
    from dflash_lib.hidden_states.encode import encode_sample
    from dflash_lib.hidden_states.shards import ShardWriter
    from dflash_lib.target.capture import CapturedSample

    def write(name, **changes):
        folder = tmp_path_factory.mktemp(name)
        plan = replace(tiny_store.plan, **changes)
        plan.save(folder)
        for shard in range(len(plan.shards)):
            tokens = [tiny_store.read_tokens(i) for i in plan.samples_of(shard)]
            with ShardWriter(folder, plan, shard, [mask for _, mask in tokens]) as writer:
                for index, (ids, mask) in zip(plan.samples_of(shard), tokens, strict=True):
                    stored = tiny_store.read(index)
                    captured = CapturedSample(stored.aux_hidden_states.float(),
                                              stored.last_hidden_state_prenorm.float())
                    writer.add(index, ids, mask, encode_sample(tiny_llama, plan, mask, captured))
        return HiddenStateStore.open(folder)

    return {"supervised": write("supervised", last_state="supervised"), "none": write("none", last_state="none"),
            "whole": write("whole", last_state="topk", topk=384), "topk": write("topk", last_state="topk", topk=4),
            "fp8": write("fp8", encoding="fp8", last_state="supervised")}


def losses_of(store, target, folder, **changes):
    trainer = Trainer(store, target, folder, replace(OPTIONS, **changes))
    return [trainer.train_step()["loss"] for _ in range(3)]


@pytest.mark.parametrize("draft_vocab_size", [None, 200])
def test_every_form_that_holds_what_the_loss_reads_trains_alike(tiny_store, tiny_llama, forms, tmp_path,
                                                                draft_vocab_size):
    settings = {"kl_weight": 0.6, "draft_vocab_size": draft_vocab_size}
    whole = losses_of(tiny_store, tiny_llama, tmp_path / "all", **settings)
    assert losses_of(forms["supervised"], tiny_llama, tmp_path / "supervised", **settings) == whole
    if draft_vocab_size is None:
        assert losses_of(forms["whole"], tiny_llama, tmp_path / "whole", **settings) == pytest.approx(whole, rel=1e-5)
    top = losses_of(forms["topk"], tiny_llama, tmp_path / "topk", **settings)
    assert all(0.3 * a < b < a for a, b in zip(whole, top, strict=True)), "a lower bound that is worth something"
    assert losses_of(forms["fp8"], tiny_llama, tmp_path / "fp8", **settings) == pytest.approx(whole, rel=0.02)


def test_cross_entropy_needs_no_last_state_and_a_kl_says_that_it_does(tiny_store, tiny_llama, forms, tmp_path):
    plain = losses_of(tiny_store, tiny_llama, tmp_path / "all", kl_weight=0.0)
    for name in ("none", "supervised", "topk"):
        assert losses_of(forms[name], tiny_llama, tmp_path / name, kl_weight=0.0) == plain
    with pytest.raises(TrainingError, match="last_state: none.*last_state: supervised, or set kl_weight: 0"):
        Trainer(forms["none"], tiny_llama, tmp_path / "kl", replace(OPTIONS, kl_weight=0.5))


def test_too_few_samples_are_refused(tiny_store):
    with pytest.raises(ValueError, match="12 samples .* 12 for validation"):
        split_samples(tiny_store, 12, seed=0)


def test_learning_rate_warms_up_and_ends_low():
    options = replace(OPTIONS, steps=100, warmup_steps=10, learning_rate=1.0, final_learning_rate=0.1)
    rates = [learning_rate(step, options) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == rates[9] == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True) and rates[99] == pytest.approx(0.1, abs=0.002)


def test_gradients_accumulate_to_those_of_one_large_batch(tiny_store, tiny_llama, tmp_path):
    options = replace(OPTIONS, batch_samples=4)
    one = Trainer(tiny_store, tiny_llama, tmp_path / "a", options)
    two = Trainer(tiny_store, tiny_llama, tmp_path / "b", options, Compute(accumulate=2))
    first, second = one.train_step(), two.train_step()
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-5)
    assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("warm_start", [True, False])
def test_loss_falls_and_validation_leaves_training_mode(tiny_store, tiny_llama, tmp_path, warm_start):
    options = replace(OPTIONS, steps=40, kl_weight=0.0, warm_start=warm_start, validation_interval=40,
                      checkpoint_interval=40)
    (tmp_path / "t").mkdir()
    trainer = Trainer(tiny_store, tiny_llama, tmp_path / "t", options)
    trainer.network.train()
    summary = trainer.run()
    assert trainer.network.training
    steps, validations = read_log(tmp_path / "t")
    losses = [row["loss"] for row in steps]
    assert [row["step"] for row in steps] == list(range(1, 41))
    assert [row["step"] for row in validations] == [0, 40]
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])  # random words: little can be learnt
    assert summary["best"]["acceptance_length"] >= 1


def test_drafter_proposer_drafts_what_training_validates(tiny_store, tiny_llama, tmp_path):
    trainer = Trainer(tiny_store, tiny_llama, tmp_path, replace(OPTIONS, steps=30))
    trainer.run()
    drafter = load_drafter(tmp_path / "last")
    proposer = DrafterProposer(drafter, tiny_llama)
    sample = tiny_store.read(trainer.split.validation[0])
    ids, states = sample.input_ids.tolist(), sample.aux_hidden_states.float()
    anchors = anchor_candidates(torch.from_numpy(sample.loss_mask))
    ends = TargetEnds(tiny_llama.embedding, tiny_llama.final_norm, tiny_llama.head.weight[drafter.draft_vocab],
                      drafter.draft_vocab)
    drafted = propose_everywhere(drafter.network, ends, torch.tensor(ids), states, anchors)
    known = 0
    for a, expected in zip(anchors.tolist(), drafted.tolist(), strict=True):
        proposer.extend(ids[known:a], states[known:a])
        known = a
        assert proposer.propose(ids[a], 3) == expected
        assert proposer.propose(ids[a], 1) == expected[:1]


def test_store_of_another_target_is_refused(tiny_store, tiny_qwen3_5, tmp_path):
    with pytest.raises(StoreError, match="target.weights"):
        Trainer(tiny_store, tiny_qwen3_5, tmp_path, OPTIONS)


def test_mask_token_outside_the_embedding_is_refused(tiny_store, tiny_llama, tmp_path):
    with pytest.raises(ValueError, match="mask_token_id 384"):
        Trainer(tiny_store, tiny_llama, tmp_path, replace(OPTIONS, mask_token_id=384))


def test_a_mask_token_that_text_uses_is_refused(tiny_store, tiny_llama, tmp_path):
    token = int(tiny_store.read_tokens(0)[0][5])
    with pytest.raises(TrainingError, match=rf"mask_token_id {token} stands \d+ times"):
        Trainer(tiny_store, tiny_llama, tmp_path, replace(OPTIONS, mask_token_id=token))


def test_another_job_moves_the_old_folder_aside_and_it_comes_back(tmp_path):
    folder = tmp_path / "drafter"
    assert open_job(folder, {"steps": 1}) == "new"
    (folder / "weights").write_text("precious")
    assert open_job(folder, {"steps": 1}) == "new", "nothing was saved yet"
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert open_job(folder, {"steps": 1}) == "continues"
    assert open_job(folder, {"steps": 2}) == "new"
    assert [p.read_text() for p in tmp_path.glob("drafter-*/weights")] == ["precious"]
    (folder / "summary.json").write_text("{}")
    assert open_job(folder, {"steps": 1}) == "continues" and (folder / "weights").read_text() == "precious"
    assert open_job(folder, {"steps": 2}) == "finished"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".job.json.partial").write_text("a kill left this")
    assert open_job(tmp_path / "other", {"steps": 1}) == "new"
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("not a training folder")
    with pytest.raises(DrafterError, match="no job.json"):
        open_job(tmp_path / "thesis", {})


def test_of_a_job_that_was_moved_aside_twice_the_one_that_came_farther_comes_back(tmp_path):
    folder, job = tmp_path / "drafter", {"steps": 1}
    for steps in (4, 8, 6):
        (folder / "checkpoints" / f"step-{steps:08d}").mkdir(parents=True)
        write_json(folder / "job.json", job)
        open_job(folder, {"steps": 2})
        shutil.rmtree(folder)
    assert len(list(tmp_path.glob("drafter-*"))) == 3
    assert open_job(folder, job) == "continues" and [p.name for p in list_checkpoints(folder / "checkpoints")] == [
        "step-00000008"]


def test_two_trainers_in_one_folder_are_refused(tiny_store, tiny_llama, tmp_path):
    parent, lock = lock_beside(tmp_path / "drafter")
    with folder_lock(parent, "training", lock), pytest.raises(Locked, match="is working on this training"):
        start_training(tmp_path / "drafter", store=tiny_store.folder, model=tiny_llama.path, dtype="float32",
                       device="cpu", threads=1, options=OPTIONS)
    assert not (tmp_path / "drafter").exists()


def test_a_checkpoint_of_another_store_is_refused(tiny_store, tiny_llama, tmp_path):
    trainer = Trainer(tiny_store, tiny_llama, tmp_path, OPTIONS)
    trainer.train_step()
    trainer.save()
    assert Trainer(tiny_store, tiny_llama, tmp_path, OPTIONS).step == 1
    state = tmp_path / "checkpoints" / "step-00000001" / "state.json"
    state.write_text(state.read_text().replace(tiny_store.plan.hash, "f" * 64))
    with pytest.raises(TrainingError, match="trained from another store"):
        Trainer(tiny_store, tiny_llama, tmp_path, OPTIONS)


def test_a_checkpoint_that_does_not_fit_on_the_disk_leaves_the_older_one(tiny_store, tiny_llama, tmp_path, monkeypatch):
    trainer = Trainer(tiny_store, tiny_llama, tmp_path, OPTIONS)
    trainer.train_step()
    trainer.save()
    trainer.train_step()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints, "publish", full)
    with pytest.raises(OSError, match="step 2 cannot be written.*No space left.*free there"):
        trainer.save()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_bfloat16_target_trains_a_float32_drafter(tiny_store, tiny_llama, tmp_path):
    half = load_target(tiny_llama.path, "bfloat16")
    first = Trainer(tiny_store, half, tmp_path / "half", OPTIONS)
    row, reference = first.train_step(), Trainer(tiny_store, tiny_llama, tmp_path / "float", OPTIONS).train_step()
    assert {p.dtype for p in first.network.parameters()} == {torch.float32}
    assert row["loss"] == pytest.approx(reference["loss"], rel=0.02) and row["loss"] != reference["loss"]
    assert first.validate()["acceptance_length"] >= 1


@pytest.mark.parametrize("bad", [{"steps": 0}, {"validation_samples": 0}, {"kl_weight": 1.5}, {"average": 1.0},
                                 {"precision": "half"}, {"optimizer": "sgd"}, {"slot_weighting": "x"},
                                 {"dpace_alpha": -1.0}, {"gamma": 0.0}, {"gamma": -1.0}, {"gamma": 1e-9}, {"clip": 0.0},
                                 {"clip": -1.0}, {"learning_rate": 0.0}, {"learning_rate": float("nan")},
                                 {"warmup_steps": -1}, {"weight_decay": -1.0}, {"final_learning_rate": -1.0},
                                 {"num_sliding_layers": 1}, {"num_sliding_layers": 5}, {"max_skipped": 0},
                                 {"spike_factor": 1.0}, {"slots_per_anchor": 2, "slot_weighting": "dpace"}])
def test_impossible_options_are_refused_by_name(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        replace(OPTIONS, **bad)


def test_training_through_torchrun_and_a_second_call(tiny_store, tiny_llama, tmp_path, capsys):
    job = {"store": tiny_store.folder, "model": tiny_llama.path, "dtype": "float32", "device": "cpu", "threads": 1,
           "options": OPTIONS}
    with pytest.raises(LaunchError):  # it ends before it has saved anything
        start_training(tmp_path / "drafter", **job | {"threads": "none"})
    assert (tmp_path / "drafter" / "job.json").exists()
    assert start_training(tmp_path / "drafter", **job)["job"] == "new"
    assert "train: 12/12 steps" in capsys.readouterr().out
    status = read_status(tmp_path / "drafter" / "logs" / "training.status.json")
    assert (status["state"], status["done"], status["total"], status["unit"]) == ("finished", 12, 12, "steps")
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"], "the lock is gone"
    written = os.stat(tmp_path / "drafter" / "last" / "model.safetensors").st_mtime_ns
    assert start_training(tmp_path / "drafter", **job)["job"] == "finished"
    assert os.stat(tmp_path / "drafter" / "last" / "model.safetensors").st_mtime_ns == written


def test_a_users_mistake_in_the_worker_is_one_line_and_its_traceback_is_in_the_log(tiny_store, tiny_llama, tmp_path):
    with pytest.raises(LaunchError, match="cannot be split into 500 .* lower validation_samples") as caught:
        start_training(tmp_path / "drafter", store=tiny_store.folder, model=tiny_llama.path, dtype="float32",
                       device="cpu", threads=1, options=replace(OPTIONS, validation_samples=500))
    assert "Traceback" not in str(caught.value) and "\n" not in str(caught.value)
    assert "in split_samples" in (tmp_path / "drafter" / "logs" / "training_job.log").read_text()


def test_interrupting_the_launcher_saves_the_training(tiny_store, tiny_llama, tmp_path, monkeypatch):
    """Ctrl-C in a notebook comes as KeyboardInterrupt while the launcher follows the job."""
    job = {"store": tiny_store.folder, "model": tiny_llama.path, "dtype": "float32", "device": "cpu", "threads": 1,
           "options": replace(OPTIONS, steps=100_000, checkpoint_interval=100_000, validation_interval=100_000)}

    def interrupted(*_):
        def take(row):
            if row["step"] >= 2:
                raise KeyboardInterrupt

        return take

    monkeypatch.setattr(training_job, "follow", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start_training(tmp_path / "drafter", **job)
    saved, = list_checkpoints(tmp_path / "drafter" / "checkpoints")
    assert read_json(saved / "state.json")["step"] >= 2


def test_a_worker_that_was_asked_to_stop_has_saved_and_that_is_said(tiny_store, tiny_llama, tmp_path):
    """As a cluster's scheduler does it, or somebody by hand."""
    def ask(row):
        if row["step"] == 2:
            worker, = (p for p in psutil.Process().children(recursive=True)
                       if "dflash_lib.drafter.training_job" in p.cmdline() and "dflash_lib.launch" not in p.cmdline())
            worker.terminate()

    with pytest.raises(TrainingError, match=r"asked to stop \(SIGTERM\) and have saved .*Start it again"):
        start_training(tmp_path / "drafter", store=tiny_store.folder, model=tiny_llama.path, dtype="float32",
                       device="cpu", threads=1, options=replace(OPTIONS, steps=100_000, checkpoint_interval=100_000,
                                                                validation_interval=100_000), on_row=ask)
    saved, = list_checkpoints(tmp_path / "drafter" / "checkpoints")
    assert read_json(saved / "state.json")["step"] >= 2


def rot(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("damage", [
    lambda folder: rot(folder / "state.safetensors"), lambda folder: os.truncate(folder / "state.safetensors", 100),
    lambda folder: (folder / "state.json").write_text("{}"), lambda folder: (folder / "state.json").write_text("[]"),
    lambda folder: (folder / "state.json").write_text("{"), lambda folder: (folder / "state.safetensors").unlink()])
def test_a_damaged_checkpoint_is_passed_over_for_the_older_one(tiny_store, tiny_llama, tmp_path, capsys, damage):
    options = replace(OPTIONS, steps=8)
    Trainer(tiny_store, tiny_llama, tmp_path, options).run()
    old, new = list_checkpoints(tmp_path / "checkpoints")
    before = tensors_of(new / "state.safetensors")
    damage(new)
    trainer = Trainer(tiny_store, tiny_llama, tmp_path, options)
    assert trainer.step == 4 and f"{new}: damaged checkpoint, passed over" in capsys.readouterr().out
    trainer.run()
    again = load_file(new / "state.safetensors")
    assert all(torch.equal(before[name], again[name]) for name in before)
    damage(old)
    damage(new)
    with pytest.raises(DrafterError, match="step-00000008: damaged checkpoint .*, and no whole one is left"):
        Trainer(tiny_store, tiny_llama, tmp_path, options)
    assert list_checkpoints(tmp_path / "checkpoints") == [old, new]  # nothing is thrown away


def test_a_field_that_came_later_does_not_orphan_a_training():
    assert "optimizer" not in identity(OPTIONS) and TrainOptions(**identity(OPTIONS)) == OPTIONS
    other = replace(OPTIONS, optimizer="muon")
    assert identity(other)["optimizer"] == "muon" and TrainOptions(**identity(other)) == other
