"""Figures of `evaluate`: what they draw is what they were given."""

import pytest

from dflash_lib.decoding.acceptance import Interval, SlotAcceptance
from dflash_lib.decoding.analysis import Bin
from dflash_lib.decoding.training_walk import WalkComparison
from dflash_lib.report import figures_evaluation as figures
from tests.report.drawn import check, lines

ACCEPTANCE = {"a run": Interval(1.5, 1.4, 1.6), "another run (export)": Interval(1.7, 1.55, 1.8)}
DIFFERENCES = {"another run (export)": Interval(0.2, 0.1, 0.3)}
BY_SET = {"a run": {"code": Interval(1.5, 1.2, 1.9), "chat": Interval(1.3, 1.2, 1.4)},
          "another run (export)": {"chat": Interval(1.6, 1.3, 1.8), "code": Interval(2.0, 1.7, 2.2)}}
POSITIONS = [Bin(0, 8, Interval(1.6, 1.5, 1.7), 300, 60), Bin(8, 16, None, 0, 0),
             Bin(16, 32, Interval(1.4, 1.2, 1.5), 200, 40)]
REPETITION = [Bin(0.0, 0.05, Interval(1.3, 1.2, 1.4), 100, 30), Bin(0.05, 0.1, None, 0, 0),
              Bin(0.1, 0.2, Interval(1.8, 1.5, 2.2), 90, 20), Bin(0.2, 0.4, Interval(2.4, 2.0, 2.9), 70, 9)]
WALK = WalkComparison(1.51, 1.5, SlotAcceptance([0.4, 0.25], [0.41, 0.1], [9, 4]),
                      SlotAcceptance([0.4, 0.25], [0.4, 0.1], [9, 4]), [(1.4, 1.4), (1.9, 1.8)], 30, 2, 0)


def texts(axis) -> list[str]:
    return [text.get_text() for text in axis.get_legend().get_texts()]


def test_drafters():
    left, right = check(figures.drafters_figure(ACCEPTANCE, DIFFERENCES), 2)
    assert [text.get_text() for text in left.get_yticklabels()] == list(ACCEPTANCE)
    assert ([1.4, 1.6], [0, 0]) in lines(left) and ([1.55, 1.8], [1, 1]) in lines(left)
    assert ([0.1, 0.3], [1, 1]) in lines(right) and "a run" in right.get_title(loc="left")
    assert [line.get_color() for line in left.lines if list(line.get_ydata()) == [1, 1]] == [
        line.get_color() for line in right.lines if list(line.get_ydata()) == [1, 1]], "a drafter keeps its colour"


def test_sets():
    axis, = check(figures.sets_figure(BY_SET), 1)
    assert [text.get_text() for text in axis.get_yticklabels()] == ["code", "chat"]
    rows = {tuple(x): y[0] for x, y in lines(axis) if len(x) == 2 and x[0] != x[1]}
    assert rows[1.2, 1.9] == pytest.approx(rows[1.7, 2.2], abs=0.5) and round(rows[1.2, 1.4]) == round(rows[1.3, 1.8])
    assert texts(axis) == list(BY_SET)
    single, = check(figures.sets_figure({"a run": BY_SET["a run"]}), 1)
    assert single.get_legend() is None


def test_histogram():
    axis, = check(figures.histogram_figure({"a": [6, 3, 1], "b": [1, 1, 0, 2]}), 1)
    assert [bar.get_height() for bar in axis.patches] == pytest.approx([60, 30, 10, 25, 25, 0, 50])
    assert texts(axis) == ["a: 10 steps", "b: 4 steps"]
    check(figures.histogram_figure({"none": [0, 0]}), 1)


def test_text():
    left, right = check(figures.text_figure(POSITIONS, REPETITION, [0.02, 0.3, 0.5], [1.3, None, 2.5]), 2)
    assert ([0, 0], [1.5, 1.7]) in lines(left) and ([2, 2], [1.2, 1.5]) in lines(left)
    assert [text.get_text() for text in left.get_xticklabels()] == ["0-7", "8-15", "16-31"]
    assert ([2.0, 50.0], [1.3, 2.5]) in [(pytest.approx(x), y) for x, y in lines(right)]
    high = [*REPETITION, Bin(0.4, 1.0, Interval(3.0, 2.8, 3.1), 9, 3)]
    wide = figures.text_figure(POSITIONS, high, [0.02, 0.3, 0.5], [1.3, None, 2.5]).axes[1]
    assert wide.get_xlim()[1] > 70, "a range's mark lies in its middle, maybe beyond every prompt"
    assert any(x == pytest.approx([30, 30]) and y == [2.0, 2.9] for x, y in lines(right))


def test_walk():
    left, right = check(figures.walk_figure(WALK), 2)
    assert ([1.4, 1.8], [1.4, 1.9]) in lines(left)
    assert [bar.get_height() for bar in right.patches] == pytest.approx([41, 10, 40, 10])
    assert "0.67 %" in right.get_title(loc="left")
    assert texts(right) == ["training's walk: 1.510", "decoded: 1.500"]
