"""Warm start from dense and hybrid targets; drafter folders; the z-lab export, field by field."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from dflash_lib.drafter import (
    DrafterError,
    DrafterProposer,
    TrainedDrafter,
    TrainOptions,
    export_speculators,
    export_zlab,
    load_drafter,
)
from dflash_lib.drafter.folder import save_drafter
from dflash_lib.drafter.network import FULL, SLIDING, DFlashDrafter, DrafterConfig
from dflash_lib.drafter.recipe import drafter_config
from dflash_lib.drafter.warm_start import effective_weight, source_layers, warm_start
from dflash_lib.target.capture import capture_batch
from dflash_lib.target.loading import load_target
from tests.families import FAMILIES, make_family

OPTIONS = TrainOptions(block_size=4, mask_token_id=3, num_layers=2)


def make_drafter(target, draft_vocab=None, **changes) -> TrainedDrafter:
    torch.manual_seed(1)
    config = drafter_config(target, [1, 3], OPTIONS, None if draft_vocab is None else len(draft_vocab))
    config = DrafterConfig(**{**config.to_dict(), **changes})
    return TrainedDrafter(DFlashDrafter(config), draft_vocab, target.identity, {"step": 7})


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_qwen3_5"])
def test_effective_weight_is_what_the_norm_multiplies_with(family, request):
    target = request.getfixturevalue(family)
    x = torch.randn(3, 64)
    normed = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.allclose(target.final_norm(x), normed * effective_weight(target.final_norm), atol=1e-5)


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_qwen3_5"])
def test_warm_start_copies_the_last_attention_layers(family, request):
    target = request.getfixturevalue(family)
    network = make_drafter(target).network
    states = capture_batch(target, [list(range(20, 50))], [1, 3], last=False)[0].aux_hidden_states
    sources = warm_start(network, target, states)
    assert sources == ([4, 5] if family == "tiny_llama" else [3, 7])
    for layer, source in zip(network.layers, sources, strict=True):
        theirs = target.layers[source]
        assert torch.equal(layer.mlp.down_proj.weight, theirs.mlp.down_proj.weight)
        x = torch.randn(1, 5, 64)
        queries = layer.self_attn.q_proj(x).view(5, 4, 16)
        if family == "tiny_llama":
            assert torch.equal(queries, theirs.self_attn.q_proj(x).view(5, 4, 16))
            assert layer.self_attn.q_norm.weight.std() == 0 and layer.self_attn.q_norm.weight[0] > 0
        else:  # the gate's half of Qwen3.5's q_proj stays behind
            expected, _ = theirs.self_attn.q_proj(x).view(1, 5, -1, 32).chunk(2, dim=-1)
            assert torch.allclose(queries, expected[0], atol=1e-6)
            assert torch.allclose(layer.self_attn.q_norm.weight, 1 + theirs.self_attn.q_norm.weight, atol=1e-5)
    assert torch.equal(network.fc(states.flatten(1)), states[:, -1])
    assert torch.allclose(network.norm.weight, effective_weight(target.final_norm))


@pytest.mark.parametrize("family", FAMILIES)
def test_warm_start_from_every_family(family, tmp_path):
    target = load_target(make_family(tmp_path / family, family))
    network = make_drafter(target, layer_types=(FULL,)).network
    random_mlp = [layer.mlp.down_proj.weight.detach().clone() for layer in network.layers]
    sources = warm_start(network, target, torch.randn(5, 2, target.hidden_size))
    for layer, source, before in zip(network.layers, sources, random_mlp, strict=True):
        theirs = target.layers[source]
        assert torch.equal(layer.self_attn.k_proj.weight, theirs.self_attn.k_proj.weight)
        if hasattr(theirs.mlp, "down_proj"):
            assert torch.equal(layer.mlp.down_proj.weight, theirs.mlp.down_proj.weight)
            norm = getattr(theirs, "pre_feedforward_layernorm" if "gemma" in family else "post_attention_layernorm")
            assert torch.allclose(layer.post_attention_layernorm.weight, effective_weight(norm))
        else:
            assert torch.equal(layer.mlp.down_proj.weight, before)


def test_warm_start_refuses_what_does_not_fit(tiny_llama, tiny_qwen3_5):
    with pytest.raises(ValueError, match="only 2 of the target's layers"):
        source_layers(tiny_qwen3_5, 3)
    network = make_drafter(tiny_llama, intermediate_size=32).network
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.gate_proj is \(32, 64\) .* layer 4"):
        warm_start(network, tiny_llama, torch.randn(5, 2, 64))


def test_a_drafter_folder_comes_back_as_it_was(tiny_llama, tmp_path):
    vocab = torch.tensor([2, 7, 90])
    drafter = make_drafter(tiny_llama, vocab)
    save_drafter(tmp_path, drafter)
    back = load_drafter(tmp_path)
    assert back.config == drafter.config and torch.equal(back.draft_vocab, vocab) and back.training == {"step": 7}
    theirs = back.network.state_dict()
    assert all(torch.equal(p, theirs[name]) for name, p in drafter.network.named_parameters())
    assert not back.network.training and not any(p.requires_grad for p in back.network.parameters())


def test_bad_drafter_folders_are_refused(tiny_llama, tiny_qwen3_5, tmp_path):
    with pytest.raises(DrafterError, match="no config.json"):
        load_drafter(tmp_path)
    good = tmp_path / "good"
    save_drafter(good, make_drafter(tiny_llama))
    with pytest.raises(DrafterError, match="another target"):
        DrafterProposer(load_drafter(good), tiny_qwen3_5)
    cut = shutil.copytree(good, tmp_path / "cut")
    data = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(data[:len(data) // 2])
    with pytest.raises(DrafterError, match="damaged"):
        load_drafter(cut)
    (cut / "model.safetensors").write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])  # one bit of one weight
    with pytest.raises(DrafterError, match="damaged drafter: model.safetensors is not what was written"):
        load_drafter(cut)
    config = json.loads((good / "config.json").read_text())
    config["drafter"]["intermediate_size"] = 100
    (good / "config.json").write_text(json.dumps(config))
    with pytest.raises(DrafterError, match="gate_proj"):
        load_drafter(good)


@pytest.mark.parametrize("reduced", [False, True])
def test_zlab_export_field_by_field(tiny_llama, tmp_path, reduced):
    vocab = torch.tensor([2, 7, 90]) if reduced else None
    drafter = make_drafter(tiny_llama, vocab)
    save_drafter(tmp_path / "drafter", drafter)
    export_zlab(tmp_path / "drafter", tiny_llama, tmp_path / "zlab", dtype="float32")
    config = json.loads((tmp_path / "zlab" / "config.json").read_text())
    tensors = load_file(tmp_path / "zlab" / "model.safetensors")
    theirs = AutoConfig.from_pretrained(tmp_path / "zlab")  # what an engine reads: Qwen3Config
    assert theirs.model_type == "qwen3" and theirs.architectures == ["DFlashDraftModel"]
    theta = tiny_llama.config.rope_parameters["rope_theta"]
    assert theirs.rope_parameters["rope_theta"] == config["rope_theta"] == theta
    assert theirs.dflash_config["target_layer_ids"] == [1, 3] and theirs.dflash_config["mask_token_id"] == 3
    assert (config["block_size"], config["num_target_layers"], config["vocab_size"]) == (4, 6, 384)
    assert config["is_causal"] is False and config["attention_bias"] is False
    assert config["tie_word_embeddings"] is False and config["max_position_embeddings"] == 1024
    assert theirs.layer_types == ["full_attention"] * 2 and theirs.head_dim == 16
    extra = {"lm_head.weight", "d2t"} if reduced else set()
    assert set(tensors) == {name for name, _ in drafter.network.named_parameters()} | extra
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.q_norm.weight",
            "layers.0.mlp.gate_proj.weight", "layers.0.post_attention_layernorm.weight"} <= set(tensors)
    for name, p in drafter.network.named_parameters():
        assert torch.equal(tensors[name], p)
    if reduced:
        assert config["draft_vocab_size"] == 3
        assert (tensors["d2t"] + torch.arange(3)).tolist() == [2, 7, 90] and tensors["d2t"].dtype == torch.int64
        assert torch.equal(tensors["lm_head.weight"], tiny_llama.head.weight[vocab])


def test_sliding_window_layers_reach_the_engine(tiny_llama, tmp_path):
    drafter = make_drafter(tiny_llama, layer_types=[SLIDING, FULL], sliding_window=9)
    save_drafter(tmp_path / "drafter", drafter)
    export_zlab(tmp_path / "drafter", tiny_llama, tmp_path / "zlab")
    theirs = AutoConfig.from_pretrained(tmp_path / "zlab")
    assert theirs.sliding_window == 9 and theirs.layer_types == ["sliding_attention", "full_attention"]
    assert not hasattr(theirs, "is_causal") and "is_causal" not in theirs.dflash_config
    assert load_file(tmp_path / "zlab" / "model.safetensors")["fc.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("reduced", [False, True])
def test_speculators_export_field_by_field(tiny_llama, tmp_path, reduced):
    """That the package itself loads it and computes the same is in test_speculators_parity.py."""
    vocab = torch.tensor([2, 7, 90]) if reduced else None
    drafter = make_drafter(tiny_llama, vocab)
    save_drafter(tmp_path / "drafter", drafter)
    export_zlab(tmp_path / "drafter", tiny_llama, tmp_path / "zlab", dtype="float32")
    returned = export_speculators(tmp_path / "drafter", tiny_llama, tmp_path / "speculators", dtype="float32")
    config = json.loads((tmp_path / "speculators" / "config.json").read_text())
    assert config == returned and config["speculators_model_type"] == "dflash"
    assert config["aux_hidden_state_layer_ids"] == [2, 4]  # layers 1 and 3, by the layer that they are the input of
    assert (config["mask_token_id"], config["block_size"], config["sample_from_anchor"]) == (3, 4, False)
    assert config["draft_vocab_size"] == (3 if reduced else 384)
    assert config["sliding_window_non_causal"] is True  # vLLM takes the default for causal attention everywhere
    layers = AutoConfig.for_model(**config["transformer_layer_config"])
    assert layers.layer_types == ["full_attention"] * 2 and layers.sliding_window is None
    assert layers.rope_parameters["rope_theta"] == tiny_llama.config.rope_parameters["rope_theta"]
    methods = config["speculators_config"]
    assert methods["proposal_methods"][0]["speculative_tokens"] == 3 and methods["algorithm"] == "dflash"
    assert methods["verifier"] == {"name_or_path": str(tiny_llama.path), "architectures": ["LlamaForCausalLM"]}
    tensors, zlab = (load_file(tmp_path / name / "model.safetensors") for name in ("speculators", "zlab"))
    assert set(tensors) - set(zlab) == ({"t2d"} if reduced else set())
    assert all(torch.equal(tensors[name], tensor) for name, tensor in zlab.items())
    if reduced:
        assert torch.nonzero(tensors["t2d"]).flatten().tolist() == [2, 7, 90] and tensors["t2d"].shape == (384,)


def test_speculators_format_cannot_express_mixed_layers(tiny_llama, tiny_qwen3_5, tmp_path):
    save_drafter(tmp_path / "mixed", make_drafter(tiny_llama, layer_types=[SLIDING, FULL], sliding_window=9))
    with pytest.raises(DrafterError, match="mixes sliding-window and full attention.*export_zlab"):
        export_speculators(tmp_path / "mixed", tiny_llama, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    save_drafter(tmp_path / "sliding", make_drafter(tiny_llama, layer_types=[SLIDING] * 2, sliding_window=9))
    config = export_speculators(tmp_path / "sliding", tiny_llama, tmp_path / "out", verifier="org/model")
    layers = AutoConfig.for_model(**config["transformer_layer_config"])
    assert config["sliding_window_non_causal"] is False and layers.sliding_window == 9
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/model"
    with pytest.raises(DrafterError, match="another target"):
        export_speculators(tmp_path / "sliding", tiny_qwen3_5, tmp_path / "out")
