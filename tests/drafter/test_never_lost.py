"""What may happen to a training: killed, its disk full, poisoned data, a spike; nothing is lost, nothing is hidden."""

import io
import os
import random
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch

from dflash_lib.drafter import checkpoints, load_drafter, training
from dflash_lib.drafter.checkpoints import list_checkpoints
from dflash_lib.drafter.dataset import TrainingData
from dflash_lib.drafter.objective import batch_loss
from dflash_lib.drafter.recipe import TrainingError
from dflash_lib.drafter.termination import Termination
from dflash_lib.drafter.training import NORMS_NEEDED, Trainer
from dflash_lib.drafter.training_job import follow
from dflash_lib.drafter.training_log import read_log
from dflash_lib.files import read_json
from dflash_lib.job_status import JobStatus
from dflash_lib.progress import Progress
from tests.drafter.running import (
    OPTIONS,
    assert_same_training,
    run_whole,
    same_tensors,
    start_child,
    tensors_of,
    without_seconds,
)


def kill_at(step, store, target, folder, options, plant=lambda: None) -> None:
    """A training that is killed in or after a step."""
    child, pipe = start_child(store, target, folder, options, plant)
    while pipe.recv() < step:
        pass
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL


def test_200_steps_are_100_killed_and_100(tiny_store, tiny_llama, tmp_path):
    """Killed in the middle of an epoch (10 conversations, 3 a step), 37 steps behind the checkpoint."""
    options = replace(OPTIONS, steps=200, batch_samples=3, checkpoint_interval=100, validation_interval=70)
    assert (100 * 3) % 10 == 0 and (137 * 3) % 10 != 0
    whole = run_whole(tiny_store, tiny_llama, tmp_path / "whole", options)
    kill_at(137, tiny_store, tiny_llama, tmp_path / "killed", options)
    trainer = Trainer(tiny_store, tiny_llama, tmp_path / "killed", options)
    assert trainer.step == 100
    trainer.run()
    assert_same_training(whole, tmp_path / "killed")


def test_killed_before_the_first_checkpoint_and_between_two(tiny_store, tiny_llama, tmp_path):
    options = replace(OPTIONS, steps=23, checkpoint_interval=7, validation_interval=8)
    whole = run_whole(tiny_store, tiny_llama, tmp_path / "whole", options)
    for step in (3, 12):
        kill_at(step, tiny_store, tiny_llama, tmp_path / "killed", options)
    child, pipe = start_child(tiny_store, tiny_llama, tmp_path / "killed", options)
    assert pipe.recv() == 8, "it did not go on from step 7's checkpoint, in the middle of an epoch"
    child.join()
    assert child.exitcode == 0
    assert_same_training(whole, tmp_path / "killed")


def test_no_random_state_but_the_step_decides(tiny_store, tiny_llama, tmp_path, monkeypatch):
    """Python's, numpy's and PyTorch's generators are disturbed between steps, and nothing changes. The step is what
    stands for their state: batches that counted from the process's start, as a sampler that is not restored does,
    would train something else."""
    options = replace(OPTIONS, steps=10, checkpoint_interval=5)
    whole = run_whole(tiny_store, tiny_llama, tmp_path / "whole", options)

    def disturb(_row):
        for generator in (random.seed, np.random.seed, torch.manual_seed):
            generator(int.from_bytes(os.urandom(3)))

    def in_two_parts(folder):
        folder.mkdir()
        trainer = Trainer(tiny_store, tiny_llama, folder, options)
        assert trainer.run(disturb, stopping=lambda: trainer.step == 5) is None
        Trainer(tiny_store, tiny_llama, folder, options).run(disturb)
        return folder

    assert_same_training(whole, in_two_parts(tmp_path / "parts"))
    passes, begun = TrainingData.passes, []

    def from_the_process_start(self, index, *rest):
        if not begun or begun[-1][0] is not self:
            begun.append((self, index))
        return passes(self, index - begun[-1][1], *rest)

    monkeypatch.setattr(TrainingData, "passes", from_the_process_start)
    assert without_seconds(in_two_parts(tmp_path / "wrong")) != without_seconds(whole)


