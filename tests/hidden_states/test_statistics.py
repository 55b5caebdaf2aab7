"""statistics, spectra, massive: against plain computations on all tokens at once."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from dflash_lib.conversations.thoughts import ANSWER, PROMPT, THOUGHT
from dflash_lib.hidden_states import massive as massive_module
from dflash_lib.hidden_states import sampling, spectra
from dflash_lib.hidden_states.massive import find_massive, massive_channels, massive_share
from dflash_lib.hidden_states.sampling import choose_samples
from dflash_lib.hidden_states.schema import StoreError
from dflash_lib.hidden_states.spectra import covariance_spectra, effective_rank
from dflash_lib.hidden_states.statistics import collect_statistics
from dflash_lib.hidden_states.store import HiddenStateStore
from tests.hidden_states.rows import make_prepared, make_store, open_random_store

SAMPLES = [0, 1, 3, 4, 6, 7, 9, 10, 11]


@pytest.fixture(scope="module")
def store(tiny_llama, tmp_path_factory):
    return open_random_store(tiny_llama, tmp_path_factory.mktemp("states"))


@pytest.fixture(scope="module")
def found(tiny_llama, store):
    return collect_statistics(store, SAMPLES, tiny_llama.final_norm, tiny_llama.tokenizer)


@pytest.fixture(scope="module")
def whole(store):
    """One float64 [tokens, layers, hidden] a sample."""
    return [torch.cat([s.aux_hidden_states, s.last_hidden_state_prenorm[:, None]], 1).double()
            for s in map(store.read, SAMPLES)]


@pytest.fixture(scope="module")
def rest(whole):
    return torch.cat([states[1:] for states in whole])


def test_the_last_state_is_counted_where_it_is_stored(tiny_llama, tmp_path, store):
    for last_state, samples in (("none", [0, 3]), ("supervised", [0, 3, 5])):
        make_store(tmp_path / last_state, tiny_llama, make_prepared(tiny_llama), last_state=last_state)
        part = HiddenStateStore.open(tmp_path / last_state)
        found = collect_statistics(part, samples, tiny_llama.final_norm, tiny_llama.tokenizer)
        assert found.names == ["layer 1", "layer 3", "layer 4"]
        rows = [part.read(i) for i in samples]
        if last_state == "none":
            assert found.num_last_rows == found.before_norm.sum() == 0
            continue
        last = torch.cat([row.last_hidden_state_prenorm[row.last_rows > 0] for row in rows]).float()
        assert found.num_last_rows == len(last) > 0
        for values, shares in ((last, found.before_norm), (tiny_llama.final_norm(last), found.after_norm)):
            wanted = np.histogram(values.detach().abs().numpy(), found.magnitude_bins)[0]
            assert np.allclose(shares * values.numel(), wanted)


def test_too_few_tokens_are_refused(tiny_llama, store):
    with pytest.raises(StoreError, match="too few"):
        collect_statistics(store, [], tiny_llama.final_norm, tiny_llama.tokenizer)


def test_the_token_table_holds_plain_numbers_of_every_token(found, store, whole, rest):
    table, states = found.tokens, torch.cat(whole)
    assert found.names == ["layer 1", "layer 3", "layer 4", "last, pre-norm"]
    assert (found.num_samples, found.population, found.num_tokens) == (9, 12, len(rest))
    assert table.token.tolist() == [t for i in SAMPLES for t in store.read_tokens(i)[0]]
    assert table.position.tolist() == [p for states in whole for p in range(len(states))]
    assert table.sample.tolist() == [n for n, states in enumerate(whole) for _ in range(len(states))]
    mask = [m for i in SAMPLES for m in store.read_tokens(i)[1]]
    assert table.group.tolist() == [ANSWER if m else PROMPT for m in mask]
    assert np.allclose(table.norm, states.norm(dim=-1), rtol=1e-5)
    assert np.allclose(table.largest, states.abs().amax(-1), rtol=1e-6)
    assert np.allclose(table.median, states.abs().median(-1).values, rtol=1e-6)
    mean = rest.mean(0)
    assert np.allclose(table.drift, torch.cosine_similarity(states, mean, dim=-1), atol=1e-5)
    for token, layer in ((5, 0), (17, 2), (40, 3)):
        x = states[token, layer].numpy()
        assert table.kurtosis[token, layer] == pytest.approx(((x - x.mean()) ** 4).mean() / x.var() ** 2, rel=1e-4)


def test_medians_by_group_and_position(found, rest):
    table = found.tokens
    assert np.allclose(found.median("norm").value, np.median(rest.norm(dim=-1), axis=0), rtol=1e-5)
    assert np.allclose(found.median("norm", at_0=True).value, np.median(table.norm[table.position == 0], axis=0))
    chosen = (table.position > 0) & (table.group == PROMPT)
    assert np.allclose(found.median("kurtosis", "prompt").value, np.median(table.kurtosis[chosen], axis=0))
    chosen = (table.position > 0) & (table.group != PROMPT)
    assert np.allclose(found.median("drift", "supervised").value, np.median(table.drift[chosen], axis=0))
    assert np.isnan(found.median("norm", "thought").value).all() and not found.has_thoughts
    assert found.why_no_thoughts == "this target's chat template renders no thoughts"
    edges = found.position_edges
    assert edges[:6].tolist() == [0, 1, 2, 3, 4, 5] and (np.diff(edges) >= 1).all()
    assert edges[-2] <= table.position.max() < edges[-1]
    by_position = found.by_position("norm")
    for i, (low, high) in enumerate(zip(edges, edges[1:], strict=False)):
        here = (table.position >= low) & (table.position < high)
        if len(set(table.sample[here])) < 5:
            assert np.isnan(by_position.value[i]).all()
        else:
            assert np.allclose(by_position.value[i], np.median(table.norm[here], axis=0))


def test_thoughts_stand_apart(found):
    table = found.tokens
    group = np.where((table.group == ANSWER) & (table.position % 2 == 0), THOUGHT, table.group).astype(np.int8)
    thinking = replace(found, tokens=replace(table, group=group), has_thoughts=True)
    for name, code in (("thought", THOUGHT), ("answer", ANSWER)):
        chosen = (table.position > 0) & (group == code)
        assert np.allclose(thinking.median("norm", name).value, np.median(table.norm[chosen], axis=0))
    assert np.allclose(thinking.median("norm", "supervised").value, found.median("norm", "supervised").value)


def test_similarity_and_final_norm(found, rest, tiny_llama):
    unit = rest / rest.norm(dim=-1, keepdim=True)
    for k in range(4):
        wanted = [(unit[:, k] * unit[:, j]).sum(-1).mean() for j in range(4)]
        assert np.allclose(found.similarity.value[k], wanted, atol=1e-6)
    first, second, cosine, error = found.nearest_layers()
    aux = found.similarity.value[:3, :3] - np.eye(3)
    assert cosine == pytest.approx(aux.max()) and error > 0 and first != second
    normed = tiny_llama.final_norm(rest[:, -1].float())
    low, high = found.magnitude_bins[64], found.magnitude_bins[70]
    inside = float(((normed.abs() >= low) & (normed.abs() < high)).float().mean())
    assert found.after_norm[64:70].sum() == pytest.approx(inside, abs=1e-3) and inside > 0.1
    assert found.after_norm.sum() == pytest.approx(1, abs=1e-3)
    assert found.before_norm.sum() == pytest.approx(1, abs=1e-3)


def test_small_blocks_change_nothing(found, store, tiny_llama, monkeypatch):
    monkeypatch.setattr(sampling, "BLOCK_BYTES", 4 * 4 * 64 * 3)
    again = collect_statistics(store, SAMPLES, tiny_llama.final_norm, tiny_llama.tokenizer)
    assert np.allclose(again.tokens.kurtosis, found.tokens.kurtosis, rtol=1e-4)
    assert np.allclose(again.similarity.value, found.similarity.value, atol=1e-6)
    assert np.allclose(again.spectra.spectra, found.spectra.spectra, atol=1e-9)
    assert np.allclose(again.massive.at_0, found.massive.at_0)
    assert np.allclose(again.massive.elsewhere, found.massive.elsewhere, rtol=1e-6)
    assert np.allclose(again.before_norm, found.before_norm)


def check_spectra(got, rest, tolerance):
    for k in range(rest.shape[1]):
        spectrum = np.linalg.eigvalsh(np.cov(rest[:, k].numpy().T, bias=True))[::-1]
        assert np.allclose(got.spectra[k], spectrum / spectrum.sum(), atol=tolerance)
        assert got.rank_90[k] == next(n for n in range(1, 65) if spectrum[:n].sum() >= 0.9 * spectrum.sum())
        assert got.effective_rank.value[k] == pytest.approx(effective_rank(spectrum), rel=100 * tolerance)


def test_spectra_are_those_of_the_covariance(found, whole, rest):
    check_spectra(found.spectra, rest, 1e-8)
    assert found.spectra.num_tokens == len(rest)
    even = torch.cat([states[1:] for states in whole[::2]])
    for k in range(4):
        half = effective_rank(np.linalg.eigvalsh(np.cov(even[:, k].numpy().T, bias=True)))
        assert found.spectra.half_rank[k] == pytest.approx(half, rel=1e-6)


def test_spectra_of_wide_states_layer_by_layer_in_float32(store, rest, monkeypatch):
    monkeypatch.setattr(spectra, "BUDGET_BYTES", 1)
    monkeypatch.setattr(spectra, "MAX_FLOAT64", 32)
    check_spectra(covariance_spectra(store, SAMPLES, rest.mean(0), 12), rest, 1e-5)


def test_spectra_take_no_more_tokens_than_allowed(store, rest, monkeypatch):
    monkeypatch.setattr(spectra, "MAX_TOKENS", 100)
    got = covariance_spectra(store, SAMPLES, rest.mean(0), 12)
    used = spectra._within(store, SAMPLES)
    assert 1 <= len(used) < len(SAMPLES) and set(used) <= set(SAMPLES)
    assert got.num_tokens == sum(store.length(i) - 1 for i in used)
    check_spectra(got, torch.cat([torch.cat([s.aux_hidden_states, s.last_hidden_state_prenorm[:, None]], 1).double()[1:]
                                  for s in map(store.read, used)]), 1e-8)  # centred on their own mean


class Drawn:
    """A store of samples drawn from a known distribution: what `state_blocks` reads."""

    def __init__(self, samples):
        self.samples = samples

    def length(self, index):
        return len(self.samples[index])


def test_the_rank_error_is_how_ranks_scatter_between_draws(monkeypatch):
    """300 samples with directions of their own; the rank of 60 drawn ones, again and again."""
    generator = np.random.default_rng(0)
    scale = np.exp(-np.arange(12) / 4)
    population = []
    for _ in range(300):
        own = np.exp(generator.normal(0, 0.5, 12)) * scale  # what a sample varies in is its own
        population.append(torch.from_numpy(generator.normal(0, 1, (20, 1, 12)) * own))
    monkeypatch.setattr(spectra, "state_blocks", lambda store, indices: (
        (number, 0, store.samples[i]) for number, i in enumerate(indices)))
    ranks, errors = [], []
    for trial in range(60):
        indices = choose_samples(range(300), 60, seed=trial)
        mean = torch.cat([population[i][1:] for i in indices]).mean(0)
        got = covariance_spectra(Drawn(population), indices, mean, 300)
        ranks.append(got.effective_rank.value[0])
        errors.append(got.effective_rank.error[0])
    assert np.mean(errors) == pytest.approx(1.96 * np.std(ranks), rel=0.25)


def test_effective_rank_has_its_known_values():
    assert effective_rank(np.array([1.0, 1, 1, 1])) == pytest.approx(4)
    assert effective_rank(np.array([3.0, 0, 0])) == pytest.approx(1)
    assert effective_rank(np.array([1.0, 1, 0, -1e-12])) == pytest.approx(2)


def test_massive_activations_are_all_found(store, found, whole, monkeypatch):
    """Every value of at least the ratio times its token's and layer's median, by a loop; the ratio so small that many
    are."""
    monkeypatch.setattr(massive_module, "MASSIVE_RATIO", 5.0)
    monkeypatch.setattr(massive_module, "NUM_CHANNELS", 64)
    got = find_massive(store, SAMPLES, found.tokens.median)
    wanted, states = set(), torch.cat(whole)
    for token in range(len(states)):
        for layer in range(4):
            x = states[token, layer].abs()
            limit = 5.0 * float(x.median())
            wanted |= {(token, layer, c) for c in range(64) if float(x[c]) >= limit * (1 - 1e-6)}
    assert {*zip(got.token.tolist(), got.layer.tolist(), got.channel.tolist(), strict=True)} == wanted
    assert len(wanted) > 10
    assert np.allclose(got.value, states[got.token, got.layer, got.channel], rtol=1e-6)
    first = torch.stack([states[0] for states in whole])
    assert np.allclose(got.at_0, first.median(dim=0).values)
    assert np.allclose(got.elsewhere, torch.cat([s[1:] for s in whole]).square().mean(0).sqrt(), rtol=1e-5)


def test_the_table_says_which_channels_positions_and_tokens(store, found, monkeypatch):
    monkeypatch.setattr(massive_module, "MASSIVE_RATIO", 4.0)
    statistics = replace(found, massive=find_massive(store, SAMPLES, found.tokens.median))
    massive, table = statistics.massive, statistics.tokens
    rows = massive_channels(statistics, str, num=2)
    assert [row.layer for row in rows] == [name for name in found.names for _ in range(2)]
    for layer, name in enumerate(found.names):
        row = next(row for row in rows if row.layer == name)
        times = Counter(massive.channel[massive.layer == layer].tolist())
        assert times[row.channel] == max(times.values())
        events = [int(t) for t, k, c in zip(massive.token, massive.layer, massive.channel, strict=True)
                  if (k, c) == (layer, row.channel)]
        later = [t for t in events if table.position[t] > 0]
        assert row.share_elsewhere == pytest.approx(len(later) / found.num_tokens)
        assert row.share_at_0 == pytest.approx((len(events) - len(later)) / 9)
        if later:
            token, count = Counter(table.token[later].tolist()).most_common(1)[0]
            in_all = sum(t == token and p > 0 for t, p in zip(table.token, table.position, strict=True))
            assert row.tokens.startswith(f"'{token}' ({count} of {in_all})")
            position, count = Counter(table.position[later].tolist()).most_common(1)[0]
            assert row.positions.startswith(f"{position} ({count})")
    assert any(row.share_elsewhere > 0 for row in rows)
    shares = massive_share(statistics)
    at_0 = {(int(t), int(k)) for t, k in zip(massive.token, massive.layer, strict=True) if table.position[t] == 0}
    assert np.allclose(shares[0], [sum(k == layer for _, k in at_0) / 9 for layer in range(4)])


def test_a_layer_without_massive_values_shows_its_largest_channels(found):
    none = replace(found.massive, **{name: getattr(found.massive, name)[:0]
                                     for name in ("token", "layer", "channel", "value")})
    rows = massive_channels(replace(found, massive=none), str, num=3)
    for layer in range(4):
        mine = [row.channel for row in rows if row.layer == found.names[layer]]
        assert mine == np.argsort(-np.abs(found.massive.at_0[layer]), kind="stable")[:3].tolist()
    assert all(row.tokens == row.positions == "" for row in rows)
