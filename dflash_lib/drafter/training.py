"""Trains a drafter from a hidden-state store. Run through torchrun: `python -m dflash_lib.drafter.training JOB.json`.

Every `checkpoint_interval` steps the whole state is saved; a killed run goes on from its newest checkpoint to the same
weights, bit for bit, because batches are a pure function of seed and step. `log.jsonl` holds a row a step and a row a
validation; on resume it is cut back to the checkpoint, so no step stands in it twice.
"""

import io
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_lib.drafter.checkpoints import load_newest, restore_tensors, save_checkpoint, state_tensors
from dflash_lib.drafter.dataset import Split, TrainingData, draft_vocabulary, split_samples
from dflash_lib.drafter.folder import DrafterError, TrainedDrafter, load_drafter, save_drafter
from dflash_lib.drafter.inference import head_rows
from dflash_lib.drafter.network import FULL, DFlashDrafter, DrafterConfig
from dflash_lib.drafter.objective import TargetEnds, batch_loss, validation_acceptance
from dflash_lib.drafter.warm_start import warm_start
from dflash_lib.files import hash_value, read_json, write_json, write_text
from dflash_lib.hidden_states.store import HiddenStateStore
from dflash_lib.launch import report_progress, run_torchrun, run_worker
from dflash_lib.progress import Progress
from dflash_lib.target.generate import stop_token_ids
from dflash_lib.target.loading import Target, load_target


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The recipe. The defaults are what BENCHMARKS.md supports on SmolLM2-135M.

    block_size counts the anchor; mask_token_id is always explicit; intermediate_size None = the target's;
    draft_vocab_size None = the full head; gamma: decay of the slot weights in slots; kl_weight: share of the KL to the
    target's distribution in the loss, the rest is cross-entropy; average: decay of the weight average that is
    validated and saved, 0 = none; final_learning_rate: share of learning_rate where the cosine ends.
    """

    block_size: int
    mask_token_id: int
    num_layers: int = 1
    intermediate_size: int | None = None
    draft_vocab_size: int | None = 8192
    warm_start: bool = True
    steps: int = 2500
    batch_samples: int = 2
    anchors_per_sample: int = 32
    accumulate: int = 1
    learning_rate: float = 5e-3
    final_learning_rate: float = 0.02
    warmup_steps: int = 20
    weight_decay: float = 0.0
    clip: float = 1.0
    gamma: float = 1.5
    kl_weight: float = 0.7
    average: float = 0.99
    seed: int = 0
    validation_samples: int = 24
    validation_interval: int = 100
    checkpoint_interval: int = 100


class TrainingError(ValueError):
    """Training that cannot start or go on; the message says why and what to do."""


def drafter_config(target: Target, layer_ids: list[int], options: TrainOptions,
                   draft_vocab_size: int | None) -> DrafterConfig:
    """The drafter for `target`: its hidden size, heads and RoPE theta, but full rotary width and plain norms."""
    c = target.config
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return DrafterConfig(
        hidden_size=c.hidden_size, intermediate_size=options.intermediate_size or c.intermediate_size,
        num_attention_heads=c.num_attention_heads, num_key_value_heads=c.num_key_value_heads, head_dim=head_dim,
        rms_norm_eps=c.rms_norm_eps, rope_theta=float(c.rope_parameters["rope_theta"]),
        max_position_embeddings=c.max_position_embeddings, vocab_size=target.embedding.weight.shape[0],
        num_target_layers=target.num_layers, target_layer_ids=layer_ids, block_size=options.block_size,
        mask_token_id=options.mask_token_id, layer_types=(FULL,) * options.num_layers,
        draft_vocab_size=draft_vocab_size)


def learning_rate(step: int, options: TrainOptions) -> float:
    """Linear warm-up to `learning_rate`, then a cosine down to `final_learning_rate` of it; step from 0."""
    if step < options.warmup_steps:
        return options.learning_rate * (step + 1) / options.warmup_steps
    share = (step - options.warmup_steps) / max(1, options.steps - options.warmup_steps)
    low = options.final_learning_rate
    return options.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * share)))


class Trainer:
    """One training job in `folder`: checkpoints/, log.jsonl, job.json and, at the end, best/ and last/."""

    def __init__(self, store: HiddenStateStore, target: Target, folder: Path, options: TrainOptions):
        store.require(target=target.identity)
        self.store, self.folder, self.options, self.identity = store, folder, options, target.identity
        self.split: Split = split_samples(store, options.validation_samples, options.seed)
        vocab = None
        if options.draft_vocab_size is not None:
            vocab = draft_vocabulary(store, self.split.train, options.draft_vocab_size, stop_token_ids(target),
                                     target.head.weight.shape[0])
        config = drafter_config(target, store.target_layer_ids, options, None if vocab is None else len(vocab))
        torch.manual_seed(options.seed)
        self.network = DFlashDrafter(config)
        if options.warm_start:
            first = store.read(self.split.train[0])
            warm_start(self.network, target, first.aux_hidden_states.float())
        self.ends = TargetEnds(target.embedding, target.final_norm, head_rows(target.head.weight, vocab), vocab)
        self.averaged = {name: p.detach().clone() for name, p in self.network.named_parameters()} if (
            options.average) else {}
        matrices = [p for p in self.network.parameters() if p.ndim == 2]
        vectors = [p for p in self.network.parameters() if p.ndim != 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=options.learning_rate, betas=(0.9, 0.95), foreach=True)
        self.data = TrainingData(
            store, self.split.train, batch_samples=options.batch_samples,
            anchors_per_sample=options.anchors_per_sample, block_size=options.block_size,
            mask_token_id=options.mask_token_id, gamma=options.gamma, need_last=options.kl_weight > 0,
            seed=options.seed)
        self.step, self.best, self.seconds = 0, {"acceptance_length": 0.0, "step": 0}, 0.0
        self._resume()

    def run(self, report: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
        """Trains to the end and returns the summary. report(row) is called with each log row."""
        with open(self.folder / "log.jsonl", "a", encoding="utf-8") as log:
            def write(row: dict[str, Any]) -> None:
                log.write(json.dumps(row, allow_nan=False) + "\n")
                log.flush()
                if report:
                    report(row)

            if self.step == 0:
                write({"step": 0, "validation": self.validate()})
            while self.step < self.options.steps:
                write(self.train_step())
                last = self.step == self.options.steps
                if last or self.step % self.options.validation_interval == 0:
                    write({"step": self.step, "validation": self.validate()})
                if last or self.step % self.options.checkpoint_interval == 0:
                    os.fsync(log.fileno())
                    self.save()
        self.export_folder("last", self.step)
        summary = {"steps": self.step, "seconds": self.seconds, "best": self.best,
                   "train_samples": len(self.split.train), "validation_samples": list(self.split.validation),
                   "parameters": sum(p.numel() for p in self.network.parameters()),
                   "draft_vocab_size": self.network.config.draft_vocab_size}
        write_json(self.folder / "summary.json", summary)
        return summary

    def train_step(self) -> dict[str, Any]:
        """One optimizer step over `accumulate` batches; returns its log row. Raises TrainingError when not finite."""
        began = time.monotonic()
        rate = learning_rate(self.step, self.options)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss_sum, weight_sum, hits, counts, samples = 0.0, 0.0, 0.0, 0.0, []
        for number in range(self.options.accumulate):
            batch = self.data.batch(self.step * self.options.accumulate + number)
            parts = batch_loss(self.network, self.ends, batch, self.options.kl_weight)
            parts.loss_sum.backward()
            loss_sum, weight_sum = loss_sum + parts.loss_sum.item(), weight_sum + parts.weight_sum.item()
            hits, counts = hits + parts.slot_hits, counts + parts.slot_counts
            samples += batch.sample_indices
        if not (math.isfinite(loss_sum) and weight_sum > 0):
            raise TrainingError(f"step {self.step + 1}: loss {loss_sum} over weight {weight_sum} on samples {samples}. "
                                f"The last whole checkpoint is in {self.folder / 'checkpoints'}; look at these samples "
                                "with `python -m dflash_lib describe`, or lower learning_rate.")
        for p in self.network.parameters():  # gradients were summed; divide by the whole step's weight
            p.grad.div_(weight_sum)
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.options.clip, error_if_nonfinite=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._update_average()
        seconds = time.monotonic() - began
        self.seconds += seconds
        return {"step": self.step, "loss": loss_sum / weight_sum, "learning_rate": rate, "grad_norm": norm.item(),
                "slot_hits": hits.tolist(), "slot_counts": counts.tolist(), "seconds": seconds}

    def _update_average(self) -> None:
        decay = min(self.options.average, self.step / (self.step + 10))  # short memory at first, or it keeps the start
        with torch.no_grad():
            for name, p in self.network.named_parameters():
                if name in self.averaged:
                    self.averaged[name].lerp_(p, 1 - decay)

    def evaluated_network(self) -> DFlashDrafter:
        """What is validated and saved: the weight average where there is one."""
        if not self.averaged:
            return self.network
        network = DFlashDrafter(self.network.config)
        network.load_state_dict(self.averaged)
        return network

    def validate(self) -> dict[str, Any]:
        """Walks the validation answers; keeps the drafter in best/ when no earlier validation was better."""
        result = validation_acceptance(self.evaluated_network(), self.ends, self.store, self.split.validation)
        if result["acceptance_length"] > self.best["acceptance_length"]:
            self.best = {"acceptance_length": result["acceptance_length"], "step": self.step}
            self.export_folder("best", self.step)
        return result

    def export_folder(self, name: str, step: int) -> None:
        """Writes the evaluated weights as a drafter folder."""
        save_drafter(self.folder / name, TrainedDrafter(
            self.evaluated_network(), self.ends.draft_vocab, self.identity,
            {"step": step, "options": asdict(self.options), "store": self.store.plan.hash}))

    def save(self) -> None:
        """Writes a checkpoint."""
        save_checkpoint(self.folder / "checkpoints", self.step,
                        state_tensors(self.network, self.averaged, self.optimizer),
                        {"best": self.best, "seconds": self.seconds})

    def _resume(self) -> None:
        newest = load_newest(self.folder / "checkpoints")
        if newest is not None:
            tensors, meta = newest
            restore_tensors(tensors, self.network, self.averaged, self.optimizer)
            self.step, self.best, self.seconds = meta["step"], meta["best"], meta["seconds"]
        cut_log(self.folder / "log.jsonl", self.step if newest is not None else -1)


def cut_log(path: Path, step: int) -> None:
    """Drops log rows after `step`, and a last line that a kill cut short."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n") and json.loads(line)["step"] <= step:
            kept.append(line)
    write_text(path, "".join(kept))


