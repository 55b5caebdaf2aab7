"""figures_statistics, figures_probes, explorer, and the table: each shows the numbers that it was given."""

import re
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from dflash_lib.conversations.thoughts import THOUGHT
from dflash_lib.hidden_states.encoding_costs import WAYS, encoding_costs
from dflash_lib.hidden_states.logit_lens import logit_lens
from dflash_lib.hidden_states.massive import massive_channels, massive_share
from dflash_lib.hidden_states.schema import StoreError
from dflash_lib.hidden_states.statistics import collect_statistics
from dflash_lib.hidden_states.statistics_table import COLUMNS, statistics_table, write_table
from dflash_lib.report import figures_probes as probes
from dflash_lib.report import figures_statistics as figures
from dflash_lib.report.explorer import ONE_LAYER, ONE_SAMPLE, Explorer, explore
from tests.hidden_states.rows import open_random_store
from tests.report.test_figures_states import named_axes

IDS = [1, 3, 4]


@pytest.fixture(scope="module")
def store(tiny_llama, tmp_path_factory):
    return open_random_store(tiny_llama, tmp_path_factory.mktemp("states"))


@pytest.fixture(scope="module")
def statistics(store, tiny_llama):
    return collect_statistics(store, store.sample_indices[::2], tiny_llama.final_norm, tiny_llama.tokenizer)


@pytest.fixture(scope="module")
def thinking(statistics):
    table = statistics.tokens
    group = np.where((table.group > 0) & (table.position % 2 == 0), THOUGHT, table.group).astype(np.int8)
    return replace(statistics, tokens=replace(table, group=group), has_thoughts=True)


@pytest.fixture(scope="module")
def channels(statistics):
    return massive_channels(statistics, str)


@pytest.fixture(scope="module")
def rows(store, statistics):
    return [store.read_tokens(i)[0].tolist() for i in statistics.samples]


@pytest.fixture(scope="module")
def costs(tiny_llama, rows):
    return encoding_costs(tiny_llama, rows, IDS, 12)


@pytest.fixture(scope="module")
def lens(tiny_llama, rows):
    return logit_lens(tiny_llama, rows, 12)


def points(axis, name):
    return next(np.asarray(line.get_ydata()) for line in axis.lines if line.get_label() == name)


def test_norms_and_tails(statistics):
    axes = named_axes(figures.norms_figure(statistics), 3)
    for axis, quantity in zip(axes, ("norm", "peak", "kurtosis"), strict=True):
        assert np.allclose(points(axis, "median token"), statistics.median(quantity).value)
        assert np.allclose(points(axis, "position 0"), statistics.median(quantity, at_0=True).value)
    assert points(axes[2], "normal distribution").tolist() == [3, 3]


def test_drift_shows_each_layer_by_position(statistics):
    left, right = named_axes(figures.drift_figure(statistics), 2)
    for axis, quantity in ((left, "norm"), (right, "drift")):
        found = statistics.by_position(quantity)
        for k, name in enumerate(statistics.names):
            assert np.allclose(points(axis, name), found.value[:, k], equal_nan=True)
    middle = left.lines[0].get_xdata()
    assert middle[:4].tolist() == [0, 1, 2, 3]


def test_massive_names_its_channels_and_positions(statistics, channels):
    left, right = named_axes(figures.massive_figure(statistics, channels), 2)
    assert [text.get_text() for text in left.texts] == [str(channel.channel) for channel in channels]
    assert [bar.get_height() for bar in left.patches] == pytest.approx([abs(channel.at_0) for channel in channels])
    image = np.ma.filled(right.collections[0].get_array().astype(float), np.nan)
    assert np.allclose(image, 100 * massive_share(statistics).T, equal_nan=True)


def test_groups_say_why_there_are_no_thoughts(statistics, thinking):
    figure = figures.groups_figure(statistics)
    named_axes(figure, 3)
    legend = figure.legends[0]
    assert [text.get_text() for text in legend.get_texts()] == ["prompt tokens", "supervised tokens"]
    assert "renders no thoughts" in legend.get_title().get_text()
    figure = figures.groups_figure(thinking)
    axes, legend = named_axes(figure, 3), figure.legends[0]
    assert [text.get_text() for text in legend.get_texts()] == ["prompt tokens", "thought tokens", "answer tokens"]
    assert legend.get_title().get_text() == ""
    relative = thinking.median("norm", "thought").value / thinking.median("norm").value
    assert np.allclose(points(axes[0], "thought tokens"), relative, equal_nan=True)
    assert np.allclose(points(axes[2], "prompt tokens"), thinking.median("drift", "prompt").value)


def test_similarity_rank_and_final_norm(statistics):
    axis, = named_axes(figures.similarity_figure(statistics), 1)
    assert [text.get_text() for text in axis.texts] == [f"{v:.2f}" for v in statistics.similarity.value.ravel()]
    left, right = named_axes(figures.rank_figure(statistics), 2)
    rank = statistics.spectra.effective_rank
    assert [bar.get_width() for bar in right.patches] == pytest.approx(list(rank.value))
    assert [text.get_text().strip() for text in right.texts] == rank.text()
    assert np.allclose(right.lines[0].get_xdata(), statistics.spectra.half_rank)
    assert np.allclose(left.lines[0].get_ydata()[-1], 100)
    named_axes(figures.final_norm_figure(statistics), 1)


