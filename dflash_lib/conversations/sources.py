"""Files of rows, read as a stream: JSONL, a JSON array, Parquet, Arrow, a Hugging Face data set folder.

Memory holds one line, one array element or one batch of rows, whatever the file's size. A row is decoded only when its
value is asked for, so a process that wants every n-th chunk skips the others cheaply.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dflash_lib.files import hash_file, hash_value, read_json

SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}
BATCH_ROWS = 256  # rows of a columnar file that are decoded at once
BLOCK_BYTES = 1 << 20
LONGEST_VALUE = 1 << 28  # characters of one element of a JSON array
NO_TEXT = {b"\x1f\x8b": "gzip-compressed", b"\x28\xb5\x2f\xfd": "zstd-compressed", b"PK\x03\x04": "a zip archive",
           b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}  # by first bytes: files that are named as text and are not
_SHARD = re.compile(r"(?P<split>.+?)-(?P<number>\d{5})-of-(?P<all>\d{5})(-[0-9a-f]+)?")
_SPLIT_WORD = re.compile(r"(^|[^A-Za-z0-9])(train|training|test|testing|eval|valid|validation|val|dev|heldout)"
                         r"($|[^A-Za-z0-9])", re.IGNORECASE)


class SourceError(ValueError):
    """A file or folder that cannot be read as rows; the message names it and, where there is one, the row."""


class BrokenRow(SourceError):
    """A row that cannot be decoded, though the rows behind it can be."""


@dataclass(frozen=True)
class RawRow:
    """One row. number: from 1, the line's in a JSONL file, through all files of a folder otherwise; unit: "line" or
    "row"; where: file and number, for messages; value(): the decoded row; raises BrokenRow when it alone is
    broken, SourceError when the file is."""

    number: int
    unit: str
    where: str
    value: Callable[[], Any]


def data_files(path: Path | str) -> list[Path]:
    """The files that hold the rows of `path`, in their order: itself, or those of a data set folder.

    A folder is one split that `datasets` saved (state.json names its files), or a folder of files of one kind (also in
    a folder `data` below it), in the order of their names. Raises FileNotFoundError, and SourceError for a folder of
    several splits, of mixed or unknown files, or one that lacks a shard.
    """
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such file or data set folder")
    if (path / "dataset_dict.json").is_file():
        splits = read_json(path / "dataset_dict.json")["splits"]
        raise SourceError(f"{path}: holds several splits ({', '.join(splits)}); name one, such as {path / splits[0]}")
    if (path / "state.json").is_file():
        files = [path / entry["filename"] for entry in read_json(path / "state.json")["_data_files"]]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise SourceError(f"{path}: state.json names files that are not there: {', '.join(absent)}")
    else:
        files = [f for folder in (path, path / "data") if folder.is_dir() for f in sorted(folder.iterdir())
                 if f.suffix in SUFFIXES and f.name not in ("dataset_info.json", "dataset_infos.json")]
        kinds = {SUFFIXES[f.suffix] for f in files}
        if len(kinds) > 1:
            raise SourceError(f"{path}: holds files of several kinds ({', '.join(sorted(kinds))}); name one file")
        _check_one_split(path, files)
    if not files:
        raise SourceError(f"{path}: no *.jsonl, *.json, *.parquet or *.arrow file in this folder")
    return files


def _check_one_split(path: Path, files: list[Path]) -> None:
    """Raises SourceError when the files' names say that they are several splits (the test rows would be trained on) or
    that shards are absent: `train-00000-of-00002.parquet` and so on, or `train.jsonl` beside `test.jsonl`."""
    splits: dict[str, list[Path]] = {}
    shards: dict[tuple[str, str], set[str]] = {}
    for file in files:
        shard = _SHARD.fullmatch(file.stem)
        split = shard["split"] if shard else file.stem
        splits.setdefault(split if shard or _SPLIT_WORD.search(split) else "", []).append(file)
        if shard:
            shards.setdefault((split, shard["all"]), set()).add(shard["number"])
    if len(splits) > 1:
        names = ", ".join(split or found[0].name for split, found in splits.items())
        raise SourceError(f"{path}: holds several splits ({names}); name one file, such as {files[-1]}, or give each a "
                          "folder of its own")
    for (split, total), numbers in shards.items():
        if len(numbers) != int(total):
            raise SourceError(f"{path}: {len(numbers)} of {int(total)} files of {split} are here. Is the download "
                              "complete?")


def hash_source(path: Path | str) -> str:
    """sha256 (hex) of a file, or over names and bytes of a folder's data files."""
    if Path(path).is_file():
        return hash_file(path)
    return hash_value([[file.name, hash_file(file)] for file in data_files(path)])


