"""Curves that grow while a training runs: one figure in one notebook output, drawn anew every few seconds.

    with LiveFigure(display("training begins", display_id=True), live_figure, folder / "log.jsonl") as curves:
        start_training(folder, ..., on_row=curves)

In JupyterLab the figure is replaced in place; an executed notebook keeps the last picture of that one output.
"""

import io
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from matplotlib.figure import Figure

Row = dict[str, Any]
MAX_ROWS = 2000  # of steps: more than a figure has pixels
MAX_BYTES = 60_000
SHARE_OF_TIME = 0.05  # that drawing may take
SLOWEST_S = 60.0


class DisplayHandle(Protocol):
    """What `IPython.display.display(..., display_id=True)` returns."""

    def update(self, obj: Any) -> None: ...


class Picture:
    """A PNG that a notebook shows."""

    def __init__(self, png: bytes):
        self.png = png

    def _repr_png_(self) -> bytes:
        return self.png

    def __repr__(self) -> str:
        return f"picture of {len(self.png):,} bytes"


def picture_of(figure: Figure, max_bytes: int = MAX_BYTES) -> Picture:
    """The figure in 256 colours, at a lower resolution where it would exceed `max_bytes`; the figure is emptied."""
    from PIL import Image

    dpi = figure.dpi
    while True:
        raw, packed = io.BytesIO(), io.BytesIO()
        figure.savefig(raw, format="png", dpi=dpi, facecolor="white")
        Image.open(raw).convert("RGB").quantize(256).save(packed, format="png", optimize=True)
        if packed.tell() <= max_bytes or dpi < 30:
            break
        dpi *= 0.8
    figure.clear()  # its parts refer to each other, and would stay until the collector comes by
    return Picture(packed.getvalue())


class LiveFigure:
    """Takes log rows as they come and redraws; a context, which draws the last state at its end.

    handle: the output to update; draw(steps, validations): the figure of step rows and validation rows, as `read_log`
    returns them; log: the job's log.jsonl, read once the first row has come (only then it is this job's) or at the end,
    so that a resumed training's curves begin where it began; interval: least seconds between two drawings, which grows
    as the job does and with what drawing takes.

    Of more than MAX_ROWS step rows every second is let go, so that a training of any length takes bounded memory and
    time. A fault in drawing, or in reading the log for it, does not end the training, which may have run for days and
    can be drawn from its log afterwards: its traceback is printed, kept in `fault`, and nothing is drawn any more.
    """

    def __init__(self, handle: DisplayHandle, draw: Callable[[list[Row], list[Row]], Figure], log: Path | None = None,
                 interval: float = 5.0, clock: Callable[[], float] = time.monotonic):
        self.handle, self.draw, self.log, self.interval, self.clock = handle, draw, log, interval, clock
        self.steps: list[Row] = []
        self.validations: list[Row] = []
        self.fault: Exception | None = None
        self.every = 1  # of the step rows, one in so many is kept
        self.began = self.last = clock()
        self.pause, self.log_read = interval, False

    def __call__(self, row: Row) -> None:
        """Takes the newest row."""
        self._read_log()
        self._take(row)
        if self.fault is None and self.clock() - self.last >= self.pause:
            self.show()

    def __enter__(self) -> "LiveFigure":
        return self

    def __exit__(self, *_) -> None:
        self._read_log()
        if self.fault is None and (self.steps or self.validations):
            self.show()

    def show(self) -> None:
        """Draws now."""
        began = self.clock()
        try:
            self.handle.update(picture_of(self.draw(self.steps, self.validations)))
        except Exception as fault:
            self._end(fault)
        self.last = self.clock()
        patience = min(SLOWEST_S, (self.last - self.began) / 100)
        self.pause = max(self.interval, patience, (self.last - began) / SHARE_OF_TIME)

    def _end(self, fault: Exception) -> None:
        """Says a fault, which is not swallowed: see the class."""
        self.fault = fault
        print("the live curves end here, the training goes on; what drawing them raised:\n"
              + "".join(traceback.format_exception(fault)), flush=True)

    def _read_log(self) -> None:
        if self.log_read:
            return
        self.log_read = True
        try:
            if self.log is not None and self.log.exists():
                with open(self.log, encoding="utf-8") as lines:
                    for line in lines:
                        if line.endswith("\n"):  # the trainer may be writing the last one
                            self._take(json.loads(line))
        except Exception as fault:
            self._end(fault)

    def _take(self, row: Row) -> None:
        """Keeps a row; what stands there of its step and later ones goes: the log may have been read ahead of it."""
        kept = self.validations if "validation" in row else self.steps
        while kept and kept[-1]["step"] >= row["step"]:
            kept.pop()
        if kept is self.validations or row["step"] % self.every == 0:
            kept.append(row)
        if len(self.steps) > MAX_ROWS:
            self.every *= 2
            self.steps = [other for other in self.steps if other["step"] % self.every == 0]
