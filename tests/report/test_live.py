"""Curves that grow: when they are drawn, what they remember, and that a fault in them ends nothing."""

import base64
import gc
import io
import json
import weakref

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from PIL import Image

from dflash_lib.report import live
from dflash_lib.report.figures_training import live_figure
from dflash_lib.report.live import MAX_BYTES, MAX_ROWS, LiveFigure, picture_of
from dflash_lib.report.style import new_figure


class Handle:
    """Keeps the pictures that it is given."""

    def __init__(self, fault: Exception | None = None):
        self.shown, self.fault = [], fault

    def update(self, obj):
        if self.fault:
            raise self.fault
        self.shown.append(obj)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def step(number: int, loss: float = 1.0, **more) -> dict:
    return {"step": number, "loss": loss, **more}


def validation(number: int, length: float = 1.5) -> dict:
    return {"step": number, "validation": {"acceptance_length": length}}


def drawing(calls: list):
    """A draw function that notes the numbers of the steps and validations that it was given."""
    def draw(steps, validations):
        calls.append(([row["step"] for row in steps], [row["step"] for row in validations]))
        return new_figure(width=1.0, height=1.0)[0]
    return draw


def test_it_draws_every_few_seconds_and_at_the_end():
    handle, calls, clock = Handle(), [], Clock()
    with LiveFigure(handle, drawing(calls), interval=5.0, clock=clock) as curves:
        curves(validation(0))
        for number in range(1, 24):
            clock.now += 0.5
            curves(step(number))
    assert [steps[-1] for steps, _ in calls] == [10, 20, 23] and all(validations == [0] for _, validations in calls)
    assert len(handle.shown) == 3 and handle.shown[-1]._repr_png_()[:4] == b"\x89PNG"


def test_long_jobs_and_slow_drawings_are_drawn_more_rarely():
    clock = Clock()
    curves = LiveFigure(Handle(), drawing([]), interval=5.0, clock=clock)
    clock.now = 3000.0
    curves(step(1))
    assert curves.pause == 30.0, "1 % of the time that the job has taken"
    clock.now = 1e6
    curves(step(2))
    assert curves.pause == live.SLOWEST_S

    def slow(steps, validations):
        clock.now += 7.0
        return new_figure(width=1.0, height=1.0)[0]

    curves = LiveFigure(Handle(), slow, clock=clock)
    clock.now += 5.0
    curves(step(1))
    assert curves.pause == pytest.approx(7.0 / live.SHARE_OF_TIME)


def test_a_resumed_training_begins_where_it_began(tmp_path):
    log, calls, clock = tmp_path / "log.jsonl", [], Clock()
    rows = [validation(0), step(1), step(2), validation(2), step(3), step(4)]  # 4: read ahead of the rows to come
    log.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 5, "lo')
    with LiveFigure(Handle(), drawing(calls), log, clock=clock) as curves:
        assert curves.steps == [], "before the first row the log may be another job's"
        for row in (step(3, 7.0), step(4), validation(4), step(5)):
            curves(row)
    assert calls == [([1, 2, 3, 4, 5], [0, 2, 4])] and curves.steps[2]["loss"] == 7.0


def test_a_training_that_was_finished_shows_its_log(tmp_path):
    log, calls = tmp_path / "log.jsonl", []
    curves = LiveFigure(Handle(), drawing(calls), log)
    log.write_text(json.dumps(step(1)) + "\n")
    with curves:
        pass
    assert calls == [([1], [])]
    with LiveFigure(Handle(), drawing(calls), tmp_path / "none.jsonl"):
        pass
    assert len(calls) == 1, "nothing came, nothing is drawn"