@pytest.mark.parametrize("moment", ["half written", "before the rename"])
def test_killed_while_a_checkpoint_is_written(tiny_store, tiny_llama, tmp_path, moment):
    options = replace(OPTIONS, steps=12)
    whole = run_whole(tiny_store, tiny_llama, tmp_path / "whole", options)
    save_file, rename = checkpoints.save_file, os.rename

    def half(tensors, path):
        save_file(tensors, path)
        if "00000008" in str(path):
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    def never(one, other):
        if "00000008" in str(other) and os.path.isdir(one):
            os.kill(os.getpid(), signal.SIGKILL)
        rename(one, other)

    def plant():
        if moment == "half written":
            checkpoints.save_file = half
        else:
            os.rename = never

    child, pipe = start_child(tiny_store, tiny_llama, tmp_path / "killed", options, plant)
    child.join()
    assert child.exitcode == -signal.SIGKILL
    pipe.close()
    assert [path.name for path in list_checkpoints(tmp_path / "killed" / "checkpoints")] == ["step-00000004"], (
        "a checkpoint that is not whole must not stand among the whole ones")
    trainer = Trainer(tiny_store, tiny_llama, tmp_path / "killed", options)
    assert trainer.step == 4
    trainer.run()
    assert_same_training(whole, tmp_path / "killed")


def test_sigterm_saves_the_step_that_it_meets_and_the_run_goes_on_bit_for_bit(tiny_store, tiny_llama, tmp_path):
    """Stopped in between, where a validation is due, and once more; no checkpoint is due anywhere before the end."""
    options = replace(OPTIONS, steps=23, checkpoint_interval=1000, validation_interval=8)
    whole, before = run_whole(tiny_store, tiny_llama, tmp_path / "whole", options), 0
    (tmp_path / "stopped").mkdir()
    for stop_at in (3, 8, 12):
        trainer = Trainer(tiny_store, tiny_llama, tmp_path / "stopped", options)
        assert trainer.step == before
        with Termination() as stopping:
            assert trainer.run(lambda row, at=stop_at: os.kill(os.getpid(), signal.SIGTERM) if row["step"] == at
                               else None, stopping) is None
        before = stop_at
    assert Trainer(tiny_store, tiny_llama, tmp_path / "stopped", options).run() is not None
    assert_same_training(whole, tmp_path / "stopped")


