"""The audit of a loaded target: each planted fault is named, and what is in order passes."""

import copy
import math
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.utils import logging

from dflash_lib.target import loading
from dflash_lib.target.audit import (
    LoadReport,
    bad_values,
    compare_with_files,
    default_max_perplexity,
    perplexity,
    sort_unexpected,
    wrong_dtypes,
)
from dflash_lib.target.checkpoint import Checkpoint
from dflash_lib.target.errors import LoadRefused, TargetError
from dflash_lib.target.loading import load_target
from tests.families import make_family

UP = "model.layers.2.mlp.up_proj.weight"


@pytest.fixture
def folder(tiny_llama_folder, tmp_path):
    return shutil.copytree(tiny_llama_folder, tmp_path / "target")


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def zero(tensors):
    tensors[UP].zero_()


def constant(tensors):
    tensors[UP].fill_(0.5)


def nan(tensors):
    tensors[UP][3, 3] = math.nan


def infinite(tensors):
    tensors["model.layers.1.input_layernorm.weight"][5] = -math.inf


def zero_norm(tensors):
    tensors["model.layers.1.post_attention_layernorm.weight"].zero_()


def constant_final_norm(tensors):
    tensors["model.norm.weight"].fill_(1.0)


def hole(tensors):
    tensors[UP].view(-1)[100:1000] = 0


def extra(tensors):
    tensors["model.layers.6.mlp.up_proj.weight"] = torch.ones(2, 2)


def extra_scale(tensors):
    tensors["model.layers.2.mlp.up_proj.weight_scale_inv"] = torch.ones(1, 1)


@pytest.mark.parametrize("fault, what", [
    (zero, f"all zero .*{UP}"), (constant, f"constant .*{UP}"), (nan, f"not finite .*{UP}"),
    (hole, f"partly zero .*never written.*{UP}"), (infinite, "not finite .*layers.1.input_layernorm.weight"),
    (zero_norm, "all zero .*layers.1.post_attention_layernorm.weight"), (constant_final_norm, "constant .*model.norm"),
    (extra, "unexpected .*no place.*model.layers.6.mlp.up_proj.weight"),
    (extra_scale, "unread scales .*wrong by that factor.: model.layers.2.mlp.up_proj.weight_scale_inv"),
])
def test_a_planted_fault_is_refused_by_name(folder, fault, what):
    edit(folder, fault)
    with pytest.raises(LoadRefused, match=what) as refused:
        load_target(folder)
    report = refused.value.report
    assert not report.is_good and report.perplexity is None and sum(map(len, report.problems.values())) == 1
    assert ("publisher's own files" in str(refused.value)) == (fault not in (extra, extra_scale))
    if fault in (extra, extra_scale):  # names are looked at by workers, too
        with pytest.raises(LoadRefused, match=what):
            load_target(folder, audit="quick")
    else:
        assert load_target(folder, audit="quick").report.is_good


def test_norms_as_they_were_initialised_are_no_fault(folder):
    def plain(tensors):
        for name in tensors:
            if "norm" in name:
                tensors[name].fill_(1.0)

    edit(folder, plain)
    assert load_target(folder).report.is_good


def test_a_dead_expert_is_found(tmp_path):
    folder = make_family(tmp_path / "moe", "qwen3_next")
    edit(folder, lambda tensors: tensors["model.layers.1.mlp.experts.2.down_proj.weight"].zero_())
    with pytest.raises(LoadRefused, match=r"all zero .*model.layers.1.mlp.experts.down_proj\[2\];"):
        load_target(folder)


