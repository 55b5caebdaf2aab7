"""Training batches out of a hidden-state store.

Which samples and anchors form step n is a pure function of (seed, n), so that a resumed run needs no saved sampler:
epochs are seeded permutations of the training samples, and anchors are drawn anew each epoch, a document at a time.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dflash_lib.drafter.blocks import anchor_candidates, build_blocks, draw_slots, sample_anchors
from dflash_lib.hidden_states.store import HiddenStateStore, StoredSample, TopLogits

COUNTED_AT_ONCE = 1 << 20  # tokens: counting costs as much as the vocabulary is large, however few they are
NUM_ORDERS = 3  # epochs whose order is kept: a batch may span two, and the next one may begin a third


@dataclass(frozen=True)
class Batch:
    """B documents padded on the right to T tokens and A anchors.

    aux_hidden_states float32 [B, T, L, H]; last_hidden_state_prenorm float32 [B, T, H] or None, top_logits (padded to
    [B, T, k] and [B, T]) in its place where the store has these: rows that it lacks, and no label needs, are zero;
    positions int64 [B, T];
    anchors int64 [B, A]; input_ids int64 [B, A, S]; slots and labels int64, weights float32 [B, A, M]: the M slots of
    each block that are trained (`blocks.draw_slots`). A padded anchor has weights 0.
    """

    sample_indices: tuple[int, ...]
    aux_hidden_states: Tensor
    last_hidden_state_prenorm: Tensor | None
    positions: Tensor
    anchors: Tensor
    input_ids: Tensor
    slots: Tensor
    labels: Tensor
    weights: Tensor
    top_logits: TopLogits | None = None

    def to(self, device: torch.device) -> "Batch":
        """The batch with its tensors on `device`."""
        return replace(self, **{name: value.to(device) for name, value in vars(self).items()
                                if isinstance(value, Tensor | TopLogits)})


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
                 slots_per_anchor: int, block_size: int, mask_token_id: int, gamma: float, need_last: bool, seed: int):
        self.store, self.samples, self.seed = store, list(samples), seed
        self.slots_per_anchor = min(slots_per_anchor, block_size - 1)
        self.batch_samples = min(batch_samples, len(self.samples))
        self.anchors_per_sample, self.block_size = anchors_per_sample, block_size
        self.mask_token_id, self.gamma, self.need_last = mask_token_id, gamma, need_last
        self._permutations: dict[int, Tensor] = {}

    def epoch_order(self, epoch: int) -> list[int]:
        """The training samples in this epoch's order."""
        return [self.samples[i] for i in self._permutation(epoch).tolist()]

    def _permutation(self, epoch: int) -> Tensor:
        """Places in `samples` in this epoch's order, int64: drawn once, since of 800,000 samples it takes 10 ms."""
        if epoch not in self._permutations:
            self._permutations[epoch] = torch.randperm(len(self.samples), generator=seeded_generator(self.seed, epoch))
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
        """Batch number `index`, see `chosen`. What the next one needs is fetched from the disk meanwhile."""
        self.store.read_ahead([sample_index for _, sample_index in self.chosen(index + 1)])
        return self.collate(self.chosen(index))

    def collate(self, chosen: Sequence[tuple[int, int]]) -> Batch:
        """The batch of (epoch, sample index) pairs; the epoch decides the anchors."""
        rows = []
        for epoch, sample_index in chosen:
            sample = self.store.read(sample_index)
            input_ids, loss_mask = torch.from_numpy(sample.input_ids), torch.from_numpy(sample.loss_mask)
            generator = seeded_generator(self.seed, epoch, sample_index)
            anchors = sample_anchors(loss_mask, self.anchors_per_sample, generator)
            slots, weights = draw_slots(len(anchors), self.slots_per_anchor, self.block_size, self.gamma, generator)
            rows.append((sample, anchors, build_blocks(input_ids, loss_mask, anchors, slots, weights, self.block_size,
                                                       self.mask_token_id)))
        num_tokens = max(len(sample.input_ids) for sample, _, _ in rows)
        num_anchors = max(len(anchors) for _, anchors, _ in rows)
        num_docs, (_, num_layers, hidden) = len(rows), rows[0][0].aux_hidden_states.shape
        aux = torch.zeros(num_docs, num_tokens, num_layers, hidden)
        all_anchors = torch.zeros(num_docs, num_anchors, dtype=torch.int64)
        input_ids = torch.full((num_docs, num_anchors, self.block_size), self.mask_token_id)
        slots = torch.ones(num_docs, num_anchors, self.slots_per_anchor, dtype=torch.int64)
        labels, weights = torch.zeros_like(slots), torch.zeros(slots.shape)
        for row, (sample, anchors, blocks) in enumerate(rows):
            aux[row, :len(sample.input_ids)] = sample.aux_hidden_states  # cast on the way
            all_anchors[row, :len(anchors)] = anchors
            input_ids[row, :len(anchors)] = blocks.input_ids
            slots[row, :len(anchors)] = blocks.slots
            labels[row, :len(anchors)] = blocks.labels
            weights[row, :len(anchors)] = blocks.weights
        last, top = _collate_last([sample for sample, _, _ in rows], num_tokens) if self.need_last else (None, None)
        return Batch(tuple(index for _, index in chosen), aux, last, torch.arange(num_tokens).expand(num_docs, -1),
                     all_anchors, input_ids, slots, labels, weights, top)


def _collate_last(samples: Sequence[StoredSample], num_tokens: int) -> tuple[Tensor | None, TopLogits | None]:
    """The last states [B, T, H] of a batch as float32, or the top logits that stand in their place, with zeros where
    nothing is stored. (None, None) for a store that has neither."""
    def padded(values: Sequence[Tensor]) -> Tensor:
        found = values[0].new_zeros((len(values), num_tokens, *values[0].shape[1:]))
        for row, (sample, part) in enumerate(zip(samples, values, strict=True)):
            found[row, slice(len(part)) if sample.last_rows is None else sample.last_rows] = part
        return found

    if samples[0].top_logits is not None:
        return None, TopLogits(*(padded([getattr(sample.top_logits, name) for sample in samples])
                                 for name in ("ids", "logits", "logsumexp")))
    if samples[0].last_hidden_state_prenorm is not None:
        return padded([sample.last_hidden_state_prenorm for sample in samples]).float(), None
    return None, None
