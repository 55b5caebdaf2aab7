"""capture: what the hooks see is what the model computed, whatever the batch, and nothing stays behind."""

import pytest
import torch

from dflash_lib.target.capture import (
    HiddenStateTap,
    capture_batch,
    check_layer_ids,
    default_layer_ids,
    padding_share,
    plan_batches,
)
from dflash_lib.target.loading import TargetError

TARGETS = pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen3_5"])


def make_rows(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, 384, (n,), generator=generator).tolist() for n in lengths]


def num_hooks(target) -> int:
    return sum(len(module._forward_hooks) for module in target.model.modules())


@pytest.mark.parametrize("ids", [[], [2, 1], [1, 1], [-1, 2], [0, 6], [1.0, 2], [True, 2]])
def test_bad_layer_ids_are_refused(tiny_llama, ids):
    with pytest.raises(TargetError, match="target_layer_ids"):
        HiddenStateTap(tiny_llama, ids)
    with pytest.raises(TargetError):
        check_layer_ids(ids, 6)


@pytest.mark.parametrize("rows, what", [([], "at least one row"), ([[1], []], "at least one token"),
                                        ([[1, 384]], "vocabulary of 384"), ([[-1]], "vocabulary of 384")])
def test_bad_rows_are_refused(tiny_llama, rows, what):
    with pytest.raises(TargetError, match=what):
        capture_batch(tiny_llama, rows, [1])


def test_default_layer_ids_follow_the_published_rule():
    assert default_layer_ids(64) == [1, 16, 31, 46, 61]
    assert default_layer_ids(36) == [1, 9, 17, 25, 33]
    assert default_layer_ids(30) == [1, 8, 14, 20, 27]
    assert default_layer_ids(30, 1) == [15]
    for num_layers, num_ids in ((6, 5), (3, 3), (8, 0)):
        with pytest.raises(TargetError, match="num_aux_layers"):
            default_layer_ids(num_layers, num_ids)


@TARGETS
def test_hook_output_is_the_next_hidden_state_and_the_last_is_before_the_norm(name, request):
    target = request.getfixturevalue(name)
    num_layers = len(target.layers)
    row = make_rows(70)[0]
    sample, = capture_batch(target, [row], range(num_layers))
    with torch.no_grad():
        output = target.model(torch.tensor([row]), output_hidden_states=True)
        logits = target.head(target.final_norm(sample.last_hidden_state_prenorm))
    assert len(output.hidden_states) == num_layers + 1
    for k in range(num_layers - 1):
        assert torch.equal(sample.aux_hidden_states[:, k], output.hidden_states[k + 1][0])
        assert not torch.equal(sample.aux_hidden_states[:, k], output.hidden_states[k][0])
    last = sample.last_hidden_state_prenorm
    assert torch.equal(sample.aux_hidden_states[:, -1], last)
    assert torch.equal(target.final_norm(last), output.hidden_states[-1][0])
    assert not torch.allclose(last, output.hidden_states[-1][0], atol=0.1)
    assert torch.equal(logits, output.logits[0])


@TARGETS
def test_a_right_padded_batch_equals_rows_alone(name, request):
    target = request.getfixturevalue(name)
    rows = make_rows(1, 130, 2, 65, 64)  # one token, very different lengths, around the hybrid's chunk of 64
    ids = default_layer_ids(len(target.layers), 3)
    together = capture_batch(target, rows, ids)
    for row, sample in zip(rows, together, strict=True):
        alone, = capture_batch(target, [row], ids)
        assert sample.aux_hidden_states.shape == (len(row), 3, 64)
        scale = alone.aux_hidden_states.abs().max()
        assert torch.allclose(sample.aux_hidden_states, alone.aux_hidden_states, atol=2e-5 * scale, rtol=0)
        assert torch.allclose(sample.last_hidden_state_prenorm, alone.last_hidden_state_prenorm, atol=2e-5 * scale,
                              rtol=0)
    swapped = (together[3].aux_hidden_states[:64] - together[4].aux_hidden_states).abs().max()
    assert swapped > 0.1 * scale  # rows are different enough that a mix-up could not pass