def test_a_fault_is_said_once_and_the_training_goes_on(capsys):
    clock, calls = Clock(), []

    def draw(steps, validations):
        calls.append(len(steps))
        raise ZeroDivisionError("planted")

    with LiveFigure(Handle(), draw, interval=1.0, clock=clock) as curves:
        for number in range(1, 9):
            clock.now += 1
            curves(step(number))
    assert calls == [1] and isinstance(curves.fault, ZeroDivisionError)
    out = capsys.readouterr().out
    assert out.count("ZeroDivisionError: planted") == 1 and "the training goes on" in out and "in draw" in out
    with LiveFigure(Handle(OSError("no front end")), drawing([])) as curves:
        curves(step(1))
    assert isinstance(curves.fault, OSError)


def test_an_interrupt_is_not_taken_for_a_fault():
    def draw(steps, validations):
        raise KeyboardInterrupt

    curves = LiveFigure(Handle(), draw, interval=0.0)
    with pytest.raises(KeyboardInterrupt):
        curves(step(1))


def test_memory_is_bounded_over_many_rows():
    figures, clock = [], Clock()

    def draw(steps, validations):
        figure = live_figure(steps[-20:], validations)
        figures.append(weakref.ref(figure))
        return figure

    class Newest(Handle):
        def update(self, obj):
            self.shown = [obj]

    curves = LiveFigure(Newest(), draw, interval=0.0, clock=clock)
    for number in range(1, 10_001):
        clock.now += 0.1
        curves.pause = 0.0 if number % 2000 == 0 else 1e9
        curves(step(number))
        if number % 500 == 0:
            curves(validation(number))
    gc.collect()
    assert len(figures) == 5 and all(figure() is None for figure in figures)
    steps = [row["step"] for row in curves.steps]
    assert len(steps) <= MAX_ROWS and steps == list(range(curves.every, steps[-1] + 1, curves.every))
    assert 10_000 - steps[-1] < curves.every and len(curves.validations) == 20, "evenly thinned, to the end"


def test_a_picture_is_small_and_its_figure_emptied():
    rng = np.random.default_rng(0)
    figure, axis = new_figure(height=3.0)
    axis.imshow(rng.random((300, 900)), aspect="auto")
    picture = picture_of(figure)
    assert len(picture.png) <= MAX_BYTES and figure.axes == []
    assert Image.open(io.BytesIO(picture.png)).width > 200
    steps = [step(i, float(rng.random()) + 0.5) for i in range(1, MAX_ROWS + 1)]
    picture = picture_of(live_figure(steps, [validation(i, 1 + i / 4000) for i in range(0, 2001, 100)]))
    assert len(picture.png) <= MAX_BYTES and Image.open(io.BytesIO(picture.png)).width == 990, "at its full size"


CELL = """
from IPython.display import display
from dflash_lib.report.figures_training import live_figure
from dflash_lib.report.live import LiveFigure

with LiveFigure(display("begins", display_id=True), live_figure, interval=0.0) as curves:
    for number in range(1, 5):
        curves.pause = 0.0
        curves({"step": number, "loss": 1.0 / number})
        print("line", number)
"""


def test_an_executed_notebook_keeps_one_picture_the_last():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    first, *others = notebook.cells[0].outputs
    assert first.output_type == "display_data" and {o.output_type for o in others} == {"stream"}
    assert "".join(o.text for o in others) == "".join(f"line {i}\n" for i in range(1, 5))
    steps = [{"step": i, "loss": 1.0 / i} for i in range(1, 5)]
    assert base64.b64decode(first.data["image/png"]) == picture_of(live_figure(steps, [])).png


def test_a_log_that_cannot_be_read_ends_the_curves_and_not_the_training(tmp_path, capsys):
    (tmp_path / "log.jsonl").write_text(json.dumps(step(1)) + "\n\0\0\n")  # what a power cut may leave
    handle = Handle()
    with LiveFigure(handle, drawing([]), tmp_path / "log.jsonl", interval=0.0) as curves:
        curves(step(2))
    assert not handle.shown and isinstance(curves.fault, ValueError)
    assert "the training goes on" in capsys.readouterr().out
