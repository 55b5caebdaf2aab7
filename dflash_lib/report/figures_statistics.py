"""Figures of notebook 05: what stored hidden states are like, layer by layer and position by position.

Lines through the middle are medians over tokens; whiskers and bands are 95 % intervals over samples, unless said
otherwise.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from dflash_lib.hidden_states.massive import MassiveChannel, massive_share
from dflash_lib.hidden_states.sampling import Estimate
from dflash_lib.hidden_states.statistics import StateStatistics
from dflash_lib.report.style import COLOURS, CYCLE, label, new_figure, plain_axis, styled

GROUP_LOOKS = {"prompt": ("grey", "s"), "supervised": ("blue", "o"), "thought": ("purple", "^"),
               "answer": ("green", "v")}


def layer_colours(num: int) -> list[str]:
    """A colour for each of `num` layers, from first to last."""
    return [CYCLE[i % len(CYCLE)] for i in range(num)]


def few_log_ticks(axis: Axis) -> None:
    """Ticks 1, 2, 5, 10, ... as plain numbers, for a logarithmic axis that spans little."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.set_minor_formatter(NullFormatter())


def _layer_ticks(axis: Axes, names: Sequence[str]) -> None:
    axis.set_xticks(np.arange(len(names)), [name.replace(", ", "\n") for name in names], rotation=30, ha="right")
    axis.set_xlim(-0.6, len(names) - 0.4)


def _whiskers(axis: Axes, x: np.ndarray, estimate: Estimate, colour: str, marker: str, name: str) -> None:
    axis.vlines(x, estimate.low, estimate.high, color=colour, linewidth=1.6)
    axis.plot(x, estimate.value, color=colour, marker=marker, linestyle="none", label=name)


def _spread(axis: Axes, names: Sequence[str], values: np.ndarray, estimate: Estimate, at_0: Estimate) -> None:
    """By layer: 5 to 95 % of the tokens, their median, position 0."""
    x = np.arange(len(names))
    low, high = np.percentile(values, [5, 95], axis=0)
    axis.vlines(x, low, high, color=COLOURS["blue"], linewidth=6, alpha=0.3, label="5 to 95 % of tokens")
    _whiskers(axis, x, estimate, COLOURS["blue"], "o", "median token")
    _whiskers(axis, x, at_0, COLOURS["vermilion"], "D", "position 0")
    axis.set_yscale("log")
    _layer_ticks(axis, names)


