"""parity: errors per token with position 0 apart, against plain loops and planted faults."""

import numpy as np
import pytest
import torch

from dflash_lib.hidden_states.parity import (
    compare_rounded,
    compare_states,
    compare_with_reference,
    find_reference,
    layer_alignment,
    padding_errors,
    read_reference,
    reference_agreements,
    relative_errors,
    token_alignment,
)
from dflash_lib.target.loading import load_target
from tests.conftest import DATA

REFERENCE = DATA / "vllm_reference"


def test_errors_are_per_token():
    a, b = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    errors = relative_errors(a, b)
    for i in range(3):
        for j in range(5):
            assert errors[i, j] == pytest.approx(float(torch.dist(a[i, j], b[i, j]) / b[i, j].norm()), rel=1e-5)


def test_a_state_of_zeros_equals_itself_and_nothing_else():
    """Gated DeltaNet leaves a zero embedding zero through its layers: 0 / 0 would hide what else differs."""
    assert relative_errors(torch.zeros(2, 4), torch.tensor([[0.0] * 4, [1.0] * 4])).tolist() == [0, 1]
    assert relative_errors(torch.ones(1, 4), torch.zeros(1, 4)).tolist() == [float("inf")]


def test_position_0_hides_a_shift_from_one_norm_and_not_from_the_agreement():
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(20, 4, 8, generator=generator) for _ in range(2)]
    for prompt in states:
        prompt[0] = 1000.0  # massive, and the same in every layer
    noisy = [prompt + 0.01 * torch.randn(20, 4, 8, generator=generator) for prompt in states]
    agreement = compare_states(noisy, states)
    assert agreement.errors.shape == (38, 4) and agreement.at_0.shape == (2, 4) and agreement.shifted.shape == (38, 3)
    assert agreement.worst_layer_median < 0.02 and agreement.best_shifted_median > 1
    assert agreement.whole_shifted.max() < 0.01  # one norm over all tokens finds the wrong layer good
    assert np.allclose(agreement.whole[1], float(
        torch.cat([(a - b)[:, 1] for a, b in zip(noisy, states, strict=True)]).norm()
        / torch.cat([b[:, 1] for b in states]).norm()))


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen3_5"])
def test_each_hook_output_is_the_next_hidden_state_and_no_other(name, request):
    target = request.getfixturevalue(name)
    matrix = layer_alignment(target, [7, 60, 200, 311, 4, 90])
    assert matrix.shape == (target.num_layers, target.num_layers + 1)
    for k in range(target.num_layers - 1):
        assert matrix[k, k + 1] == 0 and (np.delete(matrix[k], k + 1) > 0.01).all()
    assert matrix[-1, -1] > 0.1  # HF's last one is normed


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen3_5"])
def test_right_padding_is_harmless_and_left_padding_is_not(name, request):
    target = request.getfixturevalue(name)
    errors = padding_errors(target, [[9, 8, 7], [5], list(range(10, 50))], [1, 3])
    assert errors.lengths == [3, 1, 40] and np.isnan([errors.right[1], errors.left[1]]).all()
    assert errors.right[0] < 1e-5 and errors.right[2] < 1e-5
    assert errors.left[0] > 0.01 and errors.left[2] < 1e-5  # the longest row has no padding
    assert 1e-4 < errors.storage[0] < 0.01 and errors.limit == max(errors.storage[0], errors.storage[2])


def test_the_reference_is_found_by_name_and_shape(tiny_llama):
    target = load_target(REFERENCE / "tiny_qwen3_5")
    prompts = find_reference(REFERENCE, target)
    assert [len(prompt.token_ids) for prompt in prompts] == [24, 48] and len(prompts[0].greedy) == 24
    assert find_reference(REFERENCE, tiny_llama) == []  # no file of that name
    assert len(read_reference(REFERENCE / "smollm2_135m.states.safetensors")) == 2
    agreement = compare_with_reference(target, prompts)
    assert agreement.worst_layer_median < 0.05 < 0.3 < agreement.best_shifted_median
    assert agreement.errors.shape == (23 + 47, 8)


def test_reference_models_that_lie_there_are_compared_too(tiny_llama):
    agreements = reference_agreements(REFERENCE, tiny_llama)
    assert list(agreements) == ["tiny_qwen3_5"] and agreements["tiny_qwen3_5"].worst_layer_median < 0.05


def test_rounded_states_agree_with_themselves(tiny_llama):
    agreement = compare_rounded(tiny_llama, [[5, 6, 7, 8]])
    assert 0 < agreement.errors.max() < 0.004 < agreement.best_shifted_median
    assert agreement.shift_ratio == agreement.best_shifted_median / agreement.worst_layer_median


@pytest.mark.parametrize("name", ["tiny_llama_folder", "tiny_qwen3_5_folder"])
def test_a_target_that_computes_in_bf16(name, request):
    """Its states are rounded already: nothing may be divided by what storage costs, nor limited by it."""
    target = load_target(request.getfixturevalue(name), "bfloat16", audit="quick")
    rows = [[9, 8, 7], list(range(10, 50))]
    errors = padding_errors(target, rows, [1, 3])
    assert max(errors.storage) == 0 and max(errors.right) < errors.limit < errors.left[0]
    assert errors.limit == max(0.12, errors.left[0] / 4)
    agreement = compare_rounded(target, rows)
    assert agreement.errors.max() < 0.12 and agreement.shift_ratio > 3
    same = compare_states([torch.ones(3, 2, 4)], [torch.ones(3, 2, 4)])
    assert same.shift_ratio == float("inf")


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen3_5"])
def test_a_changed_token_changes_its_own_state_and_later_ones_only(name, request):
    change = token_alignment(request.getfixturevalue(name), list(range(20, 90)), [1, 3], 30)
    assert change.shape == (70, 2) and (change[:30] == 0).all() and (change[30] > 0.1).all()
    assert (change[31:] > 0).any()
