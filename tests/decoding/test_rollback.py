"""Rollback of the target's cache, and with it speculative decoding, for every family: against plain greedy decoding,
against fresh caches, and with planted faults."""

import copy
import itertools

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionAndFullAttentionLayer

from dflash_lib.decoding.agreement import first_divergence
from dflash_lib.decoding.cache import CHUNK_RULE, DecodingError, RuleCall, TargetCache, states_behind
from dflash_lib.decoding.speculative import greedy_generate, measure_verify_seconds, speculative_generate
from dflash_lib.target.capture import capture_batch
from dflash_lib.target.loading import load_target
from tests.decoding.scripted import Scripted
from tests.families import FAMILIES, WINDOW, change_config, make_family

HYBRIDS = ["qwen3_5_text", "qwen3_5", "qwen3_5_moe", "qwen3_next"]
SLIDING = ["gemma3_text", "gemma3", "gpt_oss"]
TESTED = ["llama", "qwen3", *HYBRIDS, *SLIDING, "narrow_window"]
PROMPT = [1, 90, 55, 200, 31, 8, 77]
LAYER_IDS = [0, 2]
BLOCK = 8
NUM_NEW = 90  # past the sliding window of 24, and the chunk of 64
NARROW = 4  # a window smaller than the block
STOP = 2


def talking(target):
    """A target whose greedy text varies, does not end, and depends on what its layers keep: a random head without the
    stop token, and attention that is sharp and strong, where random weights average over the text."""
    for name, parameter in target.model.named_parameters():
        if any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm", "o_proj", "out_proj", "down_proj")):
            parameter.mul_(3)
    weight = torch.randn(target.head.weight.shape, generator=torch.Generator().manual_seed(3))
    weight[STOP] = 0
    target.head.weight = torch.nn.Parameter(weight, requires_grad=False)
    target.model.generation_config.eos_token_id = STOP
    return target


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    made = {}

    def get(name: str):
        if name not in made:
            folder = tmp_path_factory.mktemp("families") / name
            make_family(folder, "gemma3_text" if name == "narrow_window" else name)
            if name == "narrow_window":
                change_config(folder, sliding_window=NARROW)
            made[name] = talking(load_target(folder, audit="quick"))
        return made[name]
    return get


@pytest.fixture(scope="module")
def answers(targets):
    """Plain greedy answers to a prompt, each family's once."""
    known = {}

    def get(name: str, prompt=tuple(PROMPT), num=NUM_NEW) -> list[int]:
        if (name, prompt, num) not in known:
            decoded = greedy_generate(targets(name), prompt, num)
            assert decoded.finish_reason == "length" and (num < NUM_NEW or len(set(decoded.token_ids)) > 10)
            known[name, prompt, num] = decoded.token_ids
        return known[name, prompt, num]
    return get


def decode(target, answer, spoil, block_size=BLOCK, prompt=PROMPT, proposer=None, num=None):
    proposer = proposer or Scripted(list(prompt) + answer, spoil)
    return speculative_generate(target, proposer, prompt, num or len(answer), block_size, LAYER_IDS)


def in_every_order(values) -> list[int]:
    """A cycle in which each of `values` follows each, itself included, once (a de Bruijn sequence of order 2)."""
    values, sequence = list(values), []
    for i, a in enumerate(values):
        sequence += [a] + [x for b in values[i + 1:] for x in (a, b)]
    assert {*zip(sequence, sequence[1:] + sequence[:1], strict=True)} == {*itertools.product(values, repeat=2)}
    return sequence


def test_every_loadable_family_is_here():
    assert {*FAMILIES} - {*TESTED} == {"llama_untied"}


@pytest.mark.parametrize("family", TESTED)
def test_acceptance_of_0_to_7_in_turn(targets, answers, family):
    target, answer = targets(family), answers(family)
    order = in_every_order([0, 1, 3, 4, 7])
    result = decode(target, answer, lambda n: order[n % len(order)] + 1)
    assert first_divergence(target, PROMPT, answer, result.token_ids) is None
    accepted = [step.accepted for step in result.steps[:-1]]
    assert accepted == order[:len(accepted)] and len(accepted) > 20


@pytest.mark.slow
@pytest.mark.parametrize("family", TESTED)
def test_acceptance_of_0_to_7_in_every_order(targets, answers, family):
    order = in_every_order(range(8))
    target, answer = targets(family), answers(family, num=sum(order) + 2 * len(order))
    result = decode(target, answer, lambda n: order[n % len(order)] + 1)
    assert first_divergence(target, PROMPT, answer, result.token_ids) is None
    accepted = [step.accepted for step in result.steps[:-1]]
    assert accepted[:len(order) + 1] == order + order[:1]


