"""encoding_costs and logit_lens: against the target's own forward, one token and one layer at a time."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from dflash_lib.hidden_states import encoding_costs as costs_module
from dflash_lib.hidden_states.encoding_costs import WAYS, encoding_costs, recomputed_error, zstd_bytes_per_token
from dflash_lib.hidden_states.logit_lens import logit_lens
from dflash_lib.hidden_states.schema import to_raw
from dflash_lib.hidden_states.store import HiddenStateStore
from dflash_lib.target.loading import load_target
from tests.hidden_states.rows import make_prepared, make_store

IDS = [1, 3, 4]


@pytest.fixture(scope="module")
def rows(tiny_llama):
    prepared = make_prepared(tiny_llama)
    return [prepared.row(i)[0].tolist() for i in range(6)]


@pytest.fixture(scope="module")
def costs(tiny_llama, rows):
    return encoding_costs(tiny_llama, rows, IDS, population=50)


def all_states(target, row):
    """[T, embedding and layers, H] of HF's own forward, the last one raw; and logits [T, vocabulary]."""
    kept = []
    handle = target.layers[-1].register_forward_hook(lambda _m, _a, out: kept.append(
        out[0] if isinstance(out, tuple) else out))
    try:
        with torch.no_grad():
            output = target.model(torch.tensor([row]), output_hidden_states=True)
    finally:
        handle.remove()
    return torch.stack([*output.hidden_states[:-1], kept[0]], dim=2)[0], output.logits[0]


def e4m3(x):
    """Nearest e4m3 value of a float, ties to even, by the format's definition: 3 mantissa bits, exponents -6 to 8."""
    if x == 0:
        return 0.0
    step = 2.0 ** (max(math.floor(math.log2(abs(x))), -6) - 3)
    return round(x / step) * step


def slowly(name, states):
    """One token's states [K, H] (float64) as the encoding keeps them, number by number."""
    if name == "bf16":
        return states.float().bfloat16().double()
    if name == "fp16":
        return torch.from_numpy(states.numpy().astype(np.float16).astype(np.float64))
    largest = [float(states.abs().max())] * len(states) if name == "fp8, one scale" else [
        float(layer.abs().max()) for layer in states]
    code = 448 if name == "fp8, one scale" else 240  # ours stays below what HDF5 would show as infinity
    return torch.tensor([[e4m3(float(x) / (top / code)) * (top / code) for x in layer]
                         for layer, top in zip(states, largest, strict=True)], dtype=torch.float64)


@pytest.mark.parametrize("name", list(WAYS))
def test_errors_are_those_of_the_format(tiny_llama, rows, costs, name):
    errors, at_0 = [], []
    for row in rows[:2]:
        states = all_states(tiny_llama, row)[0][:, [2, 4, 5, 6]].double()
        for position in range(min(len(row), 6)):
            kept = slowly(name, states[position])
            errors.append((position, (kept - states[position]).norm(dim=-1) / states[position].norm(dim=-1)))
    cost = encoding_costs(tiny_llama, [row[:6] for row in rows[:2]], IDS, population=50)[name]
    wanted = np.median(np.stack([e for p, e in errors if p > 0]), axis=0)
    at_0 = np.median(np.stack([e for p, e in errors if p == 0]), axis=0)
    assert np.allclose(cost.errors.value, wanted, rtol=0.03)
    assert np.allclose(cost.at_0, at_0, rtol=0.03)


def test_top_1_tokens_that_change_are_counted(tiny_llama, rows, costs):
    for name, way in WAYS.items():
        changed, tokens = 0, 0
        for row in rows:
            states, logits = all_states(tiny_llama, row)
            kept = way.through(states[:, [2, 4, 5, 6]].float())[:, -1]
            for position in range(1, len(row)):
                chosen = int(tiny_llama.head(tiny_llama.final_norm(kept[position])).argmax())
                changed += int(logits[position, chosen] < logits[position].max())
                tokens += 1
        assert costs[name].changed.value == pytest.approx(changed / tokens)
        assert costs.num_tokens == tokens
    assert costs["fp8, one scale"].changed.value >= costs["bf16"].changed.value


