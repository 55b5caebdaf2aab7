"""Names and headers of weight files against what safetensors reads, and the ways in which a download is broken."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dflash_lib.target.checkpoint import Checkpoint, StoredTensor, is_scale, read_header, some, text_name, weight_files
from dflash_lib.target.errors import TargetError
from dflash_lib.target.loading import load_target
from tests.miniature import write_sharded

SHARD_1, SHARD_2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tiny_llama_folder, tmp_path):
    """The tiny target in two shards with an index."""
    folder = shutil.copytree(tiny_llama_folder, tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    write_sharded(folder, tensors, 2)
    return folder


def edit_shard(folder, name, change):
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name, {"format": "pt"})


def test_a_tensor_that_its_shard_lacks(folder):
    edit_shard(folder, SHARD_2, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(TargetError, match=f"promises tensors that their files lack: model.norm.weight .{SHARD_2}"):
        load_target(folder)


def test_a_tensor_that_lies_in_another_shard(folder):
    index = folder / "model.safetensors.index.json"
    text = json.loads(index.read_text())
    text["weight_map"]["model.norm.weight"] = SHARD_1
    index.write_text(json.dumps(text))
    with pytest.raises(TargetError, match=f"promises tensors that their files lack: model.norm.weight .{SHARD_1}"):
        Checkpoint.read(folder)


def test_a_tensor_in_two_shards(folder):
    edit_shard(folder, SHARD_1, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64)}))
    with pytest.raises(TargetError, match=f"both {SHARD_1} and {SHARD_2} hold model.norm.weight"):
        load_target(folder)


def test_which_files_are_the_weights(folder, tiny_llama_folder):
    shutil.copy(tiny_llama_folder / "model.safetensors", folder)
    with pytest.raises(TargetError, match="holds model.safetensors and an index that names other files"):
        weight_files(folder)
    (folder / "model.safetensors.index.json").unlink()
    assert weight_files(folder) == [folder / "model.safetensors"]
    (folder / "model.safetensors").unlink()
    with pytest.raises(TargetError, match="2 safetensors files, but neither model.safetensors nor"):
        weight_files(folder)
    (folder / SHARD_2).unlink()
    with pytest.raises(TargetError, match="1 safetensors files, but neither"):
        load_target(folder)


def test_one_tensor_under_two_names(folder):
    edit_shard(folder, SHARD_1, lambda tensors: tensors.update({"model.language_model.norm.weight": torch.ones(64)}))
    with pytest.raises(TargetError, match="model.language_model.norm.weight.*one tensor of the text tower under two"):
        load_target(folder)


@pytest.mark.parametrize("name, expected", [
    ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
    ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
    ("language_model.model.norm.weight", "model.norm.weight"), ("language_model.lm_head.weight", "lm_head.weight"),
    ("lm_head.weight", "lm_head.weight"), ("model.visual.blocks.0.norm1.weight", None),
    ("visual.merger.norm.bias", None),
    ("vision_tower.vision_model.post_layernorm.bias", None), ("multi_modal_projector.mm_soft_emb_norm.weight", None),
    ("mtp.fc.weight", None), ("model.layers.3.self_attn.rotary_emb.inv_freq", None), ("model.mtpx.w", "model.mtpx.w"),
])
def test_names_of_the_text_tower(name, expected):
    assert text_name(name) == expected


@pytest.mark.parametrize("name, expected", [
    ("a.gate_proj.weight_scale_inv", True), ("a.weight_scale", True), ("a.input_scale", True),
    ("a.weight_scale_2", True),
    ("a.qscale_weight", True), ("experts.gate_up_proj_scales", True), ("a.scale", True), ("a.weight", False),
    ("a.layer_scale_parameter", False), ("a.scaled_weight", False), ("a.upscale.weight", False)])
def test_names_of_scales(name, expected):
    assert is_scale(name) == StoredTensor(None, name, "F32", ()).is_scale == expected


def test_headers_and_rows_are_those_of_safetensors(folder, tmp_path):
    save_file({"a": torch.arange(6).view(3, 2).to(torch.float8_e4m3fn), "b": torch.ones(2, dtype=torch.uint8)},
              tmp_path / "x.safetensors")
    for file in (folder / SHARD_1, folder / SHARD_2, tmp_path / "x.safetensors"):
        with safe_open(file, framework="pt") as f:
            slices = {name: f.get_slice(name) for name in f.keys()}  # noqa: SIM118
            expected = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
        found = read_header(file)
        assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in found} == expected
    tensors = {tensor.name: tensor for tensor in found}
    assert tensors["a"].rows(1).float().tolist() == [2, 3] and tensors["a"].whole().float()[2].tolist() == [4, 5]


def test_what_is_counted(folder):
    checkpoint = Checkpoint.read(folder)
    tensors = load_file(folder / SHARD_1) | load_file(folder / SHARD_2)
    assert checkpoint.num_parameters() == sum(tensor.numel() for tensor in tensors.values())
    assert checkpoint.stored_dtypes == {"F32": len(tensors)} and checkpoint.skipped == {}
    assert not checkpoint.is_converted(torch.float32) and checkpoint.is_converted(torch.bfloat16)
    assert checkpoint.narrowed(torch.float32) == [] and len(checkpoint.narrowed(torch.bfloat16)) == len(tensors)
    edit_shard(folder, SHARD_2, lambda t: t.update({
        "lm_head.weight": torch.ones(384, 64), "x.down_proj_blocks": torch.ones(2, 4, 1, 16, dtype=torch.uint8),
        "x.down_proj_scales": torch.ones(2, 4, 1, dtype=torch.uint8), "mtp.fc.weight": torch.ones(2, 2)}))
    more = Checkpoint.read(folder)
    assert more.num_parameters() - checkpoint.num_parameters() == 384 * 64 + 2 * 4 * 32
    assert more.num_parameters(tied=True) - checkpoint.num_parameters() == 2 * 4 * 32
    assert more.skipped == {"multi-token prediction": 1}


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.uint8])
def test_quantised_weights_of_an_unquantised_configuration(folder, dtype):
    name = "model.layers.0.mlp.up_proj.weight"

    def change(tensors):
        tensors[name] = tensors[name].to(dtype)
        tensors[f"{name}_scale"] = torch.ones(1)

    edit_shard(folder, next(file.name for file in weight_files(folder) if name in load_file(file)), change)
    with pytest.raises(TargetError, match=f"no quantization_config.*plain numbers and their 1 scale.*{name}"):
        load_target(folder)


def test_a_tie_that_the_files_break(folder):
    embedding = load_file(folder / SHARD_1)["model.embed_tokens.weight"]
    edit_shard(folder, SHARD_2, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    assert load_target(folder).report.is_good  # twice the same weights: fine
    broken = embedding.clone()
    broken[300, 7] += 1e-4
    edit_shard(folder, SHARD_2, lambda tensors: tensors.update({"lm_head.weight": broken}))
    with pytest.raises(TargetError, match="tied, yet different.*lm_head.weight differs from model.embed_tokens.weight"):
        load_target(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    target = load_target(folder)
    assert torch.equal(target.head.weight, broken) and torch.equal(target.embedding.weight, embedding)


def test_many_names_are_cut_short():
    assert some(["b", "a"]) == "a, b" and some([str(i) for i in range(9)], 2) == "0, 1, ... (9 in all)"
