"""One look for every figure: Okabe-Ito colours, legible at page width, no pyplot and so no global state.

A figure function is decorated with `styled`, makes its axes with `new_figure` and returns the Figure:

    @styled
    def loss_figure(log):
        figure, axis = new_figure(height=3.2)
        axis.plot(log.step, log.loss, color=COLOURS["blue"], label="training")
        label(axis, x="step", y="cross-entropy (nats)", title="Loss", legend=True)
        return figure
"""

import functools
from collections.abc import Callable
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito (2008), distinguishable with the common colour-vision deficiencies; yellow is left out: too pale on
# white.
COLOURS = {
    "blue": "#0072B2", "orange": "#E69F00", "green": "#009E73", "vermilion": "#D55E00", "purple": "#CC79A7",
    "sky": "#56B4E9", "black": "#222222", "grey": "#8A8F98",
}
CYCLE = [COLOURS[name] for name in ("blue", "vermilion", "green", "orange", "purple", "sky", "black")]
SEQUENTIAL = "cividis"  # maps for images: both are readable with colour-vision deficiencies and in grey
DIVERGING = "PuOr"
WIDTH = 9.0  # inches; with DPI the width of a page
DPI = 110
STYLE: dict[str, Any] = {
    "figure.dpi": DPI, "figure.facecolor": "white", "font.family": "DejaVu Sans", "font.size": 10,
    "axes.prop_cycle": cycler(color=CYCLE), "axes.titlesize": 11, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.labelsize": 10, "axes.edgecolor": "#5A6070", "axes.labelcolor": "#222222",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": "#E3E6EB", "grid.linewidth": 0.8, "xtick.color": "#444B57", "ytick.color": "#444B57",
    "xtick.labelsize": 9, "ytick.labelsize": 9, "lines.linewidth": 1.8, "lines.markersize": 4.5,
    "legend.frameon": False, "legend.fontsize": 9, "image.cmap": SEQUENTIAL,
}


def styled(function: Callable[..., Figure]) -> Callable[..., Figure]:
    """Decorates a function that returns a Figure: it runs under STYLE, and the caller's rcParams stay as they were."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs) -> Figure:
        with matplotlib.rc_context(STYLE):
            return function(*args, **kwargs)

    return wrapper


def new_figure(num_rows: int = 1, num_columns: int = 1, height: float = 3.2, width: float = WIDTH,
               **subplots) -> tuple[Figure, Any]:
    """A Figure and its axes (one Axes, or an array as `Figure.subplots` returns it).

    height: inches of the whole figure. subplots: further arguments of `Figure.subplots`, such as sharey=True. Call it
    within `styled`: matplotlib reads its style when axes and lines are made.
    """
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    return figure, figure.subplots(num_rows, num_columns, **subplots)


def label(axis: Axes, x: str, y: str, title: str = "", legend: bool = False) -> None:
    """Labels an axis: x and y with their units, a title that says what is to be seen, the legend if asked for."""
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    if title:
        axis.set_title(title)
    if legend:
        axis.legend()


def plain_axis(axis: Axes) -> None:
    """Takes the grid away: for images and for bars with their value written beside them."""
    axis.grid(False)
