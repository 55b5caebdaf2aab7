"""Our drafter and speculators' DFlashDraftModel 0.9.0 on the same input, for speculators_parity.py.

Both get the same weights (through the `speculators/` export and the package's own from_pretrained), the same documents
(ours from `TrainingData`, theirs packed into one row by the package's own collator) and the same anchors (theirs draws
its own; the drawing is replaced). Text is the target's own greedy text where labels shall agree.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import speculators.models.dflash.core as theirs_core
import torch
import torch.nn.functional as F
from speculators.losses import dflash_loss_decay, resolve_loss_config
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel
from speculators.train.data import CollateFn

from dflash_lib.drafter import TrainedDrafter, TrainOptions, export_speculators
from dflash_lib.drafter.dataset import Batch, TrainingData
from dflash_lib.drafter.folder import save_drafter
from dflash_lib.drafter.inference import head_rows
from dflash_lib.drafter.network import FULL, DFlashDrafter, DrafterConfig
from dflash_lib.drafter.objective import TargetEnds, batch_loss
from dflash_lib.drafter.recipe import drafter_config
from dflash_lib.hidden_states.store import StoredSample
from dflash_lib.target.capture import capture_batch
from dflash_lib.target.loading import Target

BLOCK, GAMMA, IDS, MASK = 6, 4.0, [0, 1, 3], 3
ROUNDING = 2e-6  # largest difference over the largest value that float32 arithmetic in another order may leave
GRADIENT_ROUNDING = 2e-5  # gradients are long sums
DIFFERENCES: dict[str, list[float]] = {}


def differ(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference over theirs' largest value, noted under `name`."""
    assert ours.shape == theirs.shape
    value = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    DIFFERENCES.setdefault(name, []).append(value)
    return value


class Held:
    """Samples in memory, read as from a store."""

    def __init__(self, samples: list[StoredSample]):
        self.samples = samples

    def read(self, index: int) -> StoredSample:
        return self.samples[index]


@torch.no_grad()
def make_samples(target: Target, masks: list[np.ndarray], greedy: bool) -> list[StoredSample]:
    """One document a mask, whose unsupervised beginning is random and whose rest is the target's greedy text (or
    random), with the target's float32 states."""
    generator, samples = np.random.default_rng(3), []
    for index, mask in enumerate(masks):
        num_prompt = max(1, int(np.argmax(mask)))
        row = generator.integers(4, 370, num_prompt).tolist()
        while greedy and len(row) < len(mask):  # EOS and all
            row.append(int(target.model(torch.tensor([row])).logits[0, -1].argmax()))
        row += generator.integers(4, 370, len(mask) - len(row)).tolist()
        sample, = capture_batch(target, [row], IDS)
        samples.append(StoredSample(index, np.array(row, np.int32), mask.astype(np.uint8), sample.aux_hidden_states,
                                    sample.last_hidden_state_prenorm))
    return samples


def mask_of(length: int, first: int, hole: range = range(0)) -> np.ndarray:
    mask = np.arange(length) >= first
    mask[list(hole)] = False
    return mask


# a short document, one of two turns, one that ends on an unsupervised token; each begins with a prompt that a block can
# not cross
MASKS = [mask_of(23, 9), mask_of(40, 7, range(20, 27)), mask_of(31, 11, range(30, 31))]


@dataclass
class Pair:
    """The same drafter on both sides, with the target's ends."""

    ours: DFlashDrafter
    theirs: DFlashDraftModel
    ends: TargetEnds

    def our_batch(self, samples: list[StoredSample], num_anchors: int) -> Batch:
        data = TrainingData(Held(samples), range(len(samples)), batch_samples=len(samples),
                            anchors_per_sample=num_anchors, slots_per_anchor=BLOCK - 1, block_size=BLOCK,
                            mask_token_id=MASK, gamma=GAMMA, need_last=True, seed=0)
        return data.collate([(0, i) for i in range(len(samples))])


def packed(samples: list[StoredSample], row_length: int) -> dict[str, torch.Tensor]:
    """Their batch: documents one after another in a row."""
    items = [{"hidden_states": s.aux_hidden_states.flatten(1), "input_ids": torch.from_numpy(s.input_ids).long(),
              "verifier_last_hidden_states": s.last_hidden_state_prenorm,
              "loss_mask": torch.from_numpy(s.loss_mask).long(), "lengths": torch.tensor([len(s.input_ids)]),
              "position_ids": torch.arange(len(s.input_ids))} for s in samples]
    batch = CollateFn(row_length, items[0]["verifier_last_hidden_states"].shape[1], len(IDS), torch.float32)(items)
    batch.pop("error_records")
    return batch


def their_anchors(batch: Batch) -> torch.Tensor:
    """Our batch's anchors as positions of the packed row, which is packed as ours is."""
    return batch.anchors + batch.starts


