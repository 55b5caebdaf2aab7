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
    (assistant(weight=0.5), "message 1: weight must be 0 .not to be learned. or 1, found 0.5"),
    (assistant(reasoning="a", thinking="b"), "message 1: has two different thoughts"),
    (assistant(reasoning="", thinking=["b"]), "message 1: reasoning_content must be text, found list"),
    (assistant(tool_calls=[{"function": {"name": "f", "arguments": "[" * 100_000}}]), "tool call 0 is not valid JSON"),
    ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "A", "content": "B"}]},
     "turn 1: from and value say 'A', but content says 'B'"),
    ({"conversations": [{"from": "human", "value": "a", "role": "assistant"}]}, "turn 0: .*but role says"),
    ({"id": "\ud83d", **GOOD}, r"id '.ud83d' holds half of a character"),
    ({"kind": "\ud83d", **GOOD}, r"kind '.ud83d' holds half of a character"),
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


# What users have, and the one form that it is brought into.

U, A = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
S = {"role": "system", "content": "s"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(("row", "messages"), [
    ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, [U, A]),
    ({"conversations": [{"from": "system", "value": "s"}, {"from": "user", "value": "a"},
                        {"from": "assistant", "value": "b"}]}, [S, U, A]),
    ({"system": "s", "conversations": [{"from": "human", "value": "a"}, {"from": "chatgpt", "value": "b"}]}, [S, U, A]),
    ({"conversations": [U, A]}, [U, A]),
    ({"conversations": [
        {"from": "human", "value": "a"}, {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "42"}, {"from": "gpt", "value": "b"}]},
     [U, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "42"}, A]),
    ({"prompt": "a", "response": "b"}, [U, A]),
    ({"prompt": "a", "completion": "b", "system": "s"}, [S, U, A]),
    ({"prompt": [S, U], "completion": [A]}, [S, U, A]),
    ({"prompt": "a", "response": "b", "token_ids": [7], "finish_reason": "length"},
     [U, {**A, "token_ids": [7], "finish_reason": "length"}]),
    ({"prompt": "not used", "messages": [U, A]}, [U, A]),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "\n"}]}, A]},
     [{"role": "user", "content": "a\n"}, A]),
    ({"messages": [U, {**A, "reasoning_content": "hm"}]}, [U, {**A, "reasoning_content": "hm"}]),
    ({"messages": [U, {**A, "reasoning": "hm", "tool_calls": None, "name": None}]},
     [U, {**A, "reasoning_content": "hm"}]),
    ({"messages": [U, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
     [U, {"role": "assistant", "content": "", "tool_calls": [CALL]}]),
    ({"messages": [U, {"role": "assistant", "tool_calls": [{"id": "1", "function": {
        "name": "f", "arguments": '{"x": 1}'}}]}]},
     [U, {"role": "assistant", "content": "", "tool_calls": [{"id": "1", **CALL}]}]),
    ({"messages": [U, {**A, "tool_calls": [{"name": "f", "arguments": ""}], "finish_reason": "tool_calls"}]},
     [U, {**A, "finish_reason": "stop", "tool_calls": [{"type": "function", "function": {
         "name": "f", "arguments": {}}}]}]),
    ({"messages": [U, {**A, "tool_calls": []}]}, [U, A]),
])
def test_forms_of_a_conversation(row, messages):
    before = json.dumps(row)
    got = parse_conversation({"id": "x", "kind": "k", **row}, "here")
    assert got.messages == messages
    assert (got.id, got.extra["kind"], got.tools, got.input_ids) == ("x", "k", None, None)
    assert json.dumps(row) == before, "the row itself is left as it was"


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_tools(tools):
    assert parse_conversation({**GOOD, "tools": tools}, "here").tools == TOOLS
    for none in ([], "", "[]", None):
        assert parse_conversation({**GOOD, "tools": none}, "here").tools is None