def test_what_kills_left_of_checkpoints_goes_with_the_next_one(tmp_path):
    (tmp_path / ".step-00000007.partial").mkdir()
    (tmp_path / ".step-00000007.partial" / ".state.safetensors").write_bytes(bytes(100))
    checkpoints.save_checkpoint(tmp_path, 9, {"weight.a": torch.ones(2)}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000009"]


def test_a_step_that_is_saved_already_is_left_as_it_is(tmp_path):
    """To remove it for a new one would leave nothing to a kill in between."""
    first = checkpoints.save_checkpoint(tmp_path, 9, {"weight.a": torch.ones(2)}, {})
    inode = first.stat().st_ino
    assert checkpoints.save_checkpoint(tmp_path, 9, {"weight.a": torch.ones(2)}, {}) == first
    assert first.stat().st_ino == inode and checkpoints.load_newest(tmp_path)[0] == first


def test_what_other_terminals_read_as_kept_is_the_newest_checkpoint(tmp_path):
    status = JobStatus(tmp_path / "status.json", "training", 40, "steps", start=10)
    take = follow(Progress(40, "train", "steps", stream=io.StringIO()), status, tmp_path, "cpu")
    for step, saved in [(11, 10), (12, 10), (20, 20), (21, 20)]:
        (tmp_path / "checkpoints" / f"step-{saved:08d}").mkdir(parents=True, exist_ok=True)
        take({"step": step})
        assert (status.done, status.kept) == (step, saved)


def test_asked_to_stop_before_the_first_step(tiny_store, tiny_llama, tmp_path):
    assert Trainer(tiny_store, tiny_llama, tmp_path, OPTIONS).run(stopping=lambda: True) is None
    trainer = Trainer(tiny_store, tiny_llama, tmp_path, OPTIONS)
    assert trainer.step == 0 and trainer.run()["steps"] == 12
    assert [row["step"] for row in read_log(tmp_path)[1]] == [0, 6, 12], "none twice"


def test_the_best_validation_is_kept_while_the_loss_still_falls(tiny_store, tiny_llama, tmp_path, monkeypatch):
    """Acceptance peaks at step 12 and falls; a stop behind the peak does not forget it."""
    options = replace(OPTIONS, steps=24, checkpoint_interval=6)
    lengths = {0: 1, 6: 2, 12: 4, 18: 3, 24: 2}
    monkeypatch.setattr(training, "walk_samples", lambda *_: [(0, lengths[trainer.step])])
    trainer = Trainer(tiny_store, tiny_llama, tmp_path, options)
    trainer.run(stopping=lambda: trainer.step == 18)
    at_peak = tensors_of(tmp_path / "best" / "model.safetensors")
    trainer = Trainer(tiny_store, tiny_llama, tmp_path, options)
    assert trainer.run()["best"] == {"acceptance_length": 4.0, "step": 12}
    assert [load_drafter(tmp_path / name).training["step"] for name in ("best", "last")] == [12, 24]
    assert all(torch.equal(at_peak[name], p) for name, p in tensors_of(tmp_path / "best" / "model.safetensors").items())
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000018", "step-00000024"]


def spiked(steps, factor=1e4):
    """batch_loss with a loss that is `factor` times as large in some calls."""
    calls = []

    def loss(*args):
        calls.append(None)
        parts = batch_loss(*args)
        return replace(parts, loss_sum=parts.loss_sum * factor) if len(calls) in steps else parts

    return loss


def test_a_spike_changes_nothing_and_is_counted(tiny_store, tiny_llama, tmp_path, monkeypatch):
    """Also over a stop and a start: what is usual is in the checkpoint."""
    options = replace(OPTIONS, steps=40, checkpoint_interval=1000, validation_interval=1000)
    monkeypatch.setattr(training, "batch_loss", spiked({NORMS_NEEDED + 3, 35}))
    trainer = Trainer(tiny_store, tiny_llama, tmp_path, options)
    for _ in range(NORMS_NEEDED + 2):
        assert "skipped" not in trainer.train_step()
    before = {name: p.detach().clone() for name, p in trainer.network.named_parameters()}
    row = trainer.train_step()
    assert row["skipped"] and row["grad_norm"] > 100 * max(trainer.norms)
    assert all(torch.equal(before[name], p) for name, p in trainer.network.named_parameters())
    trainer.save()
    again = Trainer(tiny_store, tiny_llama, tmp_path, options)
    assert again.skipped == [NORMS_NEEDED + 3] and list(again.norms) == list(trainer.norms)
    summary = again.run()
    assert summary["skipped_steps"] == 2
    assert [row["step"] for row in read_log(tmp_path)[0] if row.get("skipped")] == [35]


def test_one_spike_after_another_ends_the_training(tiny_store, tiny_llama, tmp_path, monkeypatch):
    options = replace(OPTIONS, steps=60, max_skipped=5, checkpoint_interval=1000)
    monkeypatch.setattr(training, "batch_loss", spiked(range(30, 100)))
    with pytest.raises(TrainingError, match=r"step 34: gradient norm .*the 5th step in a row .*10 times the usual .*on "
                                            r"samples \[\d+.*state before this step is saved.*lower learning_rate"):
        Trainer(tiny_store, tiny_llama, tmp_path, options).run()
    saved, = list_checkpoints(tmp_path / "checkpoints")
    state = read_json(saved / "state.json")
    assert state["step"] == 33 and state["skipped"] == [30, 31, 32, 33], "step 34 is to be taken again"
    with pytest.raises(TrainingError, match="step 34: .*the 5th step in a row"):
        Trainer(tiny_store, tiny_llama, tmp_path, options).run()


def test_nan_states_stop_training_with_the_samples_named_and_the_state_saved(tiny_store, tiny_llama, tmp_path,
                                                                             monkeypatch):
    options = replace(OPTIONS, checkpoint_interval=1000, batch_samples=3)
    trainer = Trainer(tiny_store, tiny_llama, tmp_path, options)
    for _ in range(5):
        trainer.train_step()
    trainer.save()
    before = tensors_of(list_checkpoints(tmp_path / "checkpoints")[0] / "state.safetensors")
    read, poisoned = tiny_store.read, trainer.data.chosen(5)[1][1]

    def with_nan(index):
        sample = read(index)
        if index == poisoned:
            sample.aux_hidden_states[3] = float("nan")
        return sample

    monkeypatch.setattr(tiny_store, "read", with_nan)
    chosen = [index for _, index in trainer.data.chosen(5)]
    with pytest.raises(TrainingError, match=rf"step 6: loss nan .* samples \[{', '.join(map(str, chosen))}\]; not "
                                            r"finite with .*Verify the store"):
        trainer.train_step()
    saved, = list_checkpoints(tmp_path / "checkpoints")
    after = tensors_of(saved / "state.safetensors")
    assert saved.name == "step-00000005" and all(torch.equal(before[name], after[name]) for name in before)
    monkeypatch.setattr(tiny_store, "read", read)
    assert Trainer(tiny_store, tiny_llama, tmp_path, options).run()["steps"] == 12, "it goes on once the data is mended"


def test_a_step_without_any_label_of_the_draft_vocabulary_is_skipped(tiny_store, tiny_llama, tmp_path):
    """It would end the training, and again whenever it went on."""
    trainer = Trainer(tiny_store, tiny_llama, tmp_path, replace(
        OPTIONS, draft_vocab_size=1, batch_samples=1, anchors_per_sample=1, slots_per_anchor=1))
    before = {name: p.detach().clone() for name, p in trainer.network.named_parameters()}
    row = trainer.train_step()
    assert row["skipped"] and (row["loss"], row["grad_norm"], sum(row["slot_counts"])) == (0, 0, 1)
    assert trainer.skipped == [1] and not trainer.norms
    assert all(torch.equal(before[name], p) for name, p in trainer.network.named_parameters())
    assert trainer.run()["steps"] == 12


def test_a_gradient_that_is_not_finite_stops_too(tiny_store, tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "batch_loss", spiked({2}, float("inf")))
    trainer = Trainer(tiny_store, tiny_llama, tmp_path, OPTIONS)
    trainer.train_step()
    with pytest.raises(TrainingError, match="step 2: loss inf"):
        trainer.train_step()


def test_an_error_in_validation_leaves_the_network_in_training_mode(tiny_store, tiny_llama, tmp_path, monkeypatch):
    trainer = Trainer(tiny_store, tiny_llama, tmp_path, replace(OPTIONS, average=0.0))
    trainer.network.train()
    monkeypatch.setattr(tiny_store, "read", lambda index: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.validate()
    assert trainer.network.training


def test_a_training_begun_from_a_drafter_goes_on_without_its_folder(tiny_store, tiny_llama, tmp_path):
    first = run_whole(tiny_store, tiny_llama, tmp_path / "first", OPTIONS)
    options = replace(OPTIONS, init_from=str(first / "last"), steps=8)
    (tmp_path / "second").mkdir()
    trainer = Trainer(tiny_store, tiny_llama, tmp_path / "second", options)
    weights = load_drafter(first / "last").network.state_dict()
    assert all(torch.equal(weights[name], p) for name, p in trainer.network.named_parameters())
    assert trainer.run(stopping=lambda: trainer.step == 3) is None
    os.rename(first, tmp_path / "moved")
    trainer = Trainer(tiny_store, tiny_llama, tmp_path / "second", options)
    assert trainer.step == 3 and trainer.run()["steps"] == 8
    begun = load_drafter(tmp_path / "second" / "last").training["begun_from"]
    assert begun["folder"] == str(first / "last") and len(begun["sha256"]) == 64 and begun["differences"] == []
    assert not same_tensors(tmp_path / "second" / "last" / "model.safetensors",
                            tmp_path / "moved" / "last" / "model.safetensors")


@pytest.mark.parametrize("changes", [
    {"sample_from_anchor": True}, {"slot_weighting": "dpace", "slots_per_anchor": 4},
    {"sample_from_anchor": True, "slot_weighting": "dpace", "slots_per_anchor": 4, "kl_weight": 0.0},
    {"num_layers": 2, "num_sliding_layers": 1, "sliding_window": 5}, {"precision": "bfloat16"},
    {"optimizer": "muon"},
    {"num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "warm_start": False}])
def test_every_kind_of_recipe_learns_and_resumes(tiny_store, tiny_llama, tmp_path, changes):
    options = replace(OPTIONS, steps=40, checkpoint_interval=20, **changes)
    whole = run_whole(tiny_store, tiny_llama, tmp_path / "whole", options)
    losses = [row["loss"] for row in read_log(whole)[0]]
    assert np.mean(losses[-5:]) < 0.95 * np.mean(losses[:5])
    (tmp_path / "parts").mkdir()
    trainer = Trainer(tiny_store, tiny_llama, tmp_path / "parts", options)
    trainer.run(stopping=lambda: trainer.step == 20)
    Trainer(tiny_store, tiny_llama, tmp_path / "parts", options).run()
    assert_same_training(whole, tmp_path / "parts")
    drafter = load_drafter(whole / "last")
    assert drafter.config.sample_from_anchor == options.sample_from_anchor
    assert all(p.dtype == torch.float32 for p in trainer.network.parameters())


def test_bfloat16_arithmetic_follows_the_float32_loss(tiny_store, tiny_llama, tmp_path):
    rows = [read_log(run_whole(tiny_store, tiny_llama, tmp_path / precision, replace(
        OPTIONS, steps=40, precision=precision)))[0] for precision in ("float32", "bfloat16")]
    losses = torch.tensor([[row["loss"] for row in run] for run in rows])
    assert 0 < (losses[0] - losses[1]).abs().max() < 0.05 * losses[0].mean()
