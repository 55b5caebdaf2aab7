"""A training that begins from a drafter that exists: weights equal after, and every mismatch refused by name before."""

import hashlib
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_lib.drafter import DrafterError, TrainedDrafter, export_speculators, export_zlab
from dflash_lib.drafter.folder import save_drafter
from dflash_lib.drafter.init_from import init_from, weights_hash
from dflash_lib.drafter.network import FULL, SLIDING, DFlashDrafter, DrafterConfig
from dflash_lib.drafter.training_job import begun_from
from dflash_lib.files import write_json
from tests.decoding.test_training_walk import make_drafter
from tests.drafter.running import OPTIONS

VOCAB = torch.tensor([2, 7, 90])


@pytest.fixture
def place(tiny_llama, tmp_path):
    """A run with a trained drafter, and its exports."""
    best = tmp_path / "run" / "drafter" / "best"
    save_drafter(best, make_drafter(tiny_llama, VOCAB))
    export_zlab(best, tiny_llama, tmp_path / "zlab", dtype="float32")
    export_speculators(best, tiny_llama, tmp_path / "speculators", dtype="float32")
    return tmp_path


def fresh(target, **changes) -> DFlashDrafter:
    """A network about to be trained: other weights than `make_drafter`'s."""
    network = DFlashDrafter(DrafterConfig(**{**make_drafter(target, VOCAB).config.to_dict(), **changes}))
    torch.manual_seed(5)
    with torch.no_grad():
        for p in network.parameters():
            p.copy_(torch.randn_like(p))
    return network


def weights(network) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in network.named_parameters()}


@pytest.mark.parametrize("name, form", [("run", "workbench"), ("run/drafter/best", "workbench"), ("zlab", "z-lab"),
                                        ("speculators", "speculators")])
def test_the_weights_are_those_of_the_folder(tiny_llama, place, name, form):
    network, made = fresh(tiny_llama), make_drafter(tiny_llama, VOCAB).network
    before = weights(network)
    record = init_from(network, VOCAB, place / name, tiny_llama)
    for key, p in network.named_parameters():
        assert torch.equal(p, made.get_parameter(key)) and not torch.equal(p, before[key]), key
        assert p.requires_grad, "it is about to be trained"
    file = place / ("run/drafter/best" if form == "workbench" else name) / "model.safetensors"
    assert record == {"folder": str(place / name), "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
                      "format": form, "knows_target": True, "differences": []}
    with torch.no_grad():
        network.fc.weight.zero_()
    again = fresh(tiny_llama)
    init_from(again, VOCAB, place / name, tiny_llama)
    assert torch.equal(again.fc.weight, made.fc.weight), "no memory is shared"


@pytest.mark.parametrize("changes, vocab, said", [
    ({"block_size": 16}, VOCAB, ["block_size 4, this training has 16"]),
    ({"rms_norm_eps": 1e-5}, VOCAB, ["rms_norm_eps 1e-06, this training has 1e-05"]),
    ({"sliding_window": 7}, VOCAB, []),  # of a network without sliding-window layers it says nothing
    ({"draft_vocab_size": None}, None, ["a draft vocabulary of 3 tokens, this training has the full head"]),
    ({"draft_vocab_size": 2}, VOCAB[:2], ["a draft vocabulary of 3 tokens, this training has a draft vocabulary of 2 "
                                          "tokens"]),
    ({}, VOCAB + 1, ["a draft vocabulary of 3 tokens, this training has a draft vocabulary of 3 tokens of other ids"])])
def test_what_weights_do_not_depend_on_is_allowed_and_said(tiny_llama, place, changes, vocab, said):
    network = fresh(tiny_llama, **changes)
    assert init_from(network, vocab, place / "zlab", tiny_llama)["differences"] == said
    assert torch.equal(network.fc.weight, make_drafter(tiny_llama, VOCAB).network.fc.weight)


