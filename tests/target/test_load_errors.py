"""Errors that users met, each in words that say what to do. Nothing of a target is loaded in any of them."""

import builtins
import json
import shutil
import sys

import pytest
import torch
import transformers
from safetensors.torch import save_file

from dflash_lib.files import human_bytes
from dflash_lib.target import configuration, loading, memory
from dflash_lib.target.checkpoint import Checkpoint
from dflash_lib.target.configuration import read_config, text_tower
from dflash_lib.target.errors import TargetError
from dflash_lib.target.loading import load_target, load_tokenizer
from dflash_lib.target.memory import cgroup_free, check_memory, free_memory
from dflash_lib.workbench import capacity
from tests.families import change_config

OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own_llama"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def folder(tiny_llama_folder, tmp_path):
    return shutil.copytree(tiny_llama_folder, tmp_path / "target")


@pytest.fixture
def nothing_loads(monkeypatch):
    """Fails the test when loading gets as far as the weights."""
    monkeypatch.setattr(loading, "_from_pretrained", lambda *_: pytest.fail("weights were about to be loaded"))


def forget(monkeypatch, model_type):
    """Makes the installed Transformers one that does not know a model type."""
    known = {key: None for key in configuration.CONFIG_MAPPING.keys() if key != model_type}
    monkeypatch.setattr(configuration, "CONFIG_MAPPING", known)


@pytest.mark.parametrize("model_type, since", [("qwen3_5", "5.2.0"), ("qwen3_5_text", "5.2.0"),
                                               ("qwen3_next", "4.57.0"), ("gpt_oss", "4.55.0"),
                                               ("gemma3_text", "4.50.0")])
def test_an_older_transformers(folder, monkeypatch, nothing_loads, model_type, since):
    forget(monkeypatch, model_type)
    change_config(folder, model_type=model_type)
    with pytest.raises(TargetError, match=f"{transformers.__version__} does not know the model type '{model_type}': "
                                          f"Transformers {since} and later do"):
        load_target(folder)


def test_the_installed_transformers_knows_all_that_the_table_names():
    """At the library's floor nothing of the table is missing; a misspelled key would show here."""
    assert set(configuration.KNOWN_SINCE) <= set(transformers.CONFIG_MAPPING.keys())
    for model_type in configuration.KNOWN_SINCE:
        since = tuple(map(int, configuration.KNOWN_SINCE[model_type].split(".")))
        assert since <= tuple(int(part) for part in transformers.__version__.split(".")[:3])


def test_an_unknown_model_type(folder, nothing_loads):
    change_config(folder, model_type="qwen9_9", transformers_version="9.9.9")
    with pytest.raises(TargetError, match=f"Transformers {transformers.__version__} does not know the model type 'qwen9"
                                          "_9': it needs a newer Transformers.*written by Transformers 9.9.9"):
        load_target(folder)
    change_config(folder, model_type="lama")
    with pytest.raises(TargetError, match="misspelled .'llama'\\?"):
        load_target(folder)


@pytest.mark.parametrize("text, what", [("{", "config.json: is not valid JSON"), ("[]", "holds no JSON object"),
                                        ("{}", "names no model_type")])
def test_a_broken_configuration(folder, nothing_loads, text, what):
    (folder / "config.json").write_text(text)
    with pytest.raises(TargetError, match=what):
        load_target(folder)


def test_not_a_language_model(folder, nothing_loads):
    (folder / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(TargetError, match="'vit' is not a causal language model"):
        load_target(folder)


def test_the_folders_own_code(folder, tmp_path, monkeypatch, tiny_llama):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    (folder / "own.py").write_text(OWN_CODE)
    change_config(folder, model_type="own_llama", architectures=["OwnForCausalLM"],
                  auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"})
    asked = []
    monkeypatch.setattr(builtins, "input", lambda *_: asked.append(1) or "n")
    with pytest.raises(TargetError, match=r"brings its own code \(own.py\). Read it, then.*trust_remote_code=True"):
        load_target(folder)
    assert asked == [] and "own" not in " ".join(name for name in sys.modules if "transformers_modules" in name)
    target = load_target(folder, trust_remote_code=True)
    assert type(target.model).__name__ == "OwnForCausalLM"
    assert torch.equal(target.head.weight, tiny_llama.head.weight)


def test_a_tokenizer_of_own_code(folder, monkeypatch):
    (folder / "tokenizer.json").unlink()
    (folder / "own.py").write_text("")
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}))
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("a prompt nobody can answer"))
    with pytest.raises(TargetError, match="trust_remote_code"):
        load_tokenizer(folder)


