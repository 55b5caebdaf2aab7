"""Trains a drafter from a hidden-state store, step by step. `training_job` starts it through torchrun, in one process
or in several that share each step's conversations.

Every `checkpoint_interval` steps the whole state is saved, and on SIGTERM, which is what ends the job on Ctrl-C. A run
goes on from its newest checkpoint to the same weights, bit for bit, because there is no state beside what a checkpoint
holds: which conversations, anchors and slots form a step is a pure function of seed and step (dataset.py), and no
random number is drawn elsewhere. With another number of processes it goes on with the same steps; sums are then formed
in another order. `log.jsonl` holds a row a step and a row a validation (training_log.py).
"""

import json
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dflash_lib.drafter import parallel
from dflash_lib.drafter.attention import FlexAttention
from dflash_lib.drafter.checkpoints import load_newest, restore_tensors, save_checkpoint, state_tensors
from dflash_lib.drafter.dataset import Batch, Split, TrainingData, draft_vocabulary, split_samples
from dflash_lib.drafter.folder import TrainedDrafter, save_drafter
from dflash_lib.drafter.inference import head_rows
from dflash_lib.drafter.init_from import init_from
from dflash_lib.drafter.network import DFlashDrafter
from dflash_lib.drafter.objective import TargetEnds, batch_loss, walk_result, walk_samples, walk_sums
from dflash_lib.drafter.prefetch import Prefetched
from dflash_lib.drafter.recipe import Compute, TrainingError, TrainOptions, drafter_config, learning_rate
from dflash_lib.drafter.training_log import cut_log
from dflash_lib.drafter.warm_start import warm_start
from dflash_lib.hidden_states.store import HiddenStateStore
from dflash_lib.target.generate import stop_token_ids
from dflash_lib.target.loading import Target

NUM_NORMS = 100  # gradient norms that the usual one is the median of
NORMS_NEEDED = 20  # before that nothing counts as a spike


