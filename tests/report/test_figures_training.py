"""Figures of the training page: what they draw is what they were given."""

import numpy as np
import pytest

from dflash_lib.report import figures_training as figures
from tests.report.drawn import check, lines

STEPS = [{"step": i, "loss": 4.0 / i, "learning_rate": 1e-3, "grad_norm": 0.5 + i / 100, "slot_hits": [0, 3, 1],
          "slot_counts": [0, 4, 4]} for i in range(1, 51)]
SPIKE = STEPS[29] | {"loss": 900.0, "grad_norm": 80.0, "skipped": True}
SPIKED = [*STEPS[:29], SPIKE, *STEPS[30:]]
VALIDATIONS = [{"step": i, "validation": {"acceptance_length": 1 + i / 50, "accepted_by_slot": [0.4, 0.1]}}
               for i in (0, 25, 50)]


def test_gradients_and_what_was_skipped():
    axis, = check(figures.gradient_figure(SPIKED, clip=1.0), 1)
    drawn = {line.get_label(): line for line in axis.lines}
    assert list(drawn["each step"].get_xdata()) == [i for i in range(1, 51) if i != 30]
    assert drawn["each step"].get_ydata().max() == 1.0 and list(drawn["cut back to 1"].get_ydata()) == [1.0, 1.0]
    assert (list(drawn["1 skipped"].get_xdata()), list(drawn["1 skipped"].get_ydata())) == ([30], [80.0])
    axis, = check(figures.gradient_figure(STEPS), 1)
    assert not any("skipped" in line.get_label() or "cut" in line.get_label() for line in axis.lines)


def test_medians_of_stretches_against_a_loop():
    rng = np.random.default_rng(0)
    x, y = np.arange(1, 251), rng.random(250)
    y[40] = 1e6
    means, medians = figures.stretch_medians(x, y, num=10)
    assert means == pytest.approx([np.mean(x[i:i + 25]) for i in range(0, 250, 25)])
    assert medians == pytest.approx([sorted(y[i:i + 25])[12] for i in range(0, 250, 25)])
    assert figures.stretch_medians(x[:3], y[:3])[1].tolist() == y[:3].tolist()


def test_a_skipped_step_is_no_part_of_the_loss():
    top, _ = figures.loss_figure(SPIKED).axes
    assert max(lines(top)[0][1]) == 4.0 and 30 not in lines(top)[0][0]


def test_what_there_is_so_far():
    left, right = check(figures.live_figure(STEPS, VALIDATIONS), 2)
    assert lines(left)[0] == ([row["step"] for row in STEPS], [row["loss"] for row in STEPS])
    assert lines(right)[0] == ([0, 25, 50], [1.0, 1.5, 2.0]) and right.texts[0].get_text() == "2.000"
    check(figures.live_figure([], VALIDATIONS[:1]), 2)
    check(figures.live_figure(STEPS[:1], []), 2)
    check(figures.live_figure([SPIKE], []), 2)


def test_the_anchors_slot_is_drawn_where_it_drafts():
    axis, = figures.slot_accuracy_figure(STEPS).axes
    assert [line.get_label() for line in axis.lines] == ["slot 1", "slot 2"]
    anchored = [row | {"slot_hits": [2, 3, 1], "slot_counts": [4, 4, 4]} for row in STEPS]
    axis, = figures.slot_accuracy_figure(anchored).axes
    assert [line.get_label() for line in axis.lines] == ["slot 1", "slot 2", "slot 3"]
    assert lines(axis)[0][1] == pytest.approx([50] * 50)


def test_a_step_without_labels_is_marked_among_the_gradients():
    empty = STEPS[9] | {"loss": 0.0, "grad_norm": 0.0, "skipped": True}
    axis, = check(figures.gradient_figure([*STEPS[:9], empty, *STEPS[10:]]), 1)
    assert axis.get_ylim()[0] > 0.01