def test_names_of_other_loaders(folder, nothing_loads):
    with pytest.raises(TargetError, match="takes dtype, not torch_dtype: dtype=torch.bfloat16"):
        load_target(folder, torch_dtype=torch.bfloat16)
    with pytest.raises(TargetError, match="takes device, not device_map"):
        load_target(folder, device_map="auto")
    with pytest.raises(TypeError, match="unexpected arguments: low_cpu"):
        load_target(folder, low_cpu=True)
    with pytest.raises(TargetError, match="audit: 'no' is not one of full, quick"):
        load_target(folder, audit="no")


def test_torch_dtype_in_config_json_is_read(folder):
    """Checkpoints of before the renaming carry it; the dtype asked for wins."""
    config = json.loads((folder / "config.json").read_text())
    config["torch_dtype"] = "float16"
    config.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(config))
    assert load_target(folder, "bfloat16").head.weight.dtype == torch.bfloat16


def without_accelerate(monkeypatch):
    """As if it were not installed: neither importable nor found."""
    monkeypatch.setitem(sys.modules, "accelerate", None)
    for name, module in list(sys.modules.items()):
        if name.startswith(("transformers", "dflash_lib")) and "is_accelerate_available" in vars(module):
            monkeypatch.setattr(module, "is_accelerate_available", lambda *_: False)


def test_accelerate_is_not_needed(folder, monkeypatch, tiny_llama):
    without_accelerate(monkeypatch)
    target = load_target(folder)
    assert torch.equal(target.head.weight, tiny_llama.head.weight)


def fp8_scheme(**more):
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32], **more}


def test_fp8_needs_accelerate(folder, monkeypatch, nothing_loads):
    change_config(folder, quantization_config=fp8_scheme())
    without_accelerate(monkeypatch)
    with pytest.raises(TargetError, match="FP8 weights, for which Transformers needs.*pip install accelerate"):
        load_target(folder)


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", "compressed-tensors", None])
def test_other_quantisations(folder, nothing_loads, method):
    change_config(folder, quantization_config={"quant_method": method})
    with pytest.raises(TargetError, match=f"quantised by {method!r}.*Use the unquantised checkpoint"):
        load_target(folder)


def test_quantised_modules_are_renamed(folder):
    kept = ["lm_head", "model.language_model.layers.0.linear_attn.in_proj_a", "model.visual.blocks.0", "mtp.fc"]
    change_config(folder, quantization_config=fp8_scheme(modules_to_not_convert=kept))
    scheme = text_tower(read_config(folder), folder).quantization_config
    assert scheme["modules_to_not_convert"] == ["lm_head", "model.layers.0.linear_attn.in_proj_a"]
    assert scheme["dequantize"] is True


@pytest.mark.parametrize("grid, rows, good", [((3, 2), 96, True), ((7, 2), 96, False), ((3, 1), 96, False),
                                              ((3, 2), 80, False), ((1, 2), 16, True), ((1, 2), 40, False)])
def test_fp8_blocks_that_do_not_fit(tmp_path, grid, rows, good):
    """80 rows in blocks of 32 have three scales, the last for 16 rows: spread evenly they would be wrong, silently."""
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({name: torch.ones(rows, 64).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(grid)},
              tmp_path / "model.safetensors")
    checkpoint = Checkpoint.read(tmp_path)
    checkpoint.check_scales(None)
    if good:
        checkpoint.check_scales([32, 32])
    else:
        with pytest.raises(TargetError, match=f"{name} .{rows}, 64. has scales.*cannot apply in blocks of 32 x 32"):
            checkpoint.check_scales([32, 32])


def test_no_cuda(folder, nothing_loads, monkeypatch):
    def refuse(*_args, **_options):
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch, "empty", refuse)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(TargetError, match="device 'cuda' asked for.*not compiled with CUDA.*sees 0 CUDA devices"):
        load_target(folder, device="cuda")


