"""Is the captured last state the one before the norm? Then `lm_head(norm(last))` is the target's logits, exactly.

The right way stands beside the wrong ways that users of other tools fell into, each measured on the logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_lib.target.capture import capture_batch
from dflash_lib.target.loading import Target

EXACT = "right: head(norm(last))"
STORED = "right, stored in bf16"
TWICE = "wrong: norm twice"
NO_NORM = "wrong: no norm"
OFF_BY_ONE = "wrong: one layer early"
WAYS = (EXACT, STORED, TWICE, NO_NORM, OFF_BY_ONE)


@dataclass(frozen=True)
class LogitComparison:
    """Logits made in one way against the target's own, over all tokens of all rows.

    difference: [tokens] largest absolute difference of a token's logits; kl: [tokens] KL from the target's
    distribution, nats; changed: [tokens] whether the most likely token is another one, and not one that the target
    itself finds equally likely (bf16 logits have ties); margin: [tokens] the target's lead of its most likely over its
    second token, in logits.
    """

    name: str
    difference: np.ndarray
    kl: np.ndarray
    changed: np.ndarray
    margin: np.ndarray

    @property
    def max_difference(self) -> float:
        return float(self.difference.max())

    @property
    def changed_share(self) -> float:
        """Share of tokens whose most likely next token changed, 0 to 1."""
        return float(self.changed.mean())


@torch.no_grad()
def compare_ways(target: Target, rows: Sequence[Sequence[int]]) -> dict[str, LogitComparison]:
    """Makes logits in each of WAYS for each row alone and compares them with an ordinary forward of the target."""
    parts: dict[str, list[tuple[Tensor, ...]]] = {name: [] for name in WAYS}
    before_last = target.num_layers - 2
    for row in rows:
        truth = target.model(torch.tensor([list(row)], device=target.device)).logits[0].float()
        sample, = capture_batch(target, [row], [before_last])
        last, early = sample.last_hidden_state_prenorm, sample.aux_hidden_states[:, 0]
        norm = target.final_norm
        head_inputs = {EXACT: norm(last), STORED: norm(last.bfloat16().to(last.dtype)), TWICE: norm(norm(last)),
                       NO_NORM: last, OFF_BY_ONE: norm(early)}
        top = truth.topk(2, dim=-1)
        log_truth = truth.log_softmax(dim=-1)
        for name, head_input in head_inputs.items():
            logits = target.head(head_input).float()  # one at a time: [T, vocabulary] is the largest thing here
            kl = (log_truth.exp() * (log_truth - logits.log_softmax(dim=-1))).sum(dim=-1).clamp(min=0)
            chosen = truth.gather(1, logits.argmax(dim=-1, keepdim=True))[:, 0]
            parts[name].append(((logits - truth).abs().amax(dim=-1), kl, chosen < top.values[:, 0],
                                top.values[:, 0] - top.values[:, 1]))
    return {name: LogitComparison(name, *[torch.cat(column).cpu().numpy() for column in zip(*part, strict=True)])
            for name, part in parts.items()}
