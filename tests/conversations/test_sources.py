"""The same rows from every kind of file, and what is said of broken ones."""

import gzip
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from dflash_lib.conversations import sources
from dflash_lib.conversations.formats import read_conversations
from dflash_lib.conversations.sources import BrokenRow, SourceError, count_rows, data_files, hash_source, read_rows

CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
         {"type": "function", "function": {"name": "g", "arguments": {"y": [1, 2]}}}]
ROWS = [{"id": f"r{i}", "messages": [{"role": "user", "content": f"ü {i}"}, {"role": "assistant", "content": "b" * i}]}
        for i in range(7)]
ROWS[3]["messages"].insert(1, {"role": "assistant", "content": None, "tool_calls": [CALLS[0]]})
ROWS[5]["messages"].insert(1, {"role": "assistant", "content": None, "tool_calls": [CALLS[1]]})


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def as_jsonl(folder):
    jsonl(folder / "c.jsonl", ROWS)
    return folder / "c.jsonl"


def as_lines_named_json(folder):
    jsonl(folder / "c.json", ROWS)
    return folder / "c.json"


def as_json(folder):
    (folder / "c.json").write_text("\ufeff" + json.dumps(ROWS, indent=2, ensure_ascii=False), encoding="utf-8")
    return folder / "c.json"


def as_parquet(folder):
    parquet.write_table(pa.Table.from_pylist(ROWS), folder / "c.parquet", row_group_size=3)
    return folder / "c.parquet"


