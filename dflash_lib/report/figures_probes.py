"""Figures of notebook 05 from recomputed states, and those of one sample or one layer that its controls draw."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from dflash_lib.conversations.thoughts import ANSWER, PROMPT, THOUGHT
from dflash_lib.hidden_states.encoding_costs import EncodingCosts
from dflash_lib.hidden_states.logit_lens import LogitLens
from dflash_lib.hidden_states.statistics import StateStatistics
from dflash_lib.report.figures_statistics import few_log_ticks
from dflash_lib.report.style import COLOURS, label, new_figure, styled

ENCODING_COLOURS = ("blue", "sky", "orange", "vermilion")
FLOOR = 1e-6  # where an error of exactly 0 is drawn


@styled
def encodings_figure(costs: EncodingCosts) -> Figure:
    """Relative error by layer, and the target's top-1 tokens that change when the last state is stored so."""
    figure, (left, right) = new_figure(1, 2, height=3.8, width_ratios=(1.25, 1))
    x = np.arange(len(costs.names))
    rows = np.arange(len(costs.costs))
    for i, (cost, colour) in enumerate(zip(costs.costs, ENCODING_COLOURS, strict=True)):
        shift = (i - 1.5) * 0.16
        errors = [np.maximum(part, FLOOR) for part in (cost.errors.value, cost.errors.low, cost.errors.high)]
        left.vlines(x + shift, *errors[1:], color=COLOURS[colour], linewidth=1.6)
        left.plot(x + shift, errors[0], color=COLOURS[colour], marker="o", linestyle="none", label=cost.name)
        changed = 100 * np.array([cost.changed.value, cost.changed.low, cost.changed.high])
        right.barh(i, changed[0], color=COLOURS[colour])
        right.hlines(i, *changed[1:], color=COLOURS["black"], linewidth=1.6)
        right.text(np.nanmax(changed), i, f"  {changed[0]:.2g} %, {cost.bytes_per_token:,.0f} B", va="center",
                   fontsize=9)
    left.set_yscale("log")
    left.set_xticks(x, [name.replace(", ", "\n") for name in costs.names], rotation=30, ha="right")
    label(left, x="", y="relative error (median token)", title="What storage costs each layer")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    right.set_xlim(0, max(1.9 * 100 * max(np.nanmax([c.changed.value, c.changed.high]) for c in costs.costs), 0.1))
    right.set_yticks(rows, [cost.name.replace(", ", ",\n") for cost in costs.costs])
    right.invert_yaxis()
    right.grid(axis="y", visible=False)
    label(right, x="top-1 tokens changed, of the last state (%)", y="", title="What it costs the target's tokens")
    return figure


@styled
def lens_figure(lens: LogitLens, tapped: Sequence[int]) -> Figure:
    """Top-1 agreement of every layer with the target, tapped layers marked, and how much each layer changes."""
    figure, (left, right) = new_figure(1, 2, height=3.6, width_ratios=(1.4, 1))
    layers = np.arange(len(lens.agreement.value))
    for found, colour, name in ((lens.agreement, "blue", "reads the target's own next token"),
                                (lens.repeats, "orange", "reads the token itself")):
        left.plot(layers, 100 * found.value, color=COLOURS[colour], marker=".", label=name)
        left.fill_between(layers, 100 * found.low, 100 * found.high, color=COLOURS[colour], alpha=0.2, linewidth=0)
    left.plot(list(tapped), 100 * lens.agreement.value[list(tapped)], color=COLOURS["vermilion"], marker="D",
              markersize=7, linestyle="none", label="tapped (target_layer_ids)")
    left.set_ylim(-2, 103)
    label(left, x="decoder layer (id k = its output)", y="tokens (%)", title="What the head reads out of each layer")
    left.legend(loc="upper left")
    right.plot(layers[1:], lens.step.value, color=COLOURS["green"], marker=".")
    right.fill_between(layers[1:], lens.step.low, lens.step.high, color=COLOURS["green"], alpha=0.2, linewidth=0)
    for k in tapped:
        right.axvline(k, color=COLOURS["vermilion"], linewidth=1, linestyle=":")
    label(right, x="decoder layer (dotted: tapped)", y="mean cosine to the layer before",
          title="How little each layer changes")
    return figure


@styled
def sample_figure(states: np.ndarray, groups: np.ndarray, name: str, channel: int, log_scale: bool = True) -> Figure:
    """One sample in one layer: norm of each token and the value of one channel. states: [T, H]; groups: int8 [T]."""
    figure, (upper, lower) = new_figure(2, 1, height=4.6, sharex=True)
    positions = np.arange(len(states))
    for axis in (upper, lower):
        for code, colour in ((PROMPT, "grey"), (THOUGHT, "purple")):
            if not (groups == code).any():
                continue
            axis.fill_between(positions, 0, 1, where=groups == code, step="mid", color=COLOURS[colour], alpha=0.15,
                              linewidth=0, transform=axis.get_xaxis_transform(),
                              label={PROMPT: "prompt", THOUGHT: "thought"}[code])
    upper.plot(positions, np.linalg.norm(states, axis=-1), color=COLOURS["blue"], label="norm")
    lower.plot(positions, np.abs(states[:, channel]), color=COLOURS["vermilion"], label=f"|channel {channel}|")
    lower.plot(positions, np.median(np.abs(states), axis=-1), color=COLOURS["black"], linewidth=1,
               label="median |value|")
    for axis in (upper, lower):
        axis.set_yscale("log" if log_scale else "linear")
        axis.legend(loc="upper right", ncols=4)
    label(upper, x="", y="norm of the state", title=f"{name}, token by token")
    label(lower, x="position in the row", y="|value|", title=f"Channel {channel} against the rest")
    return figure


@styled
def layer_figure(statistics: StateStatistics, layer: int, log_scale: bool = True) -> Figure:
    """One layer: distributions of norm, kurtosis and largest over median value, by group of tokens."""
    figure, axes = new_figure(1, 3, height=3.2, sharey=True)
    table = statistics.tokens
    for axis, quantity, words in zip(axes, ("norm", "peak", "kurtosis"),
                                     ("norm of the state", "largest |value| / median |value|", "kurtosis"),
                                     strict=True):
        values = getattr(table, quantity)[table.rest, layer]
        bins = (np.geomspace if log_scale else np.linspace)(values.min() * 0.999, values.max() * 1.001, 50)
        for code, colour, name in ((PROMPT, "grey", "prompt"), (ANSWER, "green", "answer"),
                                   (THOUGHT, "purple", "thought")):
            chosen = values[table.group[table.rest] == code]
            if len(chosen):
                axis.stairs(np.histogram(chosen, bins)[0], bins, color=COLOURS[colour], linewidth=1.6, label=name)
        if log_scale:
            axis.set_xscale("log")
            few_log_ticks(axis.xaxis)
        label(axis, x=words, y="tokens" if axis is axes[0] else "",
              title=statistics.names[layer] if axis is axes[0] else "")
    axes[0].legend(loc="upper right")
    return figure
