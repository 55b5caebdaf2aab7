"""The shipped conversations are what their sidecar says, and the script that mixes them loses nothing."""

import json
import subprocess
import sys

import pytest

from dflash_lib.conversations.formats import read_conversations
from dflash_lib.conversations.overlap import words
from dflash_lib.files import hash_file, read_json
from dflash_lib.workbench.runs import REPOSITORY

DATA = REPOSITORY / "data"


def test_the_demo_conversations_are_those_of_their_sidecar():
    meta = read_json(DATA / "demo_conversations.jsonl.meta.json")
    conversations = list(read_conversations(DATA / "demo_conversations.jsonl"))
    answers = [m for c in conversations for m in c.messages if m["role"] == "assistant"]
    assert len(conversations) == meta["conversations"] == sum(part["conversations"] for part in meta["parts"])
    assert sum(len(m["token_ids"]) for m in answers) == meta["generated_tokens"]
    assert sum(m["finish_reason"] == "length" for m in answers) == sum(p["finished_by_length"] for p in meta["parts"])


def test_more_prompts_are_those_that_were_answered_and_no_held_out_ones(tmp_path):
    path = tmp_path / "more_prompts.jsonl"
    subprocess.run([sys.executable, DATA / "make_more_prompts.py", path], check=True)
    assert hash_file(path) == read_json(DATA / "demo_conversations.jsonl.meta.json")["parts"][-1]["source_sha256"]
    runs, heldout = (ngrams(file) for file in (path, DATA / "demo_heldout_prompts.jsonl"))
    assert len(runs) > 3000 and not runs & heldout, "no four words in a row are a held-out prompt's"


def ngrams(path, n=4):
    texts = [words(c.messages[-1]["content"]) for c in read_conversations(path, need_assistant=False)]
    return {tuple(text[i:i + n]) for text in texts for i in range(len(text) - n + 1)}


@pytest.fixture
def parts(tmp_path):
    for name, texts in (("a", ["one\u2028line", "two"]), ("b", ["three"])):
        rows = [{"id": f"{name}{i}", "messages": [{"role": "user", "content": text}]} for i, text in enumerate(texts)]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")
        (tmp_path / f"{name}.jsonl.meta.json").write_text(json.dumps({"generated_tokens": len(rows)}))
    return [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]


def mix(out, *parts):
    return subprocess.run([sys.executable, DATA / "mix_conversations.py", out, *parts], capture_output=True, text=True)


def test_mixing_keeps_every_line(parts, tmp_path):
    done = mix(tmp_path / "out.jsonl", *parts)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "out.jsonl").read_text(encoding="utf-8").split("\n")
    assert sorted(lines) == sorted("".join(p.read_text(encoding="utf-8") for p in parts).split("\n")[:-1] + [""])
    assert read_json(tmp_path / "out.jsonl.meta.json")["generated_tokens"] == 3


def test_parts_that_follow_leave_the_first_rows_as_they_were(parts, tmp_path):
    assert mix(tmp_path / "alone.jsonl", parts[0]).returncode == 0
    assert mix(tmp_path / "out.jsonl", parts[0], "--then", parts[1]).returncode == 0
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "alone.jsonl").read_bytes() + parts[1].read_bytes()


def test_an_id_that_two_parts_have_is_refused(parts, tmp_path):
    assert "2 ids occur twice" in mix(tmp_path / "out.jsonl", parts[0], parts[0]).stderr
    assert not (tmp_path / "out.jsonl").exists()
