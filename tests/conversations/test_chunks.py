"""Preparation in chunks, in processes, after a kill: always the same bytes, and those of a plain loop."""

import importlib
import json
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from transformers import PreTrainedTokenizerFast

from dflash_lib.conversations import chunks as chunks_module
from dflash_lib.conversations.chunks import Chunk
from dflash_lib.conversations.formats import ConversationError, read_conversations
from dflash_lib.conversations.prepare import PreparedRows, PrepareOptions, prepare
from dflash_lib.conversations.templates import encode_conversation
from tests.conftest import REPOSITORY
from tests.conversations.test_mask import OWN, tokenizer_with
from tests.conversations.test_prepare import OPTIONS, ROWS, chat
from tests.tiny import make_tokenizer

prepare_module = importlib.import_module("dflash_lib.conversations.prepare")


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def many(path, num=40):
    """Rows of which some are refused, one is too long and one is blank."""
    rows = [chat(f"c{i}", f"question {i}", "an answer " * (i % 7 + 1) if i % 5 else "") for i in range(num)]
    rows.insert(7, chat("long", "Explain", "a battery is a device " * 30))
    path.write_text("".join(json.dumps(row) + "\n" + "\n" * (i == 9) for i, row in enumerate(rows)))
    return path


def contents(rows):
    return {path.name: path.read_bytes() for path in sorted(rows.folder.iterdir())}


@pytest.fixture
def reference(tmp_path, tokenizer):
    """The files of one call that makes one chunk, next to the plain loop over the rows."""
    path = many(tmp_path / "c.jsonl")
    rows = prepare(path, tokenizer, OPTIONS, work_dir=tmp_path / "one")
    encoded = [encode_conversation(tokenizer, c) for c in read_conversations(path)]
    kept = [(ids, mask) for ids, mask in encoded if len(ids) <= 90 and sum(mask) >= 4]
    assert len(kept) == len(rows) == 32 and len(rows.refused) == 9
    assert all(rows.row(i)[0].tolist() == ids and rows.row(i)[1].tolist() == mask for i, (ids, mask) in enumerate(kept))
    return path, contents(rows)


@pytest.mark.parametrize("chunk_rows", [1, 3, 41])
def test_chunks_of_any_size_give_the_same_files(tmp_path, tokenizer, reference, chunk_rows):
    path, wanted = reference
    rows = prepare(path, tokenizer, OPTIONS, work_dir=tmp_path / "work", chunk_rows=chunk_rows)
    assert contents(rows) == wanted and isinstance(rows.input_ids, np.memmap)
    assert sorted(p.name for p in rows.folder.parent.iterdir()) == ["rows"], "chunks are gone"
    in_memory = prepare(path, tokenizer, OPTIONS, chunk_rows=chunk_rows)
    assert not isinstance(in_memory.input_ids, np.memmap) and in_memory.fingerprint == rows.fingerprint
    in_memory.save(tmp_path / "saved")
    assert contents(PreparedRows.load(tmp_path / "saved")) == wanted
    rows.save(tmp_path / "linked")
    assert contents(PreparedRows.load(tmp_path / "linked")) == wanted
    rows.save(rows.folder)
    assert contents(PreparedRows.load(rows.folder)) == wanted, "saved onto itself"


def test_several_processes_give_the_same_files(tmp_path, tokenizer, reference):
    path, wanted = reference
    rows = prepare(path, tokenizer, OPTIONS, work_dir=tmp_path / "work", num_workers=2, chunk_rows=4)
    assert contents(rows) == wanted


def test_a_process_that_fails_is_told_of(tmp_path, tokenizer, reference, monkeypatch):
    monkeypatch.setattr(prepare_module, "special_tokens", lambda tokenizer: {})
    with pytest.raises(RuntimeError, match="ended with code 1(.|\n)*another one once it was saved and loaded"):
        prepare(reference[0], tokenizer, OPTIONS, work_dir=tmp_path / "work", num_workers=2, chunk_rows=4)


