"""Training batches out of a hidden-state store.

Which samples and anchors form step n is a pure function of (seed, n), so that a resumed run needs no saved sampler:
epochs are seeded permutations of the training samples, and anchors are drawn anew each epoch, a document at a time.
"""

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_lib.drafter.attention import Packing
from dflash_lib.drafter.blocks import anchor_candidates, build_blocks, coverage, draw_slots, sample_anchors
from dflash_lib.hidden_states.store import HiddenStateStore, StoredSample, TopLogits

COUNTED_AT_ONCE = 1 << 20  # tokens: counting costs as much as the vocabulary is large, however few they are
NUM_ORDERS = 3  # epochs whose order is kept: a batch may span two, and the next one may begin a third


@dataclass(frozen=True)
class Batch:
    """Documents packed one after another: T context tokens and A blocks of all of them together.

    packing: which are whose; aux_hidden_states [T, L, H] and last_hidden_state_prenorm [T, H] or None, bfloat16 as read
    from the store; top_logits ([T, k] and [T]) in the last states' place where the store has these: rows that it lacks,
    and no label needs, are zero; positions int64 [T], restarting with each document; anchors int64 [A], positions in
    their documents, ascending in each; starts int64 [A], the first context row of each block's document; input_ids
    int64 [A, S]; slots and labels int64, weights float32 [A, M]: the M slots of each block that are trained
    (`blocks.draw_slots`); first_slot: 1, or 0 for drafters whose anchor's slot drafts, too.
    """

    sample_indices: tuple[int, ...]
    packing: Packing
    aux_hidden_states: Tensor
    last_hidden_state_prenorm: Tensor | None
    positions: Tensor
    anchors: Tensor
    starts: Tensor
    input_ids: Tensor
    slots: Tensor
    labels: Tensor
    weights: Tensor
    top_logits: TopLogits | None = None
    first_slot: int = 1

    def to(self, device: torch.device) -> "Batch":
        """The batch with its tensors on `device`."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "Batch":
        """The batch in memory that a GPU copies from while it computes."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        changed: dict[str, Tensor | TopLogits] = {
            name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        if self.top_logits is not None:
            changed["top_logits"] = TopLogits(*(change(value) for value in vars(self.top_logits).values()))
        return replace(self, **changed)


@dataclass(frozen=True)
class Split:
    """Sample indices of a store, apart: `train` and `validation`."""

    train: tuple[int, ...]
    validation: tuple[int, ...]


