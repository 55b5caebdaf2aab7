"""One progress line: a live bar where a person watches, a plain line every few seconds where a log is written."""

import os
import sys
import time
from typing import TextIO

SLOWEST_S = 30.0


def watched(stream: TextIO) -> bool:
    """Whether a person watches `stream` redraw itself: a terminal, or a kernel that a Jupyter server started for an
    open notebook. Kernels of papermill have no such session, and the pipeline's own are marked."""
    if stream.isatty():
        return True
    return "ipykernel" in sys.modules and bool(os.environ.get("JPY_SESSION_NAME")) and (
        "DFLASH_PIPELINE_PID" not in os.environ)


def human_seconds(seconds: float) -> str:
    """Seconds as people say them: 41 s, 12 min, 1 h 12 min, 3 d 4 h."""
    seconds = round(seconds)
    if seconds < 100:
        return f"{seconds} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours = round(minutes / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 48 * 60 else f"{hours // 24} d {hours % 24} h"


def human_rate(rate: float) -> str:
    """Units a second: 18,480; 231; 4.32; 0.0731."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


class Progress:
    """Counts work towards `total` and reports rate and time left.

    Where it is `watched` (or `live=True`) the line is rewritten in place; otherwise a line is printed at most every
    `interval` seconds, because a bar that redraws itself floods an executed notebook (plain tqdm under papermill wrote
    41 outputs for 40 steps); in a job of hours every SLOWEST_S seconds, because a line every few would be megabytes.
    """

    def __init__(self, total: int, what: str, unit: str = "it", interval: float = 5.0, live: bool | None = None,
                 stream: TextIO | None = None, start: int = 0):
        self.total, self.what, self.unit, self.interval = total, what, unit, interval
        self.stream = stream or sys.stdout
        self.live = watched(self.stream) if live is None else live
        self.width = 0
        self.done = self.start = start
        self.began = self.last = time.monotonic()
        self.note = ""
        self.shown: tuple[int, str] | None = None

    def restart(self, done: int) -> None:
        """Rate and time left count from here on: what came before was preparation, or an earlier call's work."""
        self.done = self.start = done
        self.began = time.monotonic()

    def update(self, num: int, note: str = "") -> None:
        """Adds `num` units; `note` is free text behind the figures."""
        self.set(self.done + num, note)

    def set(self, done: int, note: str = "") -> None:
        """Sets the count of finished units."""
        self.done, self.note = done, note or self.note
        now = time.monotonic()
        quiet = max(self.interval, min(SLOWEST_S, (now - self.began) / 100))
        if now - self.last >= (0.2 if self.live else quiet):
            self.last = now
            self._show()

    def line(self) -> str:
        """The line as text: what, done/total, rate, time left, note."""
        seconds = max(time.monotonic() - self.began, 1e-9)
        rate = (self.done - self.start) / seconds
        left = human_seconds(seconds)
        if rate > 0 and self.done < self.total:
            left = f"{human_seconds((self.total - self.done) / rate)} left"
        share = int(100 * self.done / self.total) if self.total else 100  # 100 % is the end, not 99.6
        text = (f"{self.what}: {self.done:,}/{self.total:,} {self.unit} ({share} %), {human_rate(rate)} {self.unit}/s, "
                f"{left}")
        return f"{text}, {self.note}" if self.note else text

    def _show(self) -> None:
        line, self.shown = self.line(), (self.done, self.note)
        if self.live:  # spaces over what a longer line left behind: a notebook knows no "erase to the end of the line"
            self.stream.write("\r" + line.ljust(self.width))
            self.width = len(line)
        else:
            self.stream.write(line + "\n")
        self.stream.flush()

    def close(self) -> None:
        """Shows the last state, if it was not shown already, and ends the line."""
        if self.shown != (self.done, self.note):
            self._show()
        if self.live:
            self.stream.write("\n")

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        self.close()
