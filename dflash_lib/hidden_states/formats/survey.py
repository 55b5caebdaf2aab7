"""One pass over another tool's samples before a store is planned: how long each is, and a hash of all their tokens."""

import hashlib
from dataclasses import dataclass

import numpy as np

from dflash_lib.hidden_states.formats.reading import Samples
from dflash_lib.hidden_states.schema import StoreError
from dflash_lib.progress import Progress

MAX_ID = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class SurveyedRows:
    """The tokens of a source, counted: what a plan is made from. lengths int64 [samples]; fingerprint: sha256 over
    format, names, ids and masks; source_sha256 is empty: no conversation file is known."""

    tokenizer_hash: str
    fingerprint: str
    lengths: np.ndarray
    num_tokens: int
    num_supervised: int
    source_sha256: str = ""

    def __len__(self) -> int:
        return len(self.lengths)


def check_tokens(name: str, ids: np.ndarray | None, mask: np.ndarray | None) -> None:
    """Raises StoreError unless a sample has ids that fit int32 and a loss mask of the same length."""
    if ids is None or mask is None:
        raise StoreError(f"{name}: has no {'token ids' if ids is None else 'loss mask'}, and a drafter cannot be "
                         "trained without. speculators keeps the mask in its Arrow data set (--dataset DIR).")
    if len(mask) != len(ids):
        raise StoreError(f"{name}: a loss mask of {len(mask)} for {len(ids)} tokens")
    if ids.min() < 0 or ids.max() > MAX_ID:
        raise StoreError(f"{name}: token ids from {ids.min()} to {ids.max()}; they must be 0 to {MAX_ID}")


def survey(source: Samples, tokenizer_hash: str, progress: Progress) -> SurveyedRows:
    """Reads every sample's tokens once, keeping their lengths alone. Raises StoreError for the first bad one."""
    digest = hashlib.sha256(source.format.encode())
    lengths, num_supervised = np.zeros(len(source), np.int64), 0
    for i, name in enumerate(source.names):
        ids, mask = source.read_tokens(i)
        check_tokens(name, ids, mask)
        digest.update(b"\n" + name.encode() + b"\n")
        digest.update(ids.astype(np.int32))
        digest.update(mask)
        lengths[i] = len(ids)
        num_supervised += int(mask.sum())
        progress.update(1)
    return SurveyedRows(tokenizer_hash=tokenizer_hash, fingerprint=digest.hexdigest(), lengths=lengths,
                        num_tokens=int(lengths.sum()), num_supervised=num_supervised)
