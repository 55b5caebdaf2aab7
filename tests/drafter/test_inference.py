"""The drafter as a proposer: what it draws, and from which distributions."""

import numpy as np
import pytest
import torch

from dflash_lib.drafter import DrafterProposer, TrainedDrafter, TrainOptions
from dflash_lib.drafter.network import DFlashDrafter
from dflash_lib.drafter.recipe import drafter_config

VOCAB = torch.tensor([2, 7, 90, 200, 311])


def make_proposer(target, draft_vocab=None) -> DrafterProposer:
    torch.manual_seed(0)
    options = TrainOptions(block_size=4, mask_token_id=3, num_layers=1)
    config = drafter_config(target, [1, 3], options, None if draft_vocab is None else len(draft_vocab))
    proposer = DrafterProposer(TrainedDrafter(DFlashDrafter(config).eval(), draft_vocab, target.identity, {}), target)
    proposer.extend([1, 90, 55], torch.randn(3, 2, 64))
    return proposer


@pytest.mark.parametrize("draft_vocab", [None, VOCAB])
def test_distributions_are_over_the_targets_vocabulary(tiny_talker, draft_vocab):
    proposer = make_proposer(tiny_talker, draft_vocab)
    generator = torch.Generator().manual_seed(0)
    drafts, q = proposer.propose_sampled(31, 3, 0.7, generator)
    assert len(drafts) == 3 and q.shape == (3, 384) and q.dtype == torch.float64
    assert proposer.propose(31, 3) == q.argmax(dim=-1).tolist()
    torch.testing.assert_close(q.sum(dim=-1), torch.ones(3).double())
    kept = set(range(384) if draft_vocab is None else draft_vocab.tolist())
    assert set(drafts) <= kept and {int(i) for i in q.nonzero()[:, 1]} <= kept
    flatter = proposer.propose_sampled(31, 3, 1.4, generator)[1] ** 2  # twice the temperature
    torch.testing.assert_close(flatter / flatter.sum(dim=-1, keepdim=True), q, rtol=1e-5, atol=1e-9)


def test_drafts_are_drawn_from_what_is_said(tiny_talker):
    proposer = make_proposer(tiny_talker, VOCAB)
    generator, num = torch.Generator().manual_seed(0), 400
    drawn, q = [], None
    for _ in range(num):
        drafts, q = proposer.propose_sampled(31, 3, 8.0, generator)
        drawn.append(drafts)
    for slot in range(3):
        share = np.array([sum(drafts[slot] == token for drafts in drawn) / num for token in VOCAB.tolist()])
        expected = q[slot, VOCAB].numpy()
        assert (np.abs(share - expected) < 4 * np.sqrt(expected * (1 - expected) / num) + 1e-9).all()
    together = np.array([[d[0] == 7, d[1] == 7] for d in drawn], dtype=float)
    assert abs(np.corrcoef(together.T)[0, 1]) < 0.2  # slots are drawn independently of each other
