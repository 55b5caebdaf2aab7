"""Anchors, blocks and weights against slow loops that state DESIGN.md's conventions word by word."""

import math

import pytest
import torch

from dflash_lib.drafter.blocks import (
    anchor_candidates,
    build_blocks,
    coverage,
    draw_slots,
    sample_anchors,
    slot_weights,
)

MASK_TOKEN, SIZE, GAMMA = 99, 4, 3.0
INPUT_IDS = torch.arange(10, 22, dtype=torch.int32)
LOSS_MASK = torch.tensor([0, 0, 1, 1, 1, 0, 0, 1, 0, 1, 1, 1], dtype=torch.uint8)


def test_candidates_have_own_and_next_token_supervised():
    slow = [a for a in range(len(LOSS_MASK) - 1) if LOSS_MASK[a] and LOSS_MASK[a + 1]]
    assert anchor_candidates(LOSS_MASK).tolist() == slow == [2, 3, 9, 10]


@pytest.mark.parametrize("mask", [[], [1], [0, 0, 0], [1, 0, 1]])
def test_no_candidates(mask):
    assert len(anchor_candidates(torch.tensor(mask, dtype=torch.uint8))) == 0


def test_sampled_anchors_are_distinct_candidates_and_cover_all_in_time():
    mask = torch.ones(50, dtype=torch.uint8)
    generator, seen = torch.Generator().manual_seed(0), set()
    for _ in range(60):
        anchors = sample_anchors(mask, 5, generator).tolist()
        assert anchors == sorted(set(anchors)) and len(anchors) == 5 and max(anchors) <= 48
        seen.update(anchors)
    assert seen == set(range(49))
    assert sample_anchors(mask, 49, generator).tolist() == list(range(49))


@pytest.mark.parametrize("first_slot", [1, 0])
def test_blocks_equal_a_slow_loop(first_slot):
    """first_slot 1: slot k says token a + k; 0 (sample_from_anchor): slot k says token a + k + 1."""
    anchors = anchor_candidates(LOSS_MASK)
    slots, weights = draw_slots(len(anchors), SIZE, SIZE, GAMMA, torch.Generator(), first_slot)
    blocks = build_blocks(INPUT_IDS, LOSS_MASK, anchors, slots, weights, SIZE, MASK_TOKEN, first_slot)
    for row, a in enumerate(anchors.tolist()):
        assert blocks.input_ids[row].tolist() == [INPUT_IDS[a]] + [MASK_TOKEN] * (SIZE - 1)
        assert blocks.slots[row].tolist() == list(range(first_slot, SIZE))
        for column, k in enumerate(range(first_slot, SIZE)):
            position = a + k if first_slot else a + k + 1
            trained = position < len(INPUT_IDS) and LOSS_MASK[position] == 1
            expected = math.exp(-column / GAMMA) if trained else 0.0
            assert blocks.weights[row, column].item() == pytest.approx(expected)
            if trained:
                assert blocks.labels[row, column] == INPUT_IDS[position]


def test_coverage_counts_what_blocks_have_to_say():
    # could be said: 3, 4 (from 2, 3) and 10, 11 (from 9, 10); the first token of an answer has no anchor before it
    assert coverage(LOSS_MASK, anchor_candidates(LOSS_MASK), 3) == (4, 4)
    assert coverage(LOSS_MASK, torch.tensor([2]), 1) == (1, 4)
    assert coverage(LOSS_MASK, torch.tensor([9]), 5) == (2, 4)
    assert coverage(LOSS_MASK, torch.tensor([], dtype=torch.int64), 3) == (0, 4)


@pytest.mark.parametrize("first_slot", [1, 0])
@pytest.mark.parametrize("num_slots", [1, 2, 3, 6, 7, 20])
def test_drawn_slots_weigh_on_average_what_all_slots_weigh(num_slots, first_slot):
    size, gamma, num_anchors = 8, 2.0, 40_000
    slots, weights = draw_slots(num_anchors, num_slots, size, gamma, torch.Generator().manual_seed(0), first_slot)
    assert slots.shape == weights.shape == (num_anchors, min(num_slots, size - first_slot))
    assert (slots[:, 0] == first_slot).all()
    mean = torch.zeros(size).index_add(0, slots.flatten(), weights.flatten()) / num_anchors
    expected = slot_weights(size, gamma, first_slot)
    if num_slots == 1:
        expected[first_slot + 1:] = 0
    assert torch.allclose(mean, expected, atol=0.02)


def test_slot_weights_of_the_published_block_sizes():
    for size, gamma in ((16, 7), (10, 5), (8, 4)):
        weights = slot_weights(size, gamma)
        assert weights[0] == 0 and weights[1] == 1
        assert weights[size - 1].item() == pytest.approx(math.exp(-(size - 2) / gamma))
