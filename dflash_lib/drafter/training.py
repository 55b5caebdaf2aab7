"""Trains a drafter from a hidden-state store, step by step, in one process. `training_job` starts it through torchrun.

Every `checkpoint_interval` steps the whole state is saved, and on SIGTERM, which is what ends the job on Ctrl-C. A run
goes on from its newest checkpoint to the same weights, bit for bit, because batches are a pure function of seed and
step. `log.jsonl` holds a row a step and a row a validation; on resume it is cut back to the checkpoint, so no step
stands in it twice.
"""

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_lib.drafter.checkpoints import load_newest, restore_tensors, save_checkpoint, state_tensors
from dflash_lib.drafter.dataset import Split, TrainingData, draft_vocabulary, split_samples
from dflash_lib.drafter.folder import TrainedDrafter, save_drafter
from dflash_lib.drafter.inference import head_rows
from dflash_lib.drafter.network import FULL, DFlashDrafter, DrafterConfig
from dflash_lib.drafter.objective import TargetEnds, batch_loss, validation_acceptance
from dflash_lib.drafter.warm_start import warm_start
from dflash_lib.files import write_text
from dflash_lib.hidden_states.store import HiddenStateStore
from dflash_lib.target.generate import stop_token_ids
from dflash_lib.target.loading import Target


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The recipe. The defaults are those of the demo; BENCHMARKS.md has what they reach.

    block_size counts the anchor; mask_token_id is always explicit; slots_per_anchor: slots of each block that are
    trained, the first and drawn later ones (`blocks.draw_slots`), block_size - 1 = all; intermediate_size None = the
    target's; draft_vocab_size None = the full head; gamma: decay of the slot weights in slots (the published 4 for
    block 8 suits long training; where only the first slots are ever accepted, a smaller one learns faster); kl_weight:
    share of the KL to the target's distribution in the loss, the rest is cross-entropy; average: decay of the weight
    average that is validated and saved, 0 = none; final_learning_rate: share of learning_rate where the cosine ends.
    """

    block_size: int
    mask_token_id: int
    num_layers: int = 1
    intermediate_size: int | None = None
    draft_vocab_size: int | None = 8192
    warm_start: bool = True
    steps: int = 4000
    batch_samples: int = 2
    anchors_per_sample: int = 32
    slots_per_anchor: int = 2
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
    validation_interval: int = 250
    checkpoint_interval: int = 250

    def __post_init__(self) -> None:
        for name in ("steps", "batch_samples", "anchors_per_sample", "slots_per_anchor", "accumulate",
                     "validation_samples", "validation_interval", "checkpoint_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: at least 1 is needed, got {getattr(self, name)}")
        if not 0 <= self.kl_weight <= 1 or not 0 <= self.average < 1:
            raise ValueError(f"kl_weight must be 0 to 1 and average 0 to less than 1, got {self.kl_weight} and "
                             f"{self.average}")


class TrainingError(ValueError):
    """Training that cannot start or go on; the message says why and what to do."""


def rope_theta(config) -> float:
    """The target's RoPE base; where its layer types have one each (Gemma 3), that of full attention."""
    parameters = config.rope_parameters
    return float(parameters.get("full_attention", parameters)["rope_theta"])


