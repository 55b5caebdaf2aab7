"""Logit lens: what the target's own final norm and head read out of every layer (nostalgebraist, 2020).

A guide to choosing target_layer_ids: where the next token is already decided, a layer adds little to the last one;
where the states say no more than the token itself, there is little to draft from. Layers in between are what the other
tapped layers should cover. States are recomputed, because the store has the tapped layers only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dflash_lib.hidden_states.sampling import Estimate, SampleBootstrap
from dflash_lib.target.capture import capture_batch, stack_states
from dflash_lib.target.loading import Target

HEAD_TOKENS = 128  # tokens whose logits are in memory at a time


@dataclass(frozen=True)
class LogitLens:
    """L layers of the target. agreement: [L] share of tokens whose top-1 read from the layer is the target's own;
    repeats: [L] share whose top-1 is the token itself; step: [L - 1] mean cosine between outputs of neighbouring
    layers; num_tokens: tokens read (position 0 left out) of num_samples samples."""

    agreement: Estimate
    repeats: Estimate
    step: Estimate
    num_tokens: int
    num_samples: int

    def first_layer(self, share: float) -> int:
        """The first layer from which on at least `share` of the tokens agree."""
        below = np.flatnonzero(self.agreement.value < share)
        return int(below[-1]) + 1 if len(below) else 0


@torch.no_grad()
def logit_lens(target: Target, rows: Sequence[Sequence[int]], population: int, max_tokens: int = 64,
               max_length: int = 512, seed: int = 0) -> LogitLens:
    """Reads every layer of the target at up to `max_tokens` random positions of each row, position 0 left out.

    rows: token ids of drawn samples, cut to `max_length`, which bounds the memory of all layers' states; population:
    samples in the store. Rows of one token are passed over.
    """
    generator = np.random.default_rng(seed)
    columns: dict[str, list[np.ndarray]] = {name: [] for name in ("sample", "agreement", "repeats", "step")}
    rows = [list(row[:max_length]) for row in rows if len(row) > 1]
    for number, row in enumerate(rows):
        sample, = capture_batch(target, [row], range(target.num_layers - 1))
        states = stack_states(sample)  # [T, L, H]
        chosen = np.sort(1 + generator.permutation(len(row) - 1)[:max_tokens])
        states = states[torch.from_numpy(chosen).to(states.device)]
        own = torch.tensor([row[i] for i in chosen], device=states.device)
        tops = torch.stack([_top_1(target, states[:, layer]) for layer in range(target.num_layers)], dim=1)
        columns["sample"].append(np.full(len(chosen), number))
        columns["agreement"].append((tops == tops[:, -1:]).cpu().numpy())
        columns["repeats"].append((tops == own[:, None]).cpu().numpy())
        columns["step"].append(torch.nn.functional.cosine_similarity(
            states[:, :-1].float(), states[:, 1:].float(), dim=-1).cpu().numpy())
    table = {name: np.concatenate(arrays) for name, arrays in columns.items()}
    bootstrap = SampleBootstrap(table["sample"], len(rows), population)
    return LogitLens(bootstrap.share(table["agreement"]), bootstrap.share(table["repeats"]),
                     bootstrap.mean(table["step"]), num_tokens=len(table["sample"]), num_samples=len(rows))


def _top_1(target: Target, states: torch.Tensor) -> torch.Tensor:
    """[t]: the most likely next token read from states [t, H] before the norm."""
    return torch.cat([target.head(target.final_norm(part)).argmax(dim=-1) for part in states.split(HEAD_TOKENS)])
