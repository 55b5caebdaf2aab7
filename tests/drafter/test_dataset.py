"""Which samples form which batch, and how the scans of a training's start go through a store."""

import pytest
import torch

from dflash_lib.drafter.dataset import TrainingData, draft_vocabulary, seeded_generator, split_samples
from dflash_lib.drafter.training import check_mask_token


def data_of(store, samples, batch_samples):
    return TrainingData(store, samples, batch_samples=batch_samples, anchors_per_sample=4, slots_per_anchor=2,
                        block_size=4, mask_token_id=3, gamma=4.0, need_last=True, seed=1)


@pytest.mark.parametrize("batch_samples", [1, 3, 7])
def test_the_order_is_each_epochs_own_permutation_however_it_is_asked_for(tiny_store, batch_samples):
    """Against the obvious way, which draws it anew for every sample; also from the middle, as a resumed run asks."""
    samples = tiny_store.sample_indices[:7]
    for numbers in (range(20), [19, 3, 11, 0]):
        data = data_of(tiny_store, samples, batch_samples)
        for number in numbers:
            wanted = []
            for position in range(number * batch_samples, (number + 1) * batch_samples):
                epoch, offset = divmod(position, len(samples))
                order = torch.randperm(len(samples), generator=seeded_generator(1, epoch)).tolist()
                wanted.append((epoch, samples[order[offset]]))
            assert data.chosen(number) == wanted
            assert data.epoch_order(number) == [samples[i] for i in torch.randperm(
                len(samples), generator=seeded_generator(1, number)).tolist()]
    assert data.batch(2).sample_indices == tuple(index for _, index in data.chosen(2))


def test_scans_open_each_shard_once(tiny_store, monkeypatch):
    """In file order; by sample index, random reading of a large store would open a file for nearly every sample."""
    shards = []
    locate = tiny_store._locate
    monkeypatch.setattr(tiny_store, "read_tokens", lambda i, read=tiny_store.read_tokens: (
        shards.append(locate(i)[0]), read(i))[1])
    for scan in (lambda: split_samples(tiny_store, 2, seed=0), lambda: check_mask_token(tiny_store, 3),
                 lambda: draft_vocabulary(tiny_store, tiny_store.sample_indices, 20, [2], 384)):
        shards.clear()
        scan()
        assert len(shards) == 12 and shards == sorted(shards) and len(set(shards)) > 1


def test_a_batch_has_the_next_ones_samples_fetched(tiny_store, monkeypatch):
    asked = []
    monkeypatch.setattr(tiny_store, "read_ahead", lambda indices: asked.append(tuple(indices)))
    data = data_of(tiny_store, tiny_store.sample_indices, 2)
    batches = [data.batch(number) for number in range(4)]
    assert asked[:3] == [batch.sample_indices for batch in batches[1:]]
