"""Loading and capture on every family: what the hooks see is what the whole model, as published, computes."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dflash_lib.target.audit import compare_with_files
from dflash_lib.target.capture import HiddenStateTap, capture_batch
from dflash_lib.target.checkpoint import Checkpoint
from dflash_lib.target.loading import Target, load_target
from tests.families import FAMILIES, WINDOW, WRAPPERS, change_config, make_family

LENGTHS = (1, 130, 2, WINDOW, WINDOW + 1, 65, 64, 63)  # one token, very different ones, around window and chunk
OTHER_LAYERS = {**dict.fromkeys(("qwen3_5_text", "qwen3_5", "qwen3_5_moe", "qwen3_next"), {"linear_attention"}),
                **dict.fromkeys(("gemma3_text", "gemma3", "gpt_oss"), {"sliding_attention"})}
SLIDING = pytest.mark.parametrize("target", [name for name in FAMILIES if "sliding_attention" in
                                             OTHER_LAYERS.get(name, ())], indirect=True)


@pytest.fixture(scope="module", params=FAMILIES)
def target(request, tmp_path_factory) -> Target:
    return load_target(make_family(tmp_path_factory.mktemp("families") / request.param, request.param))


def family(target: Target) -> str:
    return target.path.name


def make_rows(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, 376, (n,), generator=generator).tolist() for n in lengths]  # 380 and on are image tokens


def layer_types(target: Target) -> set[str]:
    return set(getattr(target.config, "layer_types", None) or ["full_attention"])


def test_it_is_the_text_tower_alone_and_whole(target):
    name = family(target)
    report = target.report
    assert report.is_good and report.num_compared == report.num_parameters_named and report.perplexity > 100
    assert ("vision" in report.skipped) == (name in WRAPPERS)
    assert type(target.model).__name__.endswith("ForCausalLM")
    names = [name for name, _ in [*target.model.named_parameters(), *target.model.named_buffers()]]
    assert not [name for name in names if "vis" in name or "mtp" in name]
    assert (target.head.weight is target.embedding.weight) == (name in ("llama", "qwen3_5_text", "gemma3_text",
                                                                        "gemma3"))
    assert len(target.layers) == target.num_layers and target.hidden_size == 64
    assert layer_types(target) == {"full_attention"} | OTHER_LAYERS.get(name, set())


@torch.no_grad()
def test_hooks_see_what_the_model_computes(target):
    row = make_rows(90)[0]  # past the window and the chunk
    sample, = capture_batch(target, [row], range(target.num_layers))
    output = target.model(torch.tensor([row]), output_hidden_states=True)
    for k in range(target.num_layers - 1):
        assert torch.equal(sample.aux_hidden_states[:, k], output.hidden_states[k + 1][0]), k
        assert not torch.allclose(sample.aux_hidden_states[:, k], output.hidden_states[k][0], atol=1e-2)
    last = sample.last_hidden_state_prenorm
    assert torch.equal(sample.aux_hidden_states[:, -1], last)
    assert torch.equal(target.final_norm(last), output.hidden_states[-1][0])
    assert not torch.allclose(last, output.hidden_states[-1][0], atol=0.05)
    assert torch.equal(target.head(target.final_norm(last)), output.logits[0])


@torch.no_grad()
def test_the_published_class_computes_the_same(target):
    """The wrapper with its vision tower, from the same files, without any of our renaming."""
    wrapper = WRAPPERS.get(family(target), AutoModelForCausalLM)
    whole = wrapper.from_pretrained(target.path, dtype=torch.float32).eval()
    row = torch.tensor(make_rows(90))
    if family(target) in WRAPPERS:
        assert sum(p.numel() for p in whole.parameters()) > target.report.num_parameters
    theirs = whole(input_ids=row, output_hidden_states=True)
    tap = HiddenStateTap(target, range(target.num_layers))
    with tap:
        ours = target.model(row)
    assert torch.allclose(ours.logits, theirs.logits, atol=1e-5)
    for k in range(target.num_layers - 1):
        assert torch.allclose(tap.aux[:, :, k], theirs.hidden_states[k + 1], atol=1e-5 * tap.aux.abs().max())


def test_a_batch_equals_rows_alone_and_rows_share_nothing(target):
    rows = make_rows(*LENGTHS)
    ids = range(target.num_layers)
    together = capture_batch(target, rows, ids)
    for row, sample in zip(rows, together, strict=True):
        alone, = capture_batch(target, [row], ids)
        assert sample.aux_hidden_states.shape == (len(row), target.num_layers, 64)
        scale = alone.aux_hidden_states.abs().max()
        for a, b in ((sample.aux_hidden_states, alone.aux_hidden_states),
                     (sample.last_hidden_state_prenorm, alone.last_hidden_state_prenorm)):
            assert torch.allclose(a, b, atol=1e-5 * scale, rtol=0)
    other = make_rows(*LENGTHS, seed=1)
    other[1] = rows[1]  # all of its company is another, and longer or shorter padding stands behind it
    again = capture_batch(target, [*other, make_rows(200)[0]], ids)[1]
    scale = again.aux_hidden_states.abs().max()
    assert torch.allclose(again.aux_hidden_states, together[1].aux_hidden_states, atol=1e-5 * scale, rtol=0)
    mixed_up = (together[5].aux_hidden_states[:63] - together[7].aux_hidden_states).abs().max()
    assert mixed_up > 0.1 * scale  # two rows are different enough that a mix-up could not pass


def test_two_documents_in_one_row_are_not_two_documents(target):
    """Why the target is never fed packed rows: the second document would see the first."""
    first, second = make_rows(40, 30)
    packed, = capture_batch(target, [first + second], range(target.num_layers))
    alone, = capture_batch(target, [second], range(target.num_layers))
    scale = alone.aux_hidden_states.abs().max()
    assert (packed.aux_hidden_states[40:] - alone.aux_hidden_states).abs().max() > 1e-2 * scale


def test_stopping_early_changes_nothing(target):
    rows = make_rows(70, 3)
    wanted = [0, 2]
    ran = []
    handle = target.layers[3].register_forward_pre_hook(lambda *_: ran.append(3))
    try:
        with torch.no_grad(), HiddenStateTap(target, wanted) as tap:
            target.model(torch.tensor(rows[:1]))
        whole = tap.aux[0]
        assert ran == [3]
        sample, = capture_batch(target, rows[:1], wanted, last=False)
        assert ran == [3]
    finally:
        handle.remove()
    assert torch.equal(sample.aux_hidden_states, whole)


@SLIDING
@torch.no_grad()
def test_a_sliding_layer_does_not_look_past_its_window(target):
    """The first layer's output at a token is moved by the token that stands WINDOW before it, or is not."""
    row = make_rows(60)[0]
    changed = list(row)
    changed[10] = (row[10] + 100) % 370 + 4
    before, = capture_batch(target, [row], [0, target.num_layers - 1])
    after, = capture_batch(target, [changed], [0, target.num_layers - 1])
    moved = (before.aux_hidden_states - after.aux_hidden_states).abs().amax(dim=-1)  # [T, 2]
    assert (moved[10 + WINDOW:, 0] < 1e-5).all() and moved[10 + WINDOW - 1, 0] > 1e-4
    assert (moved[:10] == 0).all() and moved[59, 1] > 1e-4  # the full layers pass it on


