"""A run of a source's rows, encoded: the unit that is shared out among processes and survives a kill.

A chunk is a pure function of its rows, the tokenizer and the options, and its file exists whole or not at all, so it
does not matter who makes it, in which order, or how often the job was stopped.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from dflash_lib.conversations.formats import Conversation, ConversationError, OtherForm, RowFormat, parse_conversation
from dflash_lib.conversations.prepared_rows import PrepareOptions
from dflash_lib.conversations.rendering import ChatTemplate
from dflash_lib.conversations.sources import BrokenRow, RawRow, SourceError, read_rows
from dflash_lib.conversations.templates import row_segments, tokenize_rows
from dflash_lib.files import atomic_path

CHUNK_ROWS = 512
_FIGURES = re.compile(r" \(|, found|; | '|(?<=unknown role) |(?<=unknown speaker) ")  # what differs from row to row
ERRORS = {"ConversationError": ConversationError, "SourceError": SourceError}


@dataclass
class Chunk:
    """Rows of a source in order. input_ids int32, loss_mask uint8, both [tokens]; lengths int64 [kept rows]; kept: per
    kept row its number, id, kind and whether it was truncated; refused: see PreparedRows; seen: number and id of every
    row that is a conversation, in order; num_empty_masks: rows in which nothing is supervised; error: where reading
    stopped, if it did (number, type, message), behind all of these rows."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    lengths: np.ndarray
    kept: list[dict[str, Any]] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    seen: list[tuple[int, str]] = field(default_factory=list)
    unit: str = "row"
    num_empty_masks: int = 0
    error: dict[str, Any] | None = None

    def save(self, path: Path) -> None:
        """Writes the chunk to `path`, whole or not at all."""
        names = ("kept", "refused", "seen", "unit", "num_empty_masks", "error")
        meta = json.dumps({name: getattr(self, name) for name in names}, ensure_ascii=False)
        arrays = {"input_ids": self.input_ids, "loss_mask": self.loss_mask, "lengths": self.lengths}
        with atomic_path(path) as partial:
            save_file(arrays, partial, metadata={"rows": meta})

    @classmethod
    def load(cls, path: Path) -> "Chunk":
        with safe_open(path, framework="np") as f:
            return cls(**{name: f.get_tensor(name) for name in f.keys()},  # noqa: SIM118  (safe_open is no dict)
                       **json.loads(f.metadata()["rows"]))


def error_of(error: ValueError, number: int) -> dict[str, Any]:
    """An error as a chunk records it."""
    kind = "ConversationError" if isinstance(error, ConversationError) else "SourceError"
    return {"number": number, "type": kind, "message": str(error)}


def read_chunks(source: Path | str, chunk_rows: int) -> Iterator[tuple[int, list[RawRow], dict[str, Any] | None]]:
    """Yields (chunk number, its rows, error): an error is the source's, found behind these rows, which are the last."""
    rows: list[RawRow] = []
    number, last, error = 0, 0, None
    try:
        for row in read_rows(source):
            rows.append(row)
            last = row.number
            if len(rows) == chunk_rows:
                yield number, rows, None
                number, rows = number + 1, []
    except SourceError as found:
        error = error_of(found, last + 1)
    if rows or error:
        yield number, rows, error


def fit(input_ids: list[int], loss_mask: list[int], options: PrepareOptions) -> tuple[list[int], list[int], str]:
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


