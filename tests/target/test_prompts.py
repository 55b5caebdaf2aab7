"""User turns that the target writes itself."""

import json

import pytest
import torch

from dflash_lib.conversations.formats import read_conversations
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


@pytest.mark.parametrize("wrong", [{"num_prompts": 0}, {"max_new_tokens": 0}, {"top_k": 0}, {"batch_size": -1},
                                   {"temperature": 0.0}])
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
    assert not (tmp_path / "never.jsonl").exists()
    monkeypatch.setattr(tiny_talker.tokenizer, "chat_template", "{{ messages[0]['content'] }}")
    with pytest.raises(TargetError, match="puts nothing before"):
        prompt_prefix(tiny_talker)
