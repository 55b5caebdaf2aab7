"""Answering conversations: what is written, and that a killed job goes on to the very same file."""

import datetime
import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from dflash_lib.conversations.formats import Conversation, ConversationError, read_conversations
from dflash_lib.conversations.prepare import PrepareOptions, prepare
from dflash_lib.conversations.templates import encode_conversation, encode_prompt
from dflash_lib.files import hash_file, read_json
from dflash_lib.target import regenerate as module
from dflash_lib.target.generate import Generation, generate_batch
from dflash_lib.target.regenerate import RegenerateOptions, answer_batch, regenerate
from dflash_lib.target.resume import PartialFile
from tests.conversations.test_mask import OWN, tokenizer_with

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

    def killed(target, conversations, *more):
        if len(batches) == (0 if cut == "nothing" else 2):
            raise KeyboardInterrupt
        batches.append([c.id for c in conversations])
        return answer_batch(target, conversations, *more)

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

    def answering(target, conversations, *more):
        again.append([c.id for c in conversations])
        return answer_batch(target, conversations, *more)

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
    for changed, name in (({"thinking": "on"}, "thinking"), ({"template_kwargs": {"x": 1}}, "template_kwargs")):
        with pytest.raises(ValueError, match=f"begun with other settings.*'{name}'"):
            regenerate(tiny_llama, source, out, RegenerateOptions(**vars(OPTIONS) | changed))
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


