"""Qwen3.6-27B in miniature: loaded as the 27B will be, no vision tensor read, its FP8 variant with every scale."""

import json
import shutil
from collections import Counter

import pytest
import torch
import transformers.modeling_utils
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_5 import Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

from dflash_lib.target.capture import capture_batch, default_layer_ids
from dflash_lib.target.checkpoint import Checkpoint, text_name
from dflash_lib.target.errors import LoadRefused, TargetError
from dflash_lib.target.loading import load_target, read_config
from tests.conftest import DATA
from tests.families import change_config
from tests.miniature import BLOCK, QUANTISED, make_miniature, quantise

GATES = [f"model.language_model.layers.{i}.mlp.gate_proj.weight_scale_inv" for i in range(64)]


@pytest.fixture(scope="session")
def miniature(tmp_path_factory):
    return make_miniature(tmp_path_factory.mktemp("miniature") / "bf16")


@pytest.fixture(scope="session")
def miniature_fp8(tmp_path_factory):
    return make_miniature(tmp_path_factory.mktemp("miniature") / "fp8", fp8=True)


@pytest.fixture(scope="session")
def target(miniature):
    return load_target(miniature)


@pytest.fixture
def fp8_copy(miniature_fp8, tmp_path):
    return shutil.copytree(miniature_fp8, tmp_path / "fp8")


