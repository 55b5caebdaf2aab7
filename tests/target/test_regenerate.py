"""Answering conversations: what is written, and that a killed job goes on to the very same file."""

import json

import pytest

from dflash_lib.conversations.formats import Conversation, ConversationError, read_conversations
from dflash_lib.conversations.templates import encode_conversation, encode_prompt
from dflash_lib.files import hash_file, read_json
from dflash_lib.target import regenerate as module
from dflash_lib.target.generate import generate_batch
from dflash_lib.target.regenerate import RegenerateOptions, answer_batch, regenerate

OPTIONS = RegenerateOptions(max_new_tokens=6, batch_size=3)


def user(*contents, system=None, **extra):
    messages = [{"role": "system", "content": system}] if system else []
    return {**extra, "messages": messages + [{"role": "user", "content": c} for c in contents]}


PROMPTS = [user("What is rain?", id="a", kind="facts"), user("Write a story", "And another", id="b"),
           user("one", id="c", system="Be kind"), user("two", id="d"), user("a long question about a battery", id="e"),
           user("kitten", id="f"), user("fox", "dog", "cat", id="g"), user("user", id="h")]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return path


def test_answers_are_the_targets_own_turn_by_turn(tiny_qwen3_5):
    conversation = Conversation("x", PROMPTS[1]["messages"], {"kind": "stories"}, tools=[{"name": "f"}])
    row, = answer_batch(tiny_qwen3_5, [conversation], 6)
    assert row["id"] == "x" and row["kind"] == "stories" and row["tools"] == [{"name": "f"}]
    assert [m["role"] for m in row["messages"]] == ["user", "assistant"] * 2
    for i in (1, 3):
        prompt = encode_prompt(tiny_qwen3_5.tokenizer, Conversation("x", row["messages"][:i]))
        expected, = generate_batch(tiny_qwen3_5, [prompt], 6)
        message = row["messages"][i]
        assert (message["token_ids"], message["finish_reason"]) == (expected.token_ids, expected.finish_reason)
    ids, mask = encode_conversation(tiny_qwen3_5.tokenizer, Conversation("x", row["messages"]))
    generated = [token for m in row["messages"][1::2] for token in m["token_ids"]]
    assert [token for token, on in zip(ids, mask, strict=True) if on] == generated


def test_answers_end_at_the_end_of_turn(tiny_qwen3_5, monkeypatch):
    prompt = encode_prompt(tiny_qwen3_5.tokenizer, Conversation("x", PROMPTS[3]["messages"]))
    free = generate_batch(tiny_qwen3_5, [prompt], 6)[0].token_ids
    monkeypatch.setattr(tiny_qwen3_5.model.generation_config, "eos_token_id", free[2])
    row, = answer_batch(tiny_qwen3_5, [Conversation("x", PROMPTS[3]["messages"])], 6)
    message = row["messages"][-1]
    end = free.index(free[2])
    assert message["finish_reason"] == "stop" and message["token_ids"] == free[:end + 1]
    assert message["content"] == tiny_qwen3_5.tokenizer.decode(free[:end])


def test_file_and_sidecar(tiny_llama, source, tmp_path):
    out = tmp_path / "deep" / "out.jsonl"
    meta = regenerate(tiny_llama, source, out, OPTIONS)
    rows = list(read_conversations(out))
    assert [c.id for c in rows] == [p["id"] for p in PROMPTS] and rows[0].extra == {"kind": "facts"}
    for prompt, row in zip(PROMPTS, rows, strict=True):
        assert row.user_turns_only().messages == prompt["messages"]
    turns = [m for c in rows for m in c.messages if m["role"] == "assistant"]
    assert read_json(f"{out}.meta.json") == meta
    assert meta["model"] == tiny_llama.identity and meta["source_sha256"] == hash_file(source)
    assert (meta["max_new_tokens"], meta["batch_size"], meta["decoding"], meta["seed"]) == (6, 3, "greedy", None)
    assert meta["conversations"] == 8 and meta["assistant_turns"] == len(turns) == 11
    assert meta["generated_tokens"] == sum(len(m["token_ids"]) for m in turns)
    assert meta["finished_by_length"] == sum(m["finish_reason"] == "length" for m in turns)
    assert len(meta["date"]) == 10
    assert sorted(p.name for p in out.parent.iterdir()) == ["out.jsonl", "out.jsonl.meta.json"]
    with pytest.raises(ValueError, match="is there already"):
        regenerate(tiny_llama, source, out, OPTIONS)