class Parameters(nn.Module):
    """A model as far as `bad_values` looks: an embedding that is its head, too, and whatever a test adds."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 512)
        self.embedding.weight.data[6:] = 0  # unused rows

    def get_input_embeddings(self):
        return self.embedding

    get_output_embeddings = get_input_embeddings


def test_the_values_are_looked_at_exactly():
    model = Parameters()
    model.a, model.b_bias = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.zeros(2, 4))
    model.one = nn.Parameter(torch.ones(1))
    assert not any(bad_values(model).values())
    model.a.data[0, 0] = math.inf
    model.c = nn.Parameter(torch.full((2, 2), 3.0, dtype=torch.bfloat16))
    assert {kind: names for kind, names in bad_values(model).items() if names} == {
        "not finite": ["a"], "constant": ["c"]}


@pytest.mark.parametrize("start, length, found", [
    (0, 255, False), (300, 255, False),  # fewer than 256 zeros one after another
    (256, 256, True), (255, 511, True), (600, 511, True), (0, 3000, True),
    (258, 258, False), (258, 516, True)])  # one whole row of twelve may be a dead neuron, two are too many
def test_a_hole_of_zeros_in_a_matrix_is_found(start, length, found):
    model = Parameters()
    model.a = nn.Parameter(torch.rand(12, 258) + 0.1)
    model.a.data.view(-1)[start:start + length] = 0
    assert bad_values(model)["partly zero"] == (
        [f"a ({length} zeros from value {start} of 3096 on)"] if found else [])


@pytest.mark.parametrize("factor, named", [(20.0, False), (200.0, True), (1 / 20, False), (1 / 200, True)])
def test_one_matrix_far_from_the_same_of_other_layers_is_found(factor, named):
    model = Parameters()
    model.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))
    model.layers[2].weight.data *= factor
    found = bad_values(model)["out of scale"]
    assert bool(found) == named and all(text.startswith("layers.2.weight (") for text in found)
    model.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(2))  # which of two is wrong?
    model.layers[1].weight.data *= factor
    assert not bad_values(model)["out of scale"]


def test_what_differs_from_the_files_is_found(tiny_llama):
    """Transformers' report knows of none of these."""
    checkpoint = Checkpoint.read(tiny_llama.path)
    named = len(list(tiny_llama.model.named_parameters()))
    compared, differing = compare_with_files(tiny_llama.model, checkpoint)
    assert len(compared) == named == tiny_llama.report.num_compared and differing == []
    model = copy.deepcopy(tiny_llama.model)
    layers = model.model.layers
    layers[0].mlp.up_proj.weight.data *= 200  # a scale that was not applied
    layers[1].mlp.up_proj.weight = layers[2].mlp.up_proj.weight  # another's place
    nn.init.normal_(layers[3].self_attn.q_proj.weight)  # newly initialised
    layers[4].input_layernorm.weight.data[17] += 1e-3
    assert compare_with_files(model, checkpoint)[1] == [
        "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight",
        "model.layers.3.self_attn.q_proj.weight", "model.layers.4.input_layernorm.weight"]


def test_experts_that_are_stored_one_by_one_are_compared(tmp_path):
    target = load_target(make_family(tmp_path / "moe", "qwen3_next"))
    assert target.report.num_compared == target.report.num_parameters_named
    experts = target.layers[2].mlp.experts
    with torch.no_grad():
        experts.gate_up_proj[1] = experts.gate_up_proj[1].roll(48, 0)  # up above gate
        experts.down_proj[[0, 3]] = experts.down_proj[[3, 0]]
    assert compare_with_files(target.model, Checkpoint.read(target.path))[1] == [
        "model.layers.2.mlp.experts.down_proj", "model.layers.2.mlp.experts.gate_up_proj"]


def test_a_newly_initialised_weight_that_transformers_does_not_report(folder, monkeypatch):
    from transformers import LlamaForCausalLM

    plain = LlamaForCausalLM.from_pretrained

    def lying(*args, **kwargs):
        model, info = plain(*args, **kwargs)
        nn.init.normal_(model.model.layers[1].self_attn.o_proj.weight, std=0.02)
        return model, info

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", lying)
    with pytest.raises(LoadRefused, match="not as in the files .*: model.layers.1.self_attn.o_proj.weight"):
        load_target(folder, audit="quick")


def test_a_wrong_dtype(tiny_llama):
    model = copy.deepcopy(tiny_llama.model)
    assert wrong_dtypes(model, torch.float32) == {}
    model.model.layers[1].mlp.up_proj.bfloat16()
    assert list(wrong_dtypes(model, torch.float32)) == ["model.layers.1.mlp.up_proj.weight"]
    model.bfloat16()
    model.model.norm.float()
    assert list(wrong_dtypes(model, torch.bfloat16)) == ["model.norm.weight"]
    model._keep_in_fp32_modules_strict = ["norm"]  # Transformers' way to keep a module in float32
    assert wrong_dtypes(model, torch.bfloat16) == {}


def test_a_model_of_two_types_is_refused(folder, monkeypatch):
    from transformers import LlamaForCausalLM

    plain = LlamaForCausalLM.from_pretrained

    def mixed(*args, **kwargs):
        model, info = plain(*args, **kwargs)
        model.model.layers[3].bfloat16()
        return model, info

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", mixed)
    with pytest.raises(LoadRefused, match=r"wrong dtype .*model.layers.3.input_layernorm.weight \(bfloat16\)"):
        load_target(folder, audit="quick")