def test_what_overflows_float16_is_counted(tiny_llama, rows, monkeypatch):
    """Channels above 65,504, as massive activations of large targets are, planted by a way that scales."""
    way = WAYS["fp16"]
    monkeypatch.setitem(costs_module.WAYS, "fp16", costs_module._Way(
        lambda states: way.through(states * (65_504 / states.abs().max()) * 1.01), way.bytes_per_token))
    found = encoding_costs(tiny_llama, rows[:1], IDS, population=50)
    assert found["fp16"].infinite >= 1 and found["bf16"].infinite == 0


def test_bf16_costs_nothing_where_the_target_computes_in_it(tiny_llama_folder, rows):
    found = encoding_costs(load_target(tiny_llama_folder, "bfloat16"), rows, IDS, population=50)
    assert found.computed_in == "bfloat16"
    assert (found["bf16"].errors.value == 0).all() and found["bf16"].changed.value == 0
    assert (found["fp8, a scale per layer"].errors.value > 0.01).all()


def test_bytes_of_a_token(costs, rows, tiny_llama):
    assert [cost.bytes_per_token for cost in costs.costs] == [512, 512, 3 * 68 + 128, 4 * 64 + 4]
    alike = [np.full((400, 4, 64), 0x3F80, np.uint16)]
    assert zstd_bytes_per_token(alike) < 30
    noise = [np.random.default_rng(0).integers(0, 2**16, (400, 4, 64)).astype(np.uint16)]
    assert 500 < zstd_bytes_per_token(noise) < 540
    states = torch.cat([all_states(tiny_llama, row)[0][:, [2, 4, 5, 6]] for row in rows])
    assert costs.zstd_bytes_per_token == pytest.approx(zstd_bytes_per_token([to_raw(states.bfloat16())]), rel=0.02)


def test_stored_states_are_found_to_be_the_targets_own_or_not(tiny_llama, tmp_path):
    make_store(tmp_path / "store", tiny_llama, make_prepared(tiny_llama))
    store = HiddenStateStore.open(tmp_path / "store")
    assert 0.0005 < recomputed_error(tiny_llama, store, [2, 5]) < 0.004, "bf16"
    shifted = HiddenStateStore(store.folder, replace(store.plan, target_layer_ids=[0, 2, 3]), store.shards)
    assert recomputed_error(tiny_llama, shifted, [2, 5]) > 0.12


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_qwen3_5"])
def test_the_lens_reads_every_layer(request, rows, family):
    """Slowly: for each token and layer the head over the normed state of HF's own output."""
    target = request.getfixturevalue(family)
    found = logit_lens(target, rows, population=50, max_tokens=1000)
    agree, repeat, cosine = [], [], []
    for row in rows:
        states, logits = all_states(target, row)
        for position in range(1, len(row)):
            outputs = states[position, 1:]
            tops = [int(target.head(target.final_norm(state)).argmax()) for state in outputs]
            agree.append([top == int(logits[position].argmax()) for top in tops])
            repeat.append([top == row[position] for top in tops])
            cosine.append(torch.cosine_similarity(outputs[:-1], outputs[1:], dim=-1).numpy())
    assert found.num_tokens == len(agree) and found.num_samples == 6
    assert np.allclose(found.agreement.value, np.mean(agree, axis=0), atol=0.02)
    assert np.allclose(found.repeats.value, np.mean(repeat, axis=0), atol=0.02)
    assert np.allclose(found.step.value, np.mean(cosine, axis=0), atol=1e-4)
    assert found.agreement.value[-1] == 1 and found.agreement.low[-1] == 1
    first = found.first_layer(0.5)
    assert (found.agreement.value[first:] >= 0.5).all() and (first == 0 or found.agreement.value[first - 1] < 0.5)


def test_the_lens_takes_few_positions_of_long_rows(tiny_llama, rows):
    found = logit_lens(tiny_llama, rows, population=50, max_tokens=3, seed=1)
    assert found.num_tokens == sum(min(3, len(row) - 1) for row in rows)
    cut = logit_lens(tiny_llama, [row[:5] for row in rows], population=50)
    assert np.array_equal(logit_lens(tiny_llama, rows, population=50, max_length=5).agreement.value,
                          cut.agreement.value)
