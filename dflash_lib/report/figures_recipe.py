"""The figure of the recipe study: what each level of each factor is ahead of the base, and what it costs."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from dflash_lib.report.style import COLOURS, label, new_figure, styled
from dflash_lib.workbench.recipe_study import BETTER, FACTORS, NOT_JUDGED, WITHIN, WORSE, Comparison

LOOKS = {BETTER: ("blue", "^"), WITHIN: ("grey", "o"), WORSE: ("vermilion", "v"), NOT_JUDGED: ("black", "s")}


@styled
def differences_figure(comparisons: Sequence[Comparison], values: Mapping[str, str]) -> Figure:
    """Difference to the base of every level, grouped by factor, and its seconds of training over the base's.

    values: the base's value of each factor. Colour and marker say the verdict. The thin line is the interval that holds
    for all levels together, over prompts and seeds; the thick one that of 95 % over prompts alone.
    """
    rows: list[Comparison | str] = []
    for factor in dict.fromkeys(c.level.factor for c in comparisons):
        rows += [factor, *(c for c in comparisons if c.level.factor == factor)]
    figure, (left, right) = new_figure(1, 2, height=1.5 + 0.27 * len(rows), sharey=True,
                                       gridspec_kw={"width_ratios": [5, 2]})
    for y, row in enumerate(rows):
        if isinstance(row, str):
            for axis in (left, right):
                axis.axhspan(y - 0.5, y + 0.5, color="#F1F3F6", zorder=0)
            continue
        colour, marker = LOOKS[row.verdict]
        d = row.difference
        left.plot([d.low, d.high], [y, y], color=COLOURS[colour], linewidth=1.3)
        left.plot([row.prompts.low, row.prompts.high], [y, y], color=COLOURS[colour], linewidth=4.5, alpha=0.45,
                  solid_capstyle="butt")
        left.plot(d.value, y, color=COLOURS[colour], marker=marker, markersize=7, linestyle="none")
        right.plot([0, row.cost], [y, y], color=COLOURS["sky"], linewidth=7, solid_capstyle="butt")
        right.annotate(f"{row.cost:.2f}", (row.cost, y), xytext=(5, 0), textcoords="offset points", va="center",
                       fontsize=8, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6})  # the line at 1 below
    left.axvline(0, color=COLOURS["black"], linewidth=0.9)
    right.axvline(1, color=COLOURS["black"], linewidth=0.9)
    left.set_yticks(range(len(rows)), [f"{FACTORS[row]}, base {values[row]}" if isinstance(row, str) else row.level.name
                                       for row in rows])
    for text, row in zip(left.get_yticklabels(), rows, strict=True):
        text.set_fontweight("bold" if isinstance(row, str) else "normal")
    left.set_ylim(len(rows) - 0.5, -0.5)
    right.set_xlim(0, 1.22 * max(1.0, *(c.cost for c in comparisons)))
    for axis in (left, right):
        axis.grid(axis="y", visible=False)
        axis.tick_params(axis="y", length=0)
    label(left, x="acceptance length minus the base's (tokens a verify step)", y="", title="Ahead of the base")
    label(right, x="times the base's", y="", title="Seconds of training")
    shown = [verdict for verdict in LOOKS if any(c.verdict == verdict for c in comparisons)]
    handles = [Line2D([], [], color=COLOURS[LOOKS[v][0]], marker=LOOKS[v][1], markersize=7, linewidth=1.3, label=v)
               for v in shown]
    handles += [Line2D([], [], color=COLOURS["black"], linewidth=1.3, label="prompts and seeds, all levels together"),
                Line2D([], [], color=COLOURS["black"], linewidth=4.5, alpha=0.45, label="prompts alone, 95 %")]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure
