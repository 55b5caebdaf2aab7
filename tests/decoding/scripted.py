"""Proposers that know the true continuation, so that a test decides what is accepted."""

from collections.abc import Callable

from tests.tiny import VOCAB_SIZE


class Scripted:
    """Drafts the known text, with the draft in slot spoil(n) (1, 2, ...) of the n-th block made wrong.

    Slots behind the spoilt one are right again: accepting them would be a fault. A spoilt slot behind the block's end
    means that all is right. Everything that `extend` is handed is kept.
    """

    name = "scripted"

    def __init__(self, text: list[int], spoil: Callable[[int], int] = lambda n: 10_000):
        self.text, self.spoil = text, spoil

    def begin(self) -> None:
        self.token_ids: list[int] = []
        self.states: list = []
        self.num_blocks = 0

    def extend(self, token_ids, aux_hidden_states) -> None:
        assert len(token_ids) == len(aux_hidden_states) > 0
        self.token_ids += token_ids
        self.states.append(aux_hidden_states.clone())

    def propose(self, anchor: int, num_tokens: int) -> list[int]:
        at = len(self.token_ids)
        assert self.text[:at + 1] == [*self.token_ids, anchor]  # confirmed tokens, and nothing else
        drafts = [self.text[i] if i < len(self.text) else 7 for i in range(at + 1, at + 1 + num_tokens)]
        slot = self.spoil(self.num_blocks)
        self.num_blocks += 1
        if slot <= num_tokens:
            drafts[slot - 1] = (drafts[slot - 1] + 1) % VOCAB_SIZE
        return drafts
