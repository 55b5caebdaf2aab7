"""Acceptance as training counts it, on answers that were decoded for real: the two must agree.

Training walks its validation answers with masked blocks, many anchors at once, on states as the store keeps them
(bfloat16). Decoding caches keys and values, drafts one block at a time and reads the states of verify steps. On the
target's own greedy text both accept the same drafts, but for rounding: a gap means that the two do not do the same
thing (positions, mask, layer ids, states), and that validation promises what decoding will not keep.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash_lib.decoding.acceptance import SlotAcceptance, acceptance_length, by_slot
from dflash_lib.decoding.evaluation import Answer
from dflash_lib.decoding.speculative import Decoded, SpeculativeDecoded, Step
from dflash_lib.drafter.blocks import anchor_candidates
from dflash_lib.drafter.folder import TrainedDrafter
from dflash_lib.drafter.inference import head_rows
from dflash_lib.drafter.objective import TargetEnds, propose_everywhere, walk
from dflash_lib.target.loading import Target


@torch.inference_mode()
def training_walk(drafter: TrainedDrafter, target: Target, answers: Sequence[Answer]) -> list[list[Step]]:
    """Steps on every answer, found as `drafter.objective.validation_acceptance` finds those of a stored sample."""
    vocab = None if drafter.draft_vocab is None else drafter.draft_vocab.to(target.device)
    network = drafter.network.to(target.device)
    dtype = network.fc.weight.dtype
    head = head_rows(target.head.weight, vocab).to(dtype)
    ends = _Ends(target.embedding, target.final_norm, head, vocab)
    result = []
    for answer in answers:
        prompt_len, text = len(answer.prompt.token_ids), torch.tensor(answer.text_ids)
        mask = torch.zeros(len(text), dtype=torch.uint8)
        mask[prompt_len:] = 1
        anchors = anchor_candidates(mask)
        if not len(anchors):
            result.append([])
            continue
        stored = answer.states.bfloat16().to(dtype)
        drafted = propose_everywhere(network, ends, text, stored, anchors)
        result.append(_placed(walk(text, mask, anchors, drafted), prompt_len, drafter.config.num_drafts))
    return result


class _Ends(TargetEnds):
    """Training's, in the head's dtype: a drafter may be evaluated in another than float32."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return super().embed(token_ids).to(self.head.dtype)


def _placed(counts: Sequence[tuple[int, int]], prompt_len: int, num_drafts: int) -> list[Step]:
    """Training's (accepted, added) of one answer as verify steps."""
    steps, position = [], prompt_len
    for accepted, added in counts:
        steps.append(Step(position, num_drafts, accepted, added))
        position += added
    return steps


@dataclass(frozen=True)
class WalkComparison:
    """The walk against real decoding, on the prompts whose decoded answer is the one that was walked.

    walked, decoded: acceptance lengths; walked_slots, decoded_slots: acceptance by slot; per_prompt: (walked, decoded)
    acceptance length of each prompt with a verify step; num_steps: of decoding; num_prompts: prompts compared;
    num_other: those left out because decoding wrote another text.
    """

    walked: float
    decoded: float
    walked_slots: SlotAcceptance
    decoded_slots: SlotAcceptance
    per_prompt: list[tuple[float, float]]
    num_steps: int
    num_prompts: int
    num_other: int

    @property
    def limit(self) -> float:
        """What `difference` may be: 1 %, or two verify steps where these are more. A draft that bfloat16 rounding turns
        costs or saves a step, and the walk may need another to fall in with decoding again."""
        return max(0.01, 2 / self.num_steps)

    @property
    def difference(self) -> float:
        """How far the walk is off, as a share of the decoded acceptance length."""
        return abs(self.walked - self.decoded) / self.decoded


def compare_walk(walked: Sequence[Sequence[Step]], answers: Sequence[Answer],
                 decoded: Sequence[SpeculativeDecoded]) -> WalkComparison:
    """Raises ValueError when not one prompt has the same text in both, or none has a verify step."""
    same = [(steps, d.steps) for steps, answer, d in zip(walked, answers, decoded, strict=True) if _same(answer, d)]
    if not same:
        raise ValueError("walk against decoding: not one prompt was decoded to the answer that was walked")
    walked_steps, decoded_steps = ([step for pair in same for step in pair[side]] for side in (0, 1))
    return WalkComparison(
        acceptance_length(walked_steps), acceptance_length(decoded_steps), by_slot(walked_steps),
        by_slot(decoded_steps), [(acceptance_length(a), acceptance_length(b)) for a, b in same if a and b],
        len(decoded_steps), len(same), len(answers) - len(same))


def _same(answer: Answer, decoded: Decoded) -> bool:
    return answer.token_ids == decoded.token_ids
