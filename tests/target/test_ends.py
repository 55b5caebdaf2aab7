"""The ends of a target alone: the same values as load_target's, nothing else, and damage named as there."""

import json
import math
import shutil
import subprocess
import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from dflash_lib.drafter.network import DFlashDrafter
from dflash_lib.drafter.recipe import TrainOptions, drafter_config
from dflash_lib.drafter.warm_start import source_layers, warm_start
from dflash_lib.target import ends as ends_module
from dflash_lib.target.capture import capture_batch
from dflash_lib.target.ends import load_ends, meta_target
from dflash_lib.target.errors import LoadRefused, TargetError
from dflash_lib.target.generate import stop_token_ids
from dflash_lib.target.loading import load_target
from tests.conftest import REPOSITORY
from tests.families import FAMILIES, change_config, make_family
from tests.miniature import make_miniature
from tests.tiny import make_tokenizer

IDS = torch.arange(4, 40)[None]


def real(target) -> dict[str, torch.Tensor]:
    """Parameters and buffers that have values."""
    return {name: tensor for name, tensor in (*target.model.named_parameters(remove_duplicate=False),
                                              *target.model.named_buffers()) if not tensor.is_meta}


def assert_same_ends(ends, whole):
    """Every value that is there, bit for bit, and what the modules make of it."""
    theirs = {**dict(whole.model.named_parameters(remove_duplicate=False)), **dict(whole.model.named_buffers())}
    for name, tensor in real(ends).items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name
    embedded = ends.embedding(IDS)
    assert torch.equal(embedded, whole.embedding(IDS))
    normed = ends.final_norm(embedded.to(ends.final_norm.weight.dtype))
    assert torch.equal(normed, whole.final_norm(embedded.to(whole.final_norm.weight.dtype)))
    normed = normed.to(whole.head.weight.dtype)  # gpt-oss keeps norms in float32 beside float16
    assert torch.equal(ends.head(normed), whole.head(normed))
    assert (ends.head.weight is ends.embedding.weight) == (whole.head.weight is whole.embedding.weight)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family, tmp_path):
    folder = make_family(tmp_path / family, family)
    layers = source_layers(meta_target(folder, "float32"), 1)
    for dtype in ("float32", "bfloat16", "float16"):
        whole = load_target(folder, dtype, audit="quick")
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing is loaded as a whole
            alone, ends = load_ends(folder, dtype), load_ends(folder, dtype, layers=layers)
        assert_same_ends(alone, whole)
        assert_same_ends(ends, whole)
        assert ends.identity == alone.identity == whole.identity
        assert stop_token_ids(ends) == stop_token_ids(whole)
        assert (ends.device, ends.num_layers, ends.hidden_size) == (whole.device, whole.num_layers, whole.hidden_size)
        ours, theirs = (target.layers[layers[0]] for target in (ends, whole))
        states = torch.randn(1, 5, ends.hidden_size).to(theirs.input_layernorm.weight.dtype)
        normed = theirs.input_layernorm(states)
        assert torch.equal(ours.input_layernorm(states), normed)
        normed = normed.to(theirs.self_attn.k_proj.weight.dtype)
        assert torch.equal(ours.self_attn.k_proj(normed), theirs.self_attn.k_proj(normed))
    prefixes = ("lm_head.", "model.embed_tokens.", "model.norm.")
    assert all(name.startswith(prefixes) for name in real(alone))
    assert all(name.startswith((*prefixes, f"model.layers.{layers[0]}.")) and "experts" not in name
               for name in real(ends))
    assert ends.report.num_parameters < whole.report.num_parameters and ends.report.depth == "ends"


@pytest.mark.parametrize("family", ["llama_untied", "qwen3", "qwen3_5", "gemma3", "qwen3_5_moe"])
def test_a_warm_start_copies_the_same(family, tmp_path):
    folder = make_family(tmp_path / family, family)
    options = TrainOptions(block_size=4, mask_token_id=3, draft_vocab_size=None, num_layers=1)
    states = torch.randn(9, 2, 64, generator=torch.Generator().manual_seed(0))
    found = []
    for target in (load_target(folder, audit="quick"),
                   load_ends(folder, layers=source_layers(meta_target(folder, "float32"), 1))):
        torch.manual_seed(0)
        network = DFlashDrafter(drafter_config(target, [0, 2], options, None))
        warm_start(network, target, states)
        found.append(network.state_dict())
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())
    with pytest.raises((TargetError, NotImplementedError, RuntimeError), match="meta|were loaded"):
        warm_start(network, load_ends(folder), states)