def as_arrow_file(folder):
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_file(folder / "c.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return folder / "c.arrow"


def as_arrow_stream(folder):
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(folder / "c.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return folder / "c.arrow"


def as_saved_dataset(folder):
    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "saved", num_shards=2)
    return folder / "saved"


def as_saved_dataset_with_json(folder):
    datasets.Dataset.from_list(ROWS, on_mixed_types="use_json").save_to_disk(folder / "saved")
    return folder / "saved"


def as_parquet_folder(folder):
    (folder / "hub" / "data").mkdir(parents=True)
    (folder / "hub" / "README.md").write_text("a data set")
    for name, rows in (("train-00001-of-00002", ROWS[4:]), ("train-00000-of-00002", ROWS[:4])):
        parquet.write_table(pa.Table.from_pylist(rows), folder / "hub" / "data" / f"{name}.parquet")
    return folder / "hub"


KINDS = [as_jsonl, as_lines_named_json, as_json, as_parquet, as_arrow_file, as_arrow_stream, as_saved_dataset,
         as_saved_dataset_with_json, as_parquet_folder]


@pytest.fixture(autouse=True)
def quiet_datasets():
    datasets.disable_progress_bars()


@pytest.fixture
def small_reads(monkeypatch):
    """Batches and blocks so small that rows lie across their borders."""
    monkeypatch.setattr(sources, "BATCH_ROWS", 2)
    monkeypatch.setattr(sources, "BLOCK_BYTES", 5)


@pytest.mark.parametrize("write", KINDS, ids=lambda f: f.__name__)
def test_every_kind_of_file_gives_the_same_conversations(tmp_path, small_reads, write):
    (tmp_path / "plain").mkdir()
    wanted = list(read_conversations(as_jsonl(tmp_path / "plain")))
    path = write(tmp_path)
    assert list(read_conversations(path)) == wanted
    assert [c.messages[1].get("tool_calls") for c in wanted if len(c.messages) == 3] == [CALLS[:1], CALLS[1:]]
    assert [row.number for row in read_rows(path)] == list(range(1, 8))
    assert count_rows(path) in (7, None)
    renamed = tmp_path / "renamed.data"
    if path.is_file() and path.suffix != ".arrow" or write is as_arrow_file:
        assert list(read_conversations(path.rename(renamed))) == wanted, "known by its first bytes, too"


def test_the_hash_sees_every_file(tmp_path):
    path = as_parquet_folder(tmp_path)
    before = hash_source(path)
    parquet.write_table(pa.Table.from_pylist(ROWS[4:6]), path / "data" / "train-00001-of-00002.parquet")
    assert hash_source(path) != before != hash_source(data_files(path)[0])


def test_only_what_is_asked_for_is_decoded(tmp_path):
    """A process that skips a chunk does not parse it: a broken line there is none of its business."""
    path = tmp_path / "c.jsonl"
    path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    rows = list(read_rows(path))
    assert [rows[0].value(), rows[2].value()] == [{"a": 1}, {"a": 3}]
    with pytest.raises(SourceError, match="c.jsonl, line 2: not valid JSON"):
        rows[1].value()


def test_a_json_array_is_read_a_block_at_a_time(tmp_path, monkeypatch):
    """Memory holds one element and a block, not the file."""
    monkeypatch.setattr(sources, "BLOCK_BYTES", 1000)
    (tmp_path / "c.json").write_text(json.dumps([{"text": "x" * 400} for _ in range(500)]))
    longest, fill = [], sources._JsonText.fill

    def watched(text, *args):
        fill(text, *args)
        longest.append(len(text.text))

    monkeypatch.setattr(sources._JsonText, "fill", watched)
    assert len(list(read_rows(tmp_path / "c.json"))) == 500
    assert max(longest) < 3000 and len(longest) > 200


@pytest.mark.parametrize(("text", "message"), [
    ('[{"a": 1}, {"a": 2', "row 2: not valid JSON .*cut off"),
    ('[{"a": 1}, {"a" 2}, {"a": 3}]', "row 2: not valid JSON"),
    ('[{"a": 1} {"a": 2}]', "after row 1: .*expected ',' or ']', found '{'"),
    ('[{"a": 1}', "after row 1: .*end of the"),
    ('[{"a": 1},]', "row 2: not valid JSON"), ('[{"a": 1}] x', "after row 1: something follows"),
    (b'[{"a": "\xff"}]', "not valid UTF-8"), ('[{"a": "' + "x" * 200, "row 1: not valid JSON"),
])
def test_broken_json_arrays(tmp_path, small_reads, text, message):
    (tmp_path / "c.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SourceError, match=message):
        list(read_rows(tmp_path / "c.json"))


def test_broken_columnar_files(tmp_path):
    for write, cut in ((as_parquet, 20), (as_arrow_file, 20), (as_arrow_stream, 200)):
        path = write(tmp_path)
        path.write_bytes(path.read_bytes()[:-cut])
        with pytest.raises(SourceError, match=f"{path.name}: not a whole (Parquet|Arrow) file"):
            list(read_rows(path))


def test_folders_that_say_too_little(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent: no such file or data set folder"):
        list(read_rows(tmp_path / "absent"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match=r"empty: no \*.jsonl, .* file in this folder"):
        list(read_rows(tmp_path / "empty"))
    one = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "splits")
    with pytest.raises(SourceError, match="several splits .train, test.; name one, such as .*splits/train"):
        list(read_rows(tmp_path / "splits"))
    assert len(list(read_rows(tmp_path / "splits" / "train"))) == 7
    (tmp_path / "splits" / "train" / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(SourceError, match="names files that are not there: data-00000-of-00001.arrow"):
        list(read_rows(tmp_path / "splits" / "train"))
    as_jsonl(tmp_path / "empty")
    as_parquet(tmp_path / "empty")
    with pytest.raises(SourceError, match="files of several kinds .jsonl, parquet.; name one file"):
        list(read_rows(tmp_path / "empty"))


@pytest.mark.parametrize(("names", "message"), [
    (("train-00000-of-00001.parquet", "test-00000-of-00001.parquet"), "several splits .test, train.; name one file"),
    (("train_sft-00000-of-00001.parquet", "train_gen-00000-of-00001.parquet"), "several splits"),
    (("chats-00000-of-00001.parquet", "more.parquet"), "several splits"),
    (("train.parquet", "test.parquet"), "several splits"), (("chats.parquet", "chats_eval.parquet"), "several splits"),
    (("train-00000-of-00003.parquet", "train-00002-of-00003.parquet"), "2 of 3 files of train are here"),
    (("part-1.parquet", "part-2.parquet", "contest.parquet"), None), (("train-a.parquet",), None),
    (("t-00000-of-00002-0a1b2c3d.parquet", "t-00001-of-00002-9f.parquet"), None),
])
def test_splits_of_a_folder_are_not_joined(tmp_path, names, message):
    """The test rows would be trained on without a word, and rows of a shard that is absent be missing."""
    for name in names:
        parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / name)
    if message is None:
        assert len(list(read_rows(tmp_path))) == 7 * len(names)
        return
    with pytest.raises(SourceError, match=message):
        list(read_rows(tmp_path))


@pytest.mark.parametrize(("data", "message"), [
    (gzip.compress(b'{"a": 1}', mtime=0), "c.jsonl: is gzip-compressed; unpack it"),
    ('{"a": 1}'.encode("utf-16"), "c.jsonl: is UTF-16"),
    (b'{"a": 1}\n{"b": ' + b"[" * 100_000, "line 2: not valid JSON"),
    (b'{"a": ' + b"1" * 5000 + b"}", "line 1: not valid JSON .*digits"),
    (b"[" + b'{"a": ' + b"1" * 5000 + b"}]", "row 1: not valid JSON .*digits"),
    (b"[" * 100_000, "row 1: not valid JSON"),
])
def test_files_that_are_no_text_and_texts_that_are_too_much(tmp_path, data, message):
    path = tmp_path / ("c.json" if message.startswith("row") else "c.jsonl")
    path.write_bytes(data)
    with pytest.raises(SourceError, match=message):
        _ = [row.value() for row in read_rows(path)]


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    (tmp_path / "c.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": 2}\r\n')
    assert [(row.number, row.value()) for row in read_rows(tmp_path / "c.jsonl")] == [(1, {"a": 1}), (3, {"a": 2})]


def test_damage_inside_columnar_files(tmp_path):
    path = as_parquet(tmp_path)
    with pytest.raises(SourceError, match="c.parquet: not a whole Parquet file"):
        path.write_bytes(path.read_bytes()[:-20])
        count_rows(path)
    text = pa.array([b"\xff"], pa.binary()).view(pa.string())
    parquet.write_table(pa.table({"messages": text}), path)
    with pytest.raises(BrokenRow, match="c.parquet, row 1: values that cannot be decoded .*utf-8"):
        next(read_rows(path)).value()


def test_one_row_that_cannot_be_decoded_leaves_its_batch_alone(tmp_path):
    """Columnar files are decoded many rows at once; a row that is no text does not take the others with it."""
    text = pa.array([b'"a"', b"\xff", b'"c"'], pa.binary()).view(pa.string())
    parquet.write_table(pa.table({"messages": text}), tmp_path / "c.parquet")
    rows = list(read_rows(tmp_path / "c.parquet"))
    with pytest.raises(BrokenRow, match="c.parquet, row 2: values"):
        rows[1].value()
    assert [rows[i].value() for i in (0, 2)] == [{"messages": '"a"'}, {"messages": '"c"'}]


@pytest.mark.parametrize(("text", "kinds"), [
    ('{"a": 1}\n{"a"\n{"a": 3}\n', [None, BrokenRow, None]),
    ('{"a": 1}\n{"a": 2}\n{"a"\n', [None, None, BrokenRow]),
    ('{"a": 1}\n\n{"a"', [None, SourceError]), ('{"a": 1}\n{"a": 2}', [None, None]),
    ('\n{"a"\n{"a": 2}\n', [SourceError, None]),
])
def test_a_broken_line_and_a_broken_file(tmp_path, text, kinds):
    """A file that is not JSON lines shows in its first line, one that was cut off in its last."""
    (tmp_path / "c.jsonl").write_text(text)
    found = []
    for row in read_rows(tmp_path / "c.jsonl"):
        try:
            row.value()
            found.append(None)
        except SourceError as error:
            found.append(type(error))
    assert found == kinds
