"""Drafting: what proposes tokens while decoding, and the trained drafter as one such proposer."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_lib.drafter.folder import DrafterError, TrainedDrafter, check_fits_target
from dflash_lib.drafter.network import DrafterConfig
from dflash_lib.target.loading import Target


class Proposer(Protocol):
    """Proposes the tokens that follow an anchor. Used by decoding, by its baselines and by the trained drafter.

    One that can draw its drafts has a method `propose_sampled`, too, as DrafterProposer's.
    """

    name: str

    def begin(self) -> None:
        """Forgets everything: a new prompt."""

    def extend(self, token_ids: Sequence[int], aux_hidden_states: Tensor) -> None:
        """Takes the next n confirmed tokens with the target's states for them, [n, L, H] float32."""

    def propose(self, anchor: int, num_tokens: int) -> list[int]:
        """`num_tokens` tokens to follow `anchor`, whose position is the number of tokens extended so far."""


def head_rows(target_head: Tensor, draft_vocab: Tensor | None) -> Tensor:
    """The rows of the target's head [V, H] that the drafter proposes over."""
    return target_head if draft_vocab is None else target_head[draft_vocab].contiguous()


def _check_shapes(config: DrafterConfig, target: Target, where: str) -> None:
    """Raises DrafterError for a drafter whose configuration does not fit the target: what is left to look at when it
    does not say which target it was trained for."""
    wanted = {"hidden_size": target.hidden_size, "vocab_size": target.head.weight.shape[0],
              "num_target_layers": target.num_layers}
    differs = [f"{name} {getattr(config, name)}, the target's is {value}" for name, value in wanted.items()
               if getattr(config, name) != value]
    if differs:
        raise DrafterError(f"{where}: the drafter is one of another target: {'; '.join(differs)}")


class DrafterProposer:
    """The trained drafter with its context keys and values cached, one document at a time."""

    def __init__(self, drafter: TrainedDrafter, target: Target, name: str = "drafter"):
        check_fits_target(drafter, target.identity, name)
        _check_shapes(drafter.config, target, name)
        self.name = name
        self.network, self.draft_vocab = drafter.network.to(target.device), drafter.draft_vocab
        self.config = drafter.config
        self.embedding = target.embedding
        self.head = head_rows(target.head.weight, drafter.draft_vocab)
        self.vocab_size = target.head.weight.shape[0]
        self.mask_embedding = self.embedding(torch.tensor([self.config.mask_token_id], device=target.device))
        self.begin()

    def begin(self) -> None:
        self.num_context = 0
        self.cache: list[tuple[Tensor, Tensor]] | None = None

    @torch.inference_mode()
    def extend(self, token_ids: Sequence[int], aux_hidden_states: Tensor) -> None:
        if len(token_ids) != len(aux_hidden_states):
            raise ValueError(f"{len(token_ids)} tokens with {len(aux_hidden_states)} states")
        positions = torch.arange(self.num_context, self.num_context + len(token_ids), device=self.head.device)
        new = self.network.context(aux_hidden_states.to(self.network.fc.weight.dtype), positions)
        if self.cache is None:
            self.cache = new
        else:
            self.cache = [(torch.cat([k, more_k], dim=1), torch.cat([v, more_v], dim=1))
                          for (k, v), (more_k, more_v) in zip(self.cache, new, strict=True)]
        self.num_context += len(token_ids)

    @torch.inference_mode()
    def propose(self, anchor: int, num_tokens: int) -> list[int]:
        return self._target_ids(self._logits(anchor, num_tokens).argmax(dim=-1)).tolist()

    @torch.inference_mode()
    def propose_sampled(self, anchor: int, num_tokens: int, temperature: float,
                        generator: torch.Generator) -> tuple[list[int], Tensor]:
        """Drafts drawn slot by slot, with the distributions [num_tokens, V] float64 that they were drawn from.

        V: the target's vocabulary; a reduced draft vocabulary leaves zeros. generator: a CPU random state.
        """
        probabilities = (self._logits(anchor, num_tokens).double() / temperature).softmax(dim=-1)
        drawn = torch.multinomial(probabilities.cpu(), 1, generator=generator)[:, 0].to(probabilities.device)
        if self.draft_vocab is not None:
            over_all = probabilities.new_zeros(num_tokens, self.vocab_size)
            over_all[:, self.draft_vocab.to(over_all.device)] = probabilities
            probabilities = over_all
        return self._target_ids(drawn).tolist(), probabilities

    def _target_ids(self, ids: Tensor) -> Tensor:
        return ids if self.draft_vocab is None else self.draft_vocab.to(ids.device)[ids]

    def _logits(self, anchor: int, num_tokens: int) -> Tensor:
        """[num_tokens, rows of the head]: of the first slots that draft, the anchor's own or the one behind it on."""
        c = self.config
        if not 1 <= num_tokens <= c.num_drafts:
            raise ValueError(f"{num_tokens} draft tokens asked of a drafter with block_size {c.block_size}"
                             f"{' and sample_from_anchor' if c.sample_from_anchor else ''} (1 to {c.num_drafts})")
        if self.cache is None:
            raise ValueError("propose before the first extend: the drafter has no context yet")
        device = self.head.device
        anchor_embedding = self.embedding(torch.tensor([anchor], device=device))
        # always the trained block: a shorter one would show its slots fewer neighbours than in training
        embedded = torch.cat([anchor_embedding, self.mask_embedding.expand(c.block_size - 1, -1)])
        hidden = self.network.blocks(embedded[None].to(self.network.fc.weight.dtype),
                                     torch.tensor([self.num_context], device=device), self.cache)
        return F.linear(hidden[0, c.first_slot:c.first_slot + num_tokens], self.head.to(hidden.dtype))