def test_other_towers_are_not_unexpected():
    assert sort_unexpected(["mtp.fc.weight", "z", "a.weight_scale", "b", "model.visual.blocks.0.x"]) == {
        "unread scales": ["a.weight_scale"], "unexpected": ["b", "z"]}


def test_perplexity_by_hand(tiny_llama):
    text = "The quick brown fox jumps over the lazy dog."
    ids = tiny_llama.tokenizer(text)["input_ids"]
    with torch.no_grad():
        shares = [tiny_llama.model(torch.tensor([ids[:i]])).logits[0, -1].softmax(0)[ids[i]].item()
                  for i in range(1, len(ids))]
    expected = math.prod(shares) ** (-1 / len(shares))
    assert perplexity(tiny_llama.model, tiny_llama.tokenizer, text) == pytest.approx(expected, rel=1e-4)
    assert expected < tiny_llama.report.perplexity * 3


def test_a_target_that_knows_no_language_is_refused(folder, tiny_llama):
    """Weights 200 times too large, in the files themselves, so that only the text can tell."""
    assert tiny_llama.report.perplexity < tiny_llama.report.perplexity_limit == 4000
    edit(folder, lambda tensors: tensors["model.norm.weight"].mul_(200))
    with pytest.raises(LoadRefused, match="perplexity [0-9.e+]{1,9} on a short English text, limit 4,000") as refused:
        load_target(folder)
    assert refused.value.report.perplexity > 10_000
    for limit in (None, 1e300):
        assert load_target(folder, max_perplexity=limit).report.perplexity == refused.value.report.perplexity
    with pytest.raises(LoadRefused, match="limit 100:"):
        load_target(tiny_llama.path, max_perplexity=100)
    assert load_target(folder, audit="quick").report.perplexity is None


def test_transformers_is_quiet_while_loading_and_speaks_again_afterwards(tiny_llama, monkeypatch, capfd):
    before, heard = logging.get_verbosity(), []
    monkeypatch.setattr(loading, "perplexity", lambda *_: heard.append(logging.get_verbosity()) or 10.0)
    load_target(tiny_llama.path)
    assert heard == [logging.ERROR] and logging.get_verbosity() == before and capfd.readouterr().err == ""


def test_the_default_limit_knows_the_vocabulary():
    """A target with random weights is at about its vocabulary size: refused when the vocabulary is a real one."""
    assert default_max_perplexity(384) == 4000
    assert 3_000 < default_max_perplexity(49_152) < 49_152 / 10
    assert 500 < default_max_perplexity(248_320) < 2_000_000 / 100


def test_broken_logits_have_infinite_perplexity(tiny_llama):
    model = copy.deepcopy(tiny_llama.model)
    model.model.norm.weight.data[0] = math.nan
    assert perplexity(model, tiny_llama.tokenizer) == math.inf


def test_a_tokenizer_of_another_target(tiny_llama):
    model = copy.deepcopy(tiny_llama.model)
    model.resize_token_embeddings(100)
    with pytest.raises(TargetError, match="tokenizer does not belong to the target.*100 rows"):
        perplexity(model, tiny_llama.tokenizer)


def test_the_report_shows_checks_with_values_and_limits(tiny_llama):
    report: LoadReport = tiny_llama.report
    checks = {name: (value, limit, operator) for name, value, limit, operator in report.checks}
    assert checks["tensors: unread scales"] == (0, 0, "==") and len(checks) == 13
    assert checks["perplexity of a short text"] == (report.perplexity, 4000, "<=")
    assert report.num_parameters == sum(p.numel() for p in tiny_llama.model.parameters())
    assert report.weight_bytes == 4 * report.num_parameters and report.fast_linear_attention is None
    rows = dict(report.rows)
    assert rows["loaded as"] == "LlamaForCausalLM, float32 on cpu" and rows["not loaded"] == "none"
    bad = replace(report, problems={**report.problems, "missing": ["x"]})
    assert not bad.is_good and dict((c[0], c[1]) for c in bad.checks)["tensors: missing"] == 1
    quick = replace(report, depth="quick", perplexity=None)
    assert "tensors: all zero" not in dict((c[0], c[1]) for c in quick.checks) and len(quick.checks) == 6
