"""Figures of notebook 06: loss, acceptance by slot, learning rate, validation, gradients, and those that grow."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from dflash_lib.report.style import COLOURS, label, new_figure, styled


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centred moving mean over `window` entries; shorter windows at the ends, no padding."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    low, high = np.maximum(at - window // 2, 0), np.minimum(at + window // 2 + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def _log_scale(axis: Axes) -> None:
    """A logarithmic y axis with plain numbers, between the powers of ten, too, where it shows little more than one."""
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(1.5, 0.5)))


def _plot_loss(axis: Axes, steps: list[dict[str, Any]]) -> None:
    """Loss of the steps that were taken, with its moving mean; a skipped one's is no part of the course."""
    taken = [row for row in steps if not row.get("skipped")]
    x, y = np.array([row["step"] for row in taken]), np.array([row["loss"] for row in taken])
    axis.plot(x, y, color=COLOURS["sky"], linewidth=0.6, alpha=0.7, label="each step")
    axis.plot(x, smooth(y, max(1, len(y) // 25)), color=COLOURS["blue"], label="moving mean")
    _log_scale(axis)  # a warm start's first steps are ten times above the rest


@styled
def live_figure(steps: list[dict[str, Any]], validations: list[dict[str, Any]]) -> Figure:
    """What there is so far of a training that runs: its loss, and the acceptance length of its validations."""
    figure, (left, right) = new_figure(1, 2, height=2.9)
    if steps:
        _plot_loss(left, steps)
        left.legend()
    label(left, x="optimizer step", y="weighted loss (nats, log scale)", title="Training loss so far")
    x = [row["step"] for row in validations]
    y = [row["validation"]["acceptance_length"] for row in validations]
    right.plot(x, y, color=COLOURS["vermilion"], marker="o")
    if y:
        right.annotate(f"{y[-1]:.3f}", (x[-1], y[-1]), xytext=(0, 7), textcoords="offset points", ha="center")
        right.margins(y=0.18)
    label(right, x="optimizer step", y="tokens a verify step", title="Validation acceptance length so far")
    return figure


@styled
def gradient_figure(steps: list[dict[str, Any]], clip: float | None = None) -> Figure:
    """Norm of each step's gradient before clipping, with its median over stretches; skipped steps are marked. clip: the
    norm that longer gradients are cut back to."""
    figure, axis = new_figure(height=3.2)
    taken, skipped = ([row for row in steps if bool(row.get("skipped")) == which] for which in (False, True))
    x, y = np.array([row["step"] for row in taken]), np.array([row["grad_norm"] for row in taken])
    axis.plot(x, y, color=COLOURS["sky"], linewidth=0.6, alpha=0.8, label="each step")
    axis.plot(*stretch_medians(x, y), color=COLOURS["blue"], label="median")
    if clip:
        axis.axhline(clip, color=COLOURS["black"], linewidth=0.9, linestyle="--", label=f"cut back to {clip:g}")
    if skipped:
        axis.plot([row["step"] for row in skipped], [row["grad_norm"] for row in skipped], color=COLOURS["vermilion"],
                  marker="x", markersize=8, markeredgewidth=2, linestyle="none", label=f"{len(skipped):,} skipped")
    _log_scale(axis)
    label(axis, x="optimizer step", y="norm of the gradient (log scale)", title="Gradients")
    axis.margins(y=0.2)  # room for the legend
    axis.legend(ncols=4, loc="upper left")
    return figure


def stretch_medians(x: np.ndarray, y: np.ndarray, num: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """Mean x and median y of at most `num` stretches of equal length: what outliers do not move."""
    parts = [part for part in np.array_split(np.arange(len(x)), num) if len(part)]
    return np.array([x[part].mean() for part in parts]), np.array([np.median(y[part]) for part in parts])


@styled
def loss_figure(steps: list[dict[str, Any]]) -> Figure:
    """Loss of each step with its moving mean, and the learning rate below it. steps: step rows of log.jsonl."""
    figure, (top, bottom) = new_figure(2, 1, height=4.6, sharex=True, gridspec_kw={"height_ratios": [3, 1]})
    _plot_loss(top, steps)
    label(top, x="", y="weighted loss (nats a token, log scale)", title="Training loss", legend=True)
    bottom.plot([row["step"] for row in steps], [row["learning_rate"] for row in steps], color=COLOURS["black"])
    label(bottom, x="optimizer step", y="learning rate")
    bottom.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    return figure


@styled
def validation_figure(validations: list[dict[str, Any]]) -> Figure:
    """Acceptance length of the walked validation answers, and the share of verify steps that accept each slot."""
    figure, (left, right) = new_figure(1, 2, height=3.4)
    x = [row["step"] for row in validations]
    y = [row["validation"]["acceptance_length"] for row in validations]
    left.plot(x, y, color=COLOURS["blue"], marker="o")
    best = int(np.argmax(y))
    left.plot(x[best], y[best], color=COLOURS["vermilion"], marker="o", markersize=9, fillstyle="none",
              linestyle="none", label=f"best: {y[best]:.2f} at step {x[best]}")
    label(left, x="optimizer step", y="tokens a verify step, bonus counted", title="Acceptance length", legend=True)
    by_slot = np.array([row["validation"]["accepted_by_slot"] for row in validations])
    shown = min(4, by_slot.shape[1])
    for slot, style in zip(range(shown), ("-", "--", "-.", ":"), strict=False):
        right.plot(x, 100 * by_slot[:, slot], linestyle=style, marker="o", label=f"slot {slot + 1}")
    label(right, x="optimizer step", y="verify steps that accept the slot (%)", title="Accepted, by slot", legend=True)
    right.set_ylim(bottom=0)
    return figure


@styled
def slot_accuracy_figure(steps: list[dict[str, Any]]) -> Figure:
    """Share of supervised slots whose first choice is the data's token, slot by slot, over training."""
    figure, axis = new_figure(height=3.2)
    hits, counts = np.array([row["slot_hits"] for row in steps]), np.array([row["slot_counts"] for row in steps])
    window, x = max(1, len(steps) // 25), [row["step"] for row in steps]
    first = 0 if counts[:, 0].any() else 1  # the anchor's own slot where it drafts: then it says the first token
    for slot in range(first, hits.shape[1]):
        share = smooth(hits[:, slot], window) / np.maximum(smooth(counts[:, slot], window), 1e-9)
        axis.plot(x, 100 * share, label=f"slot {slot + 1 - first}", linestyle="-" if slot < 5 else "--")
    label(axis, x="optimizer step", y="right first choices (%)",
          title="Training accuracy by slot: the further ahead, the harder")
    axis.legend(ncols=4)
    axis.set_ylim(bottom=0)
    return figure
