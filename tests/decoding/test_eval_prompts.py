"""Prompts of every form, in named sets; and those that are shipped."""

import importlib.util
import json
import random
import re

import pytest

from dflash_lib.conversations.formats import Conversation, ConversationError, read_conversations
from dflash_lib.conversations.sources import SourceError
from dflash_lib.conversations.templates import encode_prompt
from dflash_lib.decoding.eval_prompts import SHIPPED, parse_prompt_sets, read_prompt_sets, read_prompts
from tests.conftest import REPOSITORY


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_prompts(tiny_llama, tmp_path):
    turns = [{"role": role, "content": text} for role, text in (("user", "Hi"), ("assistant", "x"), ("user", "And"))]
    path = write(tmp_path / "p.jsonl", {"id": "a", "kind": "facts", "messages": turns[:1]},
                 {"id": "b", "messages": turns}, {"messages": turns[:2]})
    first, second = read_prompts(path, tiny_llama.tokenizer, 2)
    assert (first.id, first.kind, first.text, second.text, second.kind) == ("a", "facts", "Hi", "Hi\nAnd", "")
    assert second.token_ids == encode_prompt(tiny_llama.tokenizer, Conversation("b", turns))
    with pytest.raises(ConversationError, match="'line-3' does not end with a user turn"):
        read_prompts(path, tiny_llama.tokenizer)


@pytest.mark.parametrize(("row", "expected"), [
    ({"question": "How many?", "answer": "Four. #### 4"}, ("line-1", "", "How many?")),
    ({"problem": "Find x.", "solution": "3", "unique_id": "t/1.json"}, ("t/1.json", "", "Find x.")),
    ({"task_id": "HumanEval/0", "prompt": "def f():", "canonical_solution": "pass"}, ("HumanEval/0", "", "def f():")),
    ({"question_id": 81, "category": "writing", "turns": ["First", "Second"]}, ("81", "writing", "First")),
])
def test_fields_of_public_sets(tiny_llama, tmp_path, row, expected):
    prompt, = read_prompts(write(tmp_path / "p.jsonl", row), tiny_llama.tokenizer)
    assert (prompt.id, prompt.kind, prompt.text) == expected
    asked = Conversation("", [{"role": "user", "content": expected[2]}])
    assert prompt.token_ids == encode_prompt(tiny_llama.tokenizer, asked)


@pytest.mark.parametrize(("row", "message"), [
    ({"answer": "4"}, r"p\.jsonl, line 2: expected an object .* found the keys answer\. .*question, problem, turns"),
    ([1], r"p\.jsonl, line 2: expected an object, found list"),
    ({"question": "  "}, r"p\.jsonl, line 2: question must be text that is not empty"),
    ({"question": 3}, r"p\.jsonl, line 2: question must be text"),
    ({"turns": []}, r"p\.jsonl, line 2: turns must be text that is not empty in a list"),
    ({"turns": "Hello"}, r"p\.jsonl, line 2: turns must be text that is not empty in a list"),
    ({"input_ids": [1], "loss_mask": [1]}, r"p\.jsonl, line 2: .*pre-tokenised"),
])
def test_rows_that_are_no_prompt_are_named(tiny_llama, tmp_path, row, message):
    path = write(tmp_path / "p.jsonl", {"question": "Why?"}, row)
    with pytest.raises(ConversationError, match=message):
        read_prompts(path, tiny_llama.tokenizer)


def test_files_without_prompts(tiny_llama, tmp_path):
    with pytest.raises(ConversationError, match="holds no conversation"):
        read_prompts(write(tmp_path / "empty.jsonl"), tiny_llama.tokenizer)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_prompts(tmp_path / "nowhere.jsonl", tiny_llama.tokenizer)
    (tmp_path / "cut.jsonl").write_text('{"question": "Wh')
    with pytest.raises(SourceError, match="cut off"):
        read_prompts(tmp_path / "cut.jsonl", tiny_llama.tokenizer)


def test_named_sets(tiny_llama, tmp_path):
    a = write(tmp_path / "a.jsonl", {"question": "One?"}, {"question": "Two?"}, {"question": "Three?"})
    b = write(tmp_path / "b=c.jsonl", {"id": "x", "prompt": "Four?"})
    sets = parse_prompt_sets([f"first={a}", f"second={b}"])
    assert sets == {"first": a, "second": b}
    prompts = read_prompt_sets(sets, tiny_llama.tokenizer, 2)
    assert [(p.prompt_set, p.id, p.text) for p in prompts] == [
        ("first", "line-1", "One?"), ("first", "line-2", "Two?"), ("second", "x", "Four?")]
    with pytest.raises(ValueError, match="num_prompts: at least 1"):
        read_prompt_sets(sets, tiny_llama.tokenizer, 0)
    with pytest.raises(ValueError, match=r"the set 'first' is .*a\.jsonl already"):
        parse_prompt_sets([f"first={a}", f"first={b}"])
    for wrong in ("a.jsonl", "=a.jsonl", "a="):
        with pytest.raises(ValueError, match="expected NAME=FILE"):
            parse_prompt_sets([wrong])


# --- the shipped sets ---------------------------------------------------------------------------------------


def script(name):
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "data" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def shipped():
    """Set name -> what the last user turn of each of its prompts says."""
    sets = parse_prompt_sets([])
    assert sorted(sets) == ["arithmetic", "chat", "code", "languages", "questions"]
    return {name: [c.messages[-1]["content"] for c in read_conversations(path, need_assistant=False)]
            for name, path in sets.items()}


def templates():
    """Regular expressions of every template that training prompts are made of, and of the held-out prompts."""
    first, more = script("make_demo_prompts"), script("make_more_prompts")
    texts = [template for group, _ in first.TRAIN.values() for template in group]
    texts += [template for groups in more.TEMPLATES.values() for group, _ in groups for template in group]
    texts += [prompt for prompts in first.HELDOUT.values() for prompt in prompts]
    expressions = [re.escape(text).replace(r"\{\}", ".+") for text in texts]
    for make in (first.arithmetic, more.arithmetic):
        rng = random.Random(0)
        drawn = {re.sub(r"\d+", "0", make(rng)) for _ in range(3000)}
        expressions += [re.escape(text).replace("0", r"\d+") for text in drawn]
    return [re.compile(expression, re.IGNORECASE) for expression in expressions]


def test_no_shipped_prompt_is_of_a_training_template(shipped):
    known = templates()
    assert any(e.fullmatch("Explain rain to a child.") for e in known)  # the test can fail
    assert any(e.fullmatch("What is 3 + 4?") for e in known)
    same = [(text, e.pattern) for texts in shipped.values() for text in texts for e in known if e.fullmatch(text)]
    assert same == []


def test_shipped_sets_are_small_and_of_their_kind(shipped):
    assert all(12 <= len(texts) <= 16 for texts in shipped.values())
    everything = [text for texts in shipped.values() for text in texts]
    assert len(set(everything)) == len(everything) and SHIPPED.parent == REPOSITORY / "data"
    chats = list(read_conversations(SHIPPED / "chat.jsonl", need_assistant=False))
    assert sum(any(m["role"] == "assistant" for m in c.messages) for c in chats) > len(chats) / 2
    kinds = {c.extra["kind"] for c in read_conversations(SHIPPED / "languages.jsonl", need_assistant=False)}
    assert {"german", "french", "spanish", "italian"} <= kinds
    assert all(re.search(r"\d", text) for text in shipped["arithmetic"] if "third" not in text and "Three" not in text)
