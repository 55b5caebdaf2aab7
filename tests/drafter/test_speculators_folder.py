"""Drafters of the speculators package, read: fields and tensors here, its trainer's own checkpoints in
test_speculators_trained.py."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_lib.drafter import DrafterError, DrafterProposer, export_speculators, export_zlab
from dflash_lib.drafter.exported import is_exported, open_drafter
from dflash_lib.drafter.folder import save_drafter
from dflash_lib.drafter.network import FULL, SLIDING
from dflash_lib.drafter.speculators_folder import load_speculators
from tests.decoding.test_training_walk import changed, make_drafter
from tests.drafter.folders import edit

VOCAB = torch.tensor([2, 7, 90])


@pytest.fixture
def exported(tiny_llama, tmp_path):
    """Our export with a reduced head, as the package's trainer would have written it: no note of the target, theta at
    one place only."""
    save_drafter(tmp_path / "drafter", make_drafter(tiny_llama, VOCAB))
    export_speculators(tmp_path / "drafter", tiny_llama, tmp_path / "theirs", dtype="float32")
    held = load_file(tmp_path / "theirs" / "model.safetensors")
    save_file(held, tmp_path / "theirs" / "model.safetensors")
    edit(tmp_path / "theirs", lambda c: c["transformer_layer_config"].pop("rope_theta"))
    return tmp_path / "theirs"


def layers(**fields):
    return lambda config: config["transformer_layer_config"].update(fields)


def test_every_field_and_tensor_comes_back(tiny_llama, exported):
    made, back = make_drafter(tiny_llama, VOCAB), open_drafter(exported, tiny_llama)
    assert is_exported(exported) and back.config == made.config and back.target == {}
    assert torch.equal(back.draft_vocab, VOCAB)
    assert all(torch.equal(p, back.network.state_dict()[name]) for name, p in made.network.state_dict().items())
    assert not back.network.training and not any(p.requires_grad for p in back.network.parameters())
    DrafterProposer(back, tiny_llama)


def test_it_can_be_exported_anew(tiny_llama, exported, tmp_path):
    """As z-lab's format, and in its own with what vLLM needs to be told of full-attention layers."""
    edit(exported, lambda c: c.update(sliding_window_non_causal=False))
    export_zlab(exported, tiny_llama, tmp_path / "zlab", dtype="float32")
    again = export_speculators(exported, tiny_llama, tmp_path / "again", dtype="float32")
    assert again["sliding_window_non_causal"] is True
    for folder in ("zlab", "again"):
        back = open_drafter(tmp_path / folder, tiny_llama)
        assert back.config == make_drafter(tiny_llama, VOCAB).config and torch.equal(back.draft_vocab, VOCAB)
        assert torch.equal(back.network.fc.weight, make_drafter(tiny_llama).network.fc.weight)


def test_frozen_copies_must_be_the_targets(tiny_llama, exported, tmp_path):
    """Older checkpoints carry them all, in bfloat16 perhaps; each one that is another target's is named."""
    copies = {"embed_tokens.weight": tiny_llama.embedding.weight, "verifier_norm.weight": tiny_llama.final_norm.weight,
              "verifier_lm_head.weight": tiny_llama.head.weight[VOCAB], "lm_head.weight": tiny_llama.head.weight[VOCAB]}
    with_all = edit(shutil.copytree(exported, tmp_path / "all"), None,
                    lambda t: t.update({name: copy.detach().bfloat16() for name, copy in copies.items()}))
    assert torch.equal(load_speculators(with_all, tiny_llama).draft_vocab, VOCAB)
    for name in copies:
        folder = shutil.copytree(with_all, tmp_path / name)
        edit(folder, None, lambda t, name=name: t.update({name: t[name] * 1.1}))
        with pytest.raises(DrafterError, match=rf"{name} is not made of the target's rows"):
            load_speculators(folder, tiny_llama)
        edit(folder, None, lambda t, name=name: t.update({name: t[name][:-1]}))
        with pytest.raises(DrafterError, match=f"another target: its {name}"):
            load_speculators(folder, tiny_llama)


@pytest.mark.parametrize("kinds, non_causal", [((SLIDING, FULL), False), ((FULL, FULL), False), ((FULL, FULL), True),
                                               ((SLIDING, SLIDING), False)])
