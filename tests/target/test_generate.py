"""Batched greedy generation against one prompt at a time, recomputed without any cache."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dflash_lib.target.generate import Generation, generate_batch, stop_token_ids
from dflash_lib.target.loading import TargetError

PROMPTS = [[5], [1, 90, 55, 200, 31, 8, 77], [40, 41, 42]]


def by_hand(target, prompt, num, stop) -> Generation:
    text = list(prompt)
    with torch.no_grad():
        for _ in range(num):
            text.append(int(target.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
            if text[-1] in stop:
                return Generation(text[len(prompt):], "stop")
    return Generation(text[len(prompt):], "length")


@pytest.mark.parametrize("stop", [2, [203, 2], [314, 141]])
def test_batched_equals_unbatched(tiny_talker, monkeypatch, stop):
    monkeypatch.setattr(tiny_talker.model.generation_config, "eos_token_id", stop)
    ids = stop_token_ids(tiny_talker)
    assert ids == sorted({2, *(stop if isinstance(stop, list) else [stop])})
    expected = [by_hand(tiny_talker, prompt, 9, ids) for prompt in PROMPTS]
    assert generate_batch(tiny_talker, PROMPTS, 9) == expected
    reasons = {g.finish_reason for g in expected}
    assert "length" in reasons and (stop == 2 or "stop" in reasons)
    for prompt, one in zip(PROMPTS, expected, strict=True):
        assert generate_batch(tiny_talker, [prompt], 9) == [one]


def test_batched_equals_unbatched_on_a_hybrid(tiny_qwen3_5):
    expected = [by_hand(tiny_qwen3_5, prompt, 5, [2]) for prompt in PROMPTS]
    assert len({token for g in expected for token in g.token_ids}) > 5
    assert generate_batch(tiny_qwen3_5, PROMPTS, 5) == expected


def test_ends_exactly_at_the_limit(tiny_talker, monkeypatch):
    free = by_hand(tiny_talker, PROMPTS[1], 8, [])
    first = free.token_ids.index(312)
    monkeypatch.setattr(tiny_talker.model.generation_config, "eos_token_id", 312)
    assert generate_batch(tiny_talker, [PROMPTS[1]], first + 1)[0] == Generation(free.token_ids[:first + 1], "stop")
    assert generate_batch(tiny_talker, [PROMPTS[1]], first)[0] == Generation(free.token_ids[:first], "length")


def test_sampling_habits_of_the_folder_do_not_apply(tiny_talker, monkeypatch):
    expected = by_hand(tiny_talker, PROMPTS[1], 8, [2])
    for key, value in {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "do_sample": True, "temperature": 3.0,
                       "num_beams": 3, "max_new_tokens": 3, "suppress_tokens": [141], "min_new_tokens": 5}.items():
        monkeypatch.setattr(tiny_talker.model.generation_config, key, value)
    assert generate_batch(tiny_talker, [PROMPTS[1]], 8) == [expected]


def test_bad_input(tiny_talker, monkeypatch):
    assert generate_batch(tiny_talker, [], 4) == []
    with pytest.raises(TargetError, match="prompt 1 is empty"):
        generate_batch(tiny_talker, [[1], []], 4)
    most = tiny_talker.config.max_position_embeddings
    with pytest.raises(TargetError, match=f"prompt of {most - 3} tokens and 4 more are beyond the target's {most} pos"):
        generate_batch(tiny_talker, [[1], [1] * (most - 3)], 4)
    monkeypatch.setattr(tiny_talker.model.generation_config, "eos_token_id", None)
    without = replace(tiny_talker, tokenizer=SimpleNamespace(eos_token_id=None))
    with pytest.raises(TargetError, match="names an eos_token"):
        generate_batch(without, [[1]], 4)
