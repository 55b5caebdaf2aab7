"""From a conversation file to token rows with their loss mask: what is extracted from and trained on, kept at rest.

Row i here is sample index i in the hidden-state store. A row ends with its last supervised token. The folder holds
`rows.safetensors` (input_ids int32 [tokens], loss_mask uint8 [tokens], offsets int64 [rows + 1]; row i is
offsets[i]:offsets[i+1]) and `prepared.json` (ids, kinds, what was refused and why, options, hashes, fingerprint).
"""

import hashlib
from array import array
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from dflash_lib.conversations.formats import ConversationError, read_conversations
from dflash_lib.conversations.templates import encode_conversation, tokenizer_hash
from dflash_lib.files import atomic_path, canonical_json, hash_file, read_json, write_json

TOO_LONG = ("refuse", "truncate")


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """max_samples: rows to keep, in the file's order (None = all); max_length: tokens a row may have; min_supervised:
    supervised tokens that a row must have; too_long: "refuse" a longer row, or "truncate" it to max_length."""

    max_samples: int | None = None
    max_length: int = 512
    min_supervised: int = 8
    too_long: str = "refuse"

    def __post_init__(self) -> None:
        if self.too_long not in TOO_LONG:
            raise ValueError(f"too_long: {self.too_long!r} is not one of {', '.join(TOO_LONG)}")
        if self.max_samples is not None and self.max_samples < 1:
            raise ValueError(f"max_samples: at least 1 is needed, got {self.max_samples}")
        if self.max_length < 2 or self.min_supervised < 1:
            raise ValueError(f"max_length must be at least 2 and min_supervised at least 1, got {self.max_length} and "
                             f"{self.min_supervised}")


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedRows:
    """Token rows and loss masks of many conversations, one after another.

    input_ids int32 [tokens]; loss_mask uint8 [tokens], 1 = supervised; offsets int64 [rows + 1]; sample_ids and kinds
    one a row; refused: dicts of id and reason, in the file's order; truncated: ids of rows cut to max_length;
    tokenizer_hash and source_sha256: of the tokenizer with its chat template and of the conversation file.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray
    sample_ids: list[str]
    kinds: list[str]
    options: PrepareOptions
    tokenizer_hash: str
    source_sha256: str
    refused: list[dict[str, str]] = field(default_factory=list)
    truncated: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.sample_ids)

    def row(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int32 [T] and loss mask uint8 [T] of row i: views, not copies."""
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        rows = slice(self.offsets[i], self.offsets[i + 1])
        return self.input_ids[rows], self.loss_mask[rows]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int64 [rows]."""
        return np.diff(self.offsets)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_supervised(self) -> int:
        return int(self.loss_mask.sum(dtype=np.int64))

    @property
    def refused_by_reason(self) -> dict[str, int]:
        """How many rows each kind of reason refused, most frequent first (numbers in reasons put aside)."""
        kinds = Counter(entry["reason"].split(":")[0] for entry in self.refused)
        return dict(kinds.most_common())

    def _meta(self) -> dict:
        return {"num_samples": len(self), "num_tokens": self.num_tokens, "num_supervised": self.num_supervised,
                "options": asdict(self.options), "tokenizer_hash": self.tokenizer_hash,
                "source_sha256": self.source_sha256, "sample_ids": self.sample_ids, "kinds": self.kinds,
                "refused": self.refused, "truncated": self.truncated}

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) over the rows and where they come from: arrays, sample ids, options, tokenizer hash. The hash of
        the conversation file is no part of it: lines appended behind the last row that was taken change no row."""
        meta = {"options": asdict(self.options), "tokenizer_hash": self.tokenizer_hash, "sample_ids": self.sample_ids}
        digest = hashlib.sha256(canonical_json(meta).encode("utf-8"))
        for values in (self.input_ids, self.loss_mask, self.offsets):
            digest.update(np.ascontiguousarray(values).view(np.uint8))
        return digest.hexdigest()

    def save(self, folder: Path | str) -> None:
        """Writes `rows.safetensors` and then `prepared.json` into `folder`, each whole or not at all."""
        folder = Path(folder)
        arrays = {"input_ids": self.input_ids, "loss_mask": self.loss_mask, "offsets": self.offsets}
        with atomic_path(folder / "rows.safetensors") as partial:
            save_file(arrays, partial)
        write_json(folder / "prepared.json", {"fingerprint": self.fingerprint, **self._meta()})

    @classmethod
    def load(cls, folder: Path | str) -> "PreparedRows":
        """Reads a folder that `save` wrote.

        Raises FileNotFoundError when a file is missing and ValueError when the two files do not belong together or
        are damaged.
        """
        folder = Path(folder)
        for name in ("prepared.json", "rows.safetensors"):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder / name}: no such file. Prepare the conversations first (04_extract).")
        meta = read_json(folder / "prepared.json")
        try:
            arrays = load_file(folder / "rows.safetensors")
            keys = ("sample_ids", "kinds", "tokenizer_hash", "source_sha256", "refused", "truncated")
            rows = cls(**arrays, options=PrepareOptions(**meta["options"]), **{key: meta[key] for key in keys})
        except (SafetensorError, KeyError, TypeError) as error:
            raise ValueError(f"{folder}: prepared rows are damaged or of another version ({error}). "
                             "Prepare the conversations again.") from error
        if rows.fingerprint != meta["fingerprint"]:
            raise ValueError(f"{folder}: rows.safetensors and prepared.json do not belong together. "
                             "Prepare the conversations again.")
        return rows