def tensors_of(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def edit_all(folder, change):
    """Passes every shard's tensors through `change`, and writes the index anew."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] = {}
    for file in folder.glob("*.safetensors"):
        tensors = change(load_file(file))
        save_file(tensors, file, {"format": "pt"})
        index["weight_map"] |= dict.fromkeys(tensors, file.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_it_has_the_shape_of_the_real_one(miniature):
    config, real = read_config(miniature), read_config(DATA / "qwen3.6-27b")
    assert type(config) is type(real) is Qwen3_5Config and config.architectures == real.architectures
    assert config.text_config.layer_types == real.text_config.layer_types and len(real.text_config.layer_types) == 64
    small, big = config.to_dict(), real.to_dict()
    assert {k: set(v) for k, v in small.items() if isinstance(v, dict)} == \
        {k: set(v) for k, v in big.items() if isinstance(v, dict)} and set(small) == set(big)
    assert config.text_config.vocab_size == 512 and config.text_config.hidden_size == 64
    checkpoint = Checkpoint.read(miniature)
    with torch.device("meta"):
        published = Qwen3_5ForConditionalGeneration(real).state_dict()
    depth = config.vision_config.depth
    names = {name for name in published if not name.startswith("model.visual.blocks.")
             or int(name.split(".")[3]) < depth}
    assert {name for name in checkpoint.tensors if not name.startswith("mtp.")} == names
    assert len(checkpoint.files) == 5 and checkpoint.skipped == {"vision": len([n for n in names if ".visual." in n]),
                                                                 "multi-token prediction": 15}
    assert checkpoint.stored_dtypes == {"BF16": 851 - 48, "F32": 48}  # A_log of 48 linear-attention layers


def test_the_text_tower_is_loaded_and_nothing_else_is_read(miniature, monkeypatch):
    """Records each tensor whose values are asked of a file, by Transformers and by the audit."""
    read = Counter()

    class Slice:
        def __init__(self, inner, name):
            self.inner, self.name = inner, name

        def __getitem__(self, index):
            read[self.name] += 1
            return self.inner[index]

        def __getattr__(self, name):
            return getattr(self.inner, name)

    class File:
        def __init__(self, *args, **kwargs):
            self.inner = safe_open(*args, **kwargs)

        def __enter__(self):
            self.inner.__enter__()
            return self

        def __exit__(self, *error):
            return self.inner.__exit__(*error)

        def get_slice(self, name):
            return Slice(self.inner.get_slice(name), name)

        def get_tensor(self, name):
            read[name] += 1
            return self.inner.get_tensor(name)

        def __getattr__(self, name):
            return getattr(self.inner, name)

    monkeypatch.setattr(transformers.modeling_utils, "safe_open", File)
    monkeypatch.setattr("dflash_lib.target.checkpoint.safe_open", File)
    target = load_target(miniature, "bfloat16", audit="quick")
    checkpoint = Checkpoint.read(miniature)
    assert set(read) == {tensor.name for tensor in checkpoint.text.values()} and len(read) == 851
    assert type(target.model) is Qwen3_5ForCausalLM and (target.num_layers, target.hidden_size) == (64, 64)
    assert set(target.model.state_dict()) == set(checkpoint.text)
    assert target.report.num_parameters == checkpoint.num_parameters() == 4_632_960
    assert target.report.narrowed == 48 and target.report.num_compared == 851


def test_its_numbers_are_those_of_the_published_class(miniature, target):
    whole = Qwen3_5ForConditionalGeneration.from_pretrained(miniature, dtype=torch.float32).eval()
    ids = torch.randint(4, 384, (1, 70), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = whole(input_ids=ids, output_hidden_states=True)
        ours = target.model(ids).logits
    wanted = default_layer_ids(64)
    sample, = capture_batch(target, ids.tolist(), wanted)
    assert wanted == [1, 16, 31, 46, 61] and sample.aux_hidden_states.shape == (70, 5, 64)
    scale = sample.aux_hidden_states.abs().max()
    for i, k in enumerate(wanted):
        assert torch.allclose(sample.aux_hidden_states[:, i], theirs.hidden_states[k + 1][0], atol=1e-5 * scale)
    assert torch.allclose(ours, theirs.logits, atol=1e-4)
    assert torch.equal(target.head(target.final_norm(sample.last_hidden_state_prenorm)), ours[0])


def test_a_batch_equals_rows_alone(target):
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(4, 384, (n,), generator=generator).tolist() for n in (1, 66, 3)]
    for row, sample in zip(rows, capture_batch(target, rows, default_layer_ids(64)), strict=True):
        alone, = capture_batch(target, [row], default_layer_ids(64))
        scale = alone.aux_hidden_states.abs().max()
        assert torch.allclose(sample.aux_hidden_states, alone.aux_hidden_states, atol=5e-5 * scale, rtol=0)


def test_blocks_are_quantised_within_rounding():
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    stored, scale = quantise(weight)
    assert stored.dtype == torch.float8_e4m3fn and scale.shape == (2, 3)
    back = stored.float() * scale.float().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    assert (back - weight).abs().max() < 0.04 * weight.abs().max() and not torch.equal(back, weight)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp8_is_dequantised_with_every_scale(miniature_fp8, target, dtype):
    loaded = load_target(miniature_fp8, dtype, audit="full" if dtype == "float32" else "quick")
    assert loaded.report.quantisation == f"fp8, dequantised to {dtype}" and loaded.report.num_compared == 851
    assert loaded.report.stored_dtypes["F8_E4M3"] == 48 * 6 + 16 * 7  # 3 + 3 and 4 + 3 matrices a layer
    files = {text_name(name): tensor for name, tensor in tensors_of(miniature_fp8).items()}
    original = dict(target.model.named_parameters())
    for name, parameter in loaded.model.named_parameters():
        assert parameter.dtype == getattr(torch, dtype)
        stored = files[name]
        if name.removesuffix(".weight").rpartition(".")[2] in QUANTISED:
            assert stored.dtype == torch.float8_e4m3fn
            scale = files[f"{name}_scale_inv"].float()
            expected = stored.float() * scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            assert torch.equal(parameter, expected.to(parameter.dtype))
            assert (parameter - original[name]).abs().max() < 0.05 * original[name].abs().max()
        else:
            assert torch.equal(parameter, original[name].to(parameter.dtype))


def test_the_fp8_fault_of_the_field_is_caught(fp8_copy):
    """Qwen3.6-27B-FP8: mlp.gate_proj stayed plain and its `weight_scale_inv` were dropped, without any error.

    Planted: the scales of the gate projections under a name that Transformers does not read, here its own for another
    scheme. It then takes the e4m3 numbers as they are, too large by 1 / scale.
    """
    edit_all(fp8_copy, lambda tensors: {name.replace("gate_proj.weight_scale_inv", "gate_proj.weight_scale"): tensor
                                        for name, tensor in tensors.items()})
    with pytest.raises(LoadRefused, match=r"unread scales .*gate_proj.weight_scale, .*\(64 in all\)") as refused:
        load_target(fp8_copy, audit="quick")
    assert len(refused.value.report.problems["unread scales"]) == 64 and refused.value.report.problems["missing"] == []


def test_the_fp8_fault_is_caught_when_transformers_says_nothing(miniature_fp8, monkeypatch):
    """The scales are read, and not applied: only the values tell."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    right = Fp8Dequantize.convert

    def wrong(self, input_dict, full_layer_name=None, **kwargs):
        if "gate_proj" in (full_layer_name or ""):
            input_dict = {key: value for key, value in input_dict.items() if "scale" not in key}
        return right(self, input_dict, full_layer_name=full_layer_name, **kwargs)

    monkeypatch.setattr(Fp8Dequantize, "convert", wrong)
    with pytest.raises(LoadRefused, match=r"not as in the files .*model.layers.0.mlp.gate_proj.weight.*64 in all"):
        load_target(miniature_fp8, audit="quick")


def test_fp8_files_without_their_scheme(fp8_copy):
    config = json.loads((fp8_copy / "config.json").read_text())
    config.pop("quantization_config")
    (fp8_copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(TargetError, match="no quantization_config.*their 400 scale tensors be dropped"):
        load_target(fp8_copy)


def test_fp8_scales_that_are_missing(fp8_copy):
    edit_all(fp8_copy, lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in GATES[:3]})
    with pytest.raises(TargetError, match="3 quantised weights have no scale.*layers.0.mlp.gate_proj.weight"):
        load_target(fp8_copy)


def test_a_vision_tensor_of_nonsense_does_no_harm(miniature, tmp_path, target):
    folder = shutil.copytree(miniature, tmp_path / "x")
    edit_all(folder, lambda tensors: {name: torch.full_like(tensor, float("nan")) if "visual" in name else tensor
                                      for name, tensor in tensors.items()})
    assert torch.equal(load_target(folder).head.weight, target.head.weight)


def test_a_missing_text_tensor_is_named(miniature, tmp_path):
    folder = shutil.copytree(miniature, tmp_path / "x")
    lost = "model.language_model.layers.62.linear_attn.A_log"
    edit_all(folder, lambda tensors: {name: tensor for name, tensor in tensors.items() if name != lost})
    with pytest.raises(LoadRefused, match="missing .*: model.layers.62.linear_attn.A_log"):
        load_target(folder)


def test_a_tie_is_the_whole_models(miniature, tmp_path):
    """The wrapper's own flag counts, as in the published class; here it contradicts the files."""
    folder = shutil.copytree(miniature, tmp_path / "x")
    change_config(folder, tie_word_embeddings=True)
    with pytest.raises(LoadRefused, match="tied, yet different"):
        load_target(folder)
