"""Figures of the encodings study: what each form of a store takes, and how fast it is read."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dflash_lib.report.style import COLOURS, label, new_figure, styled
from dflash_lib.workbench.encoding_study import FormCost

ENCODING_COLOURS = {"bf16": "blue", "bf16+zstd": "sky", "fp8": "vermilion", "fp8+zstd": "orange"}


@styled
def forms_figure(costs: Sequence[FormCost]) -> Figure:
    """Bytes a token on disk, and thousand tokens read a second, of every form; one colour an encoding."""
    figure, (left, right) = new_figure(1, 2, height=1.1 + 0.27 * len(costs), sharey=True)
    rows = range(len(costs))
    colours = [COLOURS[ENCODING_COLOURS[cost.form.encoding]] for cost in costs]
    rates = [cost.measured_tokens / cost.read_s / 1000 for cost in costs]
    for axis, values in ((left, [cost.bytes_per_token for cost in costs]), (right, rates)):
        axis.barh(rows, values, color=colours, height=0.7)
        axis.bar_label(axis.containers[0], fmt="{:,.0f}", padding=3, fontsize=8)
        axis.grid(axis="y", visible=False)
        axis.margins(x=0.14)
    left.set_yticks(rows, [cost.form.name for cost in costs])
    left.invert_yaxis()
    label(left, x="bytes a token on disk", y="", title="Size")
    label(right, x="thousand tokens read a second, one thread", y="", title="Reading, as training does")
    right.legend(handles=[Patch(color=COLOURS[colour], label=name) for name, colour in ENCODING_COLOURS.items()],
                 title="aux states", loc="lower right")
    return figure