REFUSED = {
    "target_layer_ids": ({"target_layer_ids": [0, 1, 3]},
                         r"target_layer_ids \[1, 2, 4\], this training has \[0, 1, 3\]. Train"),
    "num_target_layers": ({"num_target_layers": 7}, "num_target_layers 6, this training has 7"),
    "vocab_size": ({"vocab_size": 400}, "vocab_size 384, this training has 400"),
    "mask_token_id": ({"mask_token_id": 9}, "mask_token_id 3, this training has 9"),
    "sample_from_anchor": ({"sample_from_anchor": True}, "sample_from_anchor False, this training has True"),
    "num_layers": ({"layer_types": [FULL] * 2}, "num_layers 1, this training has 2. Train"),
    "layer_types": ({"layer_types": [SLIDING], "sliding_window": 9},
                    r"layer_types \['full_attention'\], this training has \['sliding_attention'\]. Train"),
    "hidden_size": ({"hidden_size": 32}, "hidden_size 64, this training has 32"),
    "intermediate_size": ({"intermediate_size": 96}, "intermediate_size 128, this training has 96"),
    "num_attention_heads": ({"num_attention_heads": 8}, "num_attention_heads 4, this training has 8"),
    "num_key_value_heads": ({"num_key_value_heads": 4}, "num_key_value_heads 2, this training has 4"),
    "head_dim": ({"head_dim": 32}, "head_dim 16, this training has 32"),
    "rope_theta": ({"rope_theta": 1e7}, r"rope_theta 10000.0, this training has 10000000.0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_weights_depend_on_is_refused_by_name(tiny_llama, place, name):
    changes, message = REFUSED[name]
    network = fresh(tiny_llama, **changes)
    before = weights(network)
    with pytest.raises(DrafterError, match=f"cannot be the beginning of that training: {message}"):
        init_from(network, VOCAB, place / "run", tiny_llama)
    assert all(torch.equal(p, before[key]) for key, p in network.named_parameters()), "nothing is copied"


def test_a_window_of_another_width_is_refused(tiny_llama, tmp_path):
    config = fresh(tiny_llama, layer_types=[SLIDING, FULL], sliding_window=9).config
    save_drafter(tmp_path, TrainedDrafter(DFlashDrafter(config), VOCAB, tiny_llama.identity))
    network = fresh(tiny_llama, layer_types=[SLIDING, FULL], sliding_window=8)
    with pytest.raises(DrafterError, match="sliding_window 9, this training has 8. Train"):
        init_from(network, VOCAB, tmp_path, tiny_llama)
    with pytest.raises(DrafterError, match=r"layer_types \['sliding_attention', 'full_attention'\]"):
        init_from(fresh(tiny_llama, layer_types=[FULL, SLIDING], sliding_window=9), VOCAB, tmp_path, tiny_llama)


def test_all_mismatches_are_named_at_once(tiny_llama, tiny_qwen3_5, place):
    network = fresh(tiny_llama, mask_token_id=9, rope_theta=1e7)
    with pytest.raises(DrafterError, match="target: the drafter was trained for another target.*; mask_token_id 3, .*; "
                                           "rope_theta 10000.0"):
        init_from(network, VOCAB, place / "run", tiny_qwen3_5)


def test_another_tools_folder_names_no_target(tiny_llama, place):
    """Then shapes and its copies of the target's rows are what there is to compare, and the record says so."""
    held = load_file(place / "zlab" / "model.safetensors")
    save_file(held, place / "zlab" / "model.safetensors")
    assert init_from(fresh(tiny_llama), VOCAB, place / "zlab", tiny_llama)["knows_target"] is False


@pytest.mark.parametrize("name", ["zlab", "speculators", "run/drafter/best"])
def test_broken_weights_are_refused(tiny_llama, place, name):
    path = place / name / "model.safetensors"
    held = load_file(path)
    held["fc.weight"][3, 5] = torch.nan
    save_file(held, path)
    network = fresh(tiny_llama)
    before = weights(network)
    with pytest.raises(DrafterError, match="not finite|damaged drafter"):
        init_from(network, VOCAB, place / name, tiny_llama)
    assert all(torch.equal(p, before[key]) for key, p in network.named_parameters())


def test_folders_without_a_drafter_are_refused(tiny_llama, tmp_path):
    with pytest.raises(DrafterError, match="no such drafter folder"):
        init_from(fresh(tiny_llama), VOCAB, tmp_path / "nowhere", tiny_llama)


def test_a_folder_without_weights_is_refused_before_a_worker_starts(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DrafterError, match="no model.safetensors"):
        weights_hash(tmp_path)


def test_a_begun_training_goes_on_without_the_folder_that_it_began_from(place, tmp_path):
    options = replace(OPTIONS, init_from=str(place / "zlab"))
    job, folder = tmp_path / "job", place / "zlab"
    known = begun_from(job, options)
    assert known == weights_hash(folder) and begun_from(job, OPTIONS) == ""
    job.mkdir()
    write_json(job / "job.json", {"options": {"init_from": known}})
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(DrafterError, match="no such drafter folder"):
        begun_from(job, options)  # it has no weights of its own yet
    (job / "checkpoints" / "step-00000004").mkdir(parents=True)
    assert begun_from(job, options) == known
    folder.mkdir()
    with pytest.raises(DrafterError):
        begun_from(job, options)  # there is something, but no drafter: another one may be meant