@pytest.mark.parametrize("family", TESTED)
@pytest.mark.parametrize("slot", [1, 10_000])
def test_never_right_and_always_right(targets, answers, family, slot):
    target, answer = targets(family), answers(family)[:40]
    for block_size in (2, 8) if slot == 1 else (2, 16):
        result = decode(target, answer, lambda n: slot, block_size)
        assert first_divergence(target, PROMPT, answer, result.token_ids) is None
        assert len(result.steps) == (39 if slot == 1 else -(-39 // block_size))


@pytest.mark.parametrize("family", TESTED)
@pytest.mark.parametrize("length", [1, 2, WINDOW - 1, WINDOW, 63, 64])
def test_prompt_lengths(targets, answers, family, length):
    prompt = [(17 * i + 5) % 377 + 3 for i in range(length)]
    target, answer = targets(family), answers(family, tuple(prompt), 16)
    result = decode(target, answer, lambda n: (3, 1, 5)[n % 3], 8, prompt)
    assert first_divergence(target, prompt, answer, result.token_ids) is None


@pytest.mark.parametrize("family", ["qwen3_5_text", "gpt_oss"])
def test_ends_inside_a_block(targets, answers, family, monkeypatch):
    target, answer = targets(family), answers(family)
    for limit in range(1, 10):
        for slot in (1, 3, 10_000):
            result = decode(target, answer, lambda n, slot=slot: slot, num=limit)
            assert (result.token_ids, result.finish_reason) == (answer[:limit], "length")
    ends = [i for i in range(1, 14) if answer.index(answer[i]) == i][-4:]
    for end in ends:
        monkeypatch.setattr(target.model.generation_config, "eos_token_id", answer[end])
        for slot in (1, 2, 4, 10_000):
            result = decode(target, answer, lambda n, slot=slot: slot)
            assert (result.token_ids, result.finish_reason) == (answer[:end + 1], "stop")


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3_text"])
def test_states_handed_over_are_those_of_the_confirmed_text(targets, answers, family):
    target, answer = targets(family), answers(family)
    proposer = Scripted(PROMPT + answer, lambda n: (2, 8, 1, 5)[n % 4])
    decode(target, answer, None, proposer=proposer)
    handed = torch.cat(proposer.states)
    fresh = capture_batch(target, [proposer.token_ids], LAYER_IDS, last=False)[0].aux_hidden_states
    assert proposer.token_ids == (PROMPT + answer)[:len(handed)] and len(handed) > 80
    torch.testing.assert_close(handed, fresh, rtol=1e-4, atol=1e-4)


# The cache itself.

def kept_by(cache: TargetCache) -> list[torch.Tensor]:
    """Everything that the layers keep and that a later forward reads, in the order of the layers."""
    found = []
    for layer in cache.kept.layers:
        if layer in cache.linear:
            found += [layer.conv_states[0], layer.recurrent_states[0]]
            continue
        window = layer.sliding_window - 1 if isinstance(layer, DynamicSlidingWindowLayer) else None
        if window is not None:
            assert layer.keys.shape[2] == min(window, layer.cumulative_length)
        found += [layer.keys, layer.values, torch.tensor(float(layer.get_seq_length()))]
    return found


@torch.inference_mode()
def run(target, cache, token_ids):
    return target.model(input_ids=torch.tensor([token_ids]), use_cache=True, **cache.arguments).logits[0]


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float("inf") if a.shape != b.shape else float((a - b).norm() / (1e-6 + b.norm()))


@torch.inference_mode()
def rolled_back_and_fresh(target, prompt_len, num_forgotten, fault=None):
    """Greatest difference of what two caches keep, and of the logits that follow: one of a prompt and a block, some of
    whose tokens were taken back; one fed the same tokens, once."""
    text = [(29 * i + 11) % 377 + 3 for i in range(prompt_len + BLOCK + 1)]
    cache, fresh = TargetCache(target), TargetCache(target)
    run(target, cache, text[:prompt_len])
    with cache.recording():
        run(target, cache, text[prompt_len:prompt_len + BLOCK])
    (fault or TargetCache.forget)(cache, num_forgotten)
    end = prompt_len + BLOCK - num_forgotten
    assert cache.num_tokens == end
    run(target, fresh, text[:end])
    kept = max(difference(a, b) for a, b in zip(kept_by(cache), kept_by(fresh), strict=True))
    return kept, difference(run(target, cache, text[-1:]), run(target, fresh, text[-1:]))


@pytest.mark.parametrize("family", TESTED)
@pytest.mark.parametrize("prompt_len", [1, WINDOW - 5, 60])
def test_a_rolled_back_cache_is_as_a_fresh_one(targets, family, prompt_len):
    for num_forgotten in (0, 1, 4, 7, 8):
        kept, logits = rolled_back_and_fresh(targets(family), prompt_len, num_forgotten)
        assert kept < 1e-4 and logits < 1e-4


def leaving(kind: str):
    """A `forget` that leaves one kind of state as the whole block made it (planted fault)."""
    def forget(cache: TargetCache, num_tokens: int) -> None:
        stale = []
        for layer in cache.kept.layers:
            if kind == "window" and isinstance(layer, DynamicSlidingWindowLayer):
                stale.append((layer, layer.keys[:, :, 1 - layer.sliding_window:].clone(),
                              layer.values[:, :, 1 - layer.sliding_window:].clone()))
            elif kind != "window" and layer in cache.linear:
                size = layer.conv_kernel_size[0]
                stale.append((layer, layer.conv_states[0][..., -size:].clone(), layer.recurrent_states[0].clone()))
        assert stale
        rolled_back(cache, num_tokens)
        for layer, first, second in stale:
            if kind == "window":
                size = layer.keys.shape[2]
                layer.keys, layer.values = first[:, :, -size:], second[:, :, -size:]
            elif kind == "convolution":
                layer.conv_states[0] = first
            else:
                layer.recurrent_states[0] = second
    rolled_back = TargetCache.forget
    return forget


@pytest.mark.parametrize(("family", "kind"), [(f, k) for f in HYBRIDS for k in ("convolution", "recurrent")]
                         + [(f, "window") for f in [*SLIDING, "narrow_window"]])
def test_what_is_not_rolled_back_is_seen(targets, answers, family, kind, monkeypatch):
    """Planted faults: in the cache's contents, in the next logits, and in the answer."""
    target, answer, fault = targets(family), answers(family), leaving(kind)
    kept, logits = rolled_back_and_fresh(target, 60, 5, fault)
    assert kept > 1e-2 and logits > 1e-3
    monkeypatch.setattr(TargetCache, "forget", fault)
    divergence = first_divergence(target, PROMPT, answer, decode_unchecked(target, answer))
    assert divergence is not None and not divergence.near_tie and divergence.gap > 0.01


def decode_unchecked(target, answer) -> list[int]:
    """With drafts that are always wrong behind the third, and no look at what was confirmed."""
    class Blind(Scripted):
        def propose(self, anchor, num_tokens):
            at = len(self.token_ids)
            drafts = [self.text[i] if i < len(self.text) else 7 for i in range(at + 1, at + 1 + num_tokens)]
            return drafts[:3] + [7] * (num_tokens - 3)
    return decode(target, answer, None, proposer=Blind(PROMPT + answer)).token_ids


@pytest.mark.parametrize("family", HYBRIDS)
def test_transformers_own_crop_leaves_the_recurrent_state(targets, family):
    """Why the rule is run again here. Should this fail one day, `crop` alone might do."""
    def crop(cache, num_tokens):
        cache.calls = None
        cache._record_past(True)
        cache.kept.crop(-num_tokens)
        cache._record_past(False)
    assert rolled_back_and_fresh(targets(family), 60, 5, crop)[0] > 1e-2


def test_verify_seconds_of_a_hybrid(targets):
    seconds = measure_verify_seconds(targets("qwen3_5_text"), PROMPT, [1, 2, 8], num_repeats=2)
    assert list(seconds) == [1, 2, 8] and min(seconds.values()) > 0


# What cannot be.

def test_layers_that_cannot_be_rolled_back_are_named(targets, monkeypatch):
    target = targets("qwen3_5_text")
    mixed = DynamicCache(config=target.config)
    mixed.layers[1] = LinearAttentionAndFullAttentionLayer()
    monkeypatch.setattr("dflash_lib.decoding.cache.DynamicCache", lambda config: copy.deepcopy(mixed))
    with pytest.raises(DecodingError, match=r"linear_attention keep something \(LinearAttentionAndFull"):
        decode(target, [1, 2], lambda n: 1)
    TargetCache(target, rollback=False)


def test_linear_layers_with_another_rule_are_refused(targets, monkeypatch):
    target = targets("qwen3_5_text")
    modelling = TargetCache(target).modelling
    rule = getattr(modelling, CHUNK_RULE)
    plain = greedy_generate(target, PROMPT, 3).token_ids
    monkeypatch.delattr(modelling, CHUNK_RULE)
    with pytest.raises(DecodingError, match="type linear_attention .*modeling_qwen3_5 has no"):
        decode(target, plain, lambda n: 1)
    monkeypatch.undo()
    for layer in target.layers:  # a kernel in the layer's place does not call the rule
        if hasattr(layer, "linear_attn"):
            monkeypatch.setattr(layer.linear_attn, "forward", lambda hidden_states, **more: hidden_states)
            break
    with pytest.raises(DecodingError, match="3 linear-attention layers keep a recurrent state, but .* called 2 times"):
        cache = TargetCache(target)
        run(target, cache, PROMPT)
        with cache.recording():
            run(target, cache, PROMPT)
        cache.linear[0].recurrent_states[0] = cache.linear[1].recurrent_states[0]
        cache.forget(1)
    assert getattr(modelling, CHUNK_RULE) is rule


@pytest.mark.parametrize("fault", [lambda state: state.transpose(-1, -2), lambda state: 1.1 * state,
                                   lambda state: state * float("nan")])
def test_a_kernel_with_states_of_its_own_is_refused(targets, monkeypatch, fault):
    target = targets("qwen3_5_text")
    cache = TargetCache(target)
    run(target, cache, PROMPT)
    rule = getattr(cache.modelling, CHUNK_RULE)

    def other(*inputs, **more):
        output, state = rule(*inputs, **more)
        return output, fault(state)
    monkeypatch.setattr(cache.modelling, CHUNK_RULE, other)
    with cache.recording():
        run(target, cache, PROMPT)
    with pytest.raises(DecodingError, match="makes other states than the gated delta rule"):
        cache.forget(3)


@pytest.mark.parametrize("decay", [0.01, 3.0, 60.0])  # the last one would overflow if gates were divided by
@pytest.mark.parametrize("normalise", [True, False])
def test_states_behind_each_token(targets, decay, normalise):
    """Against the model's own rule, token by token."""
    rule = TargetCache(targets("qwen3_5_text")).modelling.torch_recurrent_gated_delta_rule
    torch.manual_seed(0)
    calls = []
    for _ in range(3):
        inputs = {"key": torch.randn(1, 6, 2, 8) / 3, "value": torch.randn(1, 6, 4, 5), "beta": torch.rand(1, 6, 4),
                  "g": -decay * torch.rand(1, 6, 4)}
        calls.append(RuleCall(inputs, torch.randn(1, 4, 8, 5), normalise))
    for num_tokens in range(7):
        found = states_behind(calls, num_tokens)
        for call, state in zip(calls, found, strict=True):
            expected = call.state
            for i in range(num_tokens):
                one = {name: x[:, i:i + 1] for name, x in call.inputs.items()}
                _, expected = rule(one["key"].repeat_interleave(2, dim=2), one["key"].repeat_interleave(2, dim=2),
                                   one["value"], one["g"], one["beta"], initial_state=expected,
                                   output_final_state=True, use_qk_l2norm_in_kernel=normalise)
            torch.testing.assert_close(state, expected, rtol=1e-5, atol=1e-5)


def test_order_of_calls(targets):
    target = targets("qwen3_5_text")
    rule = getattr(TargetCache(target).modelling, CHUNK_RULE)
    cache = TargetCache(target)
    run(target, cache, PROMPT)
    with pytest.raises(DecodingError, match="once, after a forward that was recorded"):
        cache.forget(1)
    with cache.recording():
        run(target, cache, PROMPT)
    with pytest.raises(DecodingError, match="two recorded forwards"), cache.recording():
        run(target, cache, PROMPT)
    cache.forget(2)
    with pytest.raises(DecodingError, match="once"):
        cache.forget(1)
    with pytest.raises(ZeroDivisionError), cache.recording():
        1 / 0  # noqa: B018
    assert getattr(cache.modelling, CHUNK_RULE) is rule
    assert not any(getattr(layer, "record_past", False) for layer in cache.kept.layers)


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text", "gpt_oss"])
def test_no_more_than_the_block_is_taken_back(targets, family):
    cache = TargetCache(targets(family))
    run(targets(family), cache, PROMPT)
    with cache.recording():
        run(targets(family), cache, PROMPT[:3])
    with pytest.raises(DecodingError, match="4 tokens cannot be taken back from a block of 3"):
        cache.forget(4)


def test_divergences(targets, answers):
    target, answer = targets("qwen3_5_text"), answers("qwen3_5_text")
    assert first_divergence(target, PROMPT, answer, list(answer)) is None
    wrong = answer[:12] + [(answer[12] + 1) % 384] + answer[13:]
    found = first_divergence(target, PROMPT, answer, wrong)
    cache = TargetCache(target)
    logits = run(target, cache, PROMPT + answer[:12])[-1]
    assert (found.position, found.expected, found.found) == (12, answer[12], wrong[12])
    assert found.gap == pytest.approx(float(logits.max() - logits[wrong[12]]), abs=1e-3) and not found.near_tie
    for cut in (0, 5):
        ended = first_divergence(target, PROMPT, answer, answer[:cut])
        assert (ended.position, ended.expected, ended.found) == (cut, answer[cut], None) and not ended.near_tie
    weight = target.head.weight
    try:  # two tokens with all but the same row of the head: a near tie
        target.head.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        target.head.weight[wrong[12]] = target.head.weight[answer[12]]
        assert first_divergence(target, PROMPT, answer, wrong).near_tie
    finally:
        target.head.weight = weight