def test_too_little_memory(folder, nothing_loads, monkeypatch):
    count = Checkpoint.read(folder).num_parameters()
    monkeypatch.setattr(memory, "free_memory", lambda device: 3 * count)
    sum_of_it = f"{count:,} parameters x 4 bytes .float32. = {human_bytes(4 * count)}, but {human_bytes(3 * count)} are"
    with pytest.raises(TargetError, match=f"target: {sum_of_it} free on cpu. Nothing was loaded. Use dtype bfloat16"):
        load_target(folder)
    with pytest.raises(pytest.fail.Exception):  # half of it fits: the next step is loading
        load_target(folder, "bfloat16")
    monkeypatch.setattr(memory, "free_memory", lambda device: count)
    with pytest.raises(TargetError, match="x 2 bytes .bfloat16.*Nothing was loaded. Free memory"):
        load_target(folder, "bfloat16")


def test_memory_of_the_gpu_and_on_the_way_to_it(monkeypatch):
    free = {"cpu": 100, "cuda:1": 1000}
    monkeypatch.setattr(memory, "free_memory", free.get)
    assert check_memory("x", 100, torch.bfloat16, "cuda:1", converted=False) == (200, 1000)
    with pytest.raises(TargetError, match="200 B, but 100 B are free on cpu .where weights are converted on their way"):
        check_memory("x", 100, torch.bfloat16, "cuda:1", converted=True)
    with pytest.raises(TargetError, match="2.00 kB, but 1.00 kB are free on cuda:1"):
        check_memory("x", 1000, torch.bfloat16, "cuda:1", converted=False)


def test_free_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (123, 456))
    assert free_memory("cuda:0") == free_memory("cuda") == 123
    assert 10_000_000 < free_memory() < 10 ** 14
    monkeypatch.setattr(memory, "cgroup_free", lambda: iter([77]))
    assert free_memory() == 77
    for text, left in (("max", []), ("1000", [700])):
        (tmp_path / "memory.max").write_text(text)
        (tmp_path / "memory.current").write_text("300")
        assert list(cgroup_free(tmp_path)) == left


@pytest.mark.parametrize("values, message", [
    ({"dtype": "float8_e4m3fn"}, "dtype: 'float8_e4m3fn' is no floating dtype to compute in"),
    ({"max_perplexity": "low"}, "max_perplexity: 'low' is no number")])
def test_arguments_that_make_no_sense(folder, nothing_loads, values, message):
    with pytest.raises(TargetError, match=message):
        load_target(folder, **values)


@pytest.mark.parametrize("name", [None, "", 5])
def test_no_name_at_all(nothing_loads, name):
    with pytest.raises(TargetError, match="is no model folder and no hub id"):
        load_target(name)


@pytest.mark.parametrize("values, message", [
    ({"num_hidden_layers": "six"}, "config.json: .*num_hidden_layers.* expected int"),
    ({"quantization_config": "fp8"}, "config.json: quantization_config is no object, found 'fp8'")])
def test_values_of_a_wrong_type_in_the_configuration(folder, nothing_loads, values, message):
    change_config(folder, **values)
    with pytest.raises(TargetError, match=f"(?s){message}"):
        load_target(folder)


def test_an_adapter_beside_the_weights(folder, nothing_loads):
    """Without peft it would be left out without a word, with peft its base model might be loaded in place of these."""
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "some-org/base"}')
    with pytest.raises(TargetError, match="holds an adapter .*Merge it into its model"):
        load_target(folder)


@pytest.mark.parametrize("values, message", [
    ({"hidden_size": 0}, "hidden_size is 0, which no model has"), ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ({"vocab_size": -1}, "vocab_size is -1"), ({"num_attention_heads": 0}, "num_attention_heads is 0"),
    ({"num_hidden_layers": 10 ** 9}, "num_hidden_layers is 1000000000"), ({"vocab_size": 10 ** 12}, "vocab_size is 1"),
    ({"model_type": ["llama"]}, "model_type is no text, found .'llama'."),
    ({"hidden_act": "x"}, "no model can be made of these values .KeyError: 'x'"),
    ({"pad_token_id": 10 ** 9}, "no model can be made of these values .AssertionError: Padding_idx"),
    ({"num_attention_heads": 3.5}, "num_attention_heads")])