def test_what_is_not_there_cannot_be_used(tiny_llama_folder):
    ends = load_ends(tiny_llama_folder, layers=[5])
    for work in (lambda: ends.model(input_ids=IDS), lambda: capture_batch(ends, [[5] * 8], [5], False),
                 lambda: ends.decoder(input_ids=IDS), lambda: ends.layers[4].input_layernorm(torch.zeros(1, 64)),
                 lambda: ends.layers[4].mlp.up_proj(torch.zeros(1, 64))):
        with pytest.raises(TargetError, match="only embedding, final norm, head and layers .5. of .* were loaded"):
            work()
    assert ends.layers[5].mlp(torch.ones(1, 64)).isfinite().all()
    assert ends.report.num_compared == ends.report.num_parameters_named, "all of it was compared with the files"
    assert stop_token_ids(ends) == [2] and ends.model.generation_config.eos_token_id == 2


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory):
    """Many layers behind a small vocabulary, as in a real target: 59 MB of float32."""
    folder = tmp_path_factory.mktemp("deep")
    config = LlamaConfig(vocab_size=384, hidden_size=256, intermediate_size=704, num_attention_heads=4,
                         num_key_value_heads=2, num_hidden_layers=20, tie_word_embeddings=False, eos_token_id=2)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


MEMORY = """
import sys
from pathlib import Path
from dflash_lib.target.ends import load_ends
from dflash_lib.target.loading import load_target

def peak():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

load_target(sys.argv[2], "bfloat16", audit="quick"), load_ends(sys.argv[2])  # what libraries take once
kept, before = [], peak()
for load in (load_ends, lambda *a: load_ends(*a, layers=[18, 19]), lambda *a: load_target(*a, audit="quick")):
    kept.append(load(sys.argv[1], "bfloat16"))
    before, grown = peak(), peak() - before
    print(grown)
"""


def test_little_memory_is_taken(deep_folder, tiny_llama_folder):
    """Of a process, at most: read into another type, so that no mapped file takes the place of memory."""
    weights = sum(p.numel() * 2 for p in meta_target(deep_folder, "bfloat16").model.parameters())
    ends = load_ends(deep_folder, "bfloat16", layers=[18, 19])
    assert sum(tensor.nbytes for tensor in real(ends).values()) < weights / 8
    done = subprocess.run([sys.executable, "-c", MEMORY, str(deep_folder), str(tiny_llama_folder)],
                          capture_output=True, text=True, check=True, cwd=REPOSITORY)
    alone, with_layers, whole = map(int, done.stdout.split())
    assert whole > 0.9 * weights > 25_000_000
    assert alone < weights / 6 and with_layers < weights / 2


