"""statistics: against plain computations on all tokens at once."""

import numpy as np
import pytest
import torch

from dflash_lib.hidden_states.schema import StoreError
from dflash_lib.hidden_states.statistics import collect_statistics, effective_rank, spread_indices
from dflash_lib.hidden_states.store import HiddenStateStore
from tests.hidden_states.rows import make_prepared, make_store


@pytest.fixture(scope="module")
def store(tiny_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("states") / "store"
    make_store(folder, tiny_llama, make_prepared(tiny_llama))
    return HiddenStateStore.open(folder)


@pytest.fixture(scope="module")
def all_states(store):
    """[tokens without position 0, layers, hidden] float64 and [samples, layers, hidden] of position 0."""
    samples = [store.read(i) for i in range(12)]
    states = [torch.cat([s.aux_hidden_states, s.last_hidden_state_prenorm[:, None]], 1).double() for s in samples]
    return torch.cat([s[1:] for s in states]), torch.stack([s[0] for s in states])


def test_a_store_without_last_states_or_tokens_is_refused(tiny_llama, tmp_path, store):
    make_store(tmp_path / "store", tiny_llama, make_prepared(tiny_llama), last=False)
    with pytest.raises(StoreError, match="without the last hidden state"):
        collect_statistics(HiddenStateStore.open(tmp_path / "store"), [0], tiny_llama.final_norm)
    with pytest.raises(StoreError, match="too few"):
        collect_statistics(store, [], tiny_llama.final_norm)


def test_figures_equal_plain_computations(tiny_llama, store, all_states):
    rest, first = all_states
    found = collect_statistics(store, range(12), tiny_llama.final_norm)
    assert found.names == ["layer 1", "layer 3", "layer 4", "last, pre-norm"]
    assert (found.num_samples, found.num_tokens) == (12, len(rest))
    assert np.allclose(found.norms, rest.norm(dim=-1), rtol=1e-5)
    assert np.allclose(found.norms_at_0, first.norm(dim=-1), rtol=1e-5)
    unit = rest / rest.norm(dim=-1, keepdim=True)
    for k in range(4):
        assert np.allclose(found.similarity[k], [(unit[:, k] * unit[:, j]).sum(-1).mean() for j in range(4)], atol=1e-6)
        spectrum = np.linalg.eigvalsh(np.cov(rest[:, k].numpy().T, bias=True))[::-1]
        assert np.allclose(found.spectra[k], spectrum / spectrum.sum(), atol=1e-8)
        assert found.rank_90[k] == next(n for n in range(1, 65) if spectrum[:n].sum() >= 0.9 * spectrum.sum())
    assert np.allclose(found.median_magnitude, rest.abs().median(dim=-1).values.median(dim=0).values, rtol=1e-5)
    assert np.allclose(found.largest_at_0, first.abs().amax(-1).median(dim=0).values, rtol=1e-5)
    normed = tiny_llama.final_norm(rest[:, -1].float())
    low, high = found.magnitude_bins[64], found.magnitude_bins[70]
    inside = float(((normed.abs() >= low) & (normed.abs() < high)).float().mean())
    assert found.after_norm[64:70].sum() == pytest.approx(inside, abs=1e-3) and inside > 0.1
    assert found.after_norm.sum() == pytest.approx(1, abs=1e-3)
    assert found.before_norm.sum() == pytest.approx(1, abs=1e-3)


def test_norms_by_position_are_medians_over_samples(tiny_llama, store):
    found = collect_statistics(store, range(12), tiny_llama.final_norm)
    reach = [sum(length > p for length in store.lengths()) for p in range(128)]
    for position, num in enumerate(reach):
        assert np.isnan(found.norm_by_position[position]).all() == (num < 5)
    values = [float(store.read(i).aux_hidden_states[3, 0].float().norm()) for i in range(12) if store.length(i) > 3]
    assert found.norm_by_position[3, 0] == pytest.approx(float(torch.tensor(values).median()))


def test_massive_channels_are_found(tiny_llama, store):
    """The largest channels of the median state at position 0, by name and number."""
    found = collect_statistics(store, range(12), tiny_llama.final_norm).massive
    first = torch.stack([store.read(i).aux_hidden_states[0, 1].float() for i in range(12)]).median(dim=0).values
    ours = [m for m in found if m.layer == "layer 3"]
    assert [m.channel for m in ours] == first.abs().topk(3).indices.tolist()
    assert ours[0].at_0 == pytest.approx(float(first[ours[0].channel]))


def test_effective_rank_has_its_known_values():
    assert effective_rank(np.array([1.0, 1, 1, 1])) == pytest.approx(4)
    assert effective_rank(np.array([3.0, 0, 0])) == pytest.approx(1)
    assert effective_rank(np.array([1.0, 1, 0, -1e-12])) == pytest.approx(2)


def test_indices_are_spread_over_the_store():
    assert spread_indices(list(range(100)), 5) == [0, 24, 49, 74, 99]
    assert spread_indices([4, 9], 5) == [4, 9]
