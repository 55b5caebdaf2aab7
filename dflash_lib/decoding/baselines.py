"""What a toy would score: proposers without a network, and a trained drafter that is shown wrong states.

They stand beside a trained drafter on the same answers; a drafter that does not beat them has learned nothing from the
target's states.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from dflash_lib.drafter.inference import Proposer


class BigramProposer:
    """Follows each token with the one that followed it most often in the training text's supervised part."""

    def __init__(self, following: np.ndarray, name: str = "bigram table"):
        """following: int64 [vocabulary], the token to propose behind each token."""
        self.following, self.name = following, name

    @classmethod
    def from_rows(cls, rows: Iterable[tuple[np.ndarray, np.ndarray]], vocab_size: int) -> "BigramProposer":
        """Counts pairs whose second token is supervised, in rows of (input_ids [T], loss_mask [T]).

        Ties go to the lower id; a token that never came first is followed by the most frequent token.
        Raises ValueError for rows without any such pair.
        """
        pairs = [ids[:-1].astype(np.int64)[mask[1:] > 0] * vocab_size + ids[1:][mask[1:] > 0] for ids, mask in rows]
        pairs = np.concatenate(pairs) if pairs else np.zeros(0, np.int64)
        if not pairs.size:
            raise ValueError("bigram table: the training rows have no supervised token behind another token")
        keys, counts = np.unique(pairs, return_counts=True)
        first, second = np.divmod(keys, vocab_size)
        following = np.full(vocab_size, np.bincount(second, weights=counts).argmax())
        order = np.lexsort((-second, counts))  # the most frequent pair last, and of equals the lowest id
        following[first[order]] = second[order]
        return cls(following)

    def begin(self) -> None:
        pass

    def extend(self, token_ids: Sequence[int], aux_hidden_states: Tensor) -> None:
        pass

    def propose(self, anchor: int, num_tokens: int) -> list[int]:
        drafts = []
        for _ in range(num_tokens):
            anchor = int(self.following[anchor])
            drafts.append(anchor)
        return drafts


class PromptLookupProposer:
    """Continues as the text did after the newest earlier occurrence of its last tokens, the longest match first."""

    def __init__(self, max_ngram: int = 3, name: str = "prompt look-up"):
        """max_ngram: tokens of the longest match that is looked for, down to one."""
        self.max_ngram, self.name = max_ngram, name
        self.begin()

    def begin(self) -> None:
        self.token_ids: list[int] = []

    def extend(self, token_ids: Sequence[int], aux_hidden_states: Tensor) -> None:
        self.token_ids += token_ids

    def propose(self, anchor: int, num_tokens: int) -> list[int]:
        """Drafts; without a match, or behind the text's end, the last token is repeated."""
        text = [*self.token_ids, anchor]
        for n in range(min(self.max_ngram, len(text) - 1), 0, -1):
            suffix = text[-n:]
            for start in range(len(text) - n - 1, -1, -1):
                if text[start:start + n] == suffix:
                    drafts = text[start + n:start + n + num_tokens]
                    return drafts + [drafts[-1]] * (num_tokens - len(drafts))
        return [anchor] * num_tokens


class ZeroedStates:
    """A proposer that is shown zeros instead of the target's states."""

    def __init__(self, proposer: Proposer):
        self.proposer, self.name = proposer, f"{proposer.name}, zeroed states"

    def begin(self) -> None:
        self.proposer.begin()

    def extend(self, token_ids: Sequence[int], aux_hidden_states: Tensor) -> None:
        self.proposer.extend(token_ids, torch.zeros_like(aux_hidden_states))

    def propose(self, anchor: int, num_tokens: int) -> list[int]:
        return self.proposer.propose(anchor, num_tokens)


class OtherSampleStates:
    """A proposer that is shown another text's states, position by position.

    Behind that text's end its states are used again from position 1 on: position 0 is unlike any other.
    """

    def __init__(self, proposer: Proposer, states: Tensor):
        """states: [T, L, H] with T of at least 2."""
        if len(states) < 2:
            raise ValueError(f"states of {len(states)} tokens cannot stand for another sample; at least 2 are needed")
        self.proposer, self.states, self.name = proposer, states, f"{proposer.name}, another sample's states"
        self.num_tokens = 0

    def begin(self) -> None:
        self.num_tokens = 0
        self.proposer.begin()

    def extend(self, token_ids: Sequence[int], aux_hidden_states: Tensor) -> None:
        positions = torch.arange(self.num_tokens, self.num_tokens + len(token_ids), device=self.states.device)
        wrapped = torch.where(positions < len(self.states), positions, 1 + (positions - 1) % (len(self.states) - 1))
        self.num_tokens += len(token_ids)
        self.proposer.extend(token_ids, self.states[wrapped].to(aux_hidden_states))

    def propose(self, anchor: int, num_tokens: int) -> list[int]:
        return self.proposer.propose(anchor, num_tokens)
