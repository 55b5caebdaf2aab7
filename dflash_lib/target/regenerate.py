"""Lets the target answer conversations itself, so that a drafter learns to imitate the target's own text.

Each assistant turn is generated greedily from the turns before it, which are the target's own too. Finished
conversations are appended to a partial file, batch by batch; a second call goes on where the first ended.
"""

import datetime
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dflash_lib.conversations.formats import (
    Conversation,
    ConversationError,
    parse_conversation,
    read_conversations,
)
from dflash_lib.conversations.sources import hash_source
from dflash_lib.conversations.templates import ChatTemplate, encode_prompt
from dflash_lib.files import atomic_path, read_json, write_json
from dflash_lib.progress import Progress
from dflash_lib.target.generate import generate_batch, stop_token_ids
from dflash_lib.target.loading import Target


@dataclass(frozen=True, kw_only=True)
class RegenerateOptions:
    """max_new_tokens: limit of one assistant turn; batch_size: conversations at once (part of the settings, since the
    company in a batch can move a near-tie); max_samples: None = all."""

    max_new_tokens: int = 144
    batch_size: int = 64
    max_samples: int | None = None


def answer_batch(target: Target, conversations: list[Conversation], max_new_tokens: int) -> list[dict]:
    """The conversations as JSON-able rows with every user turn answered by the target.

    Two user messages in a row are answered one by one; a system message is context.
    """
    stop, template = set(stop_token_ids(target)), ChatTemplate(target.tokenizer)
    asked = [list(c.messages) for c in conversations]
    so_far: list[list[dict]] = [[] for _ in conversations]
    while True:
        active = []
        for i, queue in enumerate(asked):
            while queue and queue[0]["role"] != "user":
                so_far[i].append(queue.pop(0))
            if queue:
                so_far[i].append(queue.pop(0))
                active.append(i)
        if not active:
            break
        prompts = [encode_prompt(template, replace(conversations[i], messages=so_far[i])) for i in active]
        for i, generation in zip(active, generate_batch(target, prompts, max_new_tokens), strict=True):
            text_ids = [token for token in generation.token_ids if token not in stop]
            text = target.tokenizer.decode(text_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            so_far[i].append({"role": "assistant", "content": text, **asdict(generation)})
    return [{"id": c.id, **c.extra, **({"tools": c.tools} if c.tools else {}), "messages": messages}
            for c, messages in zip(conversations, so_far, strict=True)]


def regenerate(target: Target, source: Path | str, out: Path | str, options: RegenerateOptions) -> dict:
    """Writes `out` (JSONL, in the source's order) and `out` + ".meta.json"; returns the latter's content.

    Resumes from `out` + ".partial" when its settings are the same. Batches are a pure function of source and options,
    so an interrupted job ends with the very file that an uninterrupted one writes. Raises ValueError when the settings
    differ, when `out` is there already, and for a conversation without a user turn.
    """
    source, out = Path(source), Path(out)
    if out.exists():
        raise ValueError(f"{out}: is there already. Move it away, or choose another name.")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial, settings_file = Path(f"{out}.partial"), Path(f"{out}.partial.json")
    conversations = [c.user_turns_only() for c in read_conversations(source, options.max_samples, need_assistant=False)]
    for conversation in conversations:
        if not any(m["role"] == "user" for m in conversation.messages):
            raise ConversationError(f"{source}: conversation {conversation.id!r} has no user turn to be answered")
    settings = {"model": target.identity, "source": source.name, "source_sha256": hash_source(source),
                "decoding": "greedy", "seed": None, **asdict(options)}
    _check_settings(partial, settings_file, settings)
    write_json(settings_file, settings)
    where = _index_partial(partial)
    by_size = sorted(conversations, key=lambda c: (len(c.messages), len(c.messages[0]["content"])))
    with open(partial, "ab") as f, \
            Progress(len(conversations), "regenerate", "conversations", start=len(where)) as progress:
        for start in range(0, len(by_size), options.batch_size):
            batch = by_size[start:start + options.batch_size]
            if all(c.id in where for c in batch):
                continue
            for row in answer_batch(target, batch, options.max_new_tokens):
                if row["id"] not in where:
                    where[row["id"]] = f.tell()
                    f.write((json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8"))
            f.flush()
            os.fsync(f.fileno())
            progress.set(len(where))
    num_tokens: list[int] = []
    num_cut = 0
    with atomic_path(out) as path, open(path, "wb") as f, open(partial, "rb") as rows:
        for conversation in conversations:
            rows.seek(where[conversation.id])
            line = rows.readline()
            f.write(line)
            turns = [m for m in json.loads(line)["messages"] if m["role"] == "assistant"]
            num_tokens += [len(m["token_ids"]) for m in turns]
            num_cut += sum(m["finish_reason"] == "length" for m in turns)
        meta = {**settings, "date": datetime.date.today().isoformat(), "conversations": len(conversations),
                "assistant_turns": len(num_tokens), "generated_tokens": sum(num_tokens), "finished_by_length": num_cut}
        write_json(f"{out}.meta.json", meta)  # before `out` appears: who finds `out` finds its meta
    partial.unlink()
    settings_file.unlink()
    return meta


def _check_settings(partial: Path, settings_file: Path, settings: dict) -> None:
    """Raises ValueError when the partial file was begun with other settings, or with unknown ones."""
    if not partial.exists():
        return
    if not settings_file.exists():
        raise ValueError(f"{partial}: its settings file {settings_file.name} is missing, so what wrote it is not "
                         "known. Remove it to start anew.")
    before = read_json(settings_file)
    changed = {key: [before.get(key), settings[key]] for key in settings if before.get(key) != settings[key]}
    if changed:
        raise ValueError(f"{partial}: begun with other settings: {changed} (before, now). Remove it to start anew.")


def _index_partial(path: Path) -> dict[str, int]:
    """Where each finished row begins, by id. A last line that a kill cut short is dropped from the file."""
    if not path.exists():
        return {}
    where, whole = {}, 0
    with open(path, "rb") as f:
        for line in f:
            if not line.endswith(b"\n"):
                break
            where[parse_conversation(json.loads(line), f"{path}").id] = whole
            whole += len(line)
    os.truncate(path, whole)
    return where
