"""How much of held-out text occurs in the training text: the share of its n-grams found there."""

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Overlap:
    """num_ngrams: distinct n-grams of the held-out texts; num_found: those that the training text has, too;
    num_short: held-out texts shorter than n, which say nothing; shares: per held-out text, None for a short one."""

    n: int
    num_ngrams: int
    num_found: int
    num_short: int
    shares: list[float | None]

    @property
    def share(self) -> float:
        """num_found / num_ngrams; 0 when there is no n-gram at all."""
        return self.num_found / self.num_ngrams if self.num_ngrams else 0.0


def words(text: str) -> list[str]:
    """The text's words, in lower case, without punctuation: the unit of overlap between texts."""
    return re.findall(r"\w+", text.lower())


def ngrams(items: Sequence[Hashable], n: int) -> set[tuple]:
    """The distinct runs of n items."""
    return {tuple(items[i:i + n]) for i in range(len(items) - n + 1)}


def ngram_overlap(heldout: Sequence[Sequence[Hashable]], training: Iterable[Sequence[Hashable]], n: int = 8) -> Overlap:
    """Overlap of `heldout` with `training`, both sequences of words or of token ids (the caller says which).

    `training` is streamed against the held-out n-grams, so memory follows the held-out texts only.
    """
    per_text = [ngrams(list(text), n) for text in heldout]
    wanted = set().union(*per_text)
    found: set[tuple] = set()
    for text in training:
        items = list(text)
        found.update(gram for i in range(len(items) - n + 1) if (gram := tuple(items[i:i + n])) in wanted)
    shares = [len(grams & found) / len(grams) if grams else None for grams in per_text]
    return Overlap(n, len(wanted), len(found), shares.count(None), shares)