def test_sizes_and_values_that_no_model_has(folder, nothing_loads, values, message):
    """Where each would come up by itself there is an IndexError, a ZeroDivisionError or a machine without memory."""
    change_config(folder, **values)
    with pytest.raises(TargetError, match=f"(?s)config.json.*{message}"):
        load_target(folder)
    with pytest.raises(TargetError, match="config.json"):
        capacity.target_size(folder)


def test_the_configuration_of_a_larger_model(folder, nothing_loads):
    """What the files lack would be random, in as much memory as that model takes."""
    held = Checkpoint.read(folder).num_parameters()
    change_config(folder, vocab_size=4_000_000)
    with pytest.raises(TargetError, match=f"describes 25[0-9,]+ parameters, the weight files hold {held:,}"):
        load_target(folder)


def test_whatever_transformers_raises_is_told_of_the_folder(folder, monkeypatch):
    def broken(*_args, **_options):
        raise IndexError("list index out of range")

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", broken)
    with pytest.raises(TargetError, match="target: Transformers .* could not load it: IndexError: list index out"):
        load_target(folder)


@pytest.mark.parametrize("text, message", [
    ("{", "is not valid JSON"), ("[]", "holds no JSON object"), ('{"eos_token_id": "2"}', "eos_token_id must be"),
    ('{"eos_token_id": [2, null]}', "eos_token_id must be"), ('{"eos_token_id": -1}', "found -1"),
    ('{"eos_token_id": true}', "found True"), ('{"eos_token_id": {}}', "eos_token_id must be"),
    ('{"eos_token_id": []}', "eos_token_id must be")])
def test_a_broken_generation_config(folder, nothing_loads, text, message):
    """It says with which tokens turns end: tokenising and generating would find out, hours later."""
    (folder / "generation_config.json").write_text(text)
    for load in (load_target, load_tokenizer):
        with pytest.raises(TargetError, match=f"generation_config.json: .*{message}"):
            load(folder)


@pytest.mark.parametrize("text", ['{"eos_token_id": null}', "{}", '{"eos_token_id": [2, 0]}', None])
def test_a_generation_config_that_says_little(folder, text):
    (folder / "generation_config.json").unlink()
    if text is not None:
        (folder / "generation_config.json").write_text(text)
    assert load_target(folder).report.is_good


@pytest.mark.parametrize("text", ["", "[]", "{", '{"model": 5}', "\xff"])
def test_a_broken_tokenizer(folder, nothing_loads, text):
    (folder / "tokenizer.json").write_text(text, encoding="latin-1")
    with pytest.raises(TargetError, match="target: no usable tokenizer here"):
        load_target(folder)


@pytest.mark.parametrize("block", ["32", [32], [0, 0], [32, 32, 32], [32.0, 32], {"rows": 32}])
def test_an_fp8_block_of_an_odd_form(folder, nothing_loads, block):
    change_config(folder, quantization_config=fp8_scheme(weight_block_size=block))
    with pytest.raises(TargetError, match="config.json: .*weight_block_size"):
        load_target(folder)


@pytest.mark.parametrize("audit", ["full", "quick"])
@pytest.mark.parametrize("ends", [999_999, [2, 384]])
def test_an_end_of_turn_that_is_no_token(folder, ends, audit):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(TargetError, match="generation_config.json: eos_token_id .* no row of the embedding"):
        load_target(folder, audit=audit)


def test_a_tokenizer_without_a_vocabulary(folder, monkeypatch):
    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", lambda *_, **__: [])
    (folder / "tokenizer.json").unlink()
    with pytest.raises(TargetError, match="no usable tokenizer here .no tokenizer.json.*vocabulary is empty"):
        load_tokenizer(folder)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_length_of_the_text(folder, nothing_loads, kind):
    """Decoding with drafts was not plain decoding on these: a token's state changes with what comes behind it."""
    config = json.loads((folder / "config.json").read_text())
    factors = [1.0] * 8
    change_config(folder, rope_parameters={
        **config["rope_parameters"], "rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 64,
        **({"short_factor": factors, "long_factor": factors} if kind == "longrope" else {})})
    with pytest.raises(TargetError, match=f"rope_type '{kind}' .*depends on how long the whole text is"):
        load_target(folder)