def make_pair(target: Target, folder: Path, draft_vocab: torch.Tensor | None = None, **changes) -> Pair:
    """Random weights, exported and loaded by the package. Mixed layers, which its format cannot say to an engine, are
    put into the package's configuration here."""
    torch.manual_seed(1)
    options = TrainOptions(block_size=BLOCK, mask_token_id=MASK, num_layers=2, intermediate_size=96)
    config = drafter_config(target, IDS, options, None if draft_vocab is None else len(draft_vocab))
    network = DFlashDrafter(DrafterConfig(**{**config.to_dict(), **changes}))
    with torch.no_grad():
        for p in network.parameters():
            p.add_(0.1 * torch.randn_like(p))
    kinds, said = network.config.layer_types, network.config
    if len(set(kinds)) > 1:
        network.config = DrafterConfig(**{**said.to_dict(), "layer_types": [FULL] * len(kinds)})
    save_drafter(folder / "drafter", TrainedDrafter(network, draft_vocab, target.identity))
    export_speculators(folder / "drafter", target, folder / "speculators", dtype="float32")
    loaded = DFlashSpeculatorConfig.from_pretrained(folder / "speculators")
    loaded.transformer_layer_config._attn_implementation = "sdpa"  # FlexAttention has no backward on a CPU
    if len(set(kinds)) > 1:
        network.config, loaded.sliding_window_non_causal = said, False
        loaded.transformer_layer_config.layer_types = list(kinds)
        loaded.transformer_layer_config.sliding_window = said.sliding_window
    theirs = DFlashDraftModel.from_pretrained(folder / "speculators", config=loaded, dtype=torch.float32)
    assert theirs.dtype == torch.float32
    ends = TargetEnds(target.embedding, target.final_norm, head_rows(target.head.weight, draft_vocab), draft_vocab)
    return Pair(network, theirs, ends)


def run_both(pair: Pair, samples: list[StoredSample], monkeypatch, kl_weight: float, num_anchors: int = 100,
             row_length: int | None = None) -> dict:
    """Forward and backward of both on the same anchors; hidden, logits, targets [N, BLOCK, ...] over all anchors."""
    batch = pair.our_batch(samples, num_anchors)
    anchors = their_anchors(batch)
    row = packed(samples, row_length or sum(len(s.input_ids) for s in samples) + BLOCK)
    monkeypatch.setattr(theirs_core, "select_anchors", lambda *_: (anchors, torch.ones(len(anchors), dtype=torch.bool)))
    hidden, logits, targets, mask, _ = pair.theirs._backbone_forward(**row, max_anchors=len(anchors))
    _, loss, metrics = pair.theirs(**row, gamma=GAMMA, max_anchors=len(anchors), per_position_loss_weight=
                                   "fixed-exp-decay", loss_config=resolve_loss_config("kl_div" if kl_weight else "ce",
                                                                                      "eager"))
    pair.theirs.zero_grad(), pair.ours.zero_grad()
    loss.backward()
    parts = batch_loss(pair.ours, pair.ends, batch, kl_weight)
    parts.loss_sum.backward()
    our_hidden = pair.ours(pair.ends.embed(batch.input_ids), batch.anchors, batch.aux_hidden_states, batch.positions,
                           batch.packing).detach()
    shape = (len(anchors), BLOCK, -1)
    return {"batch": batch, "anchors": anchors, "row": row, "parts": parts, "loss": loss.detach(),
            "metrics": metrics, "our_hidden": our_hidden, "hidden": hidden.detach().view(shape),
            "our_logits": F.linear(our_hidden, pair.ends.head).detach(), "logits": logits.detach().view(shape),
            "targets": targets.detach().view(shape), "mask": mask.view(len(anchors), BLOCK).float()}


def our_weights(found: dict) -> torch.Tensor:
    """[N, BLOCK], slot 0 included."""
    return F.pad(found["batch"].weights, (1, 0))


def check_equal(pair: Pair, found: dict, name: str, same_labels: bool = True) -> None:
    """Everything that has to agree where the conventions do; same_labels: hits, too."""
    assert differ(f"{name}: hidden states of every slot", found["our_hidden"], found["hidden"]) < ROUNDING
    assert differ(f"{name}: logits", found["our_logits"], found["logits"]) < ROUNDING
    decay = dflash_loss_decay(torch.arange(BLOCK).float(), GAMMA)
    assert differ(f"{name}: slot weights", our_weights(found), found["mask"] * decay) < ROUNDING
    batch = found["batch"]
    before = (batch.anchors + batch.starts)[:, None] + torch.arange(BLOCK - 1)
    last = batch.last_hidden_state_prenorm[before.clamp(max=len(batch.positions) - 1)]
    trained = found["mask"][:, 1:] > 0
    assert differ(f"{name}: the target's logits", pair.ends.target_logits(last)[trained],
                  found["targets"][:, 1:][trained]) < ROUNDING
    # ours is a weighted mean, theirs is divided by the number of slots: a deliberate difference
    parts, count = found["parts"], found["mask"].sum() + 1e-5
    assert differ(f"{name}: loss", parts.loss_sum.detach() / count, found["loss"]) < ROUNDING
    their_hits, their_counts = (torch.stack([found["metrics"][f"position_{k}_acc_{what}"] for k in range(1, BLOCK)])
                                for what in ("sum", "total"))
    assert torch.equal(parts.slot_counts[1:], their_counts) and their_counts.sum() >= 30
    if same_labels:
        assert torch.equal(parts.slot_hits[1:], their_hits)
    ours = dict(pair.ours.named_parameters())
    theirs = {key: p for key, p in pair.theirs.named_parameters() if p.requires_grad}
    assert ours.keys() == theirs.keys()
    for key, p in ours.items():
        assert theirs[key].grad.abs().max() > 0, key
        assert differ(f"{name}: gradients", p.grad / count, theirs[key].grad) < GRADIENT_ROUNDING, key