def test_what_layers_see_is_read_as_the_package_means_it(tiny_llama, exported, kinds, non_causal):
    def two_layers(tensors):
        first = {name: t for name, t in tensors.items() if name.startswith("layers.0.")}
        tensors.update({name.replace("layers.0.", "layers.1."): t.clone() for name, t in first.items()})

    edit(exported, lambda c: c.update(sliding_window_non_causal=non_causal), two_layers)
    edit(exported, layers(layer_types=list(kinds), num_hidden_layers=2, use_sliding_window=SLIDING in kinds,
                          sliding_window=9 if SLIDING in kinds else None))
    config = load_speculators(exported, tiny_llama).config
    assert config.layer_types == kinds and config.sliding_window == (9 if SLIDING in kinds else None)


def test_a_whole_vocabulary_is_the_full_head(tiny_llama, tmp_path):
    drafter = changed(make_drafter(tiny_llama), sample_from_anchor=True)
    save_drafter(tmp_path / "drafter", drafter)
    export_speculators(tmp_path / "drafter", tiny_llama, tmp_path / "theirs", dtype="float32")
    back = open_drafter(tmp_path / "theirs", tiny_llama)
    assert back.config == drafter.config and back.draft_vocab is None and back.target == tiny_llama.identity
    edit(tmp_path / "theirs", lambda c: c.pop("sample_from_anchor"))
    assert open_drafter(tmp_path / "theirs", tiny_llama).config.sample_from_anchor is False, "the package's default"


def sliding_layer(**fields):
    said = {"layer_types": [SLIDING], "use_sliding_window": True, "sliding_window": 9, **fields}
    return lambda config: (layers(**said)(config), config.update(sliding_window_non_causal=False))


REFUSED = {
    "eagle": (lambda c: c.update(speculators_model_type="eagle3"), None, "a drafter of kind 'eagle3'"),
    "non-causal": (lambda c: (sliding_layer()(c), c.update(sliding_window_non_causal=True)), None,
                   "sliding_window_non_causal true for sliding-window layers"),
    "no window": (sliding_layer(sliding_window=None), None, "need a sliding_window, found None"),
    "window unused": (sliding_layer(use_sliding_window=False), None, "need a sliding_window"),
    "embedding": (lambda c: c["aux_hidden_state_layer_ids"].insert(0, 0), None, "layer id 0 in aux_hidden_state"),
    "too deep": (lambda c: c["aux_hidden_state_layer_ids"].append(9), None, "are not within the target's layers"),
    "no ids": (lambda c: c.update(aux_hidden_state_layer_ids=None), None, "aux_hidden_state_layer_ids is missing"),
    "no layers": (lambda c: c.pop("transformer_layer_config"), None, "transformer_layer_config is missing"),
    "no mask": (lambda c: c.update(mask_token_id=None), None, "mask_token_id must be a token id, found None"),
    "no theta": (lambda c: c["transformer_layer_config"].pop("rope_parameters"), None, "rope_theta is missing"),
    "no block": (lambda c: c.pop("block_size"), None, "block_size is missing"),
    "yarn": (layers(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4}), None, "type 'yarn'"),
    "partial": (layers(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}),
                None, "partial_rotary_factor"),
    "gelu": (layers(hidden_act="gelu"), None, "hidden_act 'gelu'"),
    "other width": (lambda c: c.update(target_hidden_size=128), None, "target_hidden_size 128"),
    "no head_dim": (layers(head_dim=None), None, "head_dim must be a whole number"),
    "convention": (lambda c: c.update(sample_from_anchor="yes"), None, "sample_from_anchor must be true or false"),
    "no d2t": (None, lambda t: t.pop("d2t"), "d2t has no entries"),
    "ids, not offsets": (None, lambda t: t.update(d2t=VOCAB.clone()), "t2d marks 3 of 384 tokens, which are not those"),
    "other t2d": (None, lambda t: t["t2d"].logical_not_(), "t2d marks 381 of 384"),
    "size": (lambda c: c.update(draft_vocab_size=4), None, "d2t has 3 entries"),
    "more": (None, lambda t: t.update({"markov.weight": torch.ones(3)}), "markov.weight: .* instead of nothing"),
    "lacks": (None, lambda t: t.pop("fc.weight"), "fc.weight: missing"),
    "NaN": (None, lambda t: t["fc.weight"].view(-1)[5].fill_(torch.nan), "not finite.*: fc.weight"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(tiny_llama, exported, name):
    change, tensors, message = REFUSED[name]
    with pytest.raises(DrafterError, match=message):
        open_drafter(edit(exported, change, tensors), tiny_llama)


def test_all_fields_that_are_unlike_are_named_at_once(tiny_llama, exported):
    edit(exported, lambda c: (layers(hidden_act="gelu", attention_bias=True)(c), c.update(target_hidden_size=8)))
    with pytest.raises(DrafterError, match="gelu.*; attention_bias; target_hidden_size 8"):
        open_drafter(exported, tiny_llama)