def drafter_config(target: Target, layer_ids: list[int], options: TrainOptions,
                   draft_vocab_size: int | None) -> DrafterConfig:
    """The drafter for `target`: its hidden size, heads and RoPE theta, but full rotary width and plain norms."""
    c = target.config
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return DrafterConfig(
        hidden_size=c.hidden_size, intermediate_size=options.intermediate_size or c.intermediate_size,
        num_attention_heads=c.num_attention_heads, num_key_value_heads=c.num_key_value_heads, head_dim=head_dim,
        rms_norm_eps=c.rms_norm_eps, rope_theta=rope_theta(c),
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
    """One training job in `folder`: checkpoints/, log.jsonl, best/ and, at the end, last/.

    The drafter is on the target's device, its weights and its arithmetic are float32 whatever the target's dtype is.
    Raises StoreError when the store's states are not this target's, TrainingError when the folder's checkpoint was
    trained from another store, and when the loss needs a last state that the store lacks.
    """

    def __init__(self, store: HiddenStateStore, target: Target, folder: Path, options: TrainOptions):
        store.require(target=target.identity)
        self.store, self.folder, self.options, self.identity = store, folder, options, target.identity
        self.split: Split = split_samples(store, options.validation_samples, options.seed)
        check_mask_token(store, options.mask_token_id)
        if options.kl_weight > 0 and store.plan.last_state == "none":
            raise TrainingError(f"{store.folder}: kl_weight {options.kl_weight}: a KL loss needs the target's last "
                                "state, and this store holds none (last_state: none). Extract with last_state: "
                                "supervised, or set kl_weight: 0")
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
        self.network.to(target.device)
        self.ends = TargetEnds(target.embedding, target.final_norm, head_rows(target.head.weight, vocab).float(),
                               None if vocab is None else vocab.to(target.device))
        self.averaged = {name: p.detach().clone() for name, p in self.network.named_parameters()} if (
            options.average) else {}
        matrices = [p for p in self.network.parameters() if p.ndim == 2]
        vectors = [p for p in self.network.parameters() if p.ndim != 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=options.learning_rate, betas=(0.9, 0.95), fused=True)
        self.data = TrainingData(
            store, self.split.train, batch_samples=options.batch_samples,
            anchors_per_sample=options.anchors_per_sample, slots_per_anchor=options.slots_per_anchor,
            block_size=options.block_size, mask_token_id=options.mask_token_id, gamma=options.gamma,
            need_last=options.kl_weight > 0, seed=options.seed)
        self.step, self.best, self.seconds = 0, {"acceptance_length": 0.0, "step": 0}, 0.0
        self._resume()

    def run(self, report: Callable[[dict[str, Any]], None] | None = None,
            stopping: Callable[[], bool] = lambda: False) -> dict[str, Any] | None:
        """Trains to the end and returns the summary. report(row) is called with each log row. Once `stopping()` is
        true, it saves a checkpoint at the next step's beginning and returns None."""
        with open(self.folder / "log.jsonl", "a", encoding="utf-8") as log:
            def write(row: dict[str, Any]) -> None:
                log.write(json.dumps(row, allow_nan=False) + "\n")
                log.flush()
                if report:
                    report(row)

            if self.step == 0:
                write({"step": 0, "validation": self.validate()})
            while self.step < self.options.steps:
                if stopping():  # a due validation and checkpoint of this step are behind it
                    os.fsync(log.fileno())
                    self.save()
                    return None
                write(self.train_step())
                last = self.step == self.options.steps
                if last or self.step % self.options.validation_interval == 0:
                    write({"step": self.step, "validation": self.validate()})
                if last or self.step % self.options.checkpoint_interval == 0:
                    os.fsync(log.fileno())
                    self.save()
        self.export_folder("last", self.step)
        return {"steps": self.step, "seconds": self.seconds, "best": self.best,
                "train_samples": len(self.split.train), "validation_samples": list(self.split.validation),
                "parameters": sum(p.numel() for p in self.network.parameters()),
                "draft_vocab_size": self.network.config.draft_vocab_size}

    def train_step(self) -> dict[str, Any]:
        """One optimizer step over `accumulate` batches; returns its log row. Raises TrainingError when not finite."""
        began = time.monotonic()
        rate = learning_rate(self.step, self.options)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss_sum, weight_sum, hits, counts, samples = 0.0, 0.0, 0.0, 0.0, []
        for number in range(self.options.accumulate):
            batch = self.data.batch(self.step * self.options.accumulate + number).to(self.ends.head.device)
            parts = batch_loss(self.network, self.ends, batch, self.options.kl_weight)
            parts.loss_sum.backward()
            loss_sum, weight_sum = loss_sum + parts.loss_sum.item(), weight_sum + parts.weight_sum.item()
            hits, counts = hits + parts.slot_hits, counts + parts.slot_counts
            samples += batch.sample_indices
        if not (math.isfinite(loss_sum) and weight_sum > 0):
            raise TrainingError(f"step {self.step + 1}: loss {loss_sum} over weight {weight_sum} on samples {samples}. "
                                f"The last whole checkpoint is in {self.folder / 'checkpoints'}. Verify the store "
                                "(`python -m dflash_lib verify`), look at these samples, or lower learning_rate.")
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
        if not self.averaged:
            return
        decay = min(self.options.average, self.step / (self.step + 10))  # short memory at first, or it keeps the start
        with torch.no_grad():
            torch._foreach_lerp_(list(self.averaged.values()), list(self.network.parameters()), 1 - decay)

    def evaluated_network(self) -> DFlashDrafter:
        """What is validated and saved: the weight average where there is one."""
        if not self.averaged:
            return self.network
        network = DFlashDrafter(self.network.config).to(self.ends.head.device)
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
                        {"best": self.best, "seconds": self.seconds, "store": self.store.plan.hash})

    def _resume(self) -> None:
        newest = load_newest(self.folder / "checkpoints")
        if newest is not None:
            tensors, meta = newest
            if meta["store"] != self.store.plan.hash:
                raise TrainingError(f"{self.folder}: its checkpoint was trained from another store (plan "
                                    f"{meta['store'][:12]}, not {self.store.plan.hash[:12]}); choose another folder")
            restore_tensors(tensors, self.network, self.averaged, self.optimizer)
            self.step, self.best, self.seconds = meta["step"], meta["best"], meta["seconds"]
        cut_log(self.folder / "log.jsonl", self.step if newest is not None else -1)


def check_mask_token(store: HiddenStateStore, mask_token_id: int) -> None:
    """Raises TrainingError when the mask token occurs in the store's text: the drafter could not tell a slot to fill
    from a word (convention 7: explicit, never a silent fallback)."""
    found = sum(int((store.read_tokens(i)[0] == mask_token_id).sum())
                for i in store.in_file_order(store.sample_indices))
    if found:
        raise TrainingError(f"mask_token_id {mask_token_id} stands {found} times in the text of {store.folder}; set it "
                            "to a row of the target's embedding that text does not use (248070 for Qwen3.5 and 3.6)")


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
