"""figures_states: each figure shows the numbers that it was given, with axes labelled; the loss mask is readable."""

import re

import numpy as np
import pytest

from dflash_lib.hidden_states.normalization import WAYS, compare_ways
from dflash_lib.hidden_states.parity import (
    compare_rounded,
    layer_alignment,
    padding_errors,
    token_alignment,
)
from dflash_lib.hidden_states.store import HiddenStateStore
from dflash_lib.report import figures_states as figures
from tests.hidden_states.rows import make_prepared, make_store

ROWS = [[5, 80, 200, 33, 7, 9, 14], [4, 300, 12]]


@pytest.fixture(scope="module")
def prepared(tiny_llama):
    return make_prepared(tiny_llama)


@pytest.fixture(scope="module")
def plan(tiny_llama, prepared, store):
    return store.plan


@pytest.fixture(scope="module")
def store(tiny_llama, prepared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("states") / "store"
    make_store(folder, tiny_llama, prepared)
    return HiddenStateStore.open(folder)


@pytest.fixture(scope="module")
def agreement(tiny_llama):
    return compare_rounded(tiny_llama, ROWS)


def named_axes(figure, num: int) -> list:
    """The figure's first `num` axes, after a look that what is numbered is labelled and that it can be drawn."""
    figure.canvas.draw()
    for axis in figure.axes[:num]:
        assert axis.get_title(loc="left") or axis.get_title()
        assert axis.get_xlabel() or any(label.get_text().isascii() and re.search("[a-z]", label.get_text())
                                        for label in axis.get_xticklabels())
    return figure.axes[:num]


def test_alignment_marks_the_exact_entries(tiny_llama):
    matrix = layer_alignment(tiny_llama, ROWS[0])
    axis, = named_axes(figures.alignment_figure(matrix, [1, 3]), 1)
    assert {(int(i), int(k)) for i, k in axis.collections[0].get_offsets()} == {(k + 1, k) for k in range(5)}
    assert [label.get_text() for label in axis.get_yticklabels()] == ["1 (tapped)", "3 (tapped)"]


def test_token_and_padding_figures_show_their_values(tiny_llama):
    change = token_alignment(tiny_llama, ROWS[0], [1, 3], 3)
    axis, = named_axes(figures.token_figure(change, [1, 3], 3), 1)
    assert np.allclose(axis.lines[1].get_ydata(), 100 * change[:, 1]) and axis.lines[2].get_xdata()[0] == 3
    errors = padding_errors(tiny_llama, [*ROWS, [5]], [1, 3])
    axis, = named_axes(figures.padding_figure(errors), 1)
    assert [label.get_text() for label in axis.get_xticklabels()] == ["3", "7"]  # the one-token row has no error
    assert np.allclose(axis.lines[0].get_ydata(), np.maximum([errors.left[1], errors.left[0]], figures.FLOOR))


def test_reference_has_a_panel_for_each_target(agreement):
    left, right = named_axes(figures.reference_figure({"a": agreement, "b": agreement}), 2)
    assert np.allclose(left.lines[2].get_ydata(), np.median(agreement.errors, axis=0))
    assert len(left.lines[0].get_ydata()) == 5 and right.get_title(loc="left") == "b"


def test_ways_say_that_the_right_one_is_exact(tiny_llama):
    ways = compare_ways(tiny_llama, ROWS)
    left, right = named_axes(figures.ways_figure(ways), 2)
    assert left.texts[0].get_text() == "0 exactly" and len(left.texts) == len(WAYS)
    assert [bar.get_width() for bar in right.patches] == pytest.approx([100 * ways[n].changed_share for n in WAYS])
    left, right = named_axes(figures.storage_figure(ways[WAYS[1]]), 2)
    assert sum(bar.get_height() for bar in left.patches) == len(ways[WAYS[1]].kl)


def test_position_0_shows_both_views(agreement):
    left, right = named_axes(figures.position_0_figure(agreement, "the float32 states"), 2)
    assert np.allclose(left.lines[0].get_ydata(), agreement.whole_shifted)
    assert np.allclose(right.lines[0].get_ydata(), np.median(agreement.shifted, axis=0))
    assert "float32" in left.get_ylabel()


def test_rows_count_every_row_and_batch(prepared, plan):
    left, right = named_axes(figures.rows_figure(prepared, plan), 2)
    assert sum(bar.get_height() for bar in left.patches[:39]) == len(prepared)
    real = [bar.get_height() for bar in right.patches[len(right.patches) // 2:]]
    assert sum(real) == prepared.num_tokens and len(real) == sum(map(len, plan.shards))


def test_the_loss_mask_colours_supervised_tokens_and_escapes_text(tiny_llama):
    tokenizer = tiny_llama.tokenizer
    ids = tokenizer("<b>a & b</b>\nend")["input_ids"]
    mask = [int(i >= 4) for i in range(len(ids))]
    page = figures.loss_mask_html(tokenizer, ids, mask)
    spans = re.findall(r'<span title="position (\d+), id (\d+)" style="background:(#\w+)', page)
    assert [int(token) for _, token, _ in spans] == ids and [int(i) for i, _, _ in spans] == list(range(len(ids)))
    green = {"#bfe6d3", "#a5dcc2"}
    assert [int(colour in green) for *_, colour in spans] == mask
    assert "<b>" not in page and "&lt;" in page and "&amp;" in page and "<script" not in page