def read_log(folder: Path | str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Step rows and validation rows of a training folder's log."""
    rows = [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if "loss" in row], [row for row in rows if "validation" in row]


def open_job(folder: Path | str, job: dict[str, Any]) -> str:
    """Makes `folder` the place of `job`. Returns "new", "continues" or "finished".

    A folder of another job is moved aside to `<folder>-<hash>`, not deleted.
    """
    folder = Path(folder)
    if (folder / "job.json").exists():
        before = read_json(folder / "job.json")
        if before == job:
            return "finished" if (folder / "summary.json").exists() else "continues"
        aside = folder.with_name(f"{folder.name}-{hash_value(before)[:8]}")
        if aside.exists():
            shutil.rmtree(aside)
        os.rename(folder, aside)
    elif folder.exists() and any(folder.iterdir()):
        raise DrafterError(f"{folder}: holds files but no job.json, so it is no training folder; choose another")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "job.json", job)
    return "new"


def start_training(folder: Path | str, *, store: Path | str, model: Path | str, dtype: str, device: str, threads: int,
                   options: TrainOptions, show: bool = True) -> dict[str, Any]:
    """Trains in `folder` through torchrun, or goes on where a stopped run ended; returns the summary, with `job` saying
    which: "new", "continues" or "finished". show: print a progress line. Raises LaunchError with the worker's traceback
    when it fails."""
    folder = Path(folder)
    state = open_job(folder, {
        "store": str(Path(store).resolve()), "model": str(Path(model).resolve()), "dtype": dtype, "device": device,
        "threads": threads, "options": asdict(options)})
    if state != "finished":
        with Progress(options.steps, "train", "steps", stream=None if show else io.StringIO()) as progress:

            def follow(row: dict[str, Any]) -> None:
                done = row.get("validation")
                progress.set(row["step"], f"validation acceptance {done['acceptance_length']:.3f}" if done else "")

            run_torchrun("dflash_lib.drafter.training", [str((folder / "job.json").resolve())], 1, folder / "logs",
                         threads, follow)
    return {**read_json(folder / "summary.json"), "job": state}


def main() -> None:
    """Entry of the torchrun worker: trains the job in JOB.json's folder."""
    if int(os.environ.get("WORLD_SIZE", "1")) != 1:
        raise TrainingError("this release trains on one process; start it with num_processes=1")
    job_file = Path(sys.argv[1])
    job = read_json(job_file)
    torch.set_num_threads(job["threads"])
    target = load_target(job["model"], job["dtype"], job["device"])
    store = HiddenStateStore.open(job["store"])
    trainer = Trainer(store, target, job_file.parent, TrainOptions(**job["options"]))
    trainer.run(lambda row: report_progress(**row))
    load_drafter(job_file.parent / "best")  # what was written can be read


if __name__ == "__main__":
    run_worker(main)
