"""User turns that the target writes itself."""

import hashlib
import json
import math

import pytest
import torch

from dflash_lib.conversations.formats import read_conversations
from dflash_lib.files import read_json
from dflash_lib.target import prompts as module
from dflash_lib.target.generate import sample_continuations
from dflash_lib.target.loading import TargetError
from dflash_lib.target.prompts import PromptOptions, prompt_prefix, sample_prompts

OPTIONS = PromptOptions(num_prompts=20, max_new_tokens=30, batch_size=16, min_words=1, top_k=100)


@pytest.fixture
def ending(tiny_talker, monkeypatch):
    """A random target that ends its turns now and then: many tokens are ends of turn."""
    monkeypatch.setattr(tiny_talker.model.generation_config, "eos_token_id", list(range(2, 384, 4)))
    return tiny_talker


def test_the_prefix_is_the_templates_text_before_a_users_words(tiny_talker):
    assert prompt_prefix(tiny_talker) == "<|im_start|>user\n"


def test_prompts_are_different_whole_and_made_again_by_the_same_seed(ending, tmp_path):
    torch.manual_seed(7)
    expected_random = torch.rand(3)
    torch.manual_seed(7)
    sample_prompts(ending, tmp_path / "a.jsonl", OPTIONS)
    assert torch.equal(torch.rand(3), expected_random)  # the global random state is left alone
    sample_prompts(ending, tmp_path / "b.jsonl", OPTIONS)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    conversations = list(read_conversations(tmp_path / "a.jsonl", need_assistant=False))
    texts = [c.messages[0]["content"] for c in conversations]
    assert len(texts) == len(set(texts)) == 20 and len({c.id for c in conversations}) == 20
    assert all(len(c.messages) == 1 and text and text == text.strip()
               for c, text in zip(conversations, texts, strict=True))
    sample_prompts(ending, tmp_path / "c.jsonl", PromptOptions(**{**vars(OPTIONS), "seed": 1}))
    other = [json.loads(line)["messages"] for line in (tmp_path / "c.jsonl").read_text().splitlines()]
    assert other != [c.messages for c in conversations]


def test_samples_are_drawn_from_the_targets_distribution(tiny_talker):
    prompt = [5, 90, 55]
    with torch.no_grad():
        logits = tiny_talker.model(input_ids=torch.tensor([prompt])).logits[0, -1]
    top = logits.topk(8)
    expected = torch.zeros(384).index_copy(0, top.indices, (top.values / 0.5).softmax(0))
    drawn = sample_continuations(tiny_talker, prompt, 4000, 1, temperature=0.5, top_k=8, seed=0)
    counts = torch.bincount(torch.tensor([g.token_ids[0] for g in drawn]), minlength=384) / 4000
    assert (counts - expected).abs().max() < 0.04 and counts[expected == 0].sum() == 0


@pytest.mark.parametrize("cut", ["batches", "line", "settings", "nothing"])
def test_a_killed_job_goes_on_to_the_same_file(ending, tmp_path, monkeypatch, cut):
    sample_prompts(ending, tmp_path / "whole.jsonl", OPTIONS)
    out, drawn = tmp_path / "out.jsonl", []

    def killed(*arguments, seed, **more):
        if len(drawn) == (0 if cut == "nothing" else 2):
            raise KeyboardInterrupt
        drawn.append(seed)
        return sample_continuations(*arguments, seed=seed, **more)

    monkeypatch.setattr(module, "sample_continuations", killed)
    with pytest.raises(KeyboardInterrupt):
        sample_prompts(ending, out, OPTIONS)
    assert not out.exists()
    partial = tmp_path / "out.jsonl.partial"
    assert len(partial.read_text().splitlines()) == len(drawn)
    if cut == "line":
        partial.write_bytes(partial.read_bytes()[:-3])
    if cut == "settings":
        for changed in ({"seed": 1}, {"temperature": 0.5}, {"batch_size": 17}, {"num_prompts": 21}):
            with pytest.raises(ValueError, match=f"begun with other settings: .'{next(iter(changed))}'"):
                sample_prompts(ending, out, PromptOptions(**{**vars(OPTIONS), **changed}))
    again = []
    monkeypatch.setattr(module, "sample_continuations", lambda *a, seed, **more: again.append(seed) or
                        sample_continuations(*a, seed=seed, **more))
    batches = sample_prompts(ending, out, OPTIONS)
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert batches > 2 and len(again) == batches - {"line": 1, "nothing": 0}.get(cut, 2)
    if cut == "line":
        assert again[0] == drawn[1]
    meta, whole = read_json(f"{out}.meta.json"), read_json(tmp_path / "whole.jsonl.meta.json")
    assert meta == whole and (meta["seed"], meta["batches"], meta["model"]) == (0, batches, ending.identity)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "out.jsonl", "out.jsonl.meta.json", "whole.jsonl", "whole.jsonl.meta.json"]


def test_a_seed_draws_what_it_always_drew(ending, tmp_path):
    """Files of prompts that were made before can be made again."""
    sample_prompts(ending, tmp_path / "a.jsonl", OPTIONS)
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    wanted: dict[str, None] = {}
    for batch in range(9):
        seed = int.from_bytes(hashlib.sha256(f"0,{batch}".encode()).digest()[:7], "big")
        prefix = ending.tokenizer("<|im_start|>user\n")["input_ids"]
        for found in sample_continuations(ending, prefix, 16, 30, temperature=1.0, top_k=100, seed=seed):
            text = ending.tokenizer.decode(found.token_ids, skip_special_tokens=True).strip()
            if found.finish_reason == "stop" and text:
                wanted.setdefault(text)
    assert rows == [{"id": f"sampled-0-{i:05d}", "kind": "sampled", "messages": [{"role": "user", "content": text}]}
                    for i, text in enumerate(list(wanted)[:20])]


@pytest.mark.parametrize("wrong", [{"num_prompts": 0}, {"max_new_tokens": 0}, {"top_k": 0}, {"batch_size": -1},
                                   {"temperature": 0.0}, {"temperature": math.nan}, {"temperature": math.inf}])
def test_options_that_draw_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PromptOptions(**{**vars(OPTIONS), **wrong})


def test_bad_input(tiny_talker, ending, tmp_path, monkeypatch):
    (tmp_path / "there.jsonl").write_text("kept")
    with pytest.raises(ValueError, match="is there already"):
        sample_prompts(ending, tmp_path / "there.jsonl", OPTIONS)
    assert (tmp_path / "there.jsonl").read_text() == "kept"
    monkeypatch.setattr(tiny_talker.model.generation_config, "eos_token_id", 2)
    with pytest.raises(TargetError, match="only 0 were usable"):
        sample_prompts(tiny_talker, tmp_path / "never.jsonl", PromptOptions(**{**vars(OPTIONS), "max_new_tokens": 2}))
    assert not list(tmp_path.glob("never*")), "so that a call with other settings can begin"
    monkeypatch.setattr(tiny_talker.tokenizer, "chat_template", "{{ messages[0]['content'] }}")
    with pytest.raises(TargetError, match="puts nothing before"):
        prompt_prefix(tiny_talker)