def test_in_bfloat16(target):
    """Every weight in the dtype asked for, yet the rotary frequencies in float32: rounded, they lose long positions."""
    half = load_target(target.path, "bfloat16", audit="quick")
    frequencies = {name: buffer for name, buffer in half.model.named_buffers() if "inv_freq" in name}
    assert frequencies and all(buffer.dtype == torch.float32 for buffer in frequencies.values())
    assert {parameter.dtype for parameter in half.model.parameters()} == {torch.bfloat16}
    row = make_rows(90)
    ours, exact = (capture_batch(one, row, [0, 2])[0].aux_hidden_states.float() for one in (half, target))
    error = (ours - exact).norm(dim=-1) / exact.norm(dim=-1)  # [T, 2]
    assert 1e-4 < error.median() < 0.03
    assert ((ours[:, 0] - exact[:, 1]).norm(dim=-1) / exact[:, 1].norm(dim=-1)).median() > 0.1  # a shift would show


def test_dropping_a_tensor_is_noticed(target):
    """That the comparison with the files covers the family's own parts: each of a layer's parameters is looked at."""
    checkpoint = Checkpoint.read(target.path)
    name, parameter = list(target.layers[1].named_parameters())[-1]
    kept = parameter.detach().clone()
    parameter.data[-1] += 1.0
    assert compare_with_files(target.model, checkpoint)[1] == [f"model.layers.1.{name}"]
    parameter.data.copy_(kept)
    assert compare_with_files(target.model, checkpoint)[1] == []


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gpt_oss_as_published_in_4_bits(tmp_path, dtype):
    """MXFP4 experts: two e2m1 values a byte, low nibble first, one power of two for each 32, rows stored as columns."""
    folder = make_family(tmp_path / "gpt_oss", "gpt_oss")
    generator = torch.Generator().manual_seed(0)
    expected = {}
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith((".gate_up_proj", ".down_proj"))]:
            experts, columns, rows = tensors.pop(name).shape
            blocks = torch.randint(256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(120, 125, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            values = torch.tensor(FP4)[torch.stack([blocks & 15, blocks >> 4], dim=-1).long()].flatten(-2)
            scaled = values * (2.0 ** (scales.float() - 127))[..., None]
            expected[name] = scaled.flatten(-2).transpose(1, 2)
        save_file(tensors, file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {
        name: file.name for file in folder.glob("*.safetensors") for name in load_file(file)}}))
    change_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    target = load_target(folder, dtype)
    report = target.report
    assert report.quantisation == f"mxfp4, dequantised to {dtype}" and len(expected) == 8
    assert report.num_parameters_named - report.num_compared == 8 and report.stored_dtypes["U8"] == 16
    for name, values in expected.items():
        assert torch.equal(target.model.get_parameter(name), values.to(getattr(torch, dtype))), name
    row = make_rows(30)
    assert torch.equal(capture_batch(target, row, [3])[0].aux_hidden_states[:, 0],
                       capture_batch(target, row, [3])[0].last_hidden_state_prenorm)
