"""What a target folder lacks is named; what Transformers would silently make up is refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_lib.target.loading import TargetError, load_target, weight_files


@pytest.fixture
def folder(tiny_llama_folder, tmp_path):
    return shutil.copytree(tiny_llama_folder, tmp_path / "target")


def shard(folder, *names):
    """Splits the weights into one shard per name, with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {key: names[i % len(names)] for i, key in enumerate(sorted(tensors))}
    for name in names:
        save_file({k: t for k, t in tensors.items() if weight_map[k] == name}, folder / name, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def change_config(folder, **values):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def test_a_missing_folder(tmp_path):
    with pytest.raises(TargetError, match="nowhere: no such model folder"):
        load_target(tmp_path / "nowhere")


def test_no_config(folder):
    (folder / "config.json").unlink()
    with pytest.raises(TargetError, match="no config.json"):
        load_target(folder)


@pytest.mark.parametrize("text", ["{", '{"model_type": "no_such_model"}', "{}"])
def test_a_broken_config(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(TargetError, match="config.json: "):
        load_target(folder)


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    with pytest.raises(TargetError, match="no \\*.safetensors weights.*Pickled .bin weights are not loaded"):
        load_target(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_shard(folder, keep):
    shard(folder, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(TargetError, match="model-00002-of-00002.safetensors: truncated or damaged"):
        load_target(folder)


def test_an_index_that_names_an_absent_file(folder):
    shard(folder, "a.safetensors", "b.safetensors")
    (folder / "b.safetensors").unlink()
    with pytest.raises(TargetError, match="index.json names b.safetensors, which is missing"):
        load_target(folder)


def test_a_broken_index(folder):
    shard(folder, "a.safetensors", "b.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(TargetError, match="has no weight_map"):
        load_target(folder)
    for text in ("[]", '"x"', '{"weight_map": ["x"]}', '{"weight_map": {"x": 5}}', '{"weight_map": {}}'):
        index.write_text(text)
        with pytest.raises(TargetError, match="has no weight_map"):
            load_target(folder)
    index.write_text('{"weight_map": {')
    with pytest.raises(TargetError, match="not valid JSON.*Download it again"):
        load_target(folder)


def test_a_missing_tensor(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(TargetError, match="missing .the files lack it.*random.*model.layers.2.mlp.up_proj.weight"):
        load_target(folder)


def test_a_tensor_of_another_shape(folder):
    change_config(folder, intermediate_size=96)
    with pytest.raises(TargetError, match="wrong shape .*down_proj.weight .64, 128. in the files, .64, 96."):
        load_target(folder)


def test_no_tokenizer(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(TargetError, match="no usable tokenizer"):
        load_target(folder)


@pytest.mark.parametrize("device", ["cuda:77", "tpu", "cpu:x"])
def test_a_wrong_device(folder, device):
    with pytest.raises(TargetError, match=f"device '{device}' asked for.*CUDA devices"):
        load_target(folder, device=device)


@pytest.mark.parametrize("dtype", ["float33", "int8", "Tensor", torch.int32])
def test_a_wrong_dtype(folder, dtype):
    with pytest.raises(TargetError, match="is no floating dtype"):
        load_target(folder, dtype=dtype)


def test_a_good_folder(folder, tiny_llama):
    shard(folder, "a.safetensors", "b.safetensors")
    target = load_target(folder, dtype="bfloat16")
    assert target.head.weight.dtype == torch.bfloat16 and target.identity["dtype"] == "bfloat16"
    assert not target.model.training and not any(p.requires_grad for p in target.model.parameters())
    assert (target.num_layers, target.hidden_size, len(target.layers)) == (6, 64, 6)
    assert target.final_norm is target.model.model.norm and target.head.weight is target.embedding.weight
    assert torch.equal(target.head.weight, tiny_llama.head.weight.bfloat16())
    assert [path.name for path in weight_files(folder)] == ["a.safetensors", "b.safetensors"]


def test_the_identity_sees_weights_tokenizer_and_configuration(folder, tiny_llama):
    same = load_target(folder).identity
    assert {**same, "name": ""} == {**tiny_llama.identity, "name": ""}
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "chat_template.jinja").write_text("{# another #}")
    change_config(folder, rope_theta=5000.0)
    other = load_target(folder).identity
    assert {key for key in same if same[key] != other[key]} == {"weights", "tokenizer", "config"}
