"""Training in several processes: the same numbers as in one, and nothing lost when one of them dies."""

import os
import signal
import socket
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file

from dflash_lib.drafter import Compute, parallel, read_log, start_training
from dflash_lib.drafter.checkpoints import list_checkpoints
from dflash_lib.drafter.dataset import TrainingData, share_out
from dflash_lib.drafter.recipe import TrainOptions
from dflash_lib.drafter.training import Trainer
from dflash_lib.hidden_states.store import HiddenStateStore
from dflash_lib.job_status import read_status
from dflash_lib.launch import LaunchError
from dflash_lib.target.loading import load_target

OPTIONS = TrainOptions(block_size=4, mask_token_id=3, num_layers=2, num_sliding_layers=1, sliding_window=6,
                       draft_vocab_size=64, steps=20, batch_samples=3, anchors_per_sample=6, slots_per_anchor=3,
                       validation_samples=3, validation_interval=10, checkpoint_interval=10, average=0.9, kl_weight=0.5,
                       precision="float64")


def train(rank: int, port: int, store: Path, model: Path, folder: Path, compute: Compute, stop_at: int) -> None:
    """One process of a training, as training_job has it."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(compute.num_processes),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    with parallel.process_group(torch.device("cpu")):
        trainer = Trainer(HiddenStateStore.open(store), load_target(model, audit="quick"), folder, OPTIONS, compute)
        trainer.run(stopping=lambda: rank == compute.num_processes - 1 and trainer.step >= stop_at)


def run(store, target, folder: Path, compute: Compute, stop_at: int = 1000) -> Path:
    """A training in `folder`, every process spawned, or the part of it up to a step at which the last process is asked
    to stop."""
    folder.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(train, (port, store.folder, target.path, folder, compute, stop_at), compute.num_processes)
    return folder


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_log(folder)[0]]


def largest_difference(one: Path, other: Path) -> float:
    """Over all tensors of two checkpoints' newest states: weights, averages and moments."""
    ours, theirs = (load_file(max((folder / "checkpoints").glob("step-*")) / "state.safetensors")
                    for folder in (one, other))
    assert ours.keys() == theirs.keys() and len(ours) > 50
    return max((ours[key] - theirs[key]).abs().max().item() for key in ours)


@pytest.fixture(scope="module")
def alone(tiny_store, tiny_llama, tmp_path_factory):
    """20 steps in one process, in float64."""
    return run(tiny_store, tiny_llama, tmp_path_factory.mktemp("alone"), Compute())


def check_same(folder: Path, alone: Path) -> None:
    assert len(losses(folder)) == 20
    assert max(abs(a - b) for a, b in zip(losses(folder), losses(alone), strict=True)) < 1e-10
    assert largest_difference(folder, alone) < 1e-10
    assert [row["validation"]["steps"] for row in read_log(folder)[1]] == [
        row["validation"]["steps"] for row in read_log(alone)[1]], "validation answers are shared out, none twice"


@pytest.mark.parametrize("compute", [Compute(num_processes=2), Compute(num_processes=2, accumulate=2, shard=True)],
                         ids=["DDP", "FSDP2, more passes than documents"])
def test_two_processes_equal_one(tiny_store, tiny_llama, alone, tmp_path, compute):
    """Three conversations a step: one process has two of them, and of four passes one has none."""
    check_same(run(tiny_store, tiny_llama, tmp_path / "two", compute), alone)


def test_a_training_goes_on_with_another_number_of_processes(tiny_store, tiny_llama, alone, tmp_path):
    for steps, compute in ((7, Compute()), (13, Compute(num_processes=2, shard=True)),
                           (1000, Compute(num_processes=2))):
        folder = run(tiny_store, tiny_llama, tmp_path / "moved", compute, steps)
        assert len(losses(folder)) == min(steps, 20), "asked to stop in one process, all stop after the same step"
    check_same(folder, alone)


