"""Figures of an evaluation: several drafters, prompt sets, accepted drafts a step, kinds of text, walk and decoding."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dflash_lib.decoding.acceptance import Interval
from dflash_lib.decoding.analysis import NGRAM, Bin
from dflash_lib.decoding.training_walk import WalkComparison
from dflash_lib.report.style import COLOURS, CYCLE, label, new_figure, styled

MARKERS = "osD^vPX"
TOKENS = "tokens a verify step, bonus counted"


def _offsets(num: int, width: float) -> np.ndarray:
    """Where `num` series stand around a tick."""
    return (np.arange(num) - (num - 1) / 2) * width / max(num, 1)


@styled
def drafters_figure(acceptance: Mapping[str, Interval], differences: Mapping[str, Interval]) -> Figure:
    """Acceptance length of several drafters on the same prompts, and how far each is ahead of the first one.

    acceptance: by name, the one that the others are compared with first; differences: by name, paired.
    """
    figure, (left, right) = new_figure(1, 2, height=1.2 + 0.5 * len(acceptance), sharey=True)
    names = list(acceptance)
    for axis, intervals, digits in ((left, acceptance, ".2f"), (right, differences, "+.2f")):
        for name, interval in intervals.items():
            row = names.index(name)
            colour = CYCLE[row % len(CYCLE)]
            axis.plot([interval.low, interval.high], [row, row], color=colour, linewidth=2.4, solid_capstyle="butt")
            axis.plot(interval.value, row, marker=MARKERS[row % len(MARKERS)], color=colour, markersize=7,
                      linestyle="none")
            axis.annotate(f"{interval.value:{digits}}", (interval.value, row), xytext=(0, 7), ha="center", fontsize=9,
                          textcoords="offset points", color=colour)
        axis.grid(axis="y", visible=False)
    left.axvline(1, color=COLOURS["black"], linewidth=0.8)
    left.set_xlim(left=0.9)
    left.set_yticks(range(len(names)), names)
    left.set_ylim(len(names) - 0.5, -0.7)
    right.axvline(0, color=COLOURS["black"], linewidth=0.8)
    label(left, x=TOKENS, y="", title="Acceptance length")
    label(right, x="tokens a verify step", y="", title=f"Difference to {names[0]} (paired)")
    return figure


@styled
def sets_figure(by_set: Mapping[str, Mapping[str, Interval]], what: str = "prompt set") -> Figure:
    """Acceptance length by prompt set, of each drafter. by_set: drafter -> set -> interval."""
    sets = list(dict.fromkeys(name for intervals in by_set.values() for name in intervals))
    figure, axis = new_figure(height=1.1 + len(sets) * (0.3 + 0.16 * len(by_set)))
    for i, ((drafter, intervals), offset) in enumerate(zip(by_set.items(), _offsets(len(by_set), 0.7), strict=True)):
        colour, marker = CYCLE[i % len(CYCLE)], MARKERS[i % len(MARKERS)]
        for name, interval in intervals.items():
            row = sets.index(name) + offset
            axis.plot([interval.low, interval.high], [row, row], color=colour, linewidth=2.0, solid_capstyle="butt")
            axis.plot(interval.value, row, marker=marker, color=colour, linestyle="none", markersize=6)
            axis.annotate(f"{interval.value:.2f}", (interval.high, row), xytext=(5, 0), va="center", fontsize=8,
                          textcoords="offset points", color=colour)
        axis.plot([], [], marker=marker, color=colour, linewidth=2.0, label=drafter)
    axis.axvline(1, color=COLOURS["black"], linewidth=0.8)
    axis.set_yticks(range(len(sets)), sets)
    axis.set_ylim(len(sets) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)
    axis.margins(x=0.1)
    label(axis, x=TOKENS, y="", title=f"Acceptance length by {what}")
    if len(by_set) > 1:
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


@styled
def histogram_figure(histograms: Mapping[str, Sequence[int]]) -> Figure:
    """How many drafts a verify step accepts. histograms: by name, steps that accepted 0, 1, 2, ... drafts."""
    figure, axis = new_figure(height=3.0)
    longest = max(map(len, histograms.values()))
    width = 0.8 / len(histograms)
    for i, ((name, counts), offset) in enumerate(zip(histograms.items(), _offsets(len(histograms), 0.8), strict=True)):
        shares = 100 * np.array(counts) / max(sum(counts), 1)
        axis.bar(np.arange(len(counts)) + offset, shares, width, color=CYCLE[i % len(CYCLE)],
                 label=f"{name}: {sum(counts):,} steps")
        for x, share in enumerate(shares if len(histograms) < 3 else ()):
            axis.annotate(f"{share:.1f}" if share else "0", (x + offset, share), xytext=(0, 2), ha="center",
                          textcoords="offset points", fontsize=8)
    axis.margins(y=0.1)
    axis.set_xticks(range(longest))
    axis.grid(axis="x", visible=False)
    label(axis, x="accepted drafts a verify step (the step adds one token more)", y="verify steps (%)",
          title="Accepted drafts", legend=True)
    return figure


def _bins(axis: Axes, bins: Sequence[Bin], x: Sequence[float], colour: str, **style) -> None:
    """The interval of each bin that holds a step, at its x, with the number of steps above it."""
    for b, at in zip(bins, x, strict=True):
        if b.acceptance is None:
            continue
        axis.plot([at, at], [b.acceptance.low, b.acceptance.high], color=colour, linewidth=2.4, solid_capstyle="butt")
        axis.plot(at, b.acceptance.value, color=colour, markersize=7, linestyle="none", **style)
        axis.annotate(f"{b.num_steps:,}", (at, b.acceptance.high), xytext=(0, 7), textcoords="offset points",
                      ha="center", fontsize=8, color=COLOURS["black"])


@styled
def text_figure(positions: Sequence[Bin], repetition: Sequence[Bin], shares: Sequence[float],
                lengths: Sequence[float | None]) -> Figure:
    """Acceptance length by position in the answer and by how repetitive the answer is.

    shares and lengths: each prompt's share of repeated n-grams and its acceptance length (None = no verify step).
    """
    figure, (left, right) = new_figure(1, 2, height=3.6, sharey=True)
    _bins(left, positions, range(len(positions)), COLOURS["blue"], marker="o")
    left.set_xticks(range(len(positions)), [f"{b.low}-{b.high - 1}" for b in positions])
    left.grid(axis="x", visible=False)
    left.margins(y=0.12)  # room for the numbers, on the other side, too, which shares the axis
    label(left, x="token of the answer that the step starts from (steps above)", y=TOKENS,
          title="By position in the answer")
    points = [(100 * share, length) for share, length in zip(shares, lengths, strict=True) if length is not None]
    right.plot(*zip(*points, strict=True), color=COLOURS["grey"], marker="o", markersize=3.5, linestyle="none",
               alpha=0.7, label="one prompt")
    _bins(right, repetition, [50 * (b.low + b.high) for b in repetition], COLOURS["vermilion"], marker="s")
    right.plot([], [], color=COLOURS["vermilion"], marker="s", linewidth=2.4, label="prompts of a range")
    right.margins(y=0.12)
    for b in repetition[1:]:
        right.axvline(100 * b.low, color=COLOURS["grey"], linewidth=0.6, linestyle=":")
    shown = [50 * (b.low + b.high) for b in repetition if b.acceptance is not None]
    right.set_xlim(-3, max(45, *(x + 4 for x, _ in points), *(x + 4 for x in shown)))
    label(right, x=f"runs of {NGRAM} tokens that stood in prompt or answer before (%)", y="",
          title="By how repetitive the answer is", legend=True)
    return figure


@styled
def walk_figure(walk: WalkComparison) -> Figure:
    """Acceptance as training walks it beside real decoding: prompt by prompt, and slot by slot."""
    figure, (left, right) = new_figure(1, 2, height=3.6, gridspec_kw={"width_ratios": [2, 3]})
    pairs = np.array(walk.per_prompt)
    low, high = pairs.min() - 0.05, pairs.max() + 0.05
    left.plot([low, high], [low, high], color=COLOURS["grey"], linewidth=1.0, label="equal")
    left.plot(pairs[:, 1], pairs[:, 0], color=COLOURS["blue"], marker="o", linestyle="none", label="one prompt")
    left.set_aspect("equal")
    label(left, x="decoded (tokens a step)", y="training's walk (tokens a step)", title="Acceptance length",
          legend=True)
    for slots, name, colour, offset in ((walk.walked_slots, f"training's walk: {walk.walked:.3f}", "vermilion", -0.2),
                                        (walk.decoded_slots, f"decoded: {walk.decoded:.3f}", "blue", 0.2)):
        shares = 100 * np.array(slots.cumulative)
        right.bar(np.arange(1, len(shares) + 1) + offset, shares, 0.38, color=COLOURS[colour], label=name)
    right.set_xticks(range(1, len(walk.decoded_slots.cumulative) + 1))
    right.grid(axis="x", visible=False)
    label(right, x="slot (draft token behind the anchor)", y="accepted, of all verify steps (%)",
          title=f"By slot: {100 * walk.difference:.2f} % apart in tokens a step", legend=True)
    return figure
