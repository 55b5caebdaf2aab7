"""Who sees whom, in one document and in packed ones, against slow loops that state DESIGN.md's convention 5."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from dflash_lib.drafter import attention
from dflash_lib.drafter.attention import (
    FlexAttention,
    Packing,
    SdpaAttention,
    attention_mask,
    flex_mask,
    make_attention,
)

SIZE = 4
PACKING = Packing((12, 5, 1), (3, 0, 2))
ANCHORS = torch.tensor([0, 3, 12, 0, 1])
SLOTS = torch.tensor([[0, 1, 2, 3], [3, 1, 1, 2], [0, 3, 2, 1], [0, 1, 2, 3], [2, 2, 0, 1]])


def sees(anchor: int, slot: int, position: int, in_block: bool, window: int | None) -> bool:
    """The convention, word by word; position in the document or, in_block, slot of the same block."""
    query = anchor + slot
    if in_block:
        return True if window is None else position <= slot and query - (window - 1) <= anchor + position
    return position < anchor and (window is None or query - (window - 1) <= position)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_attention_mask_equals_a_slow_loop(window):
    anchors, num_context = torch.tensor([0, 3, 9, 12]), 12
    slots = torch.arange(SIZE).expand(4, -1)
    mask = attention_mask(anchors, slots, SIZE, num_context, window)
    assert mask.shape == (4, SIZE, num_context + SIZE)
    for block, a in enumerate(anchors.tolist()):
        for j in range(SIZE):
            expected = [sees(a, j, p, False, window) for p in range(num_context)]  # the anchor has no state yet
            assert mask[block, j].tolist() == expected + [sees(a, j, i, True, window) for i in range(SIZE)]


def slow_mask(window: int | None) -> torch.Tensor:
    """bool [A, M, T + A * S] of the packed row."""
    documents = [0] * 12 + [1] * 5 + [2]
    positions, of_block = [*range(12), *range(5), 0], [0, 0, 0, 2, 2]
    rows = []
    for block, (a, slots) in enumerate(zip(ANCHORS.tolist(), SLOTS.tolist(), strict=True)):
        for j in slots:
            context = [d == of_block[block] and sees(a, j, p, False, window)
                       for d, p in zip(documents, positions, strict=True)]
            rows.append(context + [other == block and sees(a, j, i, True, window)
                                   for other in range(5) for i in range(SIZE)])
    return torch.tensor(rows).view(5, SIZE, -1)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_the_block_mask_of_a_packed_row_equals_a_slow_loop(window):
    visible, num_queries, num_keys = flex_mask(PACKING, ANCHORS, SLOTS, SIZE, window)
    mask = create_mask(visible, None, None, num_queries, num_keys, device="cpu")[0, 0]
    assert torch.equal(mask.view(5, SIZE, -1), slow_mask(window))


@pytest.mark.parametrize("at_once", [1, 2, 64])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 3])
def test_both_kernels_equal_softmax_over_the_packed_row(window, kv_heads, at_once, monkeypatch):
    """In float64, gradients of all inputs included (FlexAttention has none on a CPU)."""
    monkeypatch.setattr(attention, "BLOCKS_AT_ONCE", at_once)
    torch.manual_seed(0)
    shapes = [(4, 5, SIZE, 16), *[(kv_heads, 5, SIZE, 16)] * 2, *[(kv_heads, 18, 16)] * 2]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    queries, keys, values, context_keys, context_values = inputs
    every_key, every_value = (torch.cat([context, own.flatten(1, 2)], dim=1).repeat_interleave(4 // kv_heads, 0)
                              for context, own in ((context_keys, keys), (context_values, values)))
    scores = queries.flatten(1, 2) @ every_key.transpose(1, 2) / 4
    slow = scores.masked_fill(~slow_mask(window).flatten(0, 1), -torch.inf).softmax(dim=-1) @ every_value
    weights = torch.randn(slow.shape, dtype=torch.float64)
    expected = torch.autograd.grad((slow * weights).sum(), inputs)
    out = SdpaAttention(PACKING, ANCHORS, SLOTS, SIZE, window)(*inputs)
    assert torch.allclose(out.flatten(1, 2), slow, atol=1e-12)
    found = torch.autograd.grad((out.flatten(1, 2) * weights).sum(), inputs)
    assert all(torch.allclose(one, other, atol=1e-12) for one, other in zip(found, expected, strict=True))


def test_flex_attention_takes_the_packed_row_and_sdpa_takes_over_when_it_cannot_compile(monkeypatch):
    """Uncompiled here: the kernel is for GPUs (tests/gpu/check_training.py), what it is given is not."""
    from torch.nn.attention.flex_attention import flex_attention

    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in ((4, 5, SIZE, 16), *[(2, 5, SIZE, 16)] * 2, *[(2, 18, 16)] * 2)]
    expected = SdpaAttention(PACKING, ANCHORS, SLOTS, SIZE, 3)(*inputs)
    kernel = FlexAttention(PACKING, ANCHORS, SLOTS, SIZE, 3)
    monkeypatch.setattr(FlexAttention, "compiled", staticmethod(flex_attention))
    monkeypatch.setattr(FlexAttention, "off", False)
    with torch.no_grad():
        assert torch.allclose(kernel(*inputs), expected, atol=1e-6) and not FlexAttention.off

    def no_choices(*_, **__):
        raise RuntimeError("NoValidChoicesError: no valid choices")

    monkeypatch.setattr(FlexAttention, "compiled", staticmethod(no_choices))
    with pytest.warns(UserWarning, match="FlexAttention cannot be compiled here .*NoValidChoices.*takes its place"):
        assert torch.equal(kernel(*inputs), expected)
    assert FlexAttention.off and torch.equal(kernel(*inputs), expected), "said once, no second try"
    assert isinstance(make_attention(PACKING, ANCHORS, SLOTS, SIZE, None), SdpaAttention)


def test_sdpa_takes_over_when_the_backward_pass_cannot_be_compiled(monkeypatch):
    """Which is compiled when it is first called, and in a training that would be too late; so each of the first two
    lengths of a batch is tried in the forward pass."""
    class NoBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, queries, keys, values):
            ctx.save_for_backward(keys, values)
            return queries.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(tuple(grad.shape))
            if len(seen) == fails_at:
                raise RuntimeError("NoValidChoicesError: no valid choices")
            return grad, *map(torch.zeros_like, ctx.saved_tensors)

    monkeypatch.setattr(FlexAttention, "compiled", staticmethod(lambda *qkv, **_: NoBackward.apply(*qkv)))
    monkeypatch.setattr(FlexAttention, "off", False)
    monkeypatch.setattr(FlexAttention, "tried", set())
    seen, fails_at = [], 2
    first, *others = PACKING.num_context
    lengths = [(first + more, *others) for more in (0, 0, 1, 2)]
    given = [[torch.randn(shape) for shape in ((4, 5, SIZE, 16), *[(2, 5, SIZE, 16)] * 2, *[(2, sum(length), 16)] * 2)]
             for length in lengths]
    kernels = [FlexAttention(Packing(length, PACKING.num_blocks), ANCHORS, SLOTS, SIZE, 3)
               for length in lengths]
    for kernel, inputs in zip(kernels[:2], given, strict=False):
        assert torch.equal(kernel(*inputs), inputs[0])
    assert len(seen) == 1, "the same length is tried once"
    with pytest.warns(UserWarning, match="FlexAttention cannot be compiled here"):
        out = kernels[2](*given[2])
    assert FlexAttention.off and torch.equal(out, kernels[2].fallback()(*given[2]))
    monkeypatch.setattr(FlexAttention, "off", False)
    fails_at = 0
    for number in (2, 3):
        kernels[number](*given[number])
    assert len(seen) == 3, "a third length is computed by what was compiled for any"
    with torch.no_grad():
        monkeypatch.setattr(FlexAttention, "tried", set())
        kernels[0](*given[0])
    assert len(seen) == 3, "nothing to train"


def test_groups_cover_every_block_once_with_its_own_document():
    packing = Packing((7, 9), (130, 3))
    assert [(c.start, c.stop, b.start, b.stop) for c, b in packing.groups()] == [
        (0, 7, 0, 64), (0, 7, 64, 128), (0, 7, 128, 130), (7, 16, 130, 133)]
