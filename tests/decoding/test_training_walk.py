"""Training's walk against real decoding: equal when both do the same thing, and not when one is led astray."""

from dataclasses import replace

import pytest
import torch

from dflash_lib.decoding.acceptance import acceptance_length, by_slot
from dflash_lib.decoding.evaluation import answer_prompts
from dflash_lib.decoding.side_by_side import decode_side_by_side
from dflash_lib.decoding.speculative import SpeculativeDecoded, Step
from dflash_lib.decoding.training_walk import compare_walk, training_walk
from dflash_lib.drafter import DrafterProposer, TrainedDrafter, TrainOptions
from dflash_lib.drafter.network import DFlashDrafter, DrafterConfig
from dflash_lib.drafter.recipe import drafter_config
from tests.decoding.test_evaluation import LAYER_IDS, PROMPTS


def make_drafter(target, draft_vocab=None) -> TrainedDrafter:
    """An untrained drafter whose drafts depend on the states: its weights are larger than training begins with."""
    torch.manual_seed(0)
    options = TrainOptions(block_size=4, mask_token_id=3, num_layers=1)
    config = drafter_config(target, LAYER_IDS, options, None if draft_vocab is None else len(draft_vocab))
    network = DFlashDrafter(config).eval().requires_grad_(False)
    for parameter in network.parameters():
        if parameter.dim() > 1:
            parameter.mul_(8)
    return TrainedDrafter(network, draft_vocab, target.identity, {})


def changed(drafter: TrainedDrafter, **changes) -> TrainedDrafter:
    """The same weights under another configuration."""
    network = DFlashDrafter(DrafterConfig(**{**drafter.config.to_dict(), **changes}))
    network.load_state_dict(drafter.network.state_dict())
    return TrainedDrafter(network.eval().requires_grad_(False), drafter.draft_vocab, drafter.target, {})


@pytest.fixture(scope="module")
def few_words(tiny_llama):
    """The tiny target with a head that knows two words, so that a random drafter is often right."""
    from dflash_lib.target.loading import load_target

    target = load_target(tiny_llama.path)
    weight = torch.zeros_like(target.head.weight)
    weight[100:102] = torch.randn(2, weight.shape[1], generator=torch.Generator().manual_seed(0))
    target.head.weight = torch.nn.Parameter(weight, requires_grad=False)
    return target


@pytest.mark.parametrize("draft_vocab", [None, torch.arange(100, 102)])
def test_training_and_decoding_accept_the_same_drafts(few_words, draft_vocab):
    drafter = make_drafter(few_words, draft_vocab)
    answers = answer_prompts(few_words, PROMPTS, 24, LAYER_IDS)
    walked = training_walk(drafter, few_words, answers)
    proposer = DrafterProposer(drafter, few_words)
    results = decode_side_by_side(few_words, proposer, PROMPTS, 24, [4], LAYER_IDS)
    decoded = [result.speculative[4] for result in results]
    for steps, real in zip(walked, decoded, strict=True):
        assert [(s.position, s.accepted, s.num_new) for s in steps] == [
            (s.position, s.accepted, s.num_new) for s in real.steps]
    comparison = compare_walk(walked, answers, decoded)
    assert comparison.difference == 0 and comparison.walked > 1.05, "else nothing was compared"
    assert (comparison.num_prompts, comparison.num_other) == (3, 0)
    shifted = [replace(a, states=a.states.roll(1, dims=0)) for a in answers]  # states of the token before
    assert compare_walk(training_walk(drafter, few_words, shifted), answers, decoded).difference > 0.01


def test_an_answer_of_one_token_has_no_step(few_words):
    answers = answer_prompts(few_words, PROMPTS[:1], 1, LAYER_IDS)
    assert training_walk(make_drafter(few_words), few_words, answers) == [[]]


def test_only_equal_texts_are_compared(few_words):
    answers = answer_prompts(few_words, PROMPTS, 6, LAYER_IDS)
    walked = [[Step(3, 3, 1, 2), Step(5, 3, 2, 3)], [Step(7, 3, 0, 1)], [Step(2, 3, 3, 4)]]
    decoded = [SpeculativeDecoded(answers[0].token_ids, "length", 1.0, 0.1, [Step(3, 3, 0, 1), Step(4, 3, 3, 4)]),
               SpeculativeDecoded([1], "length", 1.0, 0.1, [Step(7, 3, 2, 3)]),
               SpeculativeDecoded(answers[2].token_ids, "length", 1.0, 0.1, [Step(2, 3, 3, 4)])]
    comparison = compare_walk(walked, answers, decoded)
    assert comparison.walked == acceptance_length(walked[0] + walked[2]) == 3.0
    assert comparison.decoded == 3.0 and (comparison.num_prompts, comparison.num_other) == (2, 1)
    assert comparison.per_prompt == [(2.5, 2.5), (4.0, 4.0)]
    assert comparison.walked_slots == by_slot(walked[0] + walked[2])
    assert (comparison.num_steps, comparison.limit) == (3, 2 / 3), "two steps of three"
    assert replace(comparison, num_steps=1000).limit == 0.01
    with pytest.raises(ValueError, match="not one prompt"):
        compare_walk(walked[1:2], answers[1:2], decoded[1:2])
