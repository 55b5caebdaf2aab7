"""sampling: which samples are drawn, blocks that join to the samples, and errors that hold as often as they say."""

import numpy as np
import pytest
import torch

from dflash_lib.hidden_states import sampling
from dflash_lib.hidden_states.sampling import (
    SampleBootstrap,
    choose_samples,
    interval_factor,
    state_blocks,
    state_names,
)
from dflash_lib.hidden_states.store import HiddenStateStore
from tests.hidden_states.rows import make_prepared, make_store, open_random_store


@pytest.fixture(scope="module")
def store(tiny_llama, tmp_path_factory):
    return open_random_store(tiny_llama, tmp_path_factory.mktemp("states"))


@pytest.mark.parametrize("last_state", ["none", "supervised"])
def test_without_every_tokens_last_state_there_are_the_tapped_layers(tiny_llama, tmp_path, last_state):
    make_store(tmp_path / "store", tiny_llama, make_prepared(tiny_llama), last_state=last_state)
    store = HiddenStateStore.open(tmp_path / "store")
    assert state_names(store) == ["layer 1", "layer 3", "layer 4"]
    for number, start, states in state_blocks(store, [4, 7]):
        assert start == 0 and torch.equal(states, store.read([4, 7][number]).aux_hidden_states.float())


def test_samples_are_drawn_at_random_and_with_a_seed():
    indices = list(range(10, 1010))
    drawn = choose_samples(indices, 40, seed=1)
    assert drawn == sorted(set(drawn)) and len(drawn) == 40 and set(drawn) <= set(indices)
    assert drawn == choose_samples(indices, 40, seed=1) != choose_samples(indices, 40, seed=2)
    assert choose_samples([9, 4], 5) == [4, 9]
    mean = np.mean([np.mean(choose_samples(indices, 40, seed=seed)) for seed in range(200)])
    assert mean == pytest.approx(509.5, abs=15), "every sample has the same chance"


@pytest.mark.parametrize("tokens_a_block", [1, 7, 1000])
def test_blocks_join_to_the_samples(store, monkeypatch, tokens_a_block):
    monkeypatch.setattr(sampling, "BLOCK_BYTES", 4 * 4 * 64 * tokens_a_block)
    joined = {}
    for number, start, states in state_blocks(store, [3, 8]):
        assert len(states) <= tokens_a_block and start == sum(map(len, joined.get(number, [])))
        joined.setdefault(number, []).append(states)
    for number, index in enumerate([3, 8]):
        sample = store.read(index)
        whole = torch.cat([sample.aux_hidden_states, sample.last_hidden_state_prenorm[:, None]], dim=1).float()
        assert torch.equal(torch.cat(joined[number]), whole)


def make_population(generator, num):
    """Samples whose tokens are alike: (values, owner) of lognormal tokens around each sample's own level."""
    lengths = generator.integers(5, 60, num)
    level = generator.normal(0, 1, num)
    owner = np.repeat(np.arange(num), lengths)
    return np.exp(level[owner] + generator.normal(0, 0.5, len(owner))), owner


@pytest.mark.parametrize("num_samples", [8, 30, 300])
def test_the_stated_error_covers_the_truth_as_often_as_it_says(num_samples):
    """95 % intervals of a median, a share and a mean, of 400 samples with tokens alike within each."""
    values, owner = make_population(np.random.default_rng(0), 400)
    truth = {"median": np.median(values), "share": (values > 2).mean(), "mean": np.log(values).mean()}
    starts = np.searchsorted(owner, np.arange(401))
    covered, trials = dict.fromkeys([*truth, "tokens on their own"], 0), 120
    for trial in range(trials):
        drawn = choose_samples(range(400), num_samples, seed=trial)
        tokens = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in drawn])
        looked_at = values[tokens][:, None]
        sample_of = np.repeat(np.arange(num_samples), [starts[i + 1] - starts[i] for i in drawn])
        bootstrap = SampleBootstrap(sample_of, num_samples, 400, seed=trial, num_resamples=80)
        found = {"median": bootstrap.median(looked_at), "share": bootstrap.share(looked_at > 2),
                 "mean": bootstrap.mean(np.log(looked_at))}
        for name, estimate in found.items():
            covered[name] += int(estimate.low[0] <= truth[name] <= estimate.high[0])
        alone = 1.96 * np.log(looked_at).std() / np.sqrt(len(tokens)) * np.sqrt(1 - num_samples / 400)
        covered["tokens on their own"] += int(abs(found["mean"].value[0] - truth["mean"]) < alone)
    for name in truth:
        assert 0.87 <= covered[name] / trials, name
    assert covered["tokens on their own"] / trials < 0.6, "what drawing whole samples is about"