@pytest.mark.parametrize("cut", ["batch", "row", "line", "nothing"])
def test_resume_gives_the_same_file(tiny_llama, source, tmp_path, monkeypatch, cut):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    regenerate(tiny_llama, source, whole, OPTIONS)
    batches = []

    def killed(target, conversations, max_new_tokens):
        if len(batches) == (0 if cut == "nothing" else 2):
            raise KeyboardInterrupt
        batches.append([c.id for c in conversations])
        return answer_batch(target, conversations, max_new_tokens)

    monkeypatch.setattr(module, "answer_batch", killed)
    with pytest.raises(KeyboardInterrupt):
        regenerate(tiny_llama, source, out, OPTIONS)
    assert not out.exists()
    partial = tmp_path / "out.jsonl.partial"
    lines = partial.read_bytes().splitlines(keepends=True)
    assert len(lines) == (0 if cut == "nothing" else 6)
    if cut == "row":  # killed between two rows of a batch
        partial.write_bytes(b"".join(lines[:4]))
    if cut == "line":  # killed inside a line, inside a character
        partial.write_bytes(b"".join(lines[:5]) + lines[5][:-7])
    again = []

    def answering(target, conversations, max_new_tokens):
        again.append([c.id for c in conversations])
        return answer_batch(target, conversations, max_new_tokens)

    monkeypatch.setattr(module, "answer_batch", answering)
    regenerate(tiny_llama, source, out, OPTIONS)
    assert out.read_bytes() == whole.read_bytes()
    assert len(again) == {"batch": 1, "row": 2, "line": 2, "nothing": 3}[cut]
    if cut in ("row", "line"):  # the whole batch again: company in a batch can move a near-tie
        assert again[0] == batches[1]
    assert not partial.exists()


def test_changed_settings_are_refused(tiny_llama, tiny_qwen3_5, source, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"

    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "answer_batch", killed)
        with pytest.raises(KeyboardInterrupt):
            regenerate(tiny_llama, source, out, OPTIONS)
    with pytest.raises(ValueError, match="begun with other settings.*'max_new_tokens': \\[6, 7\\]"):
        regenerate(tiny_llama, source, out, RegenerateOptions(max_new_tokens=7, batch_size=3))
    with pytest.raises(ValueError, match="begun with other settings.*'model'"):
        regenerate(tiny_qwen3_5, source, out, OPTIONS)
    text = source.read_text()
    source.write_text(text.replace("rain", "snow"))
    with pytest.raises(ValueError, match="begun with other settings.*'source_sha256'"):
        regenerate(tiny_llama, source, out, OPTIONS)
    source.write_text(text)
    settings = (tmp_path / "out.jsonl.partial.json").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="settings file out.jsonl.partial.json is missing"):
        regenerate(tiny_llama, source, out, OPTIONS)
    settings.rename(tmp_path / "out.jsonl.partial.json")
    assert regenerate(tiny_llama, source, out, OPTIONS)["conversations"] == 8


def test_a_conversation_without_a_question(tiny_llama, source, tmp_path):
    source.write_text(json.dumps({"id": "x", "messages": [{"role": "system", "content": "Be kind"}]}))
    with pytest.raises(ConversationError, match="'x' has no user turn"):
        regenerate(tiny_llama, source, tmp_path / "out.jsonl", OPTIONS)
    assert not list(tmp_path.glob("out*"))


def test_max_samples(tiny_llama, source, tmp_path):
    options = RegenerateOptions(max_new_tokens=2, batch_size=3, max_samples=2)
    assert regenerate(tiny_llama, source, tmp_path / "out.jsonl", options)["conversations"] == 2
    assert [c.id for c in read_conversations(tmp_path / "out.jsonl")] == ["a", "b"]