def test_encodings_and_lens(statistics, costs, lens):
    left, right = named_axes(probes.encodings_figure(costs), 2)
    for cost in costs.costs:
        assert np.allclose(points(left, cost.name), np.maximum(cost.errors.value, probes.FLOOR))
    assert [bar.get_width() for bar in right.patches] == pytest.approx([100 * float(c.changed.value) for c in
                                                                        costs.costs])
    left, right = named_axes(probes.lens_figure(lens, IDS), 2)
    assert np.allclose(points(left, "reads the target's own next token"), 100 * lens.agreement.value)
    tapped = next(line for line in left.lines if line.get_label().startswith("tapped"))
    assert list(tapped.get_xdata()) == IDS
    assert np.allclose(tapped.get_ydata(), 100 * lens.agreement.value[IDS])
    assert right.lines[0].get_xdata().tolist() == [1, 2, 3, 4, 5]


def test_one_sample_and_one_layer(store, statistics, thinking, tiny_llama):
    explorer = Explorer(statistics, store, tiny_llama.tokenizer)
    upper, lower = explorer.draw(ONE_SAMPLE, 4, 1, 7, log_scale=False).axes
    states = store.read(4).aux_hidden_states[:, 1].float().numpy()
    assert np.allclose(points(upper, "norm"), np.linalg.norm(states, axis=-1))
    assert np.allclose(points(lower, "|channel 7|"), np.abs(states[:, 7])) and upper.get_yscale() == "linear"
    upper, lower = explorer.draw(ONE_SAMPLE, 6, 3, 0, log_scale=True).axes
    last = store.read(6).last_hidden_state_prenorm.float().numpy()
    assert np.allclose(points(upper, "norm"), np.linalg.norm(last, axis=-1)) and upper.get_yscale() == "log"
    axes = named_axes(Explorer(thinking, store, tiny_llama.tokenizer).draw(ONE_LAYER, 4, 2, 0, True), 1)
    groups = thinking.tokens.group[thinking.tokens.rest]
    assert [patch.get_data().values.sum() for patch in axes[0].patches] == [int((groups == g).sum()) for g in range(3)]
    assert [t.get_text() for t in axes[0].get_legend().get_texts()] == ["prompt", "answer", "thought"]
    with pytest.raises(StoreError, match="no sample 999"):
        explorer.draw(ONE_SAMPLE, 999, 0, 0, True)


def test_controls_change_the_figure(store, statistics, channels, tiny_llama):
    pytest.importorskip("ipywidgets")
    box = explore(Explorer(statistics, store, tiny_llama.tokenizer), channels, live=True)
    switches, choices, image, text = box.children
    (view, log_scale), (layer, sample, channel) = switches.children, choices.children
    seen = {bytes(image.value)}
    assert all(value.startswith(b"\x89PNG") for value in seen) and channel.value == channels[2 * 3].channel
    assert sample.options[0] == (f"sample {statistics.samples[0]}", statistics.samples[0])
    for control, value in ((sample, statistics.samples[2]), (channel, 63), (log_scale, False), (view, ONE_LAYER)):
        control.value = value
        assert bytes(image.value) not in seen, control.description
        seen.add(bytes(image.value))
    assert sample.disabled and channel.disabled and text.value == ""
    view.value = ONE_SAMPLE
    ids = store.read_tokens(statistics.samples[2])[0].tolist()
    words = [word for word in re.findall(r"[a-z]{3,}", tiny_llama.tokenizer.decode(ids))]
    assert not sample.disabled and all(word in text.value for word in words)
    layer.value = 3
    assert channel.value == channels[3 * 3].channel, "the channel follows the layer"


def test_where_nobody_watches_there_is_a_figure_and_no_control(store, statistics, channels, tiny_llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    explorer = Explorer(statistics, store, tiny_llama.tokenizer)
    assert explore(explorer, channels, save=lambda figure: len(figure.axes)) == 2
    with pytest.raises(ImportError, match="pip install ipywidgets"):
        explore(explorer, channels, live=True)


def test_the_table_is_small_and_holds_every_figure(statistics, channels, costs, lens, tmp_path):
    path = tmp_path / "statistics" / "statistics.parquet"
    write_table(path, statistics_table(statistics, channels, costs, lens))
    assert path.stat().st_size < 200_000 and [p.name for p in path.parent.iterdir()] == [path.name]
    table = pd.read_parquet(path)
    assert tuple(table.columns) == COLUMNS

    def value(quantity, layer, of="", position=-1, channel=-1, column="value"):
        found = table.query("quantity == @quantity and layer == @layer and of == @of and position == @position "
                            "and channel == @channel")[column]
        assert len(found) == 1, f"{quantity}, {layer}, {of}"
        return found.item()

    norm = statistics.median("norm")
    assert value("norm", "layer 3") == norm.value[1] and value("norm", "layer 3", column="high") == norm.high[1]
    assert value("kurtosis", "layer 4", position=0) == statistics.median("kurtosis", at_0=True).value[2]
    assert value("norm", "layer 1", "supervised") == statistics.median("norm", "supervised").value[0]
    assert value("cosine", "layer 1", "layer 4") == statistics.similarity.value[0, 2]
    assert value("cosine to the mean state", "layer 1", "by position", 3) == statistics.by_position("drift").value[3, 0]
    assert value("share of variance up to this direction", "layer 1", channel=64) == pytest.approx(1)
    for name in WAYS:
        assert value("relative error of storage", "layer 4", name) == costs[name].errors.value[2]
        assert value("bytes a token", "", name) == costs[name].bytes_per_token
    assert value("logit lens: the target's top-1", "layer 5") == 1
    assert value("logit lens: the token itself", "layer 2") == lens.repeats.value[2]
    row = channels[0]
    assert value("share with this channel massive", row.layer, channel=row.channel) == row.share_elsewhere
