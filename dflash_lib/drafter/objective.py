"""Forward pass and loss of one batch, and acceptance as decoding would count it.

Only supervised slots reach the head, and with a reduced draft vocabulary only its rows.

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

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_lib.drafter.blocks import anchor_candidates
from dflash_lib.drafter.dataset import Batch
from dflash_lib.drafter.losses import weighted_cross_entropy, weighted_kl, weighted_topk_kl
from dflash_lib.drafter.network import DFlashDrafter
from dflash_lib.hidden_states.store import HiddenStateStore


@dataclass(frozen=True)
class TargetEnds:
    """The frozen parts of the target that a drafter uses: embedding module, final norm module, head rows float32
    [V', H] (all or those of the draft vocabulary) and `draft_vocab` int64 [V'] (None = all)."""

    embedding: nn.Module
    final_norm: nn.Module
    head: Tensor
    draft_vocab: Tensor | None

    def embed(self, token_ids: Tensor) -> Tensor:
        """The target's embedding, its scaling included, as float32."""
        return self.embedding(token_ids).float()

    def target_logits(self, last_hidden_state_prenorm: Tensor) -> Tensor:
        """The target's logits over the head's rows; its norm runs in its own dtype."""
        dtype = self.final_norm.weight.dtype
        return F.linear(self.final_norm(last_hidden_state_prenorm.to(dtype)).float(), self.head)

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


def batch_loss(network: DFlashDrafter, ends: TargetEnds, batch: Batch, kl_weight: float) -> LossParts:
    """(1 - kl_weight) * cross-entropy on the data + kl_weight * KL to the target's distribution, over the head's rows.

    Labels outside the draft vocabulary carry no loss but count as missed. The target's distribution for position p is
    head(norm(last state at p - 1)), restricted to the same rows, or what its stored top-k logits say of it
    (`losses.weighted_topk_kl`). Raises ValueError for a KL loss on a store without either.
    """
    context = network.context(batch.aux_hidden_states, batch.positions)
    hidden = network(ends.embed(batch.input_ids), batch.anchors, context, batch.slots)
    supervised = batch.weights > 0
    doc, block, _ = torch.nonzero(supervised, as_tuple=True)
    slot = batch.slots[supervised]
    labels, known = ends.draft_ids(batch.labels[supervised])
    weights = batch.weights[supervised] * known
    logits = F.linear(hidden[supervised], ends.head)
    loss = logits.new_zeros(())
    if kl_weight < 1:
        loss = loss + (1 - kl_weight) * weighted_cross_entropy(logits, labels, weights)
    if kl_weight > 0:
        position = batch.anchors[doc, block] + slot - 1
        if batch.top_logits is not None:
            top = batch.top_logits[doc, position]
            loss = loss + kl_weight * weighted_topk_kl(logits, top, *ends.draft_ids(top.ids.long()), weights)
        elif batch.last_hidden_state_prenorm is not None:
            with torch.no_grad():
                target_logits = ends.target_logits(batch.last_hidden_state_prenorm[doc, position])
            loss = loss + kl_weight * weighted_kl(logits, target_logits, weights)
        else:
            raise ValueError("a KL loss needs the target's last state or its top logits, and this batch has neither")
    with torch.no_grad():
        hits = (logits.argmax(dim=-1) == labels) & known
        counts = torch.zeros(network.config.block_size, device=weights.device)
        slot_hits = counts.index_add(0, slot, hits.float())
        slot_counts = counts.index_add(0, slot, torch.ones_like(slot, dtype=torch.float32))
    return LossParts(loss, weights.sum(), slot_hits, slot_counts)


@torch.no_grad()
def propose_everywhere(network: DFlashDrafter, ends: TargetEnds, input_ids: Tensor, aux_hidden_states: Tensor,
                       anchors: Tensor, chunk: int = 256) -> Tensor:
    """The drafter's tokens (target ids, int64 [A, S - 1]) for every anchor of one document; aux float32 [T, L, H]."""
    config, device = network.config, ends.head.device
    context = network.context(aux_hidden_states[None].to(device), torch.arange(len(input_ids), device=device)[None])
    drafted = []
    for part in anchors.split(chunk):
        tokens = torch.full((len(part), config.block_size), config.mask_token_id)
        tokens[:, 0] = input_ids[part]
        hidden = network(ends.embed(tokens.to(device))[None], part[None].to(device), context)[0, :, 1:]
        drafted.append(ends.target_ids(F.linear(hidden, ends.head).argmax(dim=-1)).cpu())
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
def validation_acceptance(network: DFlashDrafter, ends: TargetEnds, store: HiddenStateStore,
                          samples: tuple[int, ...]) -> dict[str, float | list[float]]:
    """Walks the validation answers. Returns acceptance_length (tokens added a verify step), steps, and
    accepted_by_slot: the share of verify steps in which slot k (from 1) was accepted. Leaves the network in the mode
    that it was in."""
    training = network.training
    network.eval()
    try:
        steps: list[tuple[int, int]] = []
        for index in samples:
            sample = store.read(index)
            input_ids, loss_mask = torch.from_numpy(sample.input_ids).long(), torch.from_numpy(sample.loss_mask)
            anchors = anchor_candidates(loss_mask)
            drafted = propose_everywhere(network, ends, input_ids, sample.aux_hidden_states.float(), anchors)
            steps += walk(input_ids, loss_mask, anchors, drafted)
    finally:
        network.train(training)
    accepted, added = torch.tensor(steps).unbind(dim=1)
    return {"acceptance_length": added.float().mean().item(), "steps": len(steps),
            "accepted_by_slot": [(accepted >= k).float().mean().item() for k in range(1, network.config.block_size)]}
