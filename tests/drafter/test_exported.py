"""A drafter's export read back, and the folders that hold a drafter."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_lib.drafter import (
    DrafterError,
    DrafterProposer,
    TrainedDrafter,
    export_speculators,
    export_zlab,
    serving_note,
)
from dflash_lib.drafter.export import export_differences
from dflash_lib.drafter.exported import find_drafter, load_exported, open_drafter
from dflash_lib.drafter.folder import save_drafter
from tests.decoding.test_training_walk import changed, make_drafter
from tests.drafter.folders import edit


@pytest.fixture
def saved(tiny_llama, tmp_path):
    """A run folder with drafter/best and its export."""
    drafter = make_drafter(tiny_llama, torch.tensor([2, 7, 90]))
    save_drafter(tmp_path / "run" / "drafter" / "best", drafter)
    export_zlab(tmp_path / "run" / "drafter" / "best", tiny_llama, tmp_path / "zlab", dtype="float32")
    return tmp_path


def same(one: TrainedDrafter, other: TrainedDrafter) -> bool:
    theirs, vocab = other.network.state_dict(), (one.draft_vocab, other.draft_vocab)
    return (one.config == other.config and (vocab == (None, None) or torch.equal(*vocab))
            and one.target == other.target
            and all(torch.equal(p, theirs[name]) for name, p in one.network.state_dict().items()))


def test_every_folder_leads_to_the_same_drafter(tiny_llama, saved):
    made = make_drafter(tiny_llama, torch.tensor([2, 7, 90]))
    export_speculators(saved / "run" / "drafter" / "best", tiny_llama, saved / "speculators", dtype="float32")
    for folder in (saved / "run", saved / "run" / "drafter" / "best", saved / "zlab", saved / "speculators"):
        assert same(open_drafter(folder, tiny_llama), made), folder
        assert not any(p.requires_grad for p in open_drafter(folder, tiny_llama).network.parameters())


def test_bfloat16_exports_come_back_rounded(tiny_llama, saved):
    export_zlab(saved / "run" / "drafter" / "best", tiny_llama, saved / "half")
    back, made = load_exported(saved / "half", tiny_llama), make_drafter(tiny_llama)
    assert back.network.fc.weight.dtype == torch.float32
    assert torch.equal(back.network.fc.weight, made.network.fc.weight.bfloat16().float())


def test_both_exports_say_which_slots_draft(tiny_llama, tmp_path):
    """A block of 4 whose anchor's slot drafts as well drafts 4 tokens; z-lab's format has the key only then."""
    written = []
    for name, anchored in (("without", False), ("with", True)):
        drafter = changed(make_drafter(tiny_llama), sample_from_anchor=anchored)
        save_drafter(tmp_path / name, drafter)
        zlab = export_zlab(tmp_path / name, tiny_llama, tmp_path / name / "zlab", dtype="float32")
        theirs = export_speculators(tmp_path / name, tiny_llama, tmp_path / name / "speculators", dtype="float32")
        assert export_differences(tmp_path / name, tiny_llama, tmp_path / name / "zlab") == []
        for folder in ("zlab", "speculators"):
            assert same(open_drafter(tmp_path / name / folder, tiny_llama), drafter), folder
        written.append((zlab, theirs))
        note = serving_note(drafter.config)
        assert note.startswith(f"num_speculative_tokens: {3 + anchored}")
        assert ("sample_from_anchor=True is not supported for DFlash" in note) == anchored
    assert "sample_from_anchor" not in written[0][0]["dflash_config"]
    assert written[1][0]["dflash_config"].pop("sample_from_anchor") is True and written[0][0] == written[1][0]
    said = [(c.pop("sample_from_anchor"), c["speculators_config"]["proposal_methods"][0].pop("speculative_tokens"))
            for _, c in written]
    assert said == [(False, 3), (True, 4)] and written[0][1] == written[1][1]


def test_folders_without_a_drafter(saved, tmp_path):
    with pytest.raises(DrafterError, match="nowhere: no such drafter folder"):
        find_drafter(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DrafterError, match="empty: no config.json; expected"):
        find_drafter(tmp_path / "empty")
    (tmp_path / "empty" / "params.yaml").write_text("")
    with pytest.raises(DrafterError, match="no trained drafter yet"):
        find_drafter(tmp_path / "empty")


def test_damaged_exports_are_refused(tiny_llama, saved, tmp_path):
    def broken(name, change=None, tensors=None):
        return edit(shutil.copytree(saved / "zlab", tmp_path / name), change, tensors)

    for name, change, tensors, message in (
            ("no theta", lambda c: (c.pop("rope_theta"), c.pop("rope_parameters")), None, "rope_theta is missing"),
            ("no mask", lambda c: c["dflash_config"].pop("mask_token_id"), None, "mask_token_id is missing"),
            ("block", lambda c: c.update(block_size=1), None, "block_size 1 drafts nothing"),
            ("no vocabulary", lambda c: c.pop("draft_vocab_size"), None, "d2t has 3 entries"),
            ("lacks", None, lambda t: t.pop("norm.weight"), r"norm\.weight: missing"),
            ("more", None, lambda t: t.update({"embed_tokens.weight": torch.zeros(2)}), "embed_tokens"),
            ("other head", None, lambda t: t["lm_head.weight"].mul_(1.1), "not made of the target's rows"),
            ("other d2t", None, lambda t: t["d2t"].add_(500), "d2t leads to token"),
            ("d2t below 0", None, lambda t: (t["d2t"].sub_(500), t.pop("lm_head.weight")), "d2t leads to token"),
            ("d2t above", None, lambda t: (t["d2t"].add_(500), t.pop("lm_head.weight")), "d2t leads to token"),
            ("one token", None, lambda t: t["d2t"].copy_(7 - torch.arange(3)), "1 different ones for 3 entries"),
            ("one NaN", None, lambda t: t["fc.weight"].view(-1)[5].fill_(torch.nan), "not finite.*: fc.weight"),
            ("zeros", None, lambda t: t["fc.weight"].zero_(), "all zero: fc.weight"),
            ("two sizes", lambda c: c["dflash_config"].update(block_size=5), None,
             r"two values for block_size: \[4, 5\]"),
            ("two conventions", lambda c: (c.update(sample_from_anchor=False), c["dflash_config"].update(
                sample_from_anchor=True)), None, "two values for sample_from_anchor"),
            ("no convention", lambda c: c["dflash_config"].update(sample_from_anchor=2), None,
             "sample_from_anchor must be true or false, found 2"),
            ("no size", lambda c: c.pop("block_size"), None, "block_size is missing"),
            ("no layer types", lambda c: (c.pop("layer_types"), c.update(use_sliding_window=True)), None,
             "use_sliding_window without layer_types"),
            ("half a block", lambda c: c.update(block_size=8.0), None, "block_size must be a whole number"),
            ("causal", lambda c: c.update(is_causal=True), None, "is_causal true"),
            ("causal, too", lambda c: c["dflash_config"].update(is_causal=True), None, "is_causal true"),
            ("yarn", lambda c: c.update(rope_scaling={"rope_type": "yarn", "factor": 4}, rope_parameters=None), None,
             "positions of type 'yarn'"),
            ("two thetas", lambda c: c.update(rope_theta=5.0), None, "two values for rope_theta"),
            ("partial", lambda c: c["rope_parameters"].update(partial_rotary_factor=0.25), None,
             "partial_rotary_factor"),
            ("gelu", lambda c: c.update(hidden_act="gelu"), None, "hidden_act 'gelu'"),
            ("bias", lambda c: c.update(attention_bias=True), None, "attention_bias")):
        with pytest.raises(DrafterError, match=message):
            load_exported(broken(name, change, tensors), tiny_llama)
    cut = broken("cut")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:100])
    with pytest.raises(DrafterError, match="no readable model.safetensors"):
        load_exported(cut, tiny_llama)
    (cut / "model.safetensors").unlink()
    with pytest.raises(DrafterError, match="no readable model.safetensors"):
        load_exported(cut, tiny_llama)


def test_newer_exports_of_z_lab_say_the_block_size_elsewhere(tiny_llama, saved):
    path = saved / "zlab" / "config.json"
    config = json.loads(path.read_text())
    config["dflash_config"]["block_size"] = config.pop("block_size")
    path.write_text(json.dumps(config))
    assert load_exported(saved / "zlab", tiny_llama).config.block_size == 4


def test_a_drafter_of_another_target_is_refused(tiny_llama, tiny_qwen3_5, saved):
    with pytest.raises(DrafterError, match="another target"):
        DrafterProposer(open_drafter(saved / "run", tiny_qwen3_5), tiny_qwen3_5)
    held = load_file(saved / "zlab" / "model.safetensors")
    save_file(held, saved / "zlab" / "model.safetensors")  # without the note of its target, as other tools write it
    drafter = load_exported(saved / "zlab", tiny_llama)
    assert drafter.target == {} and DrafterProposer(drafter, tiny_llama).config.block_size == 4
    for key, value in (("hidden_size", 32), ("vocab_size", 400), ("num_target_layers", 9)):
        network = make_drafter(tiny_llama).network
        object.__setattr__(network.config, key, value)
        with pytest.raises(DrafterError, match=f"one of another target: {key} {value}, the target's is"):
            DrafterProposer(TrainedDrafter(network, None, {}), tiny_llama)


def test_what_is_wrong_with_an_export_is_named(tiny_llama, saved, tmp_path):
    best = saved / "run" / "drafter" / "best"
    assert export_differences(best, tiny_llama, saved / "zlab") == []
    export_zlab(best, tiny_llama, tmp_path / "bf16")
    assert export_differences(best, tiny_llama, tmp_path / "bf16") == []
    config = json.loads((tmp_path / "bf16" / "config.json").read_text())
    config["dflash_config"]["target_layer_ids"][0] += 1
    config["more"] = 1
    (tmp_path / "bf16" / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "bf16" / "model.safetensors")
    tensors["d2t"] = tensors["d2t"] * 0
    del tensors["norm.weight"]
    save_file(tensors, tmp_path / "bf16" / "model.safetensors")
    found = export_differences(best, tiny_llama, tmp_path / "bf16")
    assert [text.split()[1] for text in found] == ["dflash_config", "more", "norm.weight", "d2t"]
    (tmp_path / "bf16" / "model.safetensors").write_bytes(b"")
    assert "cannot be read" in export_differences(best, tiny_llama, tmp_path / "bf16")[0]
