"""Figures of 01_capacity: where a target's parameters are, and what the job needs beside what is free."""

from matplotlib.figure import Figure

from dflash_lib.report.style import COLOURS, CYCLE, label, new_figure, plain_axis, styled


@styled
def parameter_figure(parameters: dict[str, int], bytes_per_parameter: int) -> Figure:
    """One bar a part of the target, longest first; parameters in millions, beside each its share and gigabytes."""
    figure, axis = new_figure(height=0.6 + 0.42 * len(parameters))
    parts = sorted(parameters.items(), key=lambda item: item[1])
    total = sum(parameters.values())
    values = [count / 1e6 for _, count in parts]
    axis.barh([name for name, _ in parts], values, color=COLOURS["blue"], height=0.62)
    for row, (_, count) in enumerate(parts):
        text = f"{count / 1e6:,.4g} M  ({100 * count / total:.3g} %, {count * bytes_per_parameter / 1e9:.3g} GB)"
        axis.annotate(text, (count / 1e6, row), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9)
    axis.set_xlim(0, 1.45 * max(values))
    label(axis, "parameters (millions)", "", f"Where the {total / 1e6:,.5g} million parameters are")
    plain_axis(axis)
    return figure


@styled
def fit_figure(needs: dict[str, tuple[float, float]]) -> Figure:
    """Needed against free, one row a resource: `needs` maps its name to (needed, free), both in bytes."""
    figure, axis = new_figure(height=0.9 + 0.55 * len(needs))
    names = list(needs)[::-1]
    axis.barh(names, [needs[n][1] / 1e9 for n in names], color="#DDE3EA", height=0.6, label="free here")
    colours = [CYCLE[0] if needs[n][0] <= needs[n][1] else COLOURS["vermilion"] for n in names]
    axis.barh(names, [needs[n][0] / 1e9 for n in names], color=colours, height=0.3, label="needed")
    for row, name in enumerate(names):
        needed, free = needs[name]
        axis.annotate(f"{needed / 1e9:.3g} of {free / 1e9:.3g} GB", (max(needed, free) / 1e9, row), xytext=(6, 0),
                      textcoords="offset points", va="center", fontsize=9)
    low = min(min(pair) for pair in needs.values()) / 1e9
    high = max(max(pair) for pair in needs.values()) / 1e9
    axis.set_xscale("log")
    axis.set_xlim(max(low / 3, 1e-7), high * 8)
    label(axis, "gigabytes (logarithmic)", "", "What the job needs, beside what is free")
    figure.legend(loc="outside lower right", ncols=2)
    plain_axis(axis)
    return figure
