"""Lets the target answer conversations itself, so that a drafter learns to imitate the target's own text.

Each assistant turn is generated greedily from the turns before it, which are the target's own too. What it thought
before an answer becomes the message's reasoning_content, where its chat template knows such a thing. Finished
conversations are appended to a partial file, batch by batch; a second call goes on where the first ended.
"""

import datetime
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dflash_lib.conversations.formats import (
    Conversation,
    ConversationError,
    parse_conversation,
    read_conversations,
)
from dflash_lib.conversations.generated import assistant_message
from dflash_lib.conversations.rendering import ChatTemplate, TemplateOptions
from dflash_lib.conversations.sources import hash_source
from dflash_lib.conversations.templates import encode_prompt
from dflash_lib.files import atomic_path, write_json
from dflash_lib.progress import Progress
from dflash_lib.target.generate import generate_batch, stop_token_ids
from dflash_lib.target.loading import Target
from dflash_lib.target.resume import PartialFile, refuse_existing


@dataclass(frozen=True, kw_only=True)
class RegenerateOptions:
    """max_new_tokens: limit of one assistant turn; batch_size: conversations at once (part of the settings, since the
    company in a batch can move a near-tie); max_samples: None = all; thinking, template_kwargs: how prompts are
    rendered (see TemplateOptions; 04_extract is to be given the same). Raises ValueError for a value that can answer
    nothing."""

    max_new_tokens: int = 144
    batch_size: int = 64
    max_samples: int | None = None
    thinking: str = "default"
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size", "max_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: at least 1 is needed, got {value}")
        _ = self.template  # checks thinking and template_kwargs

    @property
    def template(self) -> TemplateOptions:
        return TemplateOptions(thinking=self.thinking, template_kwargs=self.template_kwargs)


def answer_batch(target: Target, conversations: list[Conversation], max_new_tokens: int,
                 template: ChatTemplate | None = None) -> list[dict]:
    """The conversations as JSON-able rows with every user turn answered by the target.

    Two user messages in a row are answered one by one; a system message is context. A conversation ends before a
    question that the template does not take behind the target's own answers. Raises ConversationError when it does not
    take the first one.
    """
    stop, template = set(stop_token_ids(target)), template or ChatTemplate(target.tokenizer)
    asked = [list(c.messages) for c in conversations]
    so_far: list[list[dict]] = [[] for _ in conversations]
    while True:
        active, prompts = [], []
        for i, queue in enumerate(asked):
            while queue and queue[0]["role"] != "user":
                so_far[i].append(queue.pop(0))
            if not queue:
                continue
            try:
                prompt = encode_prompt(template, replace(conversations[i], messages=[*so_far[i], queue[0]]))
            except ConversationError:
                if not any(m["role"] == "assistant" for m in so_far[i]):
                    raise
                queue.clear()
                continue
            so_far[i].append(queue.pop(0))
            active.append(i)
            prompts.append(prompt)
        if not active:
            break
        for i, generation in zip(active, generate_batch(target, prompts, max_new_tokens), strict=True):
            text_ids = [token for token in generation.token_ids if token not in stop]
            text = target.tokenizer.decode(text_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            asked_so_far = replace(conversations[i], messages=so_far[i])
            so_far[i].append(assistant_message(template, asked_so_far, text, asdict(generation)))
    return [{"id": c.id, **c.extra, **({"tools": c.tools} if c.tools else {}), "messages": messages}
            for c, messages in zip(conversations, so_far, strict=True)]


def regenerate(target: Target, source: Path | str, out: Path | str, options: RegenerateOptions) -> dict:
    """Writes `out` (JSONL, in the source's order) and `out` + ".meta.json"; returns the latter's content.

    Resumes from `out` + ".partial" when its settings are the same. Batches are a pure function of source and options,
    so an interrupted job ends with the very file that an uninterrupted one writes. Raises ValueError when the settings
    differ, when `out` is there already, and, before anything is generated, for a broken source, a conversation without
    a user turn, and one whose first question the chat template does not take.
    """
    source, out = Path(source), Path(out)
    refuse_existing(out)
    template = ChatTemplate(target.tokenizer, options.template)
    conversations = [c.user_turns_only() for c in read_conversations(source, options.max_samples, need_assistant=False)]
    for conversation in conversations:
        if not any(m["role"] == "user" for m in conversation.messages):
            raise ConversationError(f"{source}: conversation {conversation.id!r} has no user turn to be answered")
        _check_first_question(template, conversation, source)
    settings = {"model": target.identity, "source": source.name, "source_sha256": hash_source(source),
                "decoding": "greedy", "seed": None, **asdict(options)}
    with PartialFile(out, settings, {"thinking": "default", "template_kwargs": {}}) as partial:
        where = _answer(target, template, conversations, options, partial)
        meta = _write(out, partial.path, conversations, where, settings)
        partial.remove()
    return meta


def _answer(target: Target, template: ChatTemplate, conversations: list[Conversation], options: RegenerateOptions,
            partial: PartialFile) -> dict[str, int]:
    """Answers what the partial file does not have yet; returns where in it each conversation's row begins, by id."""
    where = {parse_conversation(row, str(partial.path)).id: at for at, row in partial.rows(dict)}
    by_size = sorted(conversations, key=lambda c: (len(c.messages), len(c.messages[0]["content"])))
    with Progress(len(conversations), "regenerate", "conversations", start=len(where)) as progress:
        for start in range(0, len(by_size), options.batch_size):
            batch = by_size[start:start + options.batch_size]
            if all(c.id in where for c in batch):
                continue
            for row in answer_batch(target, batch, options.max_new_tokens, template):
                if row["id"] not in where:
                    # default: what else a columnar file has beside the messages, such as dates, becomes text
                    where[row["id"]] = partial.append(json.dumps(row, ensure_ascii=False, default=str))
            partial.keep()
            progress.set(len(where))
    return where


def _write(out: Path, partial: Path, conversations: list[Conversation], where: dict[str, int],
           settings: dict[str, Any]) -> dict[str, Any]:
    """Writes the rows in the source's order, and the sidecar, which is returned."""
    num_tokens: list[int] = []
    num_cut = num_unanswered = 0
    with atomic_path(out) as path, open(path, "wb") as f, open(partial, "rb") as rows:
        for conversation in conversations:
            rows.seek(where[conversation.id])
            line = rows.readline()
            f.write(line)
            turns = [m for m in json.loads(line)["messages"] if m["role"] == "assistant"]
            num_tokens += [len(m["token_ids"]) for m in turns]
            num_cut += sum(m["finish_reason"] == "length" for m in turns)
            num_unanswered += sum(m["role"] == "user" for m in conversation.messages) - len(turns)
        meta = {**settings, "date": datetime.date.today().isoformat(), "conversations": len(conversations),
                "assistant_turns": len(num_tokens), "generated_tokens": sum(num_tokens), "finished_by_length": num_cut,
                "unanswered_turns": num_unanswered}
        write_json(f"{out}.meta.json", meta)  # before `out` appears: who finds `out` finds its meta
    return meta


def _check_first_question(template: ChatTemplate, conversation: Conversation, source: Path) -> None:
    """Raises ConversationError when the template does not take the messages up to the first user turn: better now than
    hours later."""
    first = next(i for i, m in enumerate(conversation.messages) if m["role"] == "user")
    try:
        template.text(conversation.messages[:first + 1], conversation.tools, generation_prompt=True)
    except ConversationError as error:
        raise ConversationError(f"{source}: conversation {conversation.id!r}: {error}") from error