def test_rows_of_token_ids():
    got = parse_conversation({"id": 3, "input_ids": [1, 2], "loss_mask": [False, True], "seq_len": 2}, "here")
    assert got == Conversation("3", [], {"seq_len": 2}, None, [1, 2], [0, 1])
    got = parse_conversation({"prompt": "a", "prompt_token_ids": [1, 2], "token_ids": [3]}, "here", default_id="n")
    assert got == Conversation("n", [], {"prompt": "a"}, None, [1, 2, 3], [0, 0, 1])


@pytest.mark.parametrize(("row", "message"), [
    ({"text": "a"}, 'non-empty list "messages" .*found the keys text'),
    ({**GOOD, "conversations": [U, A]}, "is messages and conversations at once"),
    ({**GOOD, "input_ids": [1], "loss_mask": [1]}, "is pre-tokenised and messages at once"),
    ({"conversations": [{"from": "alien", "value": "a"}]}, "turn 0: unknown speaker 'alien'; known: human"),
    ({"conversations": [{"from": ["x"], "value": "a"}]}, "turn 0: unknown speaker"),
    ({"conversations": [{"from": "human", "value": None}]}, "message 0: content must be text, found NoneType"),
    ({"conversations": [{"from": "function_call", "value": "f(1)"}]}, "turn 0: a function_call's value is not valid"),
    ({"prompt": "a"}, "no assistant turn"),
    ({"prompt": "a", "response": "b", "completion": "b"}, "has both response and completion"),
    ({"prompt": [], "response": "b"}, 'non-empty list "prompt"'),
    ({"prompt": "a", "response": 5}, "message 1: content must be text, found int"),
    ({"input_ids": [1, 2], "loss_mask": [1]}, r"loss_mask must be a list of 0 and 1, one a token \(2 tokens\)"),
    ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "loss_mask must be a list of 0 and 1"),
    ({"input_ids": [1.0], "loss_mask": [1]}, "input_ids must be a non-empty list of non-negative"),
    ({"prompt_token_ids": [1], "token_ids": []}, "token_ids must be a non-empty list"),
    ({"messages": [U, {**A, "reasoning_content": ["x"]}]}, "message 1: reasoning_content must be text, found list"),
    ({"messages": [U, {**A, "tool_calls": "f"}]}, "message 1: tool_calls is not valid JSON"),
    ({"messages": [U, {**A, "tool_calls": {"f": 1}}]}, "message 1: tool_calls must be a list, found dict"),
    ({"messages": [U, {**A, "tool_calls": [{"function": {}}]}]}, "message 1: tool call 0 must be an object with a"),
    ({"messages": [U, {**A, "tool_calls": [{"name": "f", "arguments": "{x"}]}]},
     "the arguments of tool call 0 is not valid JSON"),
    ({"messages": [U, {**A, "tool_calls": [{"name": "f", "arguments": [1]}]}]},
     "the arguments of tool call 0 must be an object, .* found list"),
    ({"messages": [U, {"role": "assistant", "content": None}]}, "message 1: content must be text, found NoneType"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, A]},
     "message 0: content must be text, found list with a part of type 'image_url'"),
    ({**GOOD, "tools": {"f": 1}}, "tools must be a list of objects, found dict"),
    ({**GOOD, "tools": "{"}, "tools is not valid JSON"),
])
def test_forms_that_are_refused(row, message):
    with pytest.raises(ConversationError, match=f"^here.*{message}"):
        parse_conversation(row, "here")


def test_a_row_of_token_ids_is_no_prompt():
    with pytest.raises(ConversationError, match="here: a pre-tokenised row holds no messages"):
        parse_conversation({"input_ids": [1], "loss_mask": [1]}, "here", need_assistant=False)


def test_a_file_holds_rows_of_one_form(tmp_path):
    path = write(tmp_path / "c.jsonl", GOOD, {"prompt": "a", "response": "b"})
    with pytest.raises(ConversationError, match="line 2: the row's form is 'prompt', but 'messages' in .*line 1"):
        list(read_conversations(path))


def test_an_empty_thought_hides_none_under_another_name():
    message = parse_conversation(assistant(reasoning_content="", thinking="hm"), "here").messages[1]
    assert message["reasoning_content"] == "hm"
    assert parse_conversation(assistant(reasoning=""), "here").messages[1]["reasoning_content"] == ""
