"""Forward pass and loss of one batch, and acceptance as decoding would count it.

Only supervised slots reach the head, a chunk at a time (head_loss.py), and with a reduced draft vocabulary only its
rows.

Given the same weights, tokens and anchors, hidden states, logits, cross-entropy, KL, slot weights and gradients equal
those of speculators 0.9.0's DFlashDraftModel to float32 rounding. What differs does so on purpose; each point has a
test that shows it (tests/drafter/speculators_parity.py, `test_difference_*`):

- Labels of the cross-entropy: ours are the data's tokens, theirs the target's argmax. On the target's own greedy text
  they are the same; ours needs no last state, and does not change text that was sampled or written by another.
- Sliding window W, slot at q = a + j: ours sees context from q - (W - 1), theirs from a - W in every slot. Engines
  serve ours (vLLM, SpecForge), and a drafter has to be trained on what it will see.
- Blocks end with their document: theirs go on into the next one of the packed row, where supervised, and train tokens
  that no context of theirs can tell. Positions and visible context are the same in both.
- Anchors: ours need the next token supervised as well (a block without any label costs and teaches nothing), reach to
  a document's end, and are counted per document; theirs leave out the last block_size tokens of a packed row, and are
  counted per row, so that long rows of short documents are covered thinly.
- Scale: ours is the weighted mean, theirs the weighted sum over the number of slots. A loss in nats a token compares
  between block sizes and gammas; the gradients differ by that factor, which Adam and clipping mostly undo.
- Reduced vocabulary: a label outside it carries no loss here; there the best token that the head has takes its place,
  which decoding would refuse.
- Embedding: ours goes through the target's module, theirs takes its bare rows, which Gemma scales by sqrt(hidden).
- Final norm: ours is the target's own module. Theirs is chosen by model type and wrong for Qwen3.5-MoE and Qwen3-Next
  (weight where 1 + weight belongs), so labels and KL targets are.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_lib.drafter.blocks import anchor_candidates, dpace_weights
from dflash_lib.drafter.dataset import Batch
from dflash_lib.drafter.head_loss import chunk_rows, head_loss
from dflash_lib.drafter.losses import TopTargets
from dflash_lib.drafter.network import DFlashDrafter
from dflash_lib.hidden_states.store import HiddenStateStore


@dataclass(frozen=True)
class TargetEnds:
    """The frozen parts of the target that a drafter uses: embedding module, final norm module, head rows [V', H] (all
    or those of the draft vocabulary; their dtype is that of the head's products) and `draft_vocab` int64 [V'] (None =
    all). wide: dtype of embeddings, float32 or float64; device_type: "cpu" or "cuda" where it is not the
    head's own (to tell memory beforehand)."""

    embedding: nn.Module
    final_norm: nn.Module
    head: Tensor
    draft_vocab: Tensor | None
    wide: torch.dtype = torch.float32
    device_type: str = ""

    @property
    def rows(self) -> int:
        """How many slots' logits are formed at once."""
        return chunk_rows(self.head, self.device_type)

    def embed(self, token_ids: Tensor) -> Tensor:
        """The target's embedding, its scaling included, in the dtype `wide`."""
        return self.embedding(token_ids).to(self.wide)

    @torch.no_grad()
    def target_logits(self, last_hidden_state_prenorm: Tensor) -> Tensor:
        """The target's logits over the head's rows, float32 or wider; its norm runs in its own dtype."""
        normed = self.final_norm(last_hidden_state_prenorm.to(self.final_norm.weight.dtype))
        return F.linear(normed.to(self.head.dtype), self.head).to(self.wide)

    def draft_ids(self, target_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the reduced head for target ids, and bool whether each is in it (row 0 where not)."""
        if self.draft_vocab is None:
            return target_ids, torch.ones_like(target_ids, dtype=torch.bool)
        rows = torch.searchsorted(self.draft_vocab, target_ids).clamp(max=len(self.draft_vocab) - 1)
        known = self.draft_vocab[rows] == target_ids
        return torch.where(known, rows, 0), known

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Target ids of head rows."""
        return draft_ids if self.draft_vocab is None else self.draft_vocab[draft_ids]


@dataclass(frozen=True)
class LossParts:
    """loss_sum: weighted loss, to be divided by weight_sum; slot_hits and slot_counts float32 [S]: supervised slots
    whose argmax is the label, and how many there were."""

    loss_sum: Tensor
    weight_sum: Tensor
    slot_hits: Tensor
    slot_counts: Tensor


def batch_loss(network: nn.Module, ends: TargetEnds, batch: Batch, kl_weight: float,
               dpace_alpha: float | None = None) -> LossParts:
    """(1 - kl_weight) * cross-entropy on the data + kl_weight * KL to the target's distribution, over the head's rows.

    network: a DFlashDrafter, or what wraps one; a bfloat16 head has it computed in bfloat16, too (autocast). Labels
    outside the draft vocabulary carry no loss but count as missed.
    The target's distribution for position p is head(norm(last state at p - 1)), restricted to the same rows, or what
    its stored top-k logits say of it (`losses.row_losses`). dpace_alpha: slots weigh what `blocks.dpace_weights` says
    instead of the batch's weights, and weight_sum is their number. Raises ValueError for a KL loss on a store without
    last states and top logits, and for D-PACE on blocks that do not train all their slots.
    """
    embedded = ends.embed(batch.input_ids)
    half = ends.head.dtype == torch.bfloat16
    with torch.autocast(embedded.device.type, torch.bfloat16) if half else nullcontext():
        hidden = network(embedded, batch.anchors, batch.aux_hidden_states.to(embedded.dtype), batch.positions,
                         batch.packing, batch.slots)
    supervised = batch.weights > 0
    block, _ = torch.nonzero(supervised, as_tuple=True)
    slot = batch.slots[supervised]
    labels, known = ends.draft_ids(batch.labels[supervised])
    row = batch.starts[block] + batch.anchors[block] + slot - batch.first_slot  # whose state says the slot's token

    def targets(chunk: slice) -> Tensor | TopTargets | None:
        if kl_weight == 0:
            return None
        if batch.top_logits is not None:
            top = batch.top_logits[row[chunk]]
            return TopTargets(top, *ends.draft_ids(top.ids.long()))
        last = batch.last_hidden_state_prenorm
        return None if last is None else ends.target_logits(last[row[chunk]])

    loss, cross_entropy, best = head_loss(hidden[supervised], ends.head, labels, kl_weight, targets, ends.rows)
    with torch.no_grad():
        if dpace_alpha is None:
            weights = batch.weights[supervised].to(loss.dtype) * known
            weight_sum = weights.sum()
        else:
            weights, weight_sum = _dpace(batch, supervised, known, cross_entropy, dpace_alpha)
        hits = (best == labels) & known
        counts = torch.zeros(batch.input_ids.shape[1], device=weights.device)
        slot_hits = counts.index_add(0, slot, hits.float())
        slot_counts = counts.index_add(0, slot, torch.ones_like(slot, dtype=torch.float32))
    # where nothing is supervised the sum still has to reach every weight: other processes wait for its gradient
    loss_sum = (loss * weights).sum() if len(loss) else hidden.sum() * 0
    return LossParts(loss_sum, weight_sum, slot_hits, slot_counts)


def _dpace(batch: Batch, supervised: Tensor, known: Tensor, cross_entropy: Tensor,
           alpha: float) -> tuple[Tensor, Tensor]:
    """Weights [n] of the supervised slots, and how many of them carry loss."""
    num_slots, block_size = batch.slots.shape[1], batch.input_ids.shape[1]
    if num_slots != block_size - batch.first_slot:
        raise ValueError(f"D-PACE weighs a slot by all slots of its block, and {num_slots} of "
                         f"{block_size - batch.first_slot} are trained; set slots_per_anchor to the block size")
    found = torch.zeros(supervised.shape, dtype=cross_entropy.dtype, device=cross_entropy.device)
    counted = supervised.clone()
    found[supervised], counted[supervised] = cross_entropy, known
    return dpace_weights(found, counted, alpha)[supervised], known.sum().to(cross_entropy.dtype)


@torch.no_grad()
def propose_everywhere(network: DFlashDrafter, ends: TargetEnds, input_ids: Tensor, aux_hidden_states: Tensor,
                       anchors: Tensor, chunk: int = 256) -> Tensor:
    """The drafter's tokens (target ids, int64 [A, D] for its D drafts) for every anchor of one document; aux float32
    [T, L, H]."""
    config, device = network.config, ends.head.device
    context = network.context(aux_hidden_states.to(device), torch.arange(len(input_ids), device=device))
    drafted = []
    for part in anchors.split(chunk):
        tokens = torch.full((len(part), config.block_size), config.mask_token_id)
        tokens[:, 0] = input_ids[part]
        hidden = network.blocks(ends.embed(tokens.to(device)), part.to(device), context)[:, config.first_slot:]
        best = [F.linear(some.to(ends.head.dtype), ends.head).argmax(dim=-1)
                for some in hidden.flatten(0, 1).split(ends.rows)]
        drafted.append(ends.target_ids(torch.cat(best)).view(len(part), -1).cpu())
    return torch.cat(drafted)


def walk(input_ids: Tensor, loss_mask: Tensor, anchors: Tensor, drafted: Tensor) -> list[tuple[int, int]]:
    """(accepted drafts, tokens added) of each verify step when answers are walked as greedy decoding would.

    From an anchor the leading drafted tokens that equal the data are accepted, the next token comes from the target
    (the bonus) and is the next anchor. A step adds 1 + accepted tokens, but no more than the answer still has: the rule
    of `decoding.acceptance`.
    """
    by_anchor = {a: row for row, a in enumerate(anchors.tolist())}
    ids, mask, steps = input_ids.tolist(), loss_mask.tolist(), []
    position = 0
    while position < len(ids):
        row = by_anchor.get(position)
        if row is None:  # outside the answers, or the last token of one: nothing is drafted from here
            position += 1
            continue
        accepted, tokens_left = 0, True
        for token in [*drafted[row].tolist(), None]:
            following = position + accepted + 1
            tokens_left = following < len(ids) and bool(mask[following])
            if not tokens_left or token != ids[following]:
                break
            accepted += 1
        steps.append((accepted, accepted + tokens_left))
        position += accepted + 1
    return steps


@torch.no_grad()
def walk_samples(network: DFlashDrafter, ends: TargetEnds, store: HiddenStateStore,
                 samples: Sequence[int]) -> list[tuple[int, int]]:
    """The verify steps of `walk` on the answers of stored samples. Leaves the network in the mode that it was in."""
    training = network.training
    network.eval()
    try:
        steps: list[tuple[int, int]] = []
        for index in samples:
            sample = store.read(index)
            input_ids, loss_mask = torch.from_numpy(sample.input_ids).long(), torch.from_numpy(sample.loss_mask)
            anchors = anchor_candidates(loss_mask)
            drafted = propose_everywhere(network, ends, input_ids, sample.aux_hidden_states.to(ends.wide), anchors)
            steps += walk(input_ids, loss_mask, anchors, drafted)
    finally:
        network.train(training)
    return steps


def walk_sums(steps: list[tuple[int, int]], num_drafts: int) -> Tensor:
    """float64 [2 + D]: tokens added, verify steps, and steps in which draft 1, 2, ... D was accepted; sums add up."""
    sums = torch.zeros(2 + num_drafts, dtype=torch.float64)
    for accepted, added in steps:
        sums[0] += added
        sums[1] += 1
        sums[2:2 + accepted] += 1
    return sums


def walk_result(sums: Tensor) -> dict[str, float | int | list[float]]:
    """acceptance_length (tokens added a verify step), steps, accepted_by_slot: the share of verify steps in which draft
    k (from 1) was accepted."""
    return {"acceptance_length": (sums[0] / sums[1]).item(), "steps": int(sums[1]),
            "accepted_by_slot": (sums[2:] / sums[1]).tolist()}
