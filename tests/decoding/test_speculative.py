"""Speculative decoding against plain greedy decoding and HF generate, whatever is proposed."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from dflash_lib.decoding.cache import DecodingError, TargetCache, cache_argument
from dflash_lib.decoding.speculative import greedy_generate, measure_verify_seconds, speculative_generate
from dflash_lib.target.capture import capture_batch
from tests.decoding.scripted import Scripted

LAYER_IDS = [1, 2, 4]
PROMPT = [1, 90, 55, 200, 31, 8, 77]
NUM_NEW = 14


def hf_generate(target, prompt, max_new_tokens, stop) -> list[int]:
    ids = torch.tensor([prompt])
    return target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens,
                                 do_sample=False, eos_token_id=stop, pad_token_id=0)[0, len(prompt):].tolist()


def by_hand(target, prompt, num) -> list[int]:
    """Greedy without any cache."""
    text = list(prompt)
    with torch.no_grad():
        for _ in range(num):
            text.append(int(target.model(input_ids=torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(prompt):]


@pytest.fixture(scope="module")
def answer(tiny_talker) -> list[int]:
    tokens = by_hand(tiny_talker, PROMPT, NUM_NEW)
    assert len(set(tokens)) > 5 and 2 not in tokens  # says something, and does not end by itself
    return tokens


@pytest.fixture
def ends_with(tiny_talker, monkeypatch):
    """Makes a token end the turn."""
    return lambda token: monkeypatch.setattr(tiny_talker.model.generation_config, "eos_token_id", token)


def decode(target, proposer, block_size=4, max_new_tokens=NUM_NEW, prompt=PROMPT):
    return speculative_generate(target, proposer, prompt, max_new_tokens, block_size, LAYER_IDS)


def test_greedy_equals_generate_and_recomputing(tiny_talker, answer):
    plain = greedy_generate(tiny_talker, PROMPT, NUM_NEW)
    assert (plain.token_ids, plain.finish_reason) == (answer, "length")
    assert plain.token_ids == hf_generate(tiny_talker, PROMPT, NUM_NEW, [2])
    assert 0 < plain.prefill_seconds < plain.seconds


@pytest.mark.parametrize("pattern", list(itertools.product(range(1, 5), repeat=2)))
def test_every_pattern_of_acceptance(tiny_talker, answer, pattern):
    proposer = Scripted(PROMPT + answer, lambda n: pattern[n % 2])
    result = decode(tiny_talker, proposer)
    assert (result.token_ids, result.finish_reason) == (answer, "length")
    for n, step in enumerate(result.steps[:-1]):
        assert (step.drafted, step.accepted, step.num_new) == (3, pattern[n % 2] - 1, pattern[n % 2])
    assert sum(step.num_new for step in result.steps) == len(answer) - 1


@pytest.mark.parametrize("block_size", [2, 3, 8, 16])
@pytest.mark.parametrize("slot", [1, 2, 5, 7, 10_000])
def test_block_sizes(tiny_talker, answer, block_size, slot):
    result = decode(tiny_talker, Scripted(PROMPT + answer, lambda n: slot), block_size)
    assert result.token_ids == answer
    per_step = min(slot, block_size)
    assert len(result.steps) == -(-(NUM_NEW - 1) // per_step)


@pytest.mark.parametrize("end", [1, 5, 7, 8, 11])  # where a token stands for the first time
def test_end_of_turn_inside_a_block(tiny_talker, answer, ends_with, end):
    stop = answer[end]
    assert answer.index(stop) == end
    ends_with(stop)
    plain = greedy_generate(tiny_talker, PROMPT, NUM_NEW)
    assert (plain.token_ids, plain.finish_reason) == (answer[:end + 1], "stop")
    assert plain.token_ids == hf_generate(tiny_talker, PROMPT, NUM_NEW, [stop, 2])
    for slot in (1, 2, 3, 10_000):
        result = decode(tiny_talker, Scripted(PROMPT + answer, lambda n, slot=slot: slot), 6)
        assert (result.token_ids, result.finish_reason) == (plain.token_ids, "stop")
        assert sum(step.num_new for step in result.steps) == len(result.token_ids) - 1


@pytest.mark.parametrize("limit", range(1, 10))
def test_length_limit_inside_a_block(tiny_talker, answer, limit):
    for slot in (1, 3, 10_000):
        result = decode(tiny_talker, Scripted(PROMPT + answer, lambda n, slot=slot: slot), 4, limit)
        assert (result.token_ids, result.finish_reason) == (answer[:limit], "length")
        assert sum(step.num_new for step in result.steps) == limit - 1


def test_how_the_last_step_is_counted(tiny_talker, answer, ends_with):
    right = Scripted(PROMPT + answer)
    last = decode(tiny_talker, right, 4, 8).steps[-1]  # tokens 2-5 in one step, then 3 are left: all drafted
    assert (last.drafted, last.accepted, last.num_new) == (3, 3, 3)
    last = decode(tiny_talker, right, 4, 6).steps[-1]  # one is left, and it was drafted
    assert (last.accepted, last.num_new) == (1, 1)
    last = decode(tiny_talker, Scripted(PROMPT + answer, lambda n: 1), 4, 3).steps[-1]  # the bonus token ends it
    assert (last.accepted, last.num_new) == (0, 1)


def test_one_token_prompt_and_one_token_answer(tiny_talker, answer, ends_with):
    short = by_hand(tiny_talker, [5], 6)
    assert greedy_generate(tiny_talker, [5], 6).token_ids == short
    for slot in (1, 2, 10_000):
        result = decode(tiny_talker, Scripted([5, *short], lambda n, slot=slot: slot), 4, 6, [5])
        assert result.token_ids == short and result.steps[0].position == 1
    ends_with(answer[0])
    result = decode(tiny_talker, Scripted(PROMPT + answer), 4)
    assert (result.token_ids, result.finish_reason, result.steps) == (answer[:1], "stop", [])


@pytest.mark.parametrize("slot", [1, 2, 4, 10_000])
def test_states_handed_over_are_those_of_the_confirmed_text(tiny_talker, answer, slot):
    proposer = Scripted(PROMPT + answer, lambda n: slot)
    result = decode(tiny_talker, proposer, 5)
    handed = torch.cat(proposer.states)
    text = (PROMPT + answer)[:len(handed)]
    assert proposer.token_ids == text
    assert [len(states) for states in proposer.states] == [len(PROMPT), *(s.num_new for s in result.steps[:-1])]
    fresh = capture_batch(tiny_talker, [text], LAYER_IDS, last=False)[0].aux_hidden_states
    assert handed.dtype == torch.float32 and handed.shape == fresh.shape
    torch.testing.assert_close(handed, fresh, rtol=1e-4, atol=1e-4)
    shifted = (handed[1:] - fresh[:-1]).norm(dim=-1) / fresh[:-1].norm(dim=-1)
    assert shifted.min() > 0.01  # so a shift by one token would be seen at every position


def test_positions_and_times(tiny_talker, answer):
    result = decode(tiny_talker, Scripted(PROMPT + answer, lambda n: 2), 4)
    assert [s.position for s in result.steps] == list(range(len(PROMPT), len(PROMPT) + NUM_NEW - 1, 2))
    assert all(s.verify_s > 0 and s.draft_s > 0 for s in result.steps)
    assert result.verify_seconds + result.draft_seconds <= result.decode_seconds < result.seconds


def test_a_cache_that_is_not_rolled_back_would_be_seen(tiny_talker, answer, monkeypatch):
    """Planted fault: refused drafts stay in the cache."""
    monkeypatch.setattr(TargetCache, "forget", lambda cache, num_tokens: setattr(cache, "calls", None))
    monkeypatch.setattr(Scripted, "propose", lambda self, anchor, num_tokens: [9] * num_tokens)
    assert decode(tiny_talker, Scripted(PROMPT + answer)).token_ids != answer


def test_hooks_are_gone_and_logits_are_few(tiny_talker, answer, monkeypatch):
    seen = []
    forward = tiny_talker.model.lm_head.forward
    monkeypatch.setattr(tiny_talker.model.lm_head, "forward", lambda x: seen.append(x.shape[1]) or forward(x))
    decode(tiny_talker, Scripted(PROMPT + answer), 4)
    assert seen[0] == 1 and set(seen[1:]) == {4}
    assert not any(layer._forward_hooks for layer in tiny_talker.layers)
    with pytest.raises(ZeroDivisionError):
        decode(tiny_talker, Scripted(PROMPT + answer, lambda n: 1 / 0), 4)
    assert not any(layer._forward_hooks for layer in tiny_talker.layers)


@pytest.mark.parametrize(("prompt", "max_new", "block", "message"), [
    ([], 4, 4, "prompt is empty"),
    (PROMPT, 0, 4, "max_new_tokens: at least 1"),
    (PROMPT, 4, 1, "block_size counts the anchor"),
    (PROMPT, 1020, 4, "7 prompt tokens and 1020 new ones exceed the target's 1024 positions"),
])
def test_bad_requests(tiny_talker, prompt, max_new, block, message):
    with pytest.raises(DecodingError, match=message):
        decode(tiny_talker, Scripted([]), block, max_new, prompt)


def test_a_proposer_that_drafts_too_few(tiny_talker, answer):
    proposer = Scripted(PROMPT + answer)
    proposer.propose = lambda anchor, num_tokens: [1]
    with pytest.raises(DecodingError, match="scripted: 3 drafts asked for, 1 proposed"):
        decode(tiny_talker, proposer, 4)


def test_cache_argument(tiny_talker):
    assert cache_argument(SimpleNamespace(forward=lambda input_ids, cache=None: 0)) == "cache"
    assert cache_argument(SimpleNamespace(forward=lambda input_ids, past_key_values=None: 0)) == "past_key_values"
    with pytest.raises(DecodingError, match="neither"):
        cache_argument(SimpleNamespace(forward=lambda input_ids: 0))
    assert list(TargetCache(tiny_talker).arguments) == [cache_argument(tiny_talker.model)]


def test_verify_seconds(tiny_talker):
    seconds = measure_verify_seconds(tiny_talker, PROMPT, [1, 2, 8], num_repeats=3)
    assert list(seconds) == [1, 2, 8] and all(value > 0 for value in seconds.values())