def test_only_their_files_bytes_are_read(deep_folder, monkeypatch):
    read = []
    whole = ends_module.Checkpoint.read(deep_folder).text["lm_head.weight"].__class__.whole
    monkeypatch.setattr("dflash_lib.target.checkpoint.StoredTensor.whole",
                        lambda self: read.append(self.name) or whole(self))
    load_ends(deep_folder, layers=[19])
    assert sorted(name for name in read if not name.startswith("model.layers.19.")) == [
        "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]


@pytest.fixture
def folder(tmp_path):
    return make_family(tmp_path / "target", "qwen3")


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def fault(name, what):
    def plant(tensors):
        if what is None:
            del tensors[name]
        elif what == "shape":
            tensors[name] = tensors[name][:-1].clone()
        elif what == "nan":
            tensors[name].view(-1)[7] = math.nan
        else:
            tensors[name].zero_()

    return plant


LAYER = "model.layers.3.self_attn.k_proj.weight"


@pytest.mark.parametrize("name, what, message", [
    ("lm_head.weight", None, "missing .*: lm_head.weight"), (LAYER, None, f"missing .*: {LAYER}"),
    ("model.norm.weight", None, "missing .*: model.norm.weight"),
    ("lm_head.weight", "shape", "wrong shape .*: lm_head.weight .383, 64. in the files, .384, 64."),
    ("model.embed_tokens.weight", "nan", "not finite .*: model.embed_tokens.weight"),
    ("lm_head.weight", "zero", "all zero .*: lm_head.weight"), (LAYER, "zero", f"all zero .*: {LAYER}"),
    ("model.norm.weight", "nan", "not finite .*: model.norm.weight"),
    ("model.norm.weight", "zero", "all zero .*: model.norm.weight")])
@pytest.mark.filterwarnings("ignore:.*the whole target is loaded")
def test_damage_is_refused_by_name(folder, name, what, message):
    edit(folder, fault(name, what))
    with pytest.raises(LoadRefused, match=message) as refused:
        load_ends(folder, layers=[3])
    assert "audit=" not in str(refused.value), "there is no way around it here"


@pytest.mark.parametrize("what", [None, "shape", "nan", "zero"])
def test_layers_that_are_not_wanted_are_not_looked_at(folder, what):
    whole = load_target(folder)
    edit(folder, fault(LAYER, what))
    ends = load_ends(folder, layers=[2])
    assert_same_ends(ends, whole)
    assert ends.identity["weights"] != whole.identity["weights"], "the store sees that these are other files"


def test_a_head_that_is_tied_yet_another(tmp_path):
    folder = make_family(tmp_path / "target", "llama")
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    ends = load_ends(folder)
    assert ends.head.weight is ends.embedding.weight
    edit(folder, lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(LoadRefused, match="tied, yet different .*lm_head.weight differs"):
        load_ends(folder)


def test_a_tied_target_that_was_saved_with_its_head_alone(tmp_path):
    folder = make_family(tmp_path / "target", "llama")
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    assert_same_ends(load_ends(folder, "bfloat16"), load_target(folder, "bfloat16", audit="quick"))


def test_errors_are_those_of_load_target(folder, tmp_path):
    with pytest.raises(TargetError, match="nowhere: no such model folder"):
        load_ends(tmp_path / "nowhere")
    with pytest.raises(TargetError, match="layers .7. asked for, the target has 4"):
        load_ends(folder, layers=[7])
    with pytest.raises(TargetError, match="device 'tpu' asked for"):
        load_ends(folder, device="tpu")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 999}))
    with pytest.raises(TargetError, match="eos_token_id 999 is no row of the embedding"):
        load_ends(folder)
    (folder / "generation_config.json").unlink()
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(TargetError, match="truncated or damaged"):
        load_ends(folder)


def test_too_little_memory_is_about_the_ends(folder, monkeypatch):
    held = (2 * 384 * 64 + 64) * 4
    monkeypatch.setattr("dflash_lib.target.memory.free_memory", lambda device: held)
    assert load_ends(folder).report.memory_free == held
    with pytest.raises(TargetError, match="embedding and head: 49,216 parameters|parameters x 4 bytes"):
        load_ends(folder, layers=[0])


def test_fp8(tmp_path):
    """The ends of an FP8 checkpoint are plain; its layers are dequantised by Transformers, on the whole target."""
    folder = make_miniature(tmp_path / "fp8", fp8=True)
    whole = load_target(folder, "bfloat16", audit="quick")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_ends(load_ends(folder, "bfloat16"), whole)
    with pytest.warns(UserWarning, match="quantised are .*k_proj.*the whole target is loaded in main memory"):
        ends = load_ends(folder, "bfloat16", layers=[63])
    assert_same_ends(ends, whole)
    assert all(name.startswith(("lm_head.", "model.embed_tokens.", "model.norm.", "model.layers.63."))
               for name in real(ends))
    assert ends.report.quantisation == "fp8, dequantised to bfloat16" and ends.identity == whole.identity


def test_buffers_that_this_transformers_cannot_make(tmp_path, monkeypatch):
    """Gemma's embedding would be scaled by whatever lay in memory."""
    folder = make_family(tmp_path / "target", "gemma3")
    whole = load_target(folder, audit="quick")
    made = type(whole.model)._init_weights
    monkeypatch.setattr(type(whole.model), "_init_weights", lambda self, module: None)
    with monkeypatch.context() as later:
        later.setattr(ends_module, "load_target", lambda *a, **k: (
            monkeypatch.setattr(type(whole.model), "_init_weights", made) or load_target(*a, **k)))
        with pytest.warns(UserWarning, match="cannot make model.embed_tokens.embed_scale alone, so the whole target"):
            ends = load_ends(folder)
    assert_same_ends(ends, whole)


def test_another_configuration_of_the_same_files(folder):
    change_config(folder, vocab_size=512)
    with pytest.warns(UserWarning, match="another shape of lm_head.weight"), pytest.raises(
            LoadRefused, match="wrong shape .*lm_head.weight .384, 64. in the files, .512, 64."):
        load_ends(folder)
    shutil.rmtree(folder)
