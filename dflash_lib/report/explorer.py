"""Controls for notebook 05: choose sample, layer, channel and scale, and see the figure change.

They need a person and a kernel. Where nobody watches (papermill, the pipeline) the same figure is drawn once.
"""

import html
import io
import sys
from collections.abc import Callable

import numpy as np
from matplotlib.figure import Figure

from dflash_lib.conversations.thoughts import TokenGroups
from dflash_lib.hidden_states.massive import MassiveChannel
from dflash_lib.hidden_states.statistics import StateStatistics
from dflash_lib.hidden_states.store import HiddenStateStore, StoredSample
from dflash_lib.progress import watched
from dflash_lib.report.figures_probes import layer_figure, sample_figure

ONE_SAMPLE, ONE_LAYER = "one sample", "one layer"


class Explorer:
    """What can be drawn of the statistics and their store. tokenizer: tells thoughts from answers."""

    def __init__(self, statistics: StateStatistics, store: HiddenStateStore, tokenizer):
        self.statistics, self.store, self.groups = statistics, store, TokenGroups(tokenizer)
        self._sample: StoredSample | None = None  # the newest one: moving a slider reads nothing

    def states(self, sample: int, layer: int) -> np.ndarray:
        """float32 [T, H]: one sample's states in the layer of that number, behind the tapped ones the last."""
        if self._sample is None or self._sample.sample_index != sample:
            self._sample = self.store.read(sample)
        if layer == len(self.store.target_layer_ids):
            return self._sample.last_hidden_state_prenorm.float().numpy()
        return self._sample.aux_hidden_states[:, layer].float().numpy()

    def draw(self, view: str, sample: int, layer: int, channel: int, log_scale: bool) -> Figure:
        """The figure of that choice. Raises StoreError for a sample that the store lacks."""
        if view == ONE_LAYER:
            return layer_figure(self.statistics, layer, log_scale)
        states = self.states(sample, layer)
        groups = self.groups.of(self._sample.input_ids, self._sample.loss_mask)
        name = f"Sample {sample}, {self.statistics.names[layer]}"
        return sample_figure(states, groups, name, min(max(channel, 0), states.shape[1] - 1), log_scale)

    def text(self, sample: int) -> str:
        """The decoded row."""
        return self.groups.tokenizer.decode(self.store.read_tokens(sample)[0].tolist())


def explore(explorer: Explorer, channels: list[MassiveChannel], live: bool | None = None,
            save: Callable[[Figure], object] | None = None):
    """Controls with their figure, to be a cell's last expression; or, where nobody watches, `save(figure)` of the first
    choice (or the figure itself).

    channels: what the channel control begins with, layer by layer. live: None = find out.
    """
    statistics = explorer.statistics
    first = {name: next((c.channel for c in channels if c.layer == name), 0) for name in statistics.names}
    begin = {"view": ONE_SAMPLE, "sample": statistics.samples[0], "layer": len(statistics.names) // 2,
             "log_scale": True}
    begin["channel"] = first[statistics.names[begin["layer"]]]
    if not (watched(sys.stdout) if live is None else live):
        figure = explorer.draw(**begin)
        return figure if save is None else save(figure)
    try:
        import ipywidgets as widgets
    except ImportError as error:
        raise ImportError("the controls need ipywidgets: pip install ipywidgets, then restart the kernel (and reload "
                          "the page once, for JupyterLab to see it)") from error
    control = {
        "view": widgets.ToggleButtons(options=[ONE_SAMPLE, ONE_LAYER], value=begin["view"]),
        "layer": widgets.Dropdown(options=[(name, i) for i, name in enumerate(statistics.names)],
                                  value=begin["layer"], description="layer"),
        "sample": widgets.Dropdown(options=[(f"sample {i}", i) for i in statistics.samples], value=begin["sample"],
                                   description="sample"),
        "channel": widgets.BoundedIntText(value=begin["channel"], min=0, max=explorer.store.hidden_size - 1,
                                          description="channel"),
        "log_scale": widgets.Checkbox(value=True, description="log scale"),
    }
    image, text = widgets.Image(format="png", layout={"max_width": "990px"}), widgets.HTML()

    def show(_change=None) -> None:
        choice = {name: widget.value for name, widget in control.items()}
        image.value = _png(explorer.draw(**choice))
        one = choice["view"] == ONE_SAMPLE
        text.value = _preformatted(explorer.text(choice["sample"])) if one else ""
        for name in ("sample", "channel"):
            control[name].disabled = not one

    def follow_layer(change) -> None:
        control["channel"].value = first[statistics.names[change["new"]]]

    control["layer"].observe(follow_layer, names="value")
    for widget in control.values():
        widget.observe(show, names="value")
    show()
    return widgets.VBox([widgets.HBox([control["view"], control["log_scale"]]),
                         widgets.HBox([control["layer"], control["sample"], control["channel"]]), image, text])


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=figure.dpi, facecolor="white")
    return buffer.getvalue()


def _preformatted(text: str) -> str:
    return ('<div style="white-space:pre-wrap;font-family:monospace;font-size:12px;max-height:16em;overflow:auto">'
            f"{html.escape(text)}</div>")