def _fit(input_ids: list[int], loss_mask: list[int], options: PrepareOptions) -> tuple[list[int], list[int], str]:
    """The row within max_length, and the reason to refuse it ("" = keep). Reasons read "what: figures"."""
    if len(input_ids) > options.max_length:
        if options.too_long == "refuse":
            return [], [], f"longer than max_length: {len(input_ids)} tokens, {options.max_length} allowed"
        input_ids, loss_mask = input_ids[:options.max_length], loss_mask[:options.max_length]
    num_supervised = sum(loss_mask)
    if num_supervised < options.min_supervised:
        return [], [], f"too few supervised tokens: {num_supervised} in the row, {options.min_supervised} needed"
    end = len(loss_mask) - loss_mask[::-1].index(1)  # nothing is predicted after the last supervised token
    return input_ids[:end], loss_mask[:end], ""


def prepare(source: Path | str, tokenizer, options: PrepareOptions) -> PreparedRows:
    """Tokenises the conversations of a JSONL file, in its order, until `max_samples` rows are kept.

    A row that cannot be used (too long, too few supervised tokens, a template that does not let its mask be aligned) is
    refused and listed with its reason. Raises what `read_conversations` raises for a broken file, and
    ConversationError when no row is left: training on an all-zero mask would look fine and learn nothing.
    """
    source = Path(source)
    tokens, mask, offsets = array("i"), bytearray(), array("q", [0])
    sample_ids: list[str] = []
    kinds: list[str] = []
    refused: list[dict[str, str]] = []
    truncated: list[str] = []
    num_masked = 0
    for conversation in read_conversations(source):
        if len(sample_ids) == options.max_samples:
            break
        try:
            input_ids, loss_mask = encode_conversation(tokenizer, conversation)
        except ConversationError as error:
            refused.append({"id": conversation.id, "reason": f"template: {error}"})
            continue
        num_masked += not any(loss_mask)
        length = len(input_ids)
        input_ids, loss_mask, reason = _fit(input_ids, loss_mask, options)
        if reason:
            refused.append({"id": conversation.id, "reason": reason})
            continue
        if length > options.max_length:
            truncated.append(conversation.id)
        tokens.extend(input_ids)
        mask.extend(loss_mask)
        offsets.append(len(tokens))
        sample_ids.append(conversation.id)
        kinds.append(str(conversation.extra.get("kind", "")))
    if not sample_ids:
        if num_masked == len(refused):
            raise ConversationError(f"{source}: the loss mask is zero in every row, so nothing would be learned. "
                                    "Are the assistant turns empty?")
        reasons = "; ".join(f"{entry['id']}: {entry['reason']}" for entry in refused[:3])
        raise ConversationError(f"{source}: all {len(refused)} conversations were refused, so nothing is left to train "
                                f"on. The first: {reasons}")
    return PreparedRows(
        input_ids=np.frombuffer(tokens, np.int32), loss_mask=np.frombuffer(mask, np.uint8),
        offsets=np.frombuffer(offsets, np.int64), sample_ids=sample_ids, kinds=kinds, options=options,
        tokenizer_hash=tokenizer_hash(tokenizer), source_sha256=hash_file(source), refused=refused, truncated=truncated)
