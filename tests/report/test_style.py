import matplotlib
import pytest
from matplotlib import pyplot

from dflash_lib.report.figures_capacity import fit_figure, parameter_figure
from dflash_lib.report.style import COLOURS, STYLE, label, new_figure, styled


def test_styled_restores_the_callers_settings_and_leaves_no_pyplot_figure():
    before = dict(matplotlib.rcParams)

    @styled
    def draw():
        assert matplotlib.rcParams["axes.grid"] is STYLE["axes.grid"] is True
        figure, axis = new_figure()
        label(axis, "step", "loss (nats)", "Loss", legend=False)
        return figure

    figure = draw()
    assert dict(matplotlib.rcParams) == before and pyplot.get_fignums() == []
    axis = figure.axes[0]
    assert (axis.get_xlabel(), axis.get_ylabel(), axis.get_title("left")) == ("step", "loss (nats)", "Loss")


def test_capacity_figures_show_the_numbers():
    figure = parameter_figure({"MLP": 3_000_000, "head": 1_000_000}, 2)
    axis = figure.axes[0]
    assert [bar.get_width() for bar in axis.patches] == [1.0, 3.0]
    assert [text.get_text() for text in axis.texts] == ["1 M  (25 %, 0.002 GB)", "3 M  (75 %, 0.006 GB)"]

    figure = fit_figure({"memory": (2e9, 8e9), "disk": (9e9, 3e9)})
    axis = figure.axes[0]
    widths = {bar.get_width(): matplotlib.colors.to_hex(bar.get_facecolor()) for bar in axis.patches}
    assert widths[2.0] == COLOURS["blue"].lower() and widths[9.0] == COLOURS["vermilion"].lower(), "what does not fit"
    assert widths[8.0] == widths[3.0]
    assert [tick.get_text() for tick in axis.get_yticklabels()] == ["disk", "memory"]


@pytest.mark.parametrize("name", sorted(set(COLOURS) - {"grey", "black"}))
def test_colours_are_of_the_colour_blind_safe_palette(name):
    okabe_ito = {"#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#000000"}
    assert COLOURS[name].lower() in okabe_ito