def worker_of(rank: int, folder: Path) -> int:
    """Process id of a worker of the training in `folder`."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words, environment = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
        except OSError:  # it ended meanwhile
            continue
        if str(folder).encode() in words and f"RANK={rank}".encode() in environment.split(b"\0"):
            return int(process.name)
    raise AssertionError(f"no worker {rank}")


def test_a_killed_process_ends_the_job_and_one_alone_goes_on(tiny_store, tiny_llama, tmp_path):
    folder, killed = tmp_path / "drafter", []
    job = {"store": tiny_store.folder, "model": tiny_llama.path, "dtype": "float32", "device": "cpu", "threads": 1,
           "show": False}

    def kill_once(row):
        if row["step"] >= 11 and not killed:
            killed.append(time.monotonic())
            os.kill(worker_of(1, folder), signal.SIGKILL)

    options, went_on = replace(OPTIONS, steps=100_000), []  # so long that it is not over before the kill
    with pytest.raises(LaunchError, match="rank 1.*SIGKILL"):
        start_training(folder, options=options, compute=Compute(num_processes=2), on_row=kill_once, **job)
    assert killed and time.monotonic() - killed[0] < 60, "the issue's own limit"
    saved = list_checkpoints(folder / "checkpoints")[-1]
    assert not (folder / "summary.json").exists()
    status = read_status(folder / "logs" / "training.status.json")
    assert (status["state"], f"step-{status['done']:08d}") == ("failed", saved.name), "it goes on from there"

    def stop_at_once(row):
        went_on.append(row["step"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start_training(folder, options=options, compute=Compute(), on_row=stop_at_once, **job)
    assert went_on == [int(saved.name.removeprefix("step-")) + 1]
    status, newest = read_status(folder / "logs" / "training.status.json"), list_checkpoints(folder / "checkpoints")[-1]
    assert (status["state"], f"step-{status['done']:08d}") == ("stopped", newest.name)


@pytest.mark.slow
def test_a_process_that_waits_in_vain_ends_when_it_is_asked_to(tiny_store, tiny_llama, tmp_path):
    """As with NCCL, whose survivors wait for a dead process for hours: gloo's wait for one that was halted."""
    folder, pids, ended = tmp_path / "drafter", [], []

    def halt_one(row):
        if row["step"] >= 11 and not pids:
            pids.extend(worker_of(rank, folder) for rank in (0, 1))
            os.kill(pids[1], signal.SIGSTOP)
            threading.Thread(target=ask_the_other).start()

    def ask_the_other():
        time.sleep(3)  # it is in the step that the halted one never takes
        began = time.monotonic()
        os.kill(pids[0], signal.SIGTERM)  # torchrun would
        while Path(f"/proc/{pids[0]}").exists() and time.monotonic() - began < 100:
            time.sleep(0.1)
        ended.append(time.monotonic() - began)
        os.kill(pids[1], signal.SIGCONT)

    with pytest.raises(LaunchError):
        start_training(folder, store=tiny_store.folder, model=tiny_llama.path, dtype="float32", device="cpu", threads=1,
                       show=False, options=replace(OPTIONS, steps=100_000), compute=Compute(num_processes=2),
                       on_row=halt_one)
    assert ended[0] < 60
    assert "has been stuck in the call below" in (folder / "logs" / "training_job.log").read_text()


def test_a_process_that_fails_alone_ends_the_job(tiny_store, tiny_llama, tmp_path):
    """The first one cannot save, while the other waits for it."""
    folder, began = tmp_path / "drafter", []

    def obstruct(row):
        if row["step"] == 1:
            (folder / "checkpoints").write_text("in the way")
        began[:] = [time.monotonic()]

    with pytest.raises(LaunchError, match=r"rank 0 of 2 (?s:.)*checkpoints"):
        start_training(folder, store=tiny_store.folder, model=tiny_llama.path, dtype="float32", device="cpu", threads=1,
                       show=False, options=replace(OPTIONS, steps=60, checkpoint_interval=60),
                       compute=Compute(num_processes=2), on_row=obstruct)
    assert time.monotonic() - began[0] < 60


def test_processes_wait_longer_for_a_checkpoint_than_nccl_would(monkeypatch):
    asked = {}
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(parallel.dist, "init_process_group", lambda backend, timeout: asked.update({backend: timeout}))
    monkeypatch.setattr(parallel.dist, "destroy_process_group", lambda: asked.update(ended=True))
    with parallel.process_group(torch.device("cpu")):
        assert asked["gloo"] >= timedelta(hours=1) and "ended" not in asked
    assert asked.pop("ended")
    with pytest.raises(KeyError), parallel.process_group(torch.device("cpu")):
        raise KeyError
    assert "ended" not in asked, "it would wait for the others"


def test_documents_are_shared_out_by_length():
    items = [(5, "a"), (9, "b"), (4, "c"), (3, "d"), (1, "e")]
    assert share_out(items, 2) == [["b", "d"], ["a", "c", "e"]], "12 and 10"
    assert share_out(items, 7) == [["b"], ["a"], ["c"], ["d"], ["e"], [], []]


def test_the_passes_of_all_processes_are_the_batch(tiny_store):
    data = TrainingData(tiny_store, tiny_store.sample_indices, batch_samples=3, anchors_per_sample=4,
                        slots_per_anchor=2, block_size=4, mask_token_id=3, gamma=4.0, need_last=True, seed=1)
    for number in range(6):
        whole = data.batch(number)
        for num_ranks, accumulate in ((1, 1), (2, 1), (2, 3)):
            passes = [one for rank in range(num_ranks) for one in data.passes(number, rank, num_ranks, accumulate)]
            assert len(passes) == num_ranks * accumulate, "every process takes as many steps as the others"
            assert sorted(sum((one.sample_indices for one in passes), ())) == sorted(whole.sample_indices)
            assert sum(one.weights.sum() for one in passes).item() == pytest.approx(whole.weights.sum().item())