def encode_chunk(template: ChatTemplate, rows: Sequence[RawRow], options: PrepareOptions, row_format: RowFormat,
                 error: dict[str, Any] | None = None) -> Chunk:
    """Renders and tokenises rows. A row that cannot be used (not valid JSON, no conversation, a mask that cannot be
    aligned, too long, too few supervised tokens) is refused; one that says that the whole file is not what it should be
    (see SourceError, OtherForm) ends the chunk with an error."""
    chunk = Chunk(np.empty(0, np.int32), np.empty(0, np.uint8), np.empty(0, np.int64), error=error,
                  unit=rows[0].unit if rows else "row")
    segmented: list[tuple[int, str, str, list]] = []
    refused: dict[int, dict[str, Any]] = {}
    for row in rows:
        try:
            conversation = _parse(row, row_format)
        except _Malformed as found:
            refused[row.number] = found.entry
            continue
        except (ConversationError, SourceError) as found:
            chunk.error = error_of(found, row.number)
            break
        chunk.seen.append((row.number, conversation.id))
        try:
            segments = row_segments(template, conversation)
        except (ConversationError, RecursionError) as found:  # a tool call of a thousand brackets
            refused[row.number] = _of_template(row.number, conversation.id, found)
            continue
        segmented.append((row.number, conversation.id, str(conversation.extra.get("kind") or ""), segments))
    tokens, masks, lengths = [], [], []
    for (number, name, kind, _), row_tokens in zip(segmented, _tokenize(template, segmented), strict=True):
        if isinstance(row_tokens, ConversationError):
            refused[number] = _of_template(number, name, row_tokens)
            continue
        input_ids, loss_mask = row_tokens
        chunk.num_empty_masks += not any(loss_mask)
        length = len(input_ids)
        input_ids, loss_mask, reason = fit(input_ids, loss_mask, options)
        if reason:
            refused[number] = _refused(number, name, reason, reason.partition(":")[0])
            continue
        chunk.kept.append({"number": number, "id": name, "kind": kind, "truncated": length > options.max_length})
        tokens.append(np.array(input_ids, np.int32))
        masks.append(np.array(loss_mask, np.uint8))
        lengths.append(len(input_ids))
    if lengths:
        chunk.input_ids, chunk.loss_mask = np.concatenate(tokens), np.concatenate(masks)
        chunk.lengths = np.array(lengths, np.int64)
    chunk.refused = [refused[number] for number in sorted(refused)]
    return chunk


def _tokenize(template: ChatTemplate, segmented: list[tuple[int, str, str, list]]) -> list:
    """(input_ids, loss_mask) of each row, or why it has none: all in one call, and one by one only when that fails."""
    rows = [segments for *_, segments in segmented]
    try:
        return tokenize_rows(template.tokenizer, rows)
    except ConversationError:
        result = []
        for row in rows:
            try:
                result += tokenize_rows(template.tokenizer, [row])
            except ConversationError as error:
                result.append(error)
        return result


def _of_template(number: int, name: str, found: Exception) -> dict[str, Any]:
    """The refusal of a conversation of which no row can be made."""
    kind = getattr(found, "reason", "") or str(found)
    return _refused(number, name, f"template: {found}", f"template: {kind}")


class _Malformed(ValueError):
    """A row that is no conversation, though its neighbours are; `entry` is its line among the refused."""

    def __init__(self, entry: dict[str, Any]):
        super().__init__(entry["reason"])
        self.entry = entry


def _parse(row: RawRow, row_format: RowFormat) -> Conversation:
    """The row's conversation. Raises _Malformed when this row alone is to blame, SourceError or OtherForm else."""
    value, name = None, f"{row.unit}-{row.number}"
    try:
        value = row.value()
        row_format.check(value, row.where)
        return parse_conversation(value, row.where, default_id=name)
    except OtherForm:
        raise
    except (ConversationError, BrokenRow) as error:
        if isinstance(value, dict) and isinstance(value.get("id"), str | int):
            name = str(value["id"])
        what = str(error).removeprefix(row.where).lstrip(",: ")
        kind = _FIGURES.split(re.sub(r"^(message|turn) \d+: ", "", what))[0]
        raise _Malformed(_refused(row.number, name, f"malformed: {what}", f"malformed: {kind}")) from error


def _refused(number: int, name: str, reason: str, kind: str) -> dict[str, Any]:
    name, reason, kind = (text.encode("utf-8", "backslashreplace").decode("utf-8") for text in (name, reason, kind))
    return {"number": number, "id": name, "reason": reason, "kind": kind}
