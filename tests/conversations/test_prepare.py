"""Prepared rows: what is kept, refused and truncated, and that a folder at rest is what was saved."""

import json

import numpy as np
import pytest

from dflash_lib.conversations import prepare as prepare_module
from dflash_lib.conversations.formats import ConversationError, read_conversations
from dflash_lib.conversations.prepare import PreparedRows, PrepareOptions, prepare
from dflash_lib.conversations.sources import SourceError
from dflash_lib.conversations.templates import encode_conversation
from tests.tiny import CHAT_TEMPLATE, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def chat(id, *contents, **extra):
    roles = ("user", "assistant")
    return {"id": id, **extra, "messages": [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


ROWS = [chat("a", "What is rain?", "Water that falls.", kind="facts"),
        chat("long", "Explain", "a battery is a device " * 20),
        chat("b", "Hi", "Hello, how do you do?", "Well", "That is good to hear.", "trailing"),
        chat("short", "Hi", "")]
OPTIONS = PrepareOptions(max_length=90, min_supervised=4)
RAISES = make_tokenizer()
RAISES.chat_template = ("{% if tools %}{{ raise_exception('no such tool: ' + (tools[0] | first)) }}{% endif %}"
                        + CHAT_TEMPLATE)


def test_rows_are_the_encoded_conversations(tmp_path, tokenizer):
    path = write(tmp_path / "c.jsonl", *ROWS)
    rows = prepare(path, tokenizer, OPTIONS)
    assert rows.sample_ids == ["a", "b"] and rows.kinds == ["facts", ""] and len(rows) == 2
    by_id = {c.id: c for c in read_conversations(path)}
    for i, id in enumerate(rows.sample_ids):
        ids, mask = encode_conversation(tokenizer, by_id[id])
        got_ids, got_mask = rows.row(i)
        assert (got_ids.dtype, got_mask.dtype) == (np.int32, np.uint8)
        assert got_ids.tolist() == ids and got_mask.tolist() == mask and mask[-1] == 1
    assert rows.lengths.tolist() == [len(rows.row(0)[0]), len(rows.row(1)[0])] and rows.lengths.dtype == np.int64
    assert rows.num_tokens == sum(rows.lengths)
    assert rows.num_supervised == sum(int(rows.row(i)[1].sum()) for i in range(2))
    with pytest.raises(IndexError, match="row 2 of 2"):
        rows.row(2)


def test_what_is_refused_is_said(tmp_path, tokenizer):
    rows = prepare(write(tmp_path / "c.jsonl", *ROWS), tokenizer, OPTIONS)
    assert [entry["id"] for entry in rows.refused] == ["long", "short"]
    assert rows.refused[0]["reason"].startswith("longer than max_length: ")
    assert "90 allowed" in rows.refused[0]["reason"]
    assert rows.refused[1]["reason"] == "too few supervised tokens: 1 in the row, 4 needed"
    assert rows.refused_by_reason == {"longer than max_length": 1, "too few supervised tokens": 1}


def test_a_template_that_rewrites_turns_refuses_the_row_only(tmp_path, tokenizer):
    tokenizer.chat_template = CHAT_TEMPLATE.replace("message['content']", "message['content'].replace('bad', 'good')")
    try:
        rows = prepare(write(tmp_path / "c.jsonl", chat("x", "Hi", "a bad answer here"), ROWS[0]), tokenizer, OPTIONS)
    finally:
        tokenizer.chat_template = CHAT_TEMPLATE
    assert rows.sample_ids == ["a"]
    assert rows.refused[0]["reason"].startswith("template: conversation x, message 1: its content")


def test_truncation(tmp_path, tokenizer):
    path = write(tmp_path / "c.jsonl", *ROWS)
    options = PrepareOptions(max_length=90, min_supervised=4, too_long="truncate")
    rows = prepare(path, tokenizer, options)
    assert rows.sample_ids == ["a", "long", "b"] and rows.truncated == ["long"]
    whole = encode_conversation(tokenizer, next(c for c in read_conversations(path) if c.id == "long"))
    ids, mask = rows.row(1)
    assert ids.tolist() == whole[0][:90] and mask.tolist() == whole[1][:90]


def test_a_truncated_row_still_ends_with_a_supervised_token(tmp_path, tokenizer):
    two_turns = chat("two", "Hi", "The answer is here.", "a very long second question, " * 10, "never reached")
    path = write(tmp_path / "c.jsonl", two_turns)
    rows = prepare(path, tokenizer, PrepareOptions(max_length=60, min_supervised=1, too_long="truncate"))
    ids, mask = rows.row(0)
    assert len(ids) < 60 and mask[-1] == 1
    assert tokenizer.decode(ids).endswith("The answer is here.<|im_end|>")
    only_prompt = write(tmp_path / "d.jsonl", chat("x", "a long question, " * 20, "answer"), ROWS[0])
    rows = prepare(only_prompt, tokenizer, PrepareOptions(max_length=60, min_supervised=1, too_long="truncate"))
    assert rows.sample_ids == ["a"] and rows.truncated == []
    assert rows.refused[0]["reason"].startswith("too few supervised tokens: 0")


def test_max_samples_counts_rows_that_are_kept(tmp_path, tokenizer):
    path = write(tmp_path / "c.jsonl", ROWS[1], ROWS[0], ROWS[3], ROWS[2])
    rows = prepare(path, tokenizer, PrepareOptions(max_length=90, min_supervised=4, max_samples=1))
    assert rows.sample_ids == ["a"] and [entry["id"] for entry in rows.refused] == ["long"]


@pytest.mark.parametrize(("rows", "message"), [
    ([chat("x", "Hi", "a battery " * 90)], "all 1 conversations were refused.*x: longer than max_length"),
    ([ROWS[3], ROWS[1]], "all 2 conversations were refused.*short: too few"),
])
def test_nothing_left_stops(tmp_path, tokenizer, rows, message):
    with pytest.raises(ConversationError, match=message):
        prepare(write(tmp_path / "c.jsonl", *rows), tokenizer, OPTIONS)


def test_an_all_zero_mask_stops(tmp_path, tokenizer):
    """Cut turns without text: nothing in them was generated."""
    row = {"id": "x", "messages": [{"role": "user", "content": "Hi"},
                                   {"role": "assistant", "content": "", "finish_reason": "length"}]}
    with pytest.raises(ConversationError, match="loss mask is zero in every row"):
        prepare(write(tmp_path / "c.jsonl", row), tokenizer, OPTIONS)


def test_broken_files_stop(tmp_path, tokenizer):
    path = write(tmp_path / "c.jsonl", ROWS[0])
    path.write_text(path.read_text() + '{"id": "x", "mess')
    with pytest.raises(ValueError, match="line 2: not valid JSON"):
        prepare(path, tokenizer, OPTIONS)
    with pytest.raises(ConversationError, match="holds no conversation"):
        prepare(write(tmp_path / "d.jsonl"), tokenizer, OPTIONS)


@pytest.mark.parametrize("options", [
    {"too_long": "drop"}, {"max_samples": 0}, {"max_length": 1}, {"min_supervised": 0}])
def test_options_are_checked(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        PrepareOptions(**options)


def test_at_rest(tmp_path, tokenizer):
    path = write(tmp_path / "c.jsonl", *ROWS)
    rows = prepare(path, tokenizer, OPTIONS)
    rows.save(tmp_path / "prepared")
    again = PreparedRows.load(tmp_path / "prepared")
    assert again.fingerprint == rows.fingerprint == prepare(path, tokenizer, OPTIONS).fingerprint
    assert again.options == OPTIONS and again.refused == rows.refused and again.sample_ids == rows.sample_ids
    assert np.array_equal(again.row(1)[0], rows.row(1)[0]) and again.input_ids.dtype == np.int32
    assert str(tmp_path) not in (tmp_path / "prepared" / "prepared.json").read_text()


def test_the_fingerprint_sees_every_change(tmp_path, tokenizer):
    path = write(tmp_path / "c.jsonl", *ROWS)
    seen = {prepare(path, tokenizer, options).fingerprint
            for options in (OPTIONS, PrepareOptions(max_length=91, min_supervised=4))}
    seen.add(prepare(write(tmp_path / "d.jsonl", *ROWS[:2]), tokenizer, OPTIONS).fingerprint)
    seen.add(prepare(write(tmp_path / "e.jsonl", {**ROWS[0], "id": "z"}, *ROWS[1:]), tokenizer, OPTIONS).fingerprint)
    other = make_tokenizer()
    other.chat_template = CHAT_TEMPLATE + "{# says nothing #}"
    seen.add(prepare(path, other, OPTIONS).fingerprint)
    assert len(seen) == 5


def test_lines_appended_behind_the_last_row_do_not_change_the_fingerprint(tmp_path, tokenizer):
    options = PrepareOptions(max_length=90, min_supervised=4, max_samples=2)
    before = prepare(write(tmp_path / "c.jsonl", *ROWS[:3]), tokenizer, options)
    after = prepare(write(tmp_path / "c.jsonl", *ROWS[:3], ROWS[3], chat("new", "Hi", "Hello there.")), tokenizer,
                    options)
    assert before.source_sha256 != after.source_sha256 and before.fingerprint == after.fingerprint


def test_damaged_folders(tmp_path, tokenizer):
    rows = prepare(write(tmp_path / "c.jsonl", *ROWS), tokenizer, OPTIONS)
    folder = tmp_path / "prepared"
    with pytest.raises(FileNotFoundError, match="Prepare the conversations first"):
        PreparedRows.load(folder)
    rows.save(folder)
    names = (folder / "rows.jsonl").read_text()
    for changed, message in ((names.replace('"a"', '"x"'), "do not belong together"),
                             (names + names, "number of rows"), (names[:-9], "not valid JSON")):
        (folder / "rows.jsonl").write_text(changed)
        with pytest.raises(ValueError, match=message):
            PreparedRows.load(folder)
    rows.save(folder)
    meta = json.loads((folder / "prepared.json").read_text())
    lacking = {key: value for key, value in meta.items() if key != "source_sha256"}
    for changed, message in ((lacking, "another version.*source_sha256"),
                             ({**meta, "format": 1}, "another version.*format 1"),
                             ({**meta, "num_refused": 7}, "damaged"), ({**meta, "fingerprint": ""}, "belong together")):
        (folder / "prepared.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=message):
            PreparedRows.load(folder)
    rows.save(folder)
    data = (folder / "input_ids.npy").read_bytes()
    (folder / "input_ids.npy").write_bytes(data[:-9])
    with pytest.raises(ValueError, match="damaged"):
        PreparedRows.load(folder)
    (folder / "input_ids.npy").write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    with pytest.raises(ValueError, match="do not belong together"):
        PreparedRows.load(folder)
    (folder / "input_ids.npy").unlink()
    with pytest.raises(FileNotFoundError, match="input_ids.npy"):
        PreparedRows.load(folder)


def test_refused_rows_are_numbered_and_described(tmp_path, tokenizer):
    tokenizer.chat_template = CHAT_TEMPLATE.replace("message['content']", "message['content'].replace('bad', 'good')")
    try:
        rows = prepare(write(tmp_path / "c.jsonl", *ROWS, chat("x", "Hi", "bad"), chat("y", "Hi", "bad too")),
                       tokenizer, OPTIONS)
    finally:
        tokenizer.chat_template = CHAT_TEMPLATE
    assert [(entry["number"], entry["id"]) for entry in rows.refused] == [(2, "long"), (4, "short"), (5, "x"), (6, "y")]
    assert rows.refused_by_reason == {"template: its content is not what the template renders after the prompt": 2,
                                      "longer than max_length": 1, "too few supervised tokens": 1}
    text = rows.describe(num_refused=2)
    assert f"2 rows, {rows.num_tokens} tokens, {rows.num_supervised} of them supervised" in text
    assert "refused: 4 rows:\n  2 x template: its content" in text and "prompt (first: row 5)" in text
    assert "row 4, id short: too few supervised tokens: 1 in the row, 4 needed" in text and "row 5, id" not in text
    rows.save(tmp_path / "prepared")
    assert PreparedRows.load(tmp_path / "prepared").describe() == rows.describe()


def test_the_choices_reach_the_mask(tmp_path, tokenizer):
    path = write(tmp_path / "c.jsonl", chat("a", "a", "the first answer", "b", "the second answer"))
    all_turns, last = (prepare(path, tokenizer, PrepareOptions(turns=turns)) for turns in ("all", "last"))
    assert np.array_equal(all_turns.input_ids, last.input_ids) and last.num_supervised < all_turns.num_supervised
    assert all_turns.fingerprint != last.fingerprint
    other = prepare(path, tokenizer, PrepareOptions(template_kwargs={"unused": 1}))
    assert np.array_equal(all_turns.loss_mask, other.loss_mask) and other.fingerprint != all_turns.fingerprint


def test_half_a_character_refuses_its_row_only(tmp_path, tokenizer):
    """JSON can spell an emoji that was cut in two; no tokenizer takes it, and no file."""
    path = write(tmp_path / "c.jsonl", chat("half", "Hi", "Hello, \ud83d"), chat("asks", "\udc00", "b"), ROWS[0],
                 chat("pair", "Hi", "Hello, \ud83d\ude00, how do you do?"))
    rows = prepare(path, tokenizer, OPTIONS)
    assert rows.sample_ids == ["a", "pair"] and [entry["id"] for entry in rows.refused] == ["half", "asks"]
    assert all("half of a character" in entry["reason"] for entry in rows.refused)
    path = write(tmp_path / "c.jsonl", {**ROWS[0], "tools": [{"\ud83d": 1}]}, chat("b", *"uvwxyz"))
    refused = prepare(path, RAISES, PrepareOptions(min_supervised=4)).refused
    assert refused[0]["reason"].endswith("no such tool: \\ud83d")


@pytest.mark.parametrize("change", ["rewritten", "replaced", "removed", "broken"])
def test_a_source_that_changes_meanwhile(tmp_path, tokenizer, monkeypatch, change):
    """Rows of before and after must not be joined under the hash of before, nor resumed later."""
    path, add, seen = tmp_path / "c.jsonl", prepare_module._Join.add, []
    before = [chat(f"r{i}", "Hi", f"Hello number {i:03}") for i in range(60)]
    after = [chat(f"r{i}", "Hi", f"Other number {i:03}") for i in range(60)]

    def added(join, chunk):
        add(join, chunk)
        seen.append(chunk)
        if len(seen) == 2:
            if change in ("replaced", "removed"):
                path.rename(tmp_path / "old.jsonl")
            if change != "removed":
                write(path, *(after if change != "broken" else after[:2]))

    write(path, *before)
    monkeypatch.setattr(prepare_module._Join, "add", added)
    with pytest.raises(SourceError, match="c.jsonl: was changed while it was being prepared"):
        prepare(path, tokenizer, OPTIONS, work_dir=tmp_path / "work", chunk_rows=5)
    assert len(seen) >= 2 and not list((tmp_path / "work").iterdir())
    monkeypatch.undo()
    write(path, *before)
    rows = prepare(path, tokenizer, OPTIONS, work_dir=tmp_path / "work", chunk_rows=5)
    assert rows.fingerprint == prepare(path, tokenizer, OPTIONS).fingerprint and len(rows) == 60