def seeded_generator(*keys: int) -> torch.Generator:
    """A generator whose stream is a function of `keys` alone, on any Python and machine."""
    digest = hashlib.sha256(repr(keys).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def split_samples(store: HiddenStateStore, num_validation: int, seed: int) -> Split:
    """Sets aside `num_validation` samples at random; samples without any anchor are in neither part.

    Raises ValueError when nothing is left to train on.
    """
    usable = sorted(i for i in store.in_file_order(store.sample_indices)
                    if len(anchor_candidates(torch.from_numpy(store.read_tokens(i)[1]))))
    if len(usable) <= num_validation:
        raise ValueError(f"{len(usable)} samples with supervised tokens cannot be split into {num_validation} for "
                         "validation and the rest for training; lower validation_samples or extract more")
    order = torch.randperm(len(usable), generator=seeded_generator(seed)).tolist()
    chosen = {usable[i] for i in order[:num_validation]}
    return Split(tuple(i for i in usable if i not in chosen), tuple(sorted(chosen)))


def draft_vocabulary(store: HiddenStateStore, samples: Sequence[int], size: int, always: Sequence[int],
                     vocab_size: int) -> Tensor:
    """Target ids (int64 [size], ascending) of the reduced head.

    The ids in `always` (end of turn), then the most frequent supervised tokens of `samples`, then, where the text has
    fewer, the lowest ids: byte-pair tokenizers number their merges from frequent to rare. Without that filling the
    tokens that new prompts bring could never be drafted (17 % of the held-out answers' tokens in the demo).
    Raises ValueError when `size` exceeds the target's `vocab_size`.
    """
    if not len(always) <= size <= vocab_size:
        raise ValueError(f"draft_vocab_size {size} must be between {len(always)} and the target's {vocab_size}; "
                         "null takes the full head")
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    found, num_found = [], 0
    for i in store.in_file_order(samples):
        input_ids, loss_mask = store.read_tokens(i)
        found.append(input_ids[loss_mask > 0])
        num_found += len(found[-1])
        if num_found >= COUNTED_AT_ONCE:
            counts += _count(found, vocab_size)
            found, num_found = [], 0
    counts += _count(found, vocab_size)
    counts[list(always)] = torch.iinfo(torch.int64).max
    return torch.argsort(counts, descending=True, stable=True)[:size].sort().values


def _count(ids: list[np.ndarray], vocab_size: int) -> Tensor:
    """How often each token of the vocabulary stands in `ids`, int64 [vocab_size]."""
    return torch.bincount(torch.from_numpy(np.concatenate(ids or [np.zeros(0, np.int32)])), minlength=vocab_size)


class TrainingData:
    """Batches of a store for a drafter: block_size, mask token and gamma fixed, chosen by step."""

    def __init__(self, store: HiddenStateStore, samples: Sequence[int], *, batch_samples: int, anchors_per_sample: int,
                 slots_per_anchor: int, block_size: int, mask_token_id: int, gamma: float, need_last: bool, seed: int,
                 first_slot: int = 1):
        self.store, self.samples, self.seed, self.first_slot = store, list(samples), seed, first_slot
        self.slots_per_anchor = min(slots_per_anchor, block_size - first_slot)
        self.batch_samples = min(batch_samples, len(self.samples))
        self.anchors_per_sample, self.block_size = anchors_per_sample, block_size
        self.mask_token_id, self.gamma, self.need_last = mask_token_id, gamma, need_last
        self._permutations: dict[int, Tensor] = {}
        self._lock = threading.Lock()  # batches are made by one thread, while another may ask what was in one

    def epoch_order(self, epoch: int) -> list[int]:
        """The training samples in this epoch's order."""
        return [self.samples[i] for i in self._permutation(epoch).tolist()]

    def _permutation(self, epoch: int) -> Tensor:
        """Places in `samples` in this epoch's order, int64: drawn once, since of 800,000 samples it takes 10 ms."""
        with self._lock:
            if epoch not in self._permutations:
                self._permutations[epoch] = torch.randperm(len(self.samples),
                                                           generator=seeded_generator(self.seed, epoch))
                if len(self._permutations) > NUM_ORDERS:
                    del self._permutations[next(iter(self._permutations))]
            return self._permutations[epoch]

    def chosen(self, index: int) -> list[tuple[int, int]]:
        """(epoch, sample index) of each sample of batch number `index` of the endless stream of epochs; it may span two
        epochs."""
        first = index * self.batch_samples
        places = [divmod(position, len(self.samples)) for position in range(first, first + self.batch_samples)]
        return [(epoch, self.samples[int(self._permutation(epoch)[offset])]) for epoch, offset in places]

    def batch(self, index: int) -> Batch:
        """Batch number `index`, see `chosen`, in one piece. What the next one needs is fetched from the disk."""
        self._read_ahead(index + 1)
        return self.collate(self.chosen(index))

    def _read_ahead(self, index: int) -> None:
        self.store.read_ahead([sample_index for _, sample_index in self.chosen(index)])

    def passes(self, index: int, rank: int = 0, num_ranks: int = 1, accumulate: int = 1) -> list[Batch]:
        """What process `rank` of `num_ranks` has of batch number `index`: exactly `accumulate` batches, whose loss sums
        over all processes are that of `batch(index)`.

        Documents go, longest first, to the pass that has the fewest tokens. A pass that gets none has one of the
        documents with all weights 0: every process takes part in every collective operation, and nothing is dropped.
        """
        shares = share_out([(self.store.length(sample), (epoch, sample))
                            for epoch, sample in self.chosen(index)], num_ranks * accumulate)
        self._read_ahead(index + 1)
        own = shares[rank * accumulate:(rank + 1) * accumulate]
        return [self.collate(chosen) if chosen else self._blank(self.chosen(index)[:1]) for chosen in own]

    def _blank(self, chosen: Sequence[tuple[int, int]]) -> Batch:
        whole = self.collate(chosen)
        return replace(whole, sample_indices=(), weights=torch.zeros_like(whole.weights))

    def collate(self, chosen: Sequence[tuple[int, int]]) -> Batch:
        """The batch of (epoch, sample index) pairs; the epoch decides the anchors."""
        samples, all_anchors, all_blocks = [], [], []
        for epoch, sample_index in chosen:
            sample = self.store.read(sample_index)
            input_ids, loss_mask = torch.from_numpy(sample.input_ids), torch.from_numpy(sample.loss_mask)
            generator = seeded_generator(self.seed, epoch, sample_index)
            anchors = sample_anchors(loss_mask, self.anchors_per_sample, generator)
            slots, weights = draw_slots(len(anchors), self.slots_per_anchor, self.block_size, self.gamma, generator,
                                        self.first_slot)
            samples.append(sample)
            all_anchors.append(anchors)
            all_blocks.append(build_blocks(input_ids, loss_mask, anchors, slots, weights, self.block_size,
                                           self.mask_token_id, self.first_slot))
        lengths = [len(sample.input_ids) for sample in samples]
        packing = Packing(tuple(lengths), tuple(len(anchors) for anchors in all_anchors))
        starts = torch.tensor([0, *lengths[:-1]]).cumsum(0).repeat_interleave(torch.tensor(packing.num_blocks))
        last, top = _pack_last(samples) if self.need_last else (None, None)
        return Batch(tuple(index for _, index in chosen), packing,
                     torch.cat([sample.aux_hidden_states for sample in samples]), last,
                     torch.cat([torch.arange(length) for length in lengths]), torch.cat(all_anchors), starts,
                     *(torch.cat([getattr(blocks, name) for blocks in all_blocks])
                       for name in ("input_ids", "slots", "labels", "weights")), top, self.first_slot)

    def coverage(self, num_samples: int = 200) -> float:
        """The share of supervised tokens (an answer's first apart, which no block can say) that one epoch's blocks
        have to say: of the first epoch, over at most `num_samples` samples drawn by the seed."""
        drawn = torch.randperm(len(self.samples), generator=seeded_generator(self.seed, -1))[:num_samples]
        said = could = 0
        for sample_index in self.store.in_file_order([self.samples[i] for i in drawn.tolist()]):
            loss_mask = torch.from_numpy(self.store.read_tokens(sample_index)[1])
            anchors = sample_anchors(loss_mask, self.anchors_per_sample, seeded_generator(self.seed, 0, sample_index))
            of_this, of_all = coverage(loss_mask, anchors, self.block_size - self.first_slot)
            said, could = said + of_this, could + of_all
        return said / could


def share_out(items: Sequence[tuple[int, Any]], num_shares: int) -> list[list[Any]]:
    """(size, item) pairs as `num_shares` lists of items: largest first, each to the list with the least so far."""
    shares, totals = [[] for _ in range(num_shares)], [0] * num_shares
    for size, item in sorted(items, key=lambda pair: (-pair[0], pair[1])):
        lightest = totals.index(min(totals))
        shares[lightest].append(item)
        totals[lightest] += size
    return shares


def _pack_last(samples: Sequence[StoredSample]) -> tuple[Tensor | None, TopLogits | None]:
    """The last states [T, H] of a batch, or the top logits that stand in their place, with zeros where nothing is
    stored. (None, None) for a store that has neither."""
    def packed(values: Sequence[Tensor]) -> Tensor:
        parts = []
        for sample, part in zip(samples, values, strict=True):
            if sample.last_rows is not None:
                whole = part.new_zeros((len(sample.input_ids), *part.shape[1:]))
                whole[sample.last_rows] = part
                part = whole
            parts.append(part)
        return torch.cat(parts)

    if samples[0].top_logits is not None:
        return None, TopLogits(*(packed([getattr(sample.top_logits, name) for sample in samples])
                                 for name in ("ids", "logits", "logsumexp")))
    if samples[0].last_hidden_state_prenorm is not None:
        return packed([sample.last_hidden_state_prenorm for sample in samples]), None
    return None, None