@styled
def norms_figure(statistics: StateStatistics) -> Figure:
    """Norm, largest over median value, and kurtosis of a token's state, by layer."""
    figure, axes = new_figure(1, 3, height=3.7)
    for axis, quantity, words, title in zip(
            axes, ("norm", "peak", "kurtosis"),
            ("norm of the state (log scale)", "largest |value| / median |value|", "kurtosis of its values (log scale)"),
            ("How large", "Largest channel", "How heavy the tails"), strict=True):
        _spread(axis, statistics.names, getattr(statistics.tokens, quantity)[statistics.tokens.rest],
                statistics.median(quantity), statistics.median(quantity, at_0=True))
        label(axis, x="", y=words, title=title)
    axes[2].axhline(3, color=COLOURS["grey"], linewidth=1, linestyle="--", label="normal distribution")
    axes[2].set_ylim(bottom=2)
    figure.legend(*axes[2].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def _position_axis(axis: Axes, edges: np.ndarray) -> None:
    axis.set_xscale("symlog", linthresh=8, linscale=1.2)
    axis.set_xlim(-0.5, edges[-1])
    ticks = [t for t in (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384) if t < edges[-1]]
    axis.set_xticks(ticks, [str(t) for t in ticks])
    axis.minorticks_off()


@styled
def drift_figure(statistics: StateStatistics) -> Figure:
    """Norm, and cosine to the layer's mean state, by position in the row."""
    figure, (left, right) = new_figure(1, 2, height=3.8)
    edges = statistics.position_edges
    middle = (edges[:-1] + edges[1:] - 1) / 2
    for axis, quantity in ((left, "norm"), (right, "drift")):
        found = statistics.by_position(quantity)
        for k, (name, colour) in enumerate(zip(statistics.names, layer_colours(len(statistics.names)), strict=True)):
            axis.plot(middle, found.value[:, k], color=colour, linewidth=1.4, marker=".", label=name)
            axis.fill_between(middle, found.low[:, k], found.high[:, k], color=colour, alpha=0.2, linewidth=0)
        _position_axis(axis, edges)
    left.set_yscale("log")
    label(left, x="position in the row (log scale from 8 on)", y="norm, median token (log scale)", title="Norm")
    label(right, x="position in the row (log scale from 8 on)", y="cosine to the layer's mean state",
          title="Direction: how typical a state is")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return figure


@styled
def massive_figure(statistics: StateStatistics, channels: Sequence[MassiveChannel]) -> Figure:
    """The channels that carry massive activations, at position 0 and elsewhere, and the positions where they stand."""
    figure, (left, right) = new_figure(1, 2, height=4.0)
    names = statistics.names
    for k, name in enumerate(names):
        found = [channel for channel in channels if channel.layer == name]
        for rank, channel in enumerate(found):
            place = k + (rank - (len(found) - 1) / 2) * 0.28
            left.bar(place, abs(channel.at_0), width=0.25, color=COLOURS["vermilion"])
            left.plot(place, channel.elsewhere, marker="o", linestyle="none", color=COLOURS["blue"],
                      markeredgecolor="white")
            left.text(place, 1.25 * max(abs(channel.at_0), channel.elsewhere), str(channel.channel), ha="center",
                      va="bottom", rotation=90, fontsize=8)
    left.set_yscale("log")
    left.set_ylim(top=left.get_ylim()[1] * 40)
    _layer_ticks(left, names)
    left.grid(axis="x", visible=False)
    label(left, x="", y="|value| of the channel (log scale)", title="Channels, by number")
    left.legend(handles=[left.patches[0], left.lines[0]],
                labels=["position 0 (median)", "elsewhere (root mean square)"], loc="upper left")
    shares = 100 * massive_share(statistics).T
    edges = statistics.position_edges
    image = right.pcolormesh(np.arange(len(edges)) - 0.5, np.arange(len(names) + 1) - 0.5, shares, vmin=0, vmax=100)
    wanted = [t for t in (0, 1, 2, 4, 8, 17, 31, 63, 128, 252, 500, 1000, 2000, 4000, 8000) if t < edges[-1]]
    places = sorted({int(np.searchsorted(edges, t, side="right")) - 1 for t in wanted})
    right.set_xticks(places, [str(edges[i]) for i in places])
    right.set_yticks(np.arange(len(names)), names)
    right.invert_yaxis()
    plain_axis(right)
    label(right, x="position in the row (groups of a quarter's growth)", y="", title="Where they stand")
    figure.colorbar(image, ax=right, label="tokens with a massive value (%)")
    return figure


@styled
def groups_figure(statistics: StateStatistics) -> Figure:
    """Prompt, supervised, thought and answer tokens: norm, kurtosis and direction by layer."""
    shown = ["prompt", *(("thought", "answer") if statistics.has_thoughts else ("supervised",))]
    figure, axes = new_figure(1, 3, height=3.7)
    x = np.arange(len(statistics.names))
    for axis, quantity, words, title in zip(
            axes, ("norm", "kurtosis", "drift"),
            ("norm / norm of the median token", "kurtosis of its values (log scale)", "cosine to the mean state"),
            ("How large", "How heavy the tails", "How typical"), strict=True):
        whole = statistics.median("norm").value if quantity == "norm" else np.ones(len(x))
        for i, group in enumerate(shown):
            found = statistics.median(quantity, group)
            colour, marker = GROUP_LOOKS[group]
            scaled = Estimate(*(part / whole for part in (found.value, found.low, found.high)))
            _whiskers(axis, x + (i - (len(shown) - 1) / 2) * 0.2, scaled, COLOURS[colour], marker, f"{group} tokens")
        _layer_ticks(axis, statistics.names)
        label(axis, x="", y=words, title=title)
    axes[0].axhline(1, color=COLOURS["grey"], linewidth=1, linestyle="--")
    axes[1].set_yscale("log")
    few_log_ticks(axes[1].yaxis)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4,
                  title="" if statistics.has_thoughts else f"No thoughts: {statistics.why_no_thoughts}.")
    return figure


