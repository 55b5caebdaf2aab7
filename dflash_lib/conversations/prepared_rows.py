"""Token rows with their loss mask, at rest: what is extracted from and trained on.

Row i here is sample index i in the hidden-state store. A row ends with its last supervised token. The folder holds
`input_ids.npy` (int32 [tokens]), `loss_mask.npy` (uint8 [tokens]) and `offsets.npy` (int64 [rows + 1]; row i is
offsets[i]:offsets[i+1]), memory-mapped when loaded; `rows.jsonl` (id and kind of each row), `refused.jsonl` (number, id
and reason of each row that was refused) and `prepared.json` (options, hashes, counts, fingerprint), written last.
"""

import hashlib
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dflash_lib.conversations.rendering import TemplateOptions
from dflash_lib.files import atomic_path, canonical_json, read_json, read_jsonl, write_json

TOO_LONG = ("refuse", "truncate")
ARRAYS = {"input_ids": np.int32, "loss_mask": np.uint8, "offsets": np.int64}
META, ROWS, REFUSED = "prepared.json", "rows.jsonl", "refused.jsonl"
FORMAT = 2
BLOCK_BYTES = 1 << 24  # hashed at once


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """max_samples: rows to keep, in the file's order (None = all); max_length: tokens a row may have; min_supervised:
    supervised tokens that a row must have (a block's: with fewer no anchor has a whole block to learn from); too_long:
    "refuse" a longer row, or "truncate" it to max_length; turns, thinking, template_kwargs: see TemplateOptions."""

    max_samples: int | None = None
    max_length: int = 512
    min_supervised: int = 8
    too_long: str = "refuse"
    turns: str = "all"
    thinking: str = "default"
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.too_long not in TOO_LONG:
            raise ValueError(f"too_long: {self.too_long!r} is not one of {', '.join(TOO_LONG)}")
        if self.max_samples is not None and self.max_samples < 1:
            raise ValueError(f"max_samples: at least 1 is needed, got {self.max_samples}")
        if self.max_length < 2 or self.min_supervised < 1:
            raise ValueError(f"max_length must be at least 2 and min_supervised at least 1, got {self.max_length} and "
                             f"{self.min_supervised}")
        _ = self.template  # checks turns, thinking and template_kwargs

    @property
    def template(self) -> TemplateOptions:
        """How conversations are rendered. Prompts for the same target and drafter are rendered with it, too."""
        return TemplateOptions(turns=self.turns, thinking=self.thinking, template_kwargs=self.template_kwargs)


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedRows:
    """Token rows and loss masks of many conversations, one after another.

    input_ids int32 [tokens]; loss_mask uint8 [tokens], 1 = supervised; offsets int64 [rows + 1]; sample_ids and kinds
    one a row; refused: dicts of number (the line's or row's in the source), id, reason and kind (the reason without its
    figures), in the source's order; truncated: ids of rows cut to max_length; tokenizer_hash and source_sha256: of the
    tokenizer with its chat template and of the conversations; folder: where the arrays are mapped from, if they are.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray
    sample_ids: list[str]
    kinds: list[str]
    options: PrepareOptions
    tokenizer_hash: str
    source_sha256: str
    refused: list[dict[str, Any]] = field(default_factory=list)
    truncated: list[str] = field(default_factory=list)
    folder: Path | None = None

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

    @cached_property
    def num_supervised(self) -> int:
        return sum(int(np.frombuffer(block, np.uint8).sum(dtype=np.int64)) for block in _blocks(self.loss_mask))

    @property
    def supervised_share(self) -> float:
        """Supervised tokens over all tokens."""
        return self.num_supervised / self.num_tokens

    @property
    def refused_by_reason(self) -> dict[str, int]:
        """How many rows each kind of reason refused, most frequent first (numbers in reasons put aside)."""
        return dict(Counter(map(_kind_of, self.refused)).most_common())

    def describe(self, num_refused: int = 5) -> str:
        """What was kept and what was refused, as lines of text: for each kind of reason how many and the first row, and
        the first `num_refused` refused rows one by one."""
        lines = [f"{len(self):,} rows, {self.num_tokens:,} tokens, {self.num_supervised:,} of them supervised "
                 f"({100 * self.supervised_share:.0f} %)"]
        if self.truncated:
            lines.append(f"cut to {self.options.max_length} tokens: {len(self.truncated):,} rows")
        lines.append(f"refused: {len(self.refused):,} rows" + (":" if self.refused else ""))
        first = {_kind_of(entry): entry.get("number", "?") for entry in reversed(self.refused)}
        lines += [f"  {count:,} x {kind} (first: row {first[kind]})" for kind, count in self.refused_by_reason.items()]
        lines += [f"  row {entry.get('number', '?')}, id {entry['id']}: {entry['reason']}"
                  for entry in self.refused[:num_refused]]
        return "\n".join(lines)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) over the rows and where they come from: arrays, sample ids, options, tokenizer hash. The hash of
        the conversation file is no part of it: lines appended behind the last row that was taken change no row."""
        meta = {"options": asdict(self.options), "tokenizer_hash": self.tokenizer_hash}
        digest = hashlib.sha256(canonical_json(meta).encode("utf-8"))
        for name in self.sample_ids:
            digest.update(b"\n" + canonical_json(name).encode("utf-8"))
        for array in (self.input_ids, self.loss_mask, self.offsets):
            for block in _blocks(array):
                digest.update(block)
        return digest.hexdigest()

    def meta(self) -> dict[str, Any]:
        """What prepared.json holds."""
        return {"format": FORMAT, "fingerprint": self.fingerprint, "num_samples": len(self),
                "num_tokens": self.num_tokens, "num_supervised": self.num_supervised, "num_refused": len(self.refused),
                "refused_by_reason": self.refused_by_reason, "options": asdict(self.options),
                "tokenizer_hash": self.tokenizer_hash, "source_sha256": self.source_sha256}

    def save(self, folder: Path | str) -> None:
        """Writes the files into `folder`, each whole or not at all, `prepared.json` last. Rows that are mapped from
        another folder are linked, or copied where links are not possible: no file is changed once it is written."""
        folder = Path(folder)
        for name in (*(f"{array}.npy" for array in ARRAYS), ROWS, REFUSED):
            with atomic_path(folder / name) as partial:
                if self.folder is not None:
                    _link_or_copy(self.folder / name, partial)
                elif name == ROWS:
                    cut = set(self.truncated)
                    write_lines(partial, (row_entry(*row, cut=row[0] in cut)
                                          for row in zip(self.sample_ids, self.kinds, strict=True)))
                elif name == REFUSED:
                    write_lines(partial, self.refused)
                else:
                    with open(partial, "wb") as f:
                        np.save(f, getattr(self, name.removesuffix(".npy")), allow_pickle=False)
        write_json(folder / META, self.meta())

    @classmethod
    def load(cls, folder: Path | str) -> "PreparedRows":
        """Reads a folder that `save` wrote; the arrays are mapped, not read into memory.

        Raises FileNotFoundError when a file is missing and ValueError when the files do not belong together or are
        damaged.
        """
        rows = cls.load_unchecked(folder)
        if rows.fingerprint != read_json(Path(folder) / META)["fingerprint"]:
            raise ValueError(f"{folder}: the arrays, {ROWS} and {META} do not belong together. "
                             "Prepare the conversations again.")
        return rows

    @classmethod
    def load_unchecked(cls, folder: Path | str) -> "PreparedRows":
        """As `load`, but the arrays' values are not compared with the fingerprint."""
        folder = Path(folder)
        for name in (META, *(f"{array}.npy" for array in ARRAYS), ROWS, REFUSED):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder / name}: no such file. Prepare the conversations first (04_extract).")
        try:
            meta = read_json(folder / META)
            if meta.get("format") != FORMAT:
                raise ValueError(f"format {meta.get('format')!r}, this version reads {FORMAT}")
            arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in ARRAYS}
            sample_ids, kinds, truncated = [], [], []
            for _, entry in read_jsonl(folder / ROWS):
                sample_ids.append(entry["id"])
                kinds.append(sys.intern(entry["kind"]))
                if entry.get("truncated"):
                    truncated.append(entry["id"])
            rows = cls(**arrays, sample_ids=sample_ids, kinds=kinds, truncated=truncated,
                       refused=[entry for _, entry in read_jsonl(folder / REFUSED)],
                       options=PrepareOptions(**meta["options"]), tokenizer_hash=meta["tokenizer_hash"],
                       source_sha256=meta["source_sha256"], folder=folder)
            shapes = [len(rows.offsets), rows.offsets[-1], len(rows.loss_mask), len(rows.refused)]
            if shapes != [len(rows) + 1, rows.num_tokens, rows.num_tokens, meta["num_refused"]] or any(
                    arrays[name].dtype != dtype for name, dtype in ARRAYS.items()):
                raise ValueError("the files differ in their number of rows or tokens")
        except (ValueError, KeyError, TypeError, IndexError, EOFError) as error:
            raise ValueError(f"{folder}: prepared rows are damaged or of another version ({error}). "
                             "Prepare the conversations again.") from error
        return rows

    def in_memory(self) -> "PreparedRows":
        """The same rows with their arrays in memory, independent of the folder."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return PreparedRows(**values | {name: np.array(values[name]) for name in ARRAYS} | {"folder": None})


def _blocks(array: np.ndarray) -> Iterator[bytes]:
    """The bytes of a one-dimensional array. Those of a mapped one are read from its file: the pages of a mapping that
    was walked through would count as this process's memory, all of it."""
    if not isinstance(array, np.memmap):
        values = np.ascontiguousarray(array).view(np.uint8)
        for start in range(0, len(values), BLOCK_BYTES):
            yield values[start:start + BLOCK_BYTES].tobytes()
        return
    left = array.nbytes
    with open(array.filename, "rb") as f:
        f.seek(array.offset)
        while left > 0 and (block := f.read(min(left, BLOCK_BYTES))):
            yield block
            left -= len(block)


def _kind_of(entry: dict[str, Any]) -> str:
    """What many refused rows may have in common."""
    return entry.get("kind") or entry["reason"].split(":")[0]


def row_entry(name: str, kind: str, cut: bool) -> dict[str, Any]:
    """A line of rows.jsonl."""
    return {"id": name, "kind": kind} | ({"truncated": True} if cut else {})


def write_lines(path: Path, values: Iterable[Any]) -> None:
    """Writes JSON lines to `path`, one a value."""
    with open(path, "wb") as f:
        for value in values:
            f.write((json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8"))


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