def read_rows(path: Path | str) -> Iterator[RawRow]:
    """Streams the rows of a file or data set folder. Raises FileNotFoundError and SourceError, with file and row."""
    number = 0
    for file in data_files(path):
        for row in _READERS[_kind(file)](file, number):
            number = row.number
            yield row


def count_rows(path: Path | str) -> int | None:
    """The number of rows, where it is cheap to know (JSONL, Parquet); None elsewhere."""
    total = 0
    for file in data_files(path):
        kind = _kind(file)
        if kind == "parquet":
            total += _open_parquet(file).metadata.num_rows
        elif kind == "jsonl":
            with open(file, "rb") as f:
                total += sum(1 for line in f if line.strip())
        else:
            return None
    return total


def _kind(file: Path) -> str:
    """By its suffix; by its first bytes for an unknown one, and for .json, which may hold an array or lines."""
    kind = SUFFIXES.get(file.suffix)
    if kind in ("parquet", "arrow"):
        return kind
    with open(file, "rb") as f:
        start = f.read(4096)
    for magic, what in NO_TEXT.items():
        if start.startswith(magic):
            raise SourceError(f"{file}: is {what}; unpack it or save it as UTF-8 text first")
    if kind == "jsonl":
        return kind
    if kind is None and start.startswith(b"PAR1"):
        return "parquet"
    if kind is None and start.startswith(b"ARROW1"):
        return "arrow"
    return "json" if start.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[") else "jsonl"


def _read_jsonl(file: Path, before: int) -> Iterator[RawRow]:
    """A value a line; blank lines are passed over."""
    with open(file, "rb") as f:
        is_first = True
        for number, raw in enumerate(f, 1):
            raw = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
            if raw.strip():
                where = f"{file}, line {number}"
                yield RawRow(before + number, "line", where, partial(_decode_line, raw, where, is_first))
                is_first = False


def _decode_line(raw: bytes, where: str, is_first: bool) -> Any:
    """The line's value. A file whose first line is broken is not JSONL, one whose last line is broken and not ended
    was cut off: SourceError. Any other broken line is BrokenRow."""
    try:
        return json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as found:  # a number of 5,000 digits, a thousand brackets
        error = f"{found.msg}, at character {found.pos + 1}" if isinstance(found, json.JSONDecodeError) else found
        if not raw.endswith(b"\n"):
            raise SourceError(f"{where}: not valid JSON ({error}), and the file ends there. Was it cut off while being "
                              "written or copied?") from found
        raise (SourceError if is_first else BrokenRow)(f"{where}: not valid JSON ({error})") from found


class _JsonText:
    """A UTF-8 file as text, a block at a time: `text` from position `at` on has been read and not yet taken."""

    def __init__(self, f, file: Path):
        self.f, self.file, self.utf8 = f, file, codecs.getincrementaldecoder("utf-8-sig")()
        self.text, self.at, self.ended = "", 0, False

    def fill(self, num_bytes: int = 0) -> None:
        """Reads `num_bytes` more, or a block."""
        raw = self.f.read(num_bytes or BLOCK_BYTES)
        self.ended = not raw
        try:
            self.text, self.at = self.text[self.at:] + self.utf8.decode(raw, final=self.ended), 0
        except UnicodeDecodeError as error:
            raise SourceError(f"{self.file}: not valid UTF-8 ({error})") from error

    def peek(self) -> str:
        """The next character that is no white space, which is passed over; "" at the end."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in " \t\r\n":
                self.at += 1
            if self.at < len(self.text) or self.ended:
                return self.text[self.at:self.at + 1]
            self.fill()

    def take_value(self, where: str) -> Any:
        """Decodes the value that begins here, reading on until it is whole."""
        num_bytes = BLOCK_BYTES
        while True:
            try:
                value, self.at = json.JSONDecoder().raw_decode(self.text, self.at)
                return value
            except json.JSONDecodeError as error:
                # only a fault at the end of what has been read, or in a text that began before it, may be mended there
                unfinished = error.pos > len(self.text) - 16 or error.msg.startswith("Unterminated string")
                if self.ended or not unfinished or len(self.text) - self.at > LONGEST_VALUE:
                    raise SourceError(f"{where}: not valid JSON ({error.msg}). Was the file cut off while being "
                                      "written?") from error
            except (ValueError, RecursionError) as error:
                raise SourceError(f"{where}: not valid JSON ({error})") from error
            self.fill(num_bytes)
            num_bytes *= 2  # so that the repeated attempts at a long value stay linear


def _read_json(file: Path, before: int) -> Iterator[RawRow]:
    """The elements of one JSON array, each decoded as soon as it is whole."""
    number = before
    with open(file, "rb") as f:
        text = _JsonText(f, file)
        if text.peek() != "[":
            raise SourceError(f"{file}: not a JSON array of rows")
        text.at += 1
        while (character := text.peek()) != "]":
            if number > before:
                if character != ",":
                    raise SourceError(f"{file}, after row {number}: not valid JSON (expected ',' or ']', found "
                                      f"{character or 'the end of the file'!r})")
                text.at += 1
                text.peek()
            number += 1
            where = f"{file}, row {number}"
            value = text.take_value(where)
            yield RawRow(number, "row", where, partial(_same, value))
        text.at += 1
        if text.peek():
            raise SourceError(f"{file}, after row {number}: something follows the end of the array")


def _same(value: Any) -> Any:
    return value


class _Batch:
    """Rows of a record batch, decoded together when the first of them is asked for; one by one when that fails."""

    def __init__(self, batch):
        self.batch, self.rows = batch, None

    def value(self, i: int, where: str) -> Any:
        if self.rows is None:
            try:
                self.rows = _decode(self.batch)
            except (ValueError, RecursionError):  # text that is not UTF-8 or not JSON, in one of them
                self.rows = []
        try:
            row = self.rows[i] if self.rows else _decode(self.batch.slice(i, 1))[0]
        except (ValueError, RecursionError) as error:
            raise BrokenRow(f"{where}: values that cannot be decoded ({error})") from error
        return {name: item for name, item in row.items() if item is not None}


def _decode(batch) -> list[dict[str, Any]]:
    """A record batch's rows."""
    decoded = [[_plain(item, column.type) for item in column.to_pylist()] for column in batch.columns]
    return [dict(zip(batch.schema.names, values, strict=True)) for values in zip(*decoded, strict=True)]


def _plain(value: Any, kind) -> Any:
    """An Arrow value without the fields that a struct type fills in as null where a row has none (a tool call's
    arguments get those of every other call), and with JSON-typed text decoded."""
    import pyarrow as pa

    if value is None:
        return None
    if isinstance(kind, pa.BaseExtensionType):
        return json.loads(value) if kind.extension_name == "arrow.json" else _plain(value, kind.storage_type)
    if pa.types.is_struct(kind):
        fields = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
        return {name: _plain(item, fields[name]) for name, item in value.items() if item is not None}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        if pa.types.is_primitive(kind.value_type) or pa.types.is_string(kind.value_type):
            return value
        return [_plain(item, kind.value_type) for item in value]
    return value


def _batched(batches, file: Path, before: int) -> Iterator[RawRow]:
    number = before
    for whole in batches:
        for start in range(0, whole.num_rows, BATCH_ROWS):
            part = _Batch(whole.slice(start, BATCH_ROWS))
            for i in range(part.batch.num_rows):
                number += 1
                where = f"{file}, row {number}"
                yield RawRow(number, "row", where, partial(part.value, i, where))


def _open_parquet(file: Path):
    import pyarrow as pa
    import pyarrow.parquet as parquet

    try:
        return parquet.ParquetFile(file)
    except pa.ArrowException as error:
        raise SourceError(f"{file}: not a whole Parquet file ({error})") from error


def _read_parquet(file: Path, before: int) -> Iterator[RawRow]:
    import pyarrow as pa

    try:
        with _open_parquet(file) as opened:
            yield from _batched(opened.iter_batches(batch_size=BATCH_ROWS), file, before)
    except (pa.ArrowException, OSError) as error:  # Arrow's own I/O errors (a damaged page) are OSErrors
        raise SourceError(f"{file}: not a whole Parquet file ({error})") from error


def _read_arrow(file: Path, before: int) -> Iterator[RawRow]:
    """Arrow's stream format, which `datasets` writes, or its file format."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(file)) as mapped:
            if mapped.read(6) == b"ARROW1":
                opened = pa.ipc.open_file(mapped)
                batches = (opened.get_batch(i) for i in range(opened.num_record_batches))
            else:
                mapped.seek(0)
                batches = pa.ipc.open_stream(mapped)
            yield from _batched(batches, file, before)
    except pa.ArrowException as error:
        raise SourceError(f"{file}: not a whole Arrow file ({error})") from error


_READERS = {"jsonl": _read_jsonl, "json": _read_json, "parquet": _read_parquet, "arrow": _read_arrow}