@styled
def similarity_figure(statistics: StateStatistics) -> Figure:
    """Mean cosine between the states of one token in different layers, position 0 left out."""
    figure, axis = new_figure(height=3.9, width=6.2)
    size = len(statistics.names)
    image = axis.imshow(statistics.similarity.value, vmin=0, vmax=1)
    for i in range(size):
        for j in range(size):
            value = statistics.similarity.value[i, j]
            axis.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=9,
                      color="white" if value < 0.55 else COLOURS["black"])
    axis.set_xticks(range(size), statistics.names, rotation=30, ha="right")
    axis.set_yticks(range(size), statistics.names)
    plain_axis(axis)
    label(axis, x="", y="", title="How alike the layers are")
    error = statistics.similarity.error.max()
    figure.colorbar(image, ax=axis, label=f"mean cosine of a token (± {error:.2g})")
    return figure


@styled
def rank_figure(statistics: StateStatistics) -> Figure:
    """Share of the variance by number of directions, and the effective rank by layer."""
    figure, (left, right) = new_figure(1, 2, height=3.4)
    spectra, colours = statistics.spectra, layer_colours(len(statistics.names))
    for name, spectrum, colour in zip(statistics.names, spectra.spectra, colours, strict=True):
        left.plot(np.arange(1, len(spectrum) + 1), 100 * spectrum.cumsum(), color=colour, linewidth=1.4, label=name)
    left.axhline(90, color=COLOURS["grey"], linewidth=1, linestyle="--")
    left.set_xscale("log")
    left.set_ylim(0, 102)
    label(left, x="directions, strongest first (log scale)", y="share of variance (%)", title="Variance carried")
    left.legend(loc="lower right")
    rows, rank = np.arange(len(statistics.names)), spectra.effective_rank
    right.barh(rows, rank.value, color=colours)
    right.hlines(rows, rank.low, rank.high, color=COLOURS["black"], linewidth=1.6)
    right.plot(spectra.half_rank, rows, marker="|", markersize=12, linestyle="none", color=COLOURS["black"],
               label="from half of the samples")
    for row, value, high in zip(rows, rank.text(), np.fmax(rank.high, spectra.half_rank), strict=True):
        right.text(np.nan_to_num(high), row, f"  {value}", va="center", fontsize=9)
    right.set_xlim(0, 1.4 * np.nanmax([rank.value.max(), np.nanmax(rank.high, initial=0)]))
    right.set_yticks(rows, statistics.names)
    right.set_ylim(len(rows) + 0.3, -0.6)
    right.grid(axis="y", visible=False)
    right.legend(loc="lower right")
    label(right, x=f"effective rank (of {spectra.spectra.shape[1]} directions)", y="", title="Effective rank")
    return figure


@styled
def final_norm_figure(statistics: StateStatistics) -> Figure:
    """Distribution of all values of the last state before and after the final norm."""
    figure, axis = new_figure(height=3.2)
    for shares, colour, name in ((statistics.before_norm, "blue", "before the norm (what is stored)"),
                                 (statistics.after_norm, "vermilion", "after the norm (what the head reads)")):
        axis.stairs(100 * shares, statistics.magnitude_bins, color=COLOURS[colour], linewidth=1.8, label=name)
    axis.set_xscale("log")
    label(axis, x="|value| (log scale)", y="share of all values in the bin (%)",
          title="The last hidden state before and after the final norm", legend=True)
    return figure