def test_an_interrupted_preparation_goes_on(tmp_path, tokenizer, reference, monkeypatch):
    """Stopped while the fourth chunk is written: what was finished is not made again."""
    path, wanted = reference
    save, made = Chunk.save, []

    def interrupted(chunk, file):
        if len(made) == 3:
            file.with_name(f".{file.name}.partial").write_bytes(b"half a chunk")
            raise KeyboardInterrupt
        made.append(file.name)
        save(chunk, file)

    monkeypatch.setattr(Chunk, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(path, tokenizer, OPTIONS, work_dir=tmp_path / "work", chunk_rows=4)
    monkeypatch.setattr(Chunk, "save", lambda chunk, file: (made.append(file.name), save(chunk, file)))
    rows = prepare(path, tokenizer, OPTIONS, work_dir=tmp_path / "work", chunk_rows=4)
    assert contents(rows) == wanted
    assert made == [f"chunk-{i:07d}.safetensors" for i in range(11)]


def test_what_is_done_is_taken_and_what_changed_is_made_anew(tmp_path, tokenizer, reference, monkeypatch):
    path, wanted = reference
    work = tmp_path / "one"
    monkeypatch.setattr(prepare_module, "make_chunks", None)
    assert contents(prepare(path, tokenizer, OPTIONS, work_dir=work)) == wanted
    monkeypatch.undo()
    shorter = prepare(path, tokenizer, PrepareOptions(max_length=40, min_supervised=4), work_dir=work)
    assert max(shorter.lengths) <= 40 and contents(shorter) != wanted
    path.write_text(path.read_text().replace("an answer", "an other"))
    assert contents(prepare(path, tokenizer, OPTIONS, work_dir=work)) != wanted
    assert len(list(work.iterdir())) == 1, "only the newest job is kept"


@pytest.mark.parametrize("chunk_rows", [1, 2, 50])
def test_max_samples_stops_in_the_middle_of_a_chunk(tmp_path, tokenizer, chunk_rows):
    """As a plain loop would: nothing behind the last row that is kept is looked at, not even a broken line."""
    path = many(tmp_path / "c.jsonl")
    path.write_text(path.read_text() + '{"id": "x", "mess')
    options = PrepareOptions(max_length=90, min_supervised=4, max_samples=9)
    rows = prepare(path, tokenizer, options, chunk_rows=chunk_rows)
    assert rows.sample_ids == ["c1", "c2", "c3", "c4", "c6", "c7", "c8", "c9", "c11"]
    assert [e["id"] for e in rows.refused] == ["c0", "c5", "long", "c10"]


@pytest.mark.parametrize("chunk_rows", [1, 2, 50])
@pytest.mark.parametrize(("lines", "message"), [
    ([ROWS[0], '{"id": "x", "mess\0'], "line 2: not valid JSON .*the file ends there. Was it cut off"),
    ([ROWS[0], "{", '{"id": "x", "mess\0'], "line 3: not valid JSON"),
    ([ROWS[0], {**ROWS[0], "id": "b"}, {**ROWS[2], "id": "a"}, "{"], "line 3: id 'a' was used on line 1 already"),
    (["[1]", ROWS[0]], "line 1: expected an object, found list"),
    ([{"text": "a"}, ROWS[0]], "line 1: expected an object with a non-empty list .*found the keys text"),
    ([ROWS[0], {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}],
     "line 2: the row's form is 'conversations', but 'messages' in .*line 1"),
    (["{"], "line 1: not valid JSON"),
])
def test_the_first_fault_of_a_file_stops(tmp_path, tokenizer, lines, message, chunk_rows):
    path = tmp_path / "c.jsonl"
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    path.write_text(text.replace("\0\n", ""))
    with pytest.raises(ValueError, match=message):
        prepare(path, tokenizer, OPTIONS, chunk_rows=chunk_rows)


MALFORMED = [
    ('{"a" 1}', "line-2", "not valid JSON (Expecting ':' delimiter, at character 6)",
     "not valid JSON"),
    (b"\xff\xfe", "line-2", "not valid JSON ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte)",
     "not valid JSON"),
    ("[" * 100_000, "line-2", "not valid JSON (maximum recursion depth exceeded while decoding a JSON array from a "
     "unicode string)", "not valid JSON"),
    ("[1]", "line-2", "expected an object, found list", "expected an object"),
    ({"id": "x", "text": "a"}, "x", None, 'expected an object with a non-empty list "messages"'),
    ({"id": 7, "messages": []}, "7", 'expected an object with a non-empty list "messages"', None),
    ({"id": "x", "messages": [{"role": "robot", "content": "a"}]}, "x", "message 0: unknown role 'robot'; known roles: "
     "system, user, assistant, tool, developer", "unknown role"),
    ({"id": "x", "messages": [{"role": "user", "content": "a"}]}, "x", "no assistant turn, so nothing to train on; let "
     "the target answer it with `python -m dflash_lib regenerate`", "no assistant turn, so nothing to train on"),
    ({"id": "\ud83d", "messages": ROWS[0]["messages"]}, "\\ud83d",
     "id '\\ud83d' holds half of a character (a lone surrogate)", "id"),
]


@pytest.mark.parametrize("chunk_rows", [1, 50])
@pytest.mark.parametrize(("row", "name", "reason", "kind"), MALFORMED)
def test_a_malformed_row_is_refused_with_its_number(tmp_path, tokenizer, row, name, reason, kind, chunk_rows):
    """One bad row in a million is no reason to throw the others away, nor to pass over it without a word."""
    lines = [json.dumps(ROWS[0]), row if isinstance(row, str | bytes) else json.dumps(row), json.dumps(ROWS[2])]
    path = tmp_path / "c.jsonl"
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
    rows = prepare(path, tokenizer, OPTIONS, chunk_rows=chunk_rows)
    assert rows.sample_ids == ["a", "b"]
    entry, = rows.refused
    assert (entry["number"], entry["id"]) == (2, name)
    assert reason is None or entry["reason"] == f"malformed: {reason}"
    assert entry["kind"] == f"malformed: {kind or reason}"
    assert f"row 2, id {name}: malformed: " in rows.describe()
    rows.save(tmp_path / "prepared")
    assert PreparedRows.load(tmp_path / "prepared").refused == rows.refused


def test_a_row_that_the_tokenizer_does_not_take_is_refused_alone(tmp_path, tokenizer, monkeypatch):
    """Rows are tokenised many at once; what one of them raises must not take the others with it."""
    plain = chunks_module.tokenize_rows

    def picky(tokenizer, rows):
        if any("device" in segment.text for row in rows for segment in row):
            raise ConversationError("the tokenizer joins 'device' with what stands before it")
        return plain(tokenizer, rows)

    monkeypatch.setattr(chunks_module, "tokenize_rows", picky)
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    rows = prepare(path, tokenizer, OPTIONS)
    assert rows.sample_ids == ["a", "b"] and [e["number"] for e in rows.refused] == [2, 4]
    assert rows.refused[0]["reason"] == "template: the tokenizer joins 'device' with what stands before it"


def test_a_call_of_a_thousand_brackets_is_refused_alone(tmp_path):
    arguments = '{"x": ' * 900 + "1" + "}" * 900
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    path = tmp_path / "c.jsonl"
    deep = {"id": "deep", "messages": [{"role": "user", "content": "a"}, call]}
    path.write_text("".join(json.dumps(row) + "\n" for row in (ROWS[0], deep, ROWS[2])))
    rows = prepare(path, tokenizer_with(OWN / "drops_thinking.jinja"), OPTIONS)
    assert rows.sample_ids == ["a", "b"] and rows.refused[0]["id"] == "deep"


def test_a_file_of_malformed_rows_stops(tmp_path, tokenizer):
    path = tmp_path / "c.jsonl"
    path.write_text('{"messages": [{"role": "robot", "content": ""}]}\n' * 3)
    with pytest.raises(ConversationError, match="all 3 conversations were refused.*line-1: malformed: message 0: unkn"):
        prepare(path, tokenizer, OPTIONS)


def test_malformed_rows_in_several_processes(tmp_path, tokenizer):
    path = many(tmp_path / "c.jsonl")
    lines = path.read_text().splitlines()
    lines[20] = "{"
    path.write_text("\n".join(lines) + "\n")
    one = prepare(path, tokenizer, OPTIONS, work_dir=tmp_path / "one")
    two = prepare(path, tokenizer, OPTIONS, work_dir=tmp_path / "two", num_workers=2, chunk_rows=4)
    assert contents(one) == contents(two) and 21 in [entry["number"] for entry in one.refused]


@pytest.mark.slow
def test_a_killed_preparation_ends_with_the_same_bytes(tmp_path, tokenizer):
    """SIGKILL to the process that has two others working for it: they end, and a second call finishes the job."""
    path = many(tmp_path / "c.jsonl", num=4000)
    wanted = contents(prepare(path, tokenizer, OPTIONS, work_dir=tmp_path / "one"))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    code = ("import sys; from transformers import PreTrainedTokenizerFast\n"
            "from dflash_lib.conversations.prepare import PrepareOptions, prepare\n"
            "prepare(sys.argv[1], PreTrainedTokenizerFast.from_pretrained(sys.argv[2]),\n"
            "        PrepareOptions(max_length=90, min_supervised=4), work_dir=sys.argv[3], num_workers=2,\n"
            "        chunk_rows=8)")
    command = [sys.executable, "-c", code, str(path), str(tmp_path / "tokenizer"), str(tmp_path / "work")]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    while len(list((tmp_path / "work").glob("job-*/chunk-*"))) < 20:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.02)
    process.kill()
    process.wait()
    done = len(list((tmp_path / "work").glob("job-*/chunk-*")))
    assert done < 500, "it was finished already"
    end = time.monotonic() + 60
    while any(str(tmp_path / "work") in " ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])):
        assert time.monotonic() < end, "its processes go on without it"
        time.sleep(0.05)
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokenizer")
    rows = prepare(path, loaded, OPTIONS, work_dir=tmp_path / "work", num_workers=2, chunk_rows=8)
    assert contents(rows) == wanted
