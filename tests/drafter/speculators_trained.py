"""A checkpoint of the speculators package's trainer, opened here, against the package's own model on the same input.

Runs inside the real package (tests/speculators_package.py). TARGET CHECKPOINT OUT: writes OUT, a JSON object: our
configuration, and the largest differences over theirs' largest value.
"""

import sys
from pathlib import Path

import speculators.models.dflash.core as theirs_core
import torch
import torch.nn.functional as F
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel

from dflash_lib.drafter import DrafterProposer
from dflash_lib.drafter.exported import open_drafter
from dflash_lib.drafter.inference import head_rows
from dflash_lib.files import write_json
from dflash_lib.target.capture import capture_batch
from dflash_lib.target.loading import load_target

LENGTHS = (19, 30)  # of two documents, packed in one row of theirs


def anchors_of(block_size: int) -> list[torch.Tensor]:
    """Anchors of each document: all whose block stays in it."""
    return [torch.arange(1, length - block_size + 1) for length in LENGTHS]


@torch.no_grad()
def main(target_folder: str, checkpoint: str, out: str) -> None:
    target = load_target(target_folder)
    drafter = open_drafter(checkpoint, target)
    config = drafter.config
    loaded = DFlashSpeculatorConfig.from_pretrained(checkpoint)
    loaded.transformer_layer_config._attn_implementation = "sdpa"
    theirs = DFlashDraftModel.from_pretrained(checkpoint, config=loaded, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randint(4, 370, (length,), generator=generator) for length in LENGTHS]
    captured = [capture_batch(target, [row.tolist()], config.target_layer_ids)[0] for row in rows]

    anchors = anchors_of(config.block_size)
    packed = torch.cat([a + sum(LENGTHS[:i]) for i, a in enumerate(anchors)])
    theirs_core.select_anchors = lambda *_: (packed, torch.ones(len(packed), dtype=torch.bool))
    their_hidden, their_logits, *_ = theirs._backbone_forward(
        hidden_states=torch.cat([c.aux_hidden_states.flatten(1) for c in captured])[None],
        input_ids=torch.cat(rows)[None], loss_mask=torch.ones(1, sum(LENGTHS), dtype=torch.long),
        verifier_last_hidden_states=torch.cat([c.last_hidden_state_prenorm for c in captured])[None],
        document_ids=torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[None],
        position_ids=torch.cat([torch.arange(length) for length in LENGTHS])[None], max_anchors=len(packed))
    shape = (len(packed), config.block_size, -1)
    their_hidden, their_logits = their_hidden.view(shape), their_logits.view(shape)

    our_hidden = []
    proposed = []
    proposer = DrafterProposer(drafter, target)
    for row, states, of_document in zip(rows, captured, anchors, strict=True):
        tokens = torch.full((len(of_document), config.block_size), config.mask_token_id)
        tokens[:, 0] = row[of_document]
        context = drafter.network.context(states.aux_hidden_states, torch.arange(len(row)))
        our_hidden.append(drafter.network.blocks(target.embedding(tokens), of_document, context))
        for anchor in of_document.tolist():
            proposer.begin()
            proposer.extend(row[:anchor].tolist(), states.aux_hidden_states[:anchor])
            proposed.append(proposer.propose(int(row[anchor]), config.num_drafts))
    our_hidden = torch.cat(our_hidden)
    our_logits = F.linear(our_hidden, head_rows(target.head.weight, drafter.draft_vocab))
    drafts = their_logits[:, config.first_slot:].argmax(dim=-1)
    if theirs.d2t is not None:
        drafts = drafts + theirs.d2t[drafts]

    def differ(ours: torch.Tensor, other: torch.Tensor) -> float:
        assert ours.shape == other.shape, (ours.shape, other.shape)
        return ((ours - other).abs().max() / other.abs().max()).item()

    write_json(Path(out), {
        "config": config.to_dict(),
        "draft_vocab": None if drafter.draft_vocab is None else drafter.draft_vocab.tolist(),
        "hidden": differ(our_hidden, their_hidden), "logits": differ(our_logits, their_logits), "blocks": len(packed),
        "same_drafts": (torch.tensor(proposed) == drafts).float().mean().item(),
        "different_drafts": len(drafts.unique())})


if __name__ == "__main__":
    main(*sys.argv[1:])
