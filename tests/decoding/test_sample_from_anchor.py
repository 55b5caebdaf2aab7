"""A drafter whose anchor's slot drafts as well: a block of S tokens drafts S, a verify step has S + 1 tokens."""

import pytest
import torch
import torch.nn.functional as F

from dflash_lib.decoding.comparison import NamedDrafter, compare_drafters
from dflash_lib.decoding.evaluation import answer_prompts, draft_answers, walk_block_sizes
from dflash_lib.decoding.served_causes import likely_causes
from dflash_lib.decoding.side_by_side import decode_side_by_side
from dflash_lib.decoding.training_walk import compare_walk, training_walk
from dflash_lib.drafter import DrafterProposer, TrainedDrafter
from tests.decoding.test_evaluation import LAYER_IDS, PROMPTS
from tests.decoding.test_training_walk import changed, few_words, make_drafter  # noqa: F401 (a fixture)

BLOCK = 4


def from_anchor(drafter: TrainedDrafter) -> TrainedDrafter:
    """The same weights, read by the other convention."""
    return changed(drafter, sample_from_anchor=True)


@pytest.mark.parametrize("draft_vocab", [None, torch.tensor([2, 7, 90, 200, 311])])
def test_drafts_are_those_of_a_forward_by_hand(tiny_llama, draft_vocab):
    """Slot k of the block [anchor, mask, mask, mask] at position a says token a + k + 1, the anchor's own slot first;
    without it the same slots say token a + k."""
    drafter = make_drafter(tiny_llama, draft_vocab)
    states, anchor = torch.randn(6, 3, 64, generator=torch.Generator().manual_seed(1)), 31
    network, positions = drafter.network, torch.arange(6)
    block = tiny_llama.embedding(torch.tensor([[anchor, 3, 3, 3]]))
    hidden = network.blocks(block, torch.tensor([6]), network.context(states, positions))[0]
    rows = torch.arange(384) if draft_vocab is None else draft_vocab
    logits = F.linear(hidden, tiny_llama.head.weight[rows]).double()
    by_slot = torch.zeros(4, 384).double()
    by_slot[:, rows] = (logits / 0.5).softmax(dim=-1)
    assert all((one - other).abs().max() > 1e-3 for i, one in enumerate(by_slot) for other in by_slot[:i])
    for one, first, num in ((drafter, 1, 3), (from_anchor(drafter), 0, 4)):
        proposer = DrafterProposer(one, tiny_llama)
        proposer.extend([1, 90, 55, 4, 5, 6], states)
        for asked in range(1, num + 1):
            wanted = by_slot[first:first + asked]
            assert proposer.propose(anchor, asked) == wanted.argmax(dim=-1).tolist()
            drawn, q = proposer.propose_sampled(anchor, asked, 0.5, torch.Generator().manual_seed(0))
            assert len(drawn) == asked
            torch.testing.assert_close(q, wanted, rtol=1e-4, atol=1e-7)
        for asked in (0, num + 1):
            with pytest.raises(ValueError, match=rf"{asked} draft tokens asked of .* \(1 to {num}\)"):
                proposer.propose(anchor, asked)


@pytest.mark.parametrize("size", [2, BLOCK, BLOCK + 1])
def test_decoding_changes_no_token(few_words, size):  # noqa: F811
    proposer = DrafterProposer(from_anchor(make_drafter(few_words)), few_words)
    results = decode_side_by_side(few_words, proposer, PROMPTS, 24, [size], LAYER_IDS)
    assert all(result.outcome(size) == "identical" for result in results)
    steps = [step for result in results for step in result.speculative[size].steps]
    assert {step.drafted for step in steps} == {size - 1} and len({step.accepted for step in steps}) > 1


def test_up_to_num_drafts_are_accepted(few_words):  # noqa: F811
    """Where the head knows one word all drafts are right: each step brings num_drafts + 1 = block_size + 1 tokens."""
    weight = few_words.head.weight
    try:
        few_words.head.weight = torch.nn.Parameter(torch.zeros_like(weight), requires_grad=False)  # all equal: token 0
        drafter = from_anchor(make_drafter(few_words))
        answers = answer_prompts(few_words, PROMPTS, 1 + 4 * (BLOCK + 1), LAYER_IDS)
        assert {t for a in answers for t in a.token_ids} == {0}
        proposer = DrafterProposer(drafter, few_words)
        walks = walk_block_sizes(draft_answers(proposer, answers, BLOCK + 1), answers, BLOCK + 1)
        decoded = decode_side_by_side(few_words, proposer, PROMPTS, 1 + 4 * (BLOCK + 1), [BLOCK + 1], LAYER_IDS)
        for steps in walks[BLOCK + 1] + [d.speculative[BLOCK + 1].steps for d in decoded]:
            assert [(s.drafted, s.accepted, s.num_new) for s in steps] == [(BLOCK, BLOCK, BLOCK + 1)] * 4
    finally:
        few_words.head.weight = weight


def test_training_and_decoding_accept_the_same_drafts(few_words):  # noqa: F811
    drafter = from_anchor(make_drafter(few_words))
    answers = answer_prompts(few_words, PROMPTS, 24, LAYER_IDS)
    walked = training_walk(drafter, few_words, answers)
    results = decode_side_by_side(few_words, DrafterProposer(drafter, few_words), PROMPTS, 24, [BLOCK + 1], LAYER_IDS)
    decoded = [result.speculative[BLOCK + 1] for result in results]
    for steps, real in zip(walked, decoded, strict=True):
        assert [(s.position, s.drafted, s.accepted, s.num_new) for s in steps] == [
            (s.position, s.drafted, s.accepted, s.num_new) for s in real.steps]
    assert compare_walk(walked, answers, decoded).walked > 1.05, "else nothing was compared"


def test_an_evaluation_decodes_with_the_whole_block(few_words, tmp_path):  # noqa: F811
    """Both conventions side by side: each with its own size of a verify step, and none changes a token."""
    plain = make_drafter(few_words)
    drafters = [NamedDrafter(name, tmp_path, one, DrafterProposer(one, few_words, name))
                for name, one in (("plain", plain), ("anchor", from_anchor(plain)))]
    found = compare_drafters(few_words, drafters, PROMPTS, 12)
    assert [(e.block_size, e.sample_from_anchor) for e in found.evaluations] == [(BLOCK, False), (BLOCK + 1, True)]
    assert [len(e.histogram) for e in found.evaluations] == [BLOCK, BLOCK + 1]
    assert [max(b.block_size for b in e.promised) for e in found.evaluations] == [BLOCK, BLOCK + 1]
    assert not found.leaves


def test_a_server_that_ignores_the_convention_is_the_first_suspect():
    common = dict(ours=[0.5, 0.2], served=[0.1, 0.0], is_higher=False, is_off=True, num_apart=0, positions=[],
                  num_slots=BLOCK, block_size=BLOCK + 1)
    assert likely_causes(**common, sample_from_anchor=True)[0].startswith("sample_from_anchor")
    assert not any("sample_from_anchor" in cause for cause in likely_causes(**common))