def test_intervals_are_as_wide_as_estimates_scatter():
    """Not only wide enough: their half width is about 1.96 standard deviations of the estimate over many draws."""
    values, owner = make_population(np.random.default_rng(4), 400)
    starts = np.searchsorted(owner, np.arange(401))
    found = []
    for trial in range(100):
        drawn = choose_samples(range(400), 40, seed=trial)
        tokens = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in drawn])
        sample_of = np.repeat(np.arange(40), [starts[i + 1] - starts[i] for i in drawn])
        found.append(SampleBootstrap(sample_of, 40, 400, seed=trial).mean(np.log(values[tokens])[:, None]))
    assert np.mean([f.error for f in found]) == pytest.approx(1.96 * np.std([f.value for f in found]), rel=0.2)


def test_a_whole_store_leaves_no_error_and_one_sample_says_nothing():
    values, owner = make_population(np.random.default_rng(1), 12)
    whole = SampleBootstrap(owner, 12, 12).median(values[:, None])
    assert whole.low == whole.high == whole.value == np.median(values)
    first = owner == 0
    alone = SampleBootstrap(owner[first], 1, 12).median(values[first][:, None])
    assert alone.value == np.median(values[first]) and np.isnan(alone.low).all() and np.isnan(alone.high).all()
    assert "nan" in alone.text()[0]


def test_the_factor_is_students_t_for_few_samples():
    for num, t in ((8, 2.365), (21, 2.086), (61, 2.000)):
        assert interval_factor(num, 10**9) * 1.96 == pytest.approx(t * np.sqrt(num / (num - 1)), rel=0.005)
    assert interval_factor(50, 100) == pytest.approx(interval_factor(50, 10**9) * np.sqrt(0.5), rel=1e-6)


def test_estimates_are_the_plain_figures():
    values, owner = make_population(np.random.default_rng(2), 9)
    columns = np.stack([values, -values], axis=1)
    bootstrap = SampleBootstrap(owner, 9, 100)
    assert np.allclose(bootstrap.median(columns).value, [np.median(values), np.median(-values)])
    assert np.allclose(bootstrap.mean(columns).value, [values.mean(), -values.mean()])
    where = owner % 2 == 0
    assert np.allclose(bootstrap.median(columns, where).value, np.median(columns[where], axis=0))
    assert np.isnan(bootstrap.median(columns, owner < 4).value).all(), "fewer than five samples are too few"


def test_the_bootstrap_resamples_whole_samples():
    """The resampled medians are those of the drawn samples' tokens, each sample as often as it was drawn."""
    values, owner = make_population(np.random.default_rng(3), 6)
    bootstrap = SampleBootstrap(owner, 6, 10**9, num_resamples=50)
    slow = []
    for counts in bootstrap.counts:
        drawn = np.sort(np.concatenate([np.tile(values[owner == i], counts[i]) for i in range(6)]))
        slow.append(drawn[(len(drawn) - 1) // 2])
    low, high = np.percentile(slow, [2.5, 97.5])
    found, factor = bootstrap.median(values[:, None]), interval_factor(6, 10**9)
    assert found.low[0] == pytest.approx(found.value[0] - factor * (found.value[0] - low))
    assert found.high[0] == pytest.approx(found.value[0] + factor * (high - found.value[0]))


def test_no_event_in_many_tokens_is_not_certainty():
    owner = np.repeat(np.arange(10), 30)
    none, all_of_them = np.zeros((300, 1), bool), np.ones((300, 1), bool)
    found = SampleBootstrap(owner, 10, 50).share(none)
    assert found.value == 0 and found.high == pytest.approx(3 / 300)
    assert SampleBootstrap(owner, 10, 10).share(none).high == 0, "nothing is left to chance"
    assert SampleBootstrap(owner, 10, 50).share(all_of_them).low == 1