class Trainer:
    """One training job in `folder`: checkpoints/, log.jsonl, best/ and, at the end, last/.

    The drafter is on the target's device; its weights are float32 whatever the target's dtype is. Every process makes
    one, and only the first writes. Raises StoreError when the store's states are not this target's, TrainingError when
    the folder's checkpoint was trained from another store, and when the loss needs a last state that the store lacks.
    """

    def __init__(self, store: HiddenStateStore, target: Target, folder: Path, options: TrainOptions,
                 compute: Compute | None = None):
        store.require(target=target.identity)
        self.store, self.folder, self.options, self.identity = store, folder, options, target.identity
        self.compute = compute or Compute()
        FlexAttention.off |= not self.compute.flex_attention
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
        self.begun_from: dict[str, Any] | None = None
        newest = self._newest()
        self.resumed = newest is not None
        if newest is not None:
            self.begun_from = newest[1].get("begun_from")  # its folder may be gone by now
        elif options.init_from:
            self.begun_from = init_from(self.network, vocab, options.init_from, target)
        elif options.warm_start:
            first = store.read(self.split.train[0])
            warm_start(self.network, target, first.aux_hidden_states.float())
        wide = torch.float64 if options.precision == "float64" else torch.float32
        self.device = target.device
        self.network.to(self.device, wide)
        head = head_rows(target.head.weight, vocab).to(torch.bfloat16 if options.precision == "bfloat16" else wide)
        self.ends = TargetEnds(target.embedding, target.final_norm, head,
                               None if vocab is None else vocab.to(self.device), wide)
        self.module = parallel.wrap(self.network, self.device, self.compute.shard, options.precision)
        self.averaged = {name: p.detach().clone() for name, p in self.network.named_parameters()} if (
            options.average) else {}
        self.optimizers = make_optimizers(self.network, options)
        self.data = TrainingData(
            store, self.split.train, batch_samples=options.batch_samples,
            anchors_per_sample=options.anchors_per_sample, slots_per_anchor=options.slots_per_anchor,
            block_size=options.block_size, mask_token_id=options.mask_token_id, gamma=options.gamma,
            need_last=options.kl_weight > 0, seed=options.seed, first_slot=config.first_slot)
        self.step, self.best, self.seconds, self.waited = 0, {"acceptance_length": 0.0, "step": 0}, 0.0, 0.0
        self.norms: deque[float] = deque(maxlen=NUM_NORMS)
        self.skipped: list[int] = []
        self._writer, self._saving = parallel.gathered(os.getpid())[0], False
        self._resume(newest)

    def run(self, report: Callable[[dict[str, Any]], None] | None = None,
            stopping: Callable[[], bool] = lambda: False) -> dict[str, Any] | None:
        """Trains to the end and returns the summary. report(row) is called with each log row, in the first process.
        Once `stopping()` is true in any process, all save a checkpoint after the step that they are at and return
        None."""
        first = parallel.rank() == 0
        with (open(self.folder / "log.jsonl" if first else os.devnull, "a", encoding="utf-8") as log,
              Prefetched(self._passes, self.step, self.options.steps - 1) as prefetched):
            def write(row: dict[str, Any]) -> None:
                log.write(json.dumps(row, allow_nan=False) + "\n")
                log.flush()
                if report and first:
                    report(row)

            if not self.resumed:
                write({"step": 0, "validation": self.validate()})
            stop = parallel.any_of(stopping(), self.device)
            while self.step < self.options.steps and not stop:
                write(self.train_step(prefetched.next(), prefetched.wait_s))
                last, stop = self.step == self.options.steps, parallel.any_of(stopping(), self.device)
                if last or self.step % self.options.validation_interval == 0:
                    write({"step": self.step, "validation": self.validate()})
                if last or stop or self.step % self.options.checkpoint_interval == 0:
                    if first:
                        os.fsync(log.fileno())
                    self.save()
            if self.step < self.options.steps:
                if self.step == 0:
                    self.save()
                return None
        self.export_folder("last", self.step)
        return {"steps": self.step, "seconds": self.seconds, "wait_share": self.waited / max(self.seconds, 1e-9),
                "best": self.best, "skipped_steps": len(self.skipped),
                "train_samples": len(self.split.train), "validation_samples": list(self.split.validation),
                "anchor_coverage": self.data.coverage(),
                "parameters": sum(p.numel() for p in self.network.parameters()),
                "draft_vocab_size": self.network.config.draft_vocab_size}

    def _passes(self, step: int) -> list[Batch]:
        batches = self.data.passes(step, parallel.rank(), parallel.num_ranks(), self.compute.accumulate)
        return [batch.pinned() for batch in batches] if self.device.type == "cuda" else batches

    def train_step(self, batches: list[Batch] | None = None, wait_s: float = 0.0) -> dict[str, Any]:
        """One optimizer step over `batches` (this process's of the step, None = read now). Returns its log row.

        A step without any label of the draft vocabulary changes nothing and counts as skipped. Raises TrainingError
        when the loss or its gradient is not finite, and after max_skipped spikes in a row; the state before the step is
        saved then.
        """
        began = time.monotonic()
        batches = self._passes(self.step) if batches is None else batches
        rate = learning_rate(self.step, self.options)
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = rate
        sums, broken = self._backward(batches)
        loss_sum, weight_sum = sums[:2].tolist()
        hits, counts = sums[2:].view(2, -1).float().tolist()
        norm = math.nan
        if math.isfinite(loss_sum) and weight_sum > 0:
            grads = [p.grad for p in self.network.parameters()]
            for grad in grads:  # sums (means over processes): divide by the whole step's weight
                grad.mul_(parallel.num_ranks() / weight_sum)
            norm = parallel.whole(torch.nn.utils.get_total_norm(grads)).item()
        empty = loss_sum == weight_sum == 0  # short documents whose labels the draft vocabulary lacks
        if empty:
            self.skipped.append(self.step + 1)
            norm, weight_sum = 0.0, 1.0
        if not math.isfinite(norm):
            self._give_up(f"loss {loss_sum} over weight {weight_sum}, gradient norm {norm}", broken)
        skip = empty or self._is_spike(norm)
        if not skip:
            torch.nn.utils.clip_grads_with_norm_(self.network.parameters(), self.options.clip,
                                                 torch.tensor(norm, device=self.device))
            for optimizer in self.optimizers:
                optimizer.step()
            self.norms.append(norm)
        self._drop_gradients()
        self.step += 1
        if not skip:
            self._update_average()
        seconds = time.monotonic() - began + wait_s
        self.seconds, self.waited = self.seconds + seconds, self.waited + wait_s
        row = {"step": self.step, "loss": loss_sum / weight_sum, "learning_rate": rate, "grad_norm": norm,
               "slot_hits": hits, "slot_counts": counts, "seconds": seconds, "wait_s": wait_s}
        return row | ({"skipped": True} if skip else {})

    def _backward(self, batches: list[Batch]) -> tuple[torch.Tensor, list[int]]:
        """Gradients of the step's loss sum; [loss sum, weight sum, hits by slot, counts by slot] float64 over all
        processes, and the samples of this one's passes whose loss is not finite."""
        options, sums, broken = self.options, 0.0, []
        for number, batch in enumerate(batches):
            batch = batch.to(self.device)
            with parallel.gradients_shared(self.module, number == len(batches) - 1):
                parts = batch_loss(self.module, self.ends, batch, options.kl_weight,
                                   options.dpace_alpha if options.slot_weighting == "dpace" else None)
                parts.loss_sum.backward()
            totals = torch.stack([parts.loss_sum.detach(), parts.weight_sum]).double()
            if not totals.isfinite().all():
                broken += batch.sample_indices
            sums = sums + torch.cat([totals, parts.slot_hits.double(), parts.slot_counts.double()])
        return parallel.summed(sums), broken

    def _is_spike(self, norm: float) -> bool:
        if len(self.norms) < NORMS_NEEDED or norm <= self.options.spike_factor * statistics.median(self.norms):
            return False
        recent = [*self.skipped, self.step + 1][-self.options.max_skipped:]
        if len(recent) == self.options.max_skipped and recent[0] == self.step + 2 - self.options.max_skipped:
            self._give_up(f"gradient norm {norm:.3g}, the {len(recent)}th step in a row with more than "
                          f"{self.options.spike_factor:g} times the usual {statistics.median(self.norms):.3g}", [])
        self.skipped.append(self.step + 1)  # not before: one that ends the training is taken again when it goes on
        return True

    def _give_up(self, what: str, broken: list[int]) -> None:
        """Saves the state before the step and raises."""
        self._drop_gradients()
        self.save()
        samples = [index for _, index in self.data.chosen(self.step)]
        named = sorted({index for found in parallel.gathered(broken) for index in found})
        raise TrainingError(
            f"step {self.step + 1}: {what}, on samples {samples}" + (f"; not finite with {named}" if named else "") +
            f". The state before this step is saved in {self.folder / 'checkpoints'}. Verify the store (`python -m "
            "dflash_lib verify`), look at these samples, or lower learning_rate.")

    def _drop_gradients(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _update_average(self) -> None:
        if not self.averaged:
            return
        decay = min(self.options.average, self.step / (self.step + 10))  # short memory at first, or it keeps the start
        torch._foreach_lerp_([parallel.local(tensor) for tensor in self.averaged.values()],
                             [parallel.local(p) for p in self.network.parameters()], 1 - decay)

    def evaluated_network(self) -> DFlashDrafter:
        """What is validated and saved: the weight average where there is one, whole in every process."""
        if not self.averaged and not self.compute.shard:
            return self.network
        weights = parallel.wholes(self.averaged or {name: p.detach() for name, p in self.network.named_parameters()})
        network = DFlashDrafter(self.network.config).to(self.device, self.ends.wide)
        network.load_state_dict(weights)
        return network

    def validate(self) -> dict[str, Any]:
        """Walks the validation answers, shared among the processes; keeps the drafter in best/ when no earlier
        validation was better."""
        own = self.split.validation[parallel.rank()::parallel.num_ranks()]
        steps = walk_samples(self.evaluated_network(), self.ends, self.store, own)
        sums = walk_sums(steps, self.network.config.num_drafts).to(self.device)
        result = walk_result(parallel.summed(sums))
        if result["acceptance_length"] > self.best["acceptance_length"]:
            self.best = {"acceptance_length": result["acceptance_length"], "step": self.step}
            self.export_folder("best", self.step)
        return result

    def export_folder(self, name: str, step: int) -> None:
        """Writes the evaluated weights as a drafter folder."""
        network = self.evaluated_network()
        if parallel.rank() == 0:
            save_drafter(self.folder / name, TrainedDrafter(
                network, self.ends.draft_vocab, self.identity,
                {"step": step, "options": asdict(self.options), "store": self.store.plan.hash,
                 "begun_from": self.begun_from}))

    def save(self) -> None:
        """Writes a checkpoint."""
        tensors = parallel.collected(state_tensors(self.network, self.averaged, self.optimizers))
        self._saving = True
        if parallel.rank() == 0:
            save_checkpoint(self.folder / "checkpoints", self.step, tensors, {
                "best": self.best, "seconds": self.seconds, "waited": self.waited, "norms": list(self.norms),
                "skipped": self.skipped, "store": self.store.plan.hash, "begun_from": self.begun_from})
        parallel.barrier()
        self._saving = False

    def is_saving(self) -> bool:
        """Whether a checkpoint is being written: by the first process, which the others wait for while it lives."""
        return self._saving and Path(f"/proc/{self._writer}").exists()

    def _newest(self) -> tuple[Path, dict[str, Any]] | None:
        """The checkpoint to go on from, the same for all processes."""
        return parallel.gathered(load_newest(self.folder / "checkpoints") if parallel.rank() == 0 else None)[0]

    def _resume(self, newest: tuple[Path, dict[str, Any]] | None) -> None:
        if newest is not None:
            path, meta = newest
            if meta["store"] != self.store.plan.hash:
                raise TrainingError(f"{self.folder}: its checkpoint was trained from another store (plan "
                                    f"{meta['store'][:12]}, not {self.store.plan.hash[:12]}); choose another folder")
            restore_tensors(path, self.network, self.averaged, self.optimizers)
            self.step, self.best, self.seconds = meta["step"], meta["best"], meta["seconds"]
            self.waited, self.skipped = meta.get("waited", 0.0), meta.get("skipped", [])  # releases before had none
            self.norms.extend(meta.get("norms", []))
        if parallel.rank() == 0:
            cut_log(self.folder / "log.jsonl", self.step if newest is not None else -1)


def make_optimizers(network: DFlashDrafter, options: TrainOptions) -> list[torch.optim.Optimizer]:
    """AdamW for all weights, or Muon for the matrices and AdamW for the vectors, which are never decayed."""
    matrices = [p for p in network.parameters() if p.ndim == 2]
    vectors = {"params": [p for p in network.parameters() if p.ndim != 2], "weight_decay": 0.0}
    rate, decay = options.learning_rate, options.weight_decay
    if options.optimizer == "muon":
        return [torch.optim.Muon(matrices, lr=rate, weight_decay=decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
                torch.optim.AdamW([vectors], lr=rate, betas=(0.9, 0.95), fused=True)]
    return [torch.optim.AdamW([{"params": matrices, "weight_decay": decay}, vectors], lr=rate, betas=(0.9, 0.95),
                              fused=True)]


def check_mask_token(store: HiddenStateStore, mask_token_id: int) -> None:
    """Raises TrainingError when the mask token occurs in the store's text: the drafter could not tell a slot to fill
    from a word (convention 7: explicit, never a silent fallback)."""
    found = sum(int((store.read_tokens(i)[0] == mask_token_id).sum())
                for i in store.in_file_order(store.sample_indices))
    if found:
        raise TrainingError(f"mask_token_id {mask_token_id} stands {found} times in the text of {store.folder}; set it "
                            "to a row of the target's embedding that text does not use (248070 for Qwen3.5 and 3.6)")
