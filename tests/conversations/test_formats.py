"""Conversation files: what is refused, and where the message says the fault is."""

import json

import pytest

from dflash_lib.conversations.formats import Conversation, ConversationError, parse_conversation, read_conversations

GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def assistant(**message):
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **message}]}


@pytest.mark.parametrize(("value", "message"), [
    ([], "expected an object"),
    ({"messages": []}, "non-empty list"),
    ({"messages": "hello"}, "non-empty list"),
    ({"conversations": []}, "non-empty list"),
    ({"messages": ["hello"]}, "message 0: expected an object with role and content, found str"),
    ({"messages": [{"role": "human", "content": "a"}]}, "message 0: unknown role 'human'; known roles: system, user"),
    ({"messages": [{"content": "a"}]}, "unknown role None"),
    ({"messages": [{"role": "user", "content": None}]}, "content must be text, found NoneType"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content must be text, found list"),
    ({"messages": [{"role": "user", "content": "a"}]}, "no assistant turn.*regenerate"),
    (assistant(token_ids=[]), "message 1: token_ids must be a non-empty list"),
    (assistant(token_ids=[1, -1]), "token_ids must be"),
    (assistant(token_ids=[True]), "token_ids must be"),
    (assistant(token_ids=[1]), "finish_reason 'stop' or 'length'"),
    (assistant(finish_reason="eos"), "finish_reason must be 'stop' or 'length', found 'eos'"),
    ({"id": ["x"], **GOOD}, "id must be text or a whole number, found list"),
])
def test_refused(value, message):
    with pytest.raises(ConversationError, match=f"here.*{message}"):
        parse_conversation(value, "here")


def test_accepted():
    c = parse_conversation({"id": 7, "kind": "facts", **assistant(token_ids=[5], finish_reason="stop")}, "here")
    assert (c.id, c.extra) == ("7", {"kind": "facts"})
    assert c.user_turns_only() == Conversation("7", [{"role": "user", "content": "a"}], {"kind": "facts"})
    prompts_only = {"messages": GOOD["messages"][:1]}
    assert parse_conversation(prompts_only, "here", need_assistant=False).messages == prompts_only["messages"]


def write(path, *lines):
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def test_files(tmp_path):
    path = write(tmp_path / "c.jsonl", {"id": "x", **GOOD}, "", GOOD)
    assert [c.id for c in read_conversations(path)] == ["x", "line-3"]
    assert [c.id for c in read_conversations(path, max_samples=1)] == ["x"]


@pytest.mark.parametrize(("lines", "message"), [
    ([], "holds no conversation"),
    (["", "  "], "holds no conversation"),
    ([GOOD, "", '{"messages": ['], "c.jsonl, line 3: not valid JSON"),
    ([GOOD, {"messages": [{"role": "robot", "content": ""}]}], "c.jsonl, line 2, message 0: unknown role 'robot'"),
    ([{"id": "x", **GOOD}, GOOD, {"id": "x", **GOOD}], "line 3: id 'x' was used on line 1 already"),
    ([{"id": 1, **GOOD}, {"id": "1", **GOOD}], "line 2: id '1' was used on line 1"),
])
def test_broken_files(tmp_path, lines, message):
    with pytest.raises(ValueError, match=message):
        list(read_conversations(write(tmp_path / "c.jsonl", *lines)))


def test_bytes_that_are_not_utf8(tmp_path):
    (tmp_path / "c.jsonl").write_bytes(json.dumps(GOOD).encode() + b"\n\xff\xfe{}\n")
    with pytest.raises(ValueError, match="line 2: not valid JSON"):
        list(read_conversations(tmp_path / "c.jsonl"))


def test_absent_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="c.jsonl: no such file"):
        list(read_conversations(tmp_path / "c.jsonl"))