@TARGETS
def test_stopping_early_changes_nothing_and_runs_nothing_more(name, request):
    target = request.getfixturevalue(name)
    row = make_rows(20)[0]
    ran = []
    modules = {"layer 2": target.layers[2], "layer 3": target.layers[3], "norm": target.final_norm, "head": target.head}
    handles = [module.register_forward_pre_hook(lambda *_, what=what: ran.append(what))
               for what, module in modules.items()]
    try:
        with torch.no_grad(), HiddenStateTap(target, [0, 2]) as tap:
            target.model(torch.tensor([row]))
        whole = tap.aux
        assert ran == ["layer 2", "layer 3", "norm", "head"]
        ran.clear()
        sample, = capture_batch(target, [row], [0, 2], last=False)
        assert ran == ["layer 2"]
        ran.clear()
        capture_batch(target, [row], [0, 2], last=True)
        assert ran == ["layer 2", "layer 3"]
    finally:
        for handle in handles:
            handle.remove()
    assert torch.equal(sample.aux_hidden_states, whole[0]) and sample.last_hidden_state_prenorm is None


def test_hooks_are_removed_on_every_exit(tiny_llama):
    row = torch.tensor([make_rows(5)[0]])
    before = num_hooks(tiny_llama)
    with HiddenStateTap(tiny_llama, [1, 3], last=True, stop_early=True) as tap:
        tiny_llama.model(row)
        pytest.fail("the forward should have ended the block")
    assert num_hooks(tiny_llama) == before and tap.last.shape == (1, 5, 64)
    with pytest.raises(ZeroDivisionError), HiddenStateTap(tiny_llama, [1, 3]):
        assert num_hooks(tiny_llama) == before + 2
        raise ZeroDivisionError
    assert num_hooks(tiny_llama) == before
    with torch.no_grad():  # an interrupted forward leaves the model able to run whole
        assert len(tiny_llama.model(row, output_hidden_states=True).hidden_states) == 7


def test_states_that_were_not_captured_cannot_be_read(tiny_llama):
    with HiddenStateTap(tiny_llama, [1]) as tap:
        with pytest.raises(TargetError, match="layer 1"):
            _ = tap.aux
        with pytest.raises(TargetError, match="last=True"):
            _ = tap.last


def test_the_tap_shows_the_newest_forward(tiny_llama):
    first, second = make_rows(4, 6)
    with torch.no_grad(), HiddenStateTap(tiny_llama, [2]) as tap:
        tiny_llama.model(torch.tensor([first]))
        kept = tap.aux
        tiny_llama.model(torch.tensor([second]))
    assert kept.shape == (1, 4, 1, 64) and tap.aux.shape == (1, 6, 1, 64)
    assert torch.allclose(tap.aux[0], capture_batch(tiny_llama, [second], [2])[0].aux_hidden_states, atol=1e-6)


def test_batches_keep_the_budget_and_lose_nothing():
    lengths = torch.randint(30, 300, (400,), generator=torch.Generator().manual_seed(1)).tolist() + [5000]
    batches = plan_batches(lengths, 2048)
    assert sorted(i for batch in batches for i in batch) == list(range(401))
    assert batches[0] == [400]  # longer than the budget: alone
    assert all(max(lengths[i] for i in batch) * len(batch) <= 2048 for batch in batches[1:])
    assert batches == plan_batches(lengths, 2048)
    by_hand = sum(max(lengths[i] for i in batch) for batch in batches for _ in batch)
    assert padding_share(lengths, batches) == pytest.approx(1 - sum(lengths) / by_hand) and by_hand > sum(lengths)
    in_file_order = [list(range(start, start + 10)) for start in range(0, 400, 10)]
    assert padding_share(lengths, batches) < 0.05 < 0.3 < padding_share(lengths, in_file_order)
    assert plan_batches([], 10) == []
