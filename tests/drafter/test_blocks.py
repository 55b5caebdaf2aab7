"""Anchors, blocks, weights and masks against slow loops that state DESIGN.md's conventions word by word."""

import math

import pytest
import torch

from dflash_lib.drafter.blocks import (
    anchor_candidates,
    attention_mask,
    build_blocks,
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


def test_blocks_equal_a_slow_loop():
    anchors = anchor_candidates(LOSS_MASK)
    slots, weights = draw_slots(len(anchors), SIZE - 1, SIZE, GAMMA, torch.Generator())
    blocks = build_blocks(INPUT_IDS, LOSS_MASK, anchors, slots, weights, SIZE, MASK_TOKEN)
    for row, a in enumerate(anchors.tolist()):
        assert blocks.input_ids[row].tolist() == [INPUT_IDS[a]] + [MASK_TOKEN] * (SIZE - 1)
        assert blocks.slots[row].tolist() == list(range(1, SIZE))
        for k in range(1, SIZE):
            position = a + k
            trained = position < len(INPUT_IDS) and LOSS_MASK[position] == 1
            expected = math.exp(-(k - 1) / GAMMA) if trained else 0.0
            assert blocks.weights[row, k - 1].item() == pytest.approx(expected)
            if trained:
                assert blocks.labels[row, k - 1] == INPUT_IDS[position]


@pytest.mark.parametrize("num_slots", [1, 2, 3, 6, 7, 20])
def test_drawn_slots_weigh_on_average_what_all_slots_weigh(num_slots):
    size, gamma, num_anchors = 8, 2.0, 40_000
    slots, weights = draw_slots(num_anchors, num_slots, size, gamma, torch.Generator().manual_seed(0))
    assert slots.shape == weights.shape == (num_anchors, min(num_slots, size - 1)) and (slots[:, 0] == 1).all()
    mean = torch.zeros(size).index_add(0, slots.flatten(), weights.flatten()) / num_anchors
    expected = slot_weights(size, gamma)
    if num_slots == 1:
        expected[2:] = 0
    assert torch.allclose(mean, expected, atol=0.02)


def test_slot_weights_of_the_published_block_sizes():
    for size, gamma in ((16, 7), (10, 5), (8, 4)):
        weights = slot_weights(size, gamma)
        assert weights[0] == 0 and weights[1] == 1
        assert weights[size - 1].item() == pytest.approx(math.exp(-(size - 2) / gamma))


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_attention_mask_equals_a_slow_loop(window):
    anchors, num_context = torch.tensor([[0, 3, 9], [1, 4, 12]]), 12
    mask = attention_mask(anchors, SIZE, num_context, window)
    assert mask.shape == (2, 3, SIZE, num_context + SIZE)
    for doc in range(2):
        for block in range(3):
            a = anchors[doc, block].item()
            for j in range(SIZE):
                q = a + j
                for p in range(num_context):  # strictly before the anchor: it has no target state yet
                    visible = p < a and (window is None or q - (window - 1) <= p)
                    assert mask[doc, block, j, p].item() == visible, (doc, block, j, p)
                for i in range(SIZE):
                    visible = True if window is None else i <= j and q - (window - 1) <= a + i
                    assert mask[doc, block, j, num_context + i].item() == visible