def test_a_job_begun_before_the_template_options_goes_on(tiny_llama, source, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(module, "answer_batch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            regenerate(tiny_llama, source, tmp_path / "out.jsonl", OPTIONS)
    settings = tmp_path / "out.jsonl.partial.json"
    before = {key: value for key, value in read_json(settings).items() if key not in ("thinking", "template_kwargs")}
    settings.write_text(json.dumps(before))
    with pytest.raises(ValueError, match="'thinking': ..default., 'on'"):
        regenerate(tiny_llama, source, tmp_path / "out.jsonl", RegenerateOptions(**vars(OPTIONS) | {"thinking": "on"}))
    assert regenerate(tiny_llama, source, tmp_path / "out.jsonl", OPTIONS)["conversations"] == 8


def interrupt(*_):
    raise KeyboardInterrupt


def test_two_processes_do_not_write_one_file(tiny_llama, source, tmp_path, monkeypatch):
    def answering(*arguments):
        with pytest.raises(ValueError, match="out.jsonl.partial: another process is writing it"):
            PartialFile(tmp_path / "out.jsonl", {})
        return answer_batch(*arguments)

    monkeypatch.setattr(module, "answer_batch", answering)
    assert regenerate(tiny_llama, source, tmp_path / "out.jsonl", OPTIONS)["conversations"] == 8


@pytest.fixture
def thinker(tiny_llama, monkeypatch):
    """The tiny target with a template that thinks, writing what it is told: thoughts, an answer, an end."""
    tokenizer = tokenizer_with(OWN / "drops_thinking.jinja")
    asked, texts = [], ["hm\n</think>\n\nb c", "so\n</think>\n\nd", "first, I"]

    def generate(target, prompts, max_new_tokens):
        asked.extend(tokenizer.decode(prompt) for prompt in prompts)
        text = texts[len(asked) - 1]
        ids = tokenizer(text)["input_ids"]
        cut = "</think>" not in text
        return [Generation(ids if cut else [*ids, tokenizer.eos_token_id], "length" if cut else "stop")]

    monkeypatch.setattr(module, "generate_batch", generate)
    return replace(tiny_llama, tokenizer=tokenizer), asked


def test_thinking_is_asked_for_recorded_and_supervised(thinker, tmp_path):
    """The masks of 04_extract supervise what was generated: thoughts, answer and end of the last turn; of the turns
    before it what the template keeps."""
    target, asked = thinker
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(user("one", "two", id="x")) + "\n" + json.dumps(user("three", "", id="y")) + "\n")
    options = RegenerateOptions(batch_size=1, max_samples=1, thinking="on", template_kwargs={"keep_thoughts": False})
    meta = regenerate(target, path, tmp_path / "out.jsonl", options)
    assert meta["thinking"] == "on" and meta["template_kwargs"] == {"keep_thoughts": False}
    assert asked == ["<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n<think>\n",
                     "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\nb c<|im_end|>\n"
                     "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n<think>\n"]
    row, = read_conversations(tmp_path / "out.jsonl")
    answers = row.messages[1::2]
    assert [(m["reasoning_content"], m["content"]) for m in answers] == [("hm", "b c"), ("so", "d")]
    rows = prepare(tmp_path / "out.jsonl", target.tokenizer, PrepareOptions(min_supervised=2, thinking="on"))
    ids, mask = rows.row(0)
    kept = [*target.tokenizer("b c<|im_end|>")["input_ids"], *answers[1]["token_ids"]]
    assert ids[mask == 1].tolist() == kept
    last = prepare(tmp_path / "out.jsonl", target.tokenizer, PrepareOptions(min_supervised=2, turns="last"))
    assert last.row(0)[0][last.row(0)[1] == 1].tolist() == answers[1]["token_ids"]


def test_a_question_that_the_template_does_not_take(tiny_llama, source, tmp_path, monkeypatch):
    """Before anything is generated where it is the first one; behind the target's own answers that conversation ends,
    and the others go on."""
    refuses = ("{% for m in messages %}{% if m.content in " + "('kitten', 'dog')" +
               " %}{{ raise_exception('not that') }}{% endif %}{% endfor %}")
    monkeypatch.setattr(tiny_llama.tokenizer, "chat_template", refuses + tiny_llama.tokenizer.chat_template)
    with monkeypatch.context() as patch:
        patch.setattr(module, "answer_batch", interrupt)
        with pytest.raises(ConversationError, match="prompts.jsonl: conversation 'f': .*not that"):
            regenerate(tiny_llama, source, tmp_path / "out.jsonl", OPTIONS)
    source.write_text(source.read_text().replace("kitten", "kittens"))
    meta = regenerate(tiny_llama, source, tmp_path / "out.jsonl", OPTIONS)
    by_id = {c.id: c for c in read_conversations(tmp_path / "out.jsonl")}
    assert [m["role"] for m in by_id["g"].messages] == ["user", "assistant"] and meta["unanswered_turns"] == 2
    assert meta["assistant_turns"] == 9 and len(by_id) == 8


def test_every_form_of_prompts_and_what_stands_beside_them(tiny_llama, tmp_path):
    """Columnar files have dates and bytes, which JSON has no words for: found out before hours of work, not after."""
    sharegpt = [{"from": "human", "value": "What is rain?"}, {"from": "gpt", "value": "another's answer"}]
    rows = {"messages": user("What is rain?"), "prompt": {"prompt": "What is rain?", "response": "another's answer"},
            "conversations": {"conversations": sharegpt}}
    answers = []
    for name, row in rows.items():
        source = tmp_path / f"{name}.parquet"
        when = {"when": datetime.datetime(2026, 5, 1), "raw": b"x"}
        parquet.write_table(pa.Table.from_pylist([{"id": "a", **row, **when}]), source)
        regenerate(tiny_llama, source, tmp_path / f"{name}.jsonl", OPTIONS)
        found, = read_conversations(tmp_path / f"{name}.jsonl")
        assert found.extra["when"].startswith("2026-05-01")
        answers.append(found.messages)
    assert answers[0] == answers[1] == answers[2] and answers[0][1]["content"] != "another's answer"


@pytest.mark.parametrize("wrong", [{"max_new_tokens": 0}, {"batch_size": 0}, {"max_samples": 0}, {"thinking": "yes"},
                                   {"template_kwargs": {"tokenize": True}}])
def test_options_that_answer_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RegenerateOptions(**wrong)
