"""Conversations as users have them: JSONL with OpenAI-style `messages`.

A line is `{"id": ..., "messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}, ...]}`; further keys
are kept in `Conversation.extra`. An assistant message may carry `token_ids` (what the target generated, the end-of-turn
token included when it was generated) and `finish_reason` ("stop" or "length"), as `regenerate` writes them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_lib.files import read_jsonl

ROLES = ("system", "user", "assistant", "tool")
FINISH_REASONS = ("stop", "length")


class ConversationError(ValueError):
    """A conversation that cannot be used; the message names file, line or row, and the reason."""


@dataclass(frozen=True)
class Conversation:
    """One conversation: `messages` are dicts with role and content, in order."""

    id: str
    messages: list[dict[str, Any]]
    extra: dict[str, Any] = field(default_factory=dict)

    def user_turns_only(self) -> "Conversation":
        """The same conversation without its assistant messages, ready to be answered by a target."""
        return Conversation(self.id, [m for m in self.messages if m["role"] != "assistant"], self.extra)


def parse_conversation(value: Any, where: str, need_assistant: bool = True, default_id: str = "") -> Conversation:
    """Checks one decoded JSON value and returns it as a Conversation; `default_id` serves where it has no id.

    Raises ConversationError, starting with `where`, for anything but a dict with a non-empty list of messages of known
    roles with text content, and for a conversation without an assistant turn when `need_assistant`.
    """
    if not isinstance(value, dict) or not isinstance(value.get("messages"), list) or not value["messages"]:
        raise ConversationError(f'{where}: expected an object with a non-empty list "messages"')
    if not isinstance(value.get("id", ""), str | int):
        raise ConversationError(f"{where}: id must be text or a whole number, found {type(value['id']).__name__}")
    for i, message in enumerate(value["messages"]):
        at = f"{where}, message {i}"
        if not isinstance(message, dict):
            raise ConversationError(f"{at}: expected an object with role and content, found {type(message).__name__}")
        if message.get("role") not in ROLES:
            raise ConversationError(f"{at}: unknown role {message.get('role')!r}; known roles: {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise ConversationError(f"{at}: content must be text, found {type(message.get('content')).__name__}")
        ids = message.get("token_ids")
        if ids is not None and not (isinstance(ids, list) and ids
                                    and all(type(i) is int and i >= 0 for i in ids)):
            raise ConversationError(f"{at}: token_ids must be a non-empty list of non-negative integers")
        if message.get("finish_reason", "stop") not in FINISH_REASONS:
            raise ConversationError(f"{at}: finish_reason must be 'stop' or 'length', "
                                    f"found {message['finish_reason']!r}")
        if ids is not None and "finish_reason" not in message:
            raise ConversationError(f"{at}: token_ids need finish_reason 'stop' or 'length'")
    if need_assistant and not any(m["role"] == "assistant" for m in value["messages"]):
        raise ConversationError(f"{where}: no assistant turn, so nothing to train on; "
                                "let the target answer it with `python -m dflash_lib regenerate`")
    extra = {key: item for key, item in value.items() if key not in ("id", "messages")}
    return Conversation(str(value.get("id", default_id)), value["messages"], extra)


def read_conversations(path: Path | str, max_samples: int | None = None,
                       need_assistant: bool = True) -> Iterator[Conversation]:
    """Streams the conversations of a JSONL file, at most `max_samples` of them.

    Raises FileNotFoundError, ValueError for a broken line (number named) and ConversationError for a row that is no
    conversation, a repeated id, or a file without any conversation.
    """
    seen: dict[str, int] = {}
    for number, value in read_jsonl(path):
        if max_samples is not None and len(seen) >= max_samples:
            break
        conversation = parse_conversation(value, f"{path}, line {number}", need_assistant, f"line-{number}")
        if conversation.id in seen:
            raise ConversationError(f"{path}, line {number}: id {conversation.id!r} was used on line "
                                    f"{seen[conversation.id]} already")
        seen[conversation.id] = number
        yield conversation
    if not seen:
        raise ConversationError(f"{path}: holds no conversation")
