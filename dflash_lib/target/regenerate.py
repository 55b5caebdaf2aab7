"""Lets the target answer conversations itself, so that a drafter learns to imitate the target's own text.

Each assistant turn is generated greedily from the turns before it, which are the target's own too. Finished
conversations are appended to a partial file, batch by batch; a second call goes on where the first ended.
"""

import datetime
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from dflash_lib.conversations.formats import Conversation, parse_conversation, read_conversations
from dflash_lib.conversations.templates import encode_prompt
from dflash_lib.files import atomic_path, hash_file, read_json, write_json
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
    stop = set(stop_token_ids(target))
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
        prompts = [encode_prompt(target.tokenizer, Conversation(conversations[i].id, so_far[i])) for i in active]
        for i, generation in zip(active, generate_batch(target, prompts, max_new_tokens), strict=True):
            text_ids = [token for token in generation.token_ids if token not in stop]
            so_far[i].append({"role": "assistant", "content": target.tokenizer.decode(text_ids),
                              **asdict(generation)})
    return [{"id": c.id, **c.extra, "messages": messages} for c, messages in zip(conversations, so_far, strict=True)]


def regenerate(target: Target, source: Path | str, out: Path | str, options: RegenerateOptions) -> dict:
    """Writes `out` (JSONL, in the source's order) and `out` + ".meta.json"; returns the latter's content.

    Resumes from `out` + ".partial" when its settings are the same; raises ValueError when they differ or when `out`
    is there already.
    """
    source, out = Path(source), Path(out)
    if out.exists():
        raise ValueError(f"{out}: is there already. Move it away, or choose another name.")
    partial, settings_file = Path(f"{out}.partial"), Path(f"{out}.partial.json")
    conversations = [c.user_turns_only() for c in read_conversations(source, options.max_samples, need_assistant=False)]
    settings = {"model": target.identity, "source": source.name, "source_sha256": hash_file(source),
                "decoding": "greedy", "seed": None, **asdict(options)}
    if settings_file.exists():
        before = read_json(settings_file)
        changed = {key: [before.get(key), settings[key]] for key in settings if before.get(key) != settings[key]}
        if changed:
            raise ValueError(f"{partial}: begun with other settings: {changed} (before, now). "
                             "Remove it to start anew.")
    write_json(settings_file, settings)
    done = _read_partial(partial)
    todo = sorted((c for c in conversations if c.id not in done),
                  key=lambda c: (len(c.messages), len(c.messages[0]["content"])))
    with open(partial, "a", encoding="utf-8") as f, \
            Progress(len(conversations), "regenerate", "conversations", start=len(done)) as progress:
        for start in range(0, len(todo), options.batch_size):
            for row in answer_batch(target, todo[start:start + options.batch_size], options.max_new_tokens):
                f.write(json.dumps(row, ensure_ascii=False) + "\n")
                done[row["id"]] = row
            f.flush()
            os.fsync(f.fileno())
            progress.set(len(done))
    with atomic_path(out) as path, open(path, "w", encoding="utf-8") as f:
        f.writelines(json.dumps(done[c.id], ensure_ascii=False) + "\n" for c in conversations)
    turns = [m for c in conversations for m in done[c.id]["messages"] if m["role"] == "assistant"]
    meta = {**settings, "date": datetime.date.today().isoformat(), "conversations": len(conversations),
            "assistant_turns": len(turns), "generated_tokens": sum(len(m["token_ids"]) for m in turns),
            "finished_by_length": sum(m["finish_reason"] == "length" for m in turns)}
    write_json(f"{out}.meta.json", meta)
    partial.unlink()
    settings_file.unlink()
    return meta


def _read_partial(path: Path) -> dict[str, dict]:
    """Finished rows by id. A last line that a kill cut short is dropped from the file."""
    if not path.exists():
        return {}
    rows, whole = {}, 0
    with open(path, "rb") as f:
        for line in f:
            if not line.endswith(b"\n"):
                break
            row = json.loads(line)
            parse_conversation(row, f"{path}")
            rows[row["id"]] = row
            whole += len(line)
    os.truncate(path, whole)
    return rows
