"""Trainings that are killed and compared, for the tests beside."""

import json
import multiprocessing
from pathlib import Path

import torch
from safetensors.torch import load_file

from dflash_lib.drafter.checkpoints import list_checkpoints
from dflash_lib.drafter.recipe import TrainOptions
from dflash_lib.drafter.training import Trainer
from dflash_lib.hidden_states.store import HiddenStateStore

OPTIONS = TrainOptions(block_size=4, mask_token_id=3, num_layers=1, draft_vocab_size=64, steps=12, anchors_per_sample=6,
                       validation_samples=2, validation_interval=6, checkpoint_interval=4, average=0.9, kl_weight=0.5)


def train_in_child(pipe, store_folder, target, folder, options, plant) -> None:
    """What the killed process runs; it tells each step before the next one begins."""
    plant()
    Trainer(HiddenStateStore.open(store_folder), target, folder, options).run(lambda row: pipe.send(row["step"]))


def nothing() -> None:
    """Plants no fault."""


def start_child(store, target, folder: Path, options: TrainOptions, plant=nothing):
    """A forked child (this process computes with one thread, so nothing is lost in the fork) and its pipe's end."""
    folder.mkdir(exist_ok=True)
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(
        target=train_in_child, args=(theirs, store.folder, target, folder, options, plant))
    child.start()
    theirs.close()
    return child, ours


def run_whole(store, target, folder: Path, options: TrainOptions) -> Path:
    """A training that nothing disturbs."""
    folder.mkdir()
    Trainer(store, target, folder, options).run()
    return folder


def tensors_of(file: Path) -> dict[str, torch.Tensor]:
    """A copy of a file's tensors: they are mapped, and it may change."""
    return {name: tensor.clone() for name, tensor in load_file(file).items()}


def same_tensors(one: Path, other: Path) -> bool:
    """Whether two files hold the same tensors, bit for bit."""
    ours, theirs = load_file(one), load_file(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def without_seconds(run: Path) -> list[dict]:
    """The log's rows without what may differ from run to run."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in ("seconds", "wait_s")} for row in rows]


def assert_same_training(one: Path, other: Path) -> None:
    """Both drafters, the newest state (weights, averages, moments) and the log are the same, bit for bit."""
    for name in ("last", "best"):
        assert same_tensors(one / name / "model.safetensors", other / name / "model.safetensors"), name
    newest = [list_checkpoints(folder / "checkpoints")[-1] for folder in (one, other)]
    assert newest[0].name == newest[1].name
    assert same_tensors(*(path / "state.safetensors" for path in newest))
    assert without_seconds(one) == without_seconds(other)
