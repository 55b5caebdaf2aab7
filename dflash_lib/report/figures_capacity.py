"""Figures of 01_capacity: where a target's parameters are, what the job needs beside what is free, what the GPUs do."""

from matplotlib.figure import Figure
from matplotlib.patches import Patch

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


WORK_COLOURS = {"load": "#C9CED6", "extract": COLOURS["blue"], "train": COLOURS["orange"]}


@styled
def gpu_plan_figure(plan) -> Figure:
    """One bar a GPU and strategy over the hours (a `GpuPlan`): what it does, paler the more it waits."""
    letters = list(plan.outcomes)
    num_gpus = plan.outcomes[letters[0]].strategy.num_gpus
    figure, axis = new_figure(height=0.9 + len(letters) * max(0.55, min(0.11 * num_gpus, 1.0)))
    for row, letter in enumerate(letters):
        outcome = plan.outcomes[letter]
        lanes: dict[tuple[float, float], int] = {}
        for phase in outcome.phases:
            first = lanes.get((phase.start, phase.end), 0)  # groups that work at the same time stand below each other
            lanes[phase.start, phase.end] = first + phase.num_gpus
            for gpu in range(first, first + phase.num_gpus):
                axis.barh(row - 0.4 + (gpu + 0.5) * 0.8 / num_gpus, phase.end - phase.start, left=phase.start,
                          height=0.7 / num_gpus, color=WORK_COLOURS[phase.work], alpha=0.15 + 0.85 * phase.busy)
        axis.annotate(f"{outcome.gpu_hours:,.4g} GPU-hours", (outcome.hours, row), xytext=(6, 0),
                      textcoords="offset points", va="center", fontsize=9,
                      fontweight="bold" if letter == plan.winner else "normal")
    axis.set_yticks(range(len(letters)), [f"{k}  {plan.outcomes[k].strategy.name}" for k in letters])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.3 * max(o.hours for o in plan.outcomes.values()))
    label(axis, "hours", "", "What each GPU does, strategy by strategy (pale = waiting)")
    plain_axis(axis)
    figure.legend(handles=[Patch(color=colour, label=work) for work, colour in WORK_COLOURS.items()],
                  loc="outside lower right", ncols=3)
    return figure
