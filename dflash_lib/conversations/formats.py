"""Conversations as users have them, brought into one form.

A row is one of these; a file holds rows of one kind, and what else a row carries is kept in `Conversation.extra`:

- `messages`: OpenAI's, `[{"role": "user", "content": "..."}, ...]`, with tools, tool calls and `reasoning_content`;
- `conversations`: ShareGPT's, `[{"from": "human", "value": "..."}, ...]`, with a `system` text of its own or without;
- `prompt` and `response` (or `completion`): texts, or lists of messages;
- `input_ids` and `loss_mask` (0 or 1 a token): tokenised already, taken as they are;
- `prompt_token_ids` and `token_ids`: what a target was given and what it generated.

An assistant message may carry `token_ids` (what the target generated, the end-of-turn token included when it was
generated) and `finish_reason` ("stop" or "length"), as `regenerate` writes them; with `weight` 0, as in OpenAI's files,
it is context only. `sources` says which files are read.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dflash_lib.conversations.sources import read_rows

ROLES = ("system", "user", "assistant", "tool", "developer")
FINISH_REASONS = ("stop", "length")
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "model": "assistant", "bot": "assistant", "function_call": "assistant", "system": "system", "tool": "tool",
    "observation": "tool", "function_response": "tool", "function": "tool"}
FORMATS = {  # by the keys that a row of it must have
    "pre-tokenised": ("input_ids", "loss_mask"), "generated": ("prompt_token_ids", "token_ids"),
    "messages": ("messages",), "conversations": ("conversations",)}
RESPONSE_KEYS = ("response", "completion")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


class ConversationError(ValueError):
    """A conversation that cannot be used; the message names file, line or row, and the reason.

    `reason` is what many rows may have in common, without the names in the message; "" where that is all of it.
    """

    def __init__(self, message: str, reason: str = ""):
        super().__init__(message)
        self.reason = reason


class OtherForm(ConversationError):
    """A row that says the file is not what it should be: none of the known forms from its first row on, or several."""


@dataclass(frozen=True)
class Conversation:
    """One conversation: `messages` are dicts with role and content (text), in order.

    An assistant message may also have reasoning_content (text) and tool_calls (a list of `{"type": "function",
    "function": {"name": text, "arguments": dict}}`). tools: what the target may call. input_ids and loss_mask: the row
    itself where the file has it tokenised; it has no messages then.
    """

    id: str
    messages: list[dict[str, Any]]
    extra: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    input_ids: list[int] | None = None
    loss_mask: list[int] | None = None

    def user_turns_only(self) -> "Conversation":
        """The same conversation without its assistant messages, ready to be answered by a target."""
        return replace(self, messages=[m for m in self.messages if m["role"] != "assistant"])


def detect_format(value: Any, where: str) -> str:
    """Which of the forms above a row has. Raises ConversationError for none of them, or for two at once."""
    if not isinstance(value, dict):
        raise ConversationError(f"{where}: expected an object, found {type(value).__name__}")
    found = [name for name, keys in FORMATS.items() if all(value.get(key) is not None for key in keys)]
    if len(found) > 1:
        raise ConversationError(f"{where}: the row is {' and '.join(found)} at once; leave one of them")
    if found:
        return found[0]
    if value.get("prompt") is not None:
        return "prompt"
    raise ConversationError(
        f'{where}: expected an object with a non-empty list "messages" (or "conversations", "prompt" and "response", '
        f'"input_ids" and "loss_mask"), found the keys {", ".join(map(str, value)) or "none"}')


def parse_conversation(value: Any, where: str, need_assistant: bool = True, default_id: str = "") -> Conversation:
    """Checks one decoded row and returns it as a Conversation; `default_id` serves where it has no id.

    Raises ConversationError, starting with `where`, for a row of no known form, messages of unknown roles or without
    text, tool calls whose arguments are no object, and, when `need_assistant`, for a row without an assistant turn.
    """
    kind = detect_format(value, where)
    number = value.get("id")
    if number is not None and not isinstance(number, str | int):
        raise ConversationError(f"{where}: id must be text or a whole number, found {type(number).__name__}")
    name, rest = default_id if number is None else str(number), dict(value)
    for key, text in (("id", name), ("kind", value.get("kind"))):
        if isinstance(text, str) and not is_unicode(text):
            raise ConversationError(f"{where}: {key} {text!r} holds half of a character (a lone surrogate)")
    rest.pop("id", None)
    if kind in ("pre-tokenised", "generated"):
        if not need_assistant:
            raise ConversationError(f"{where}: a {kind} row holds no messages, so it is no prompt to be answered")
        return _tokenised(kind, name, rest, where)
    tools = _tools(rest.pop("tools", None), where)
    messages = {"messages": _openai, "conversations": _sharegpt, "prompt": _prompt_response}[kind](rest, where)
    messages = [_message(m, f"{where}, message {i}") for i, m in enumerate(messages)]
    if need_assistant and not any(m["role"] == "assistant" for m in messages):
        raise ConversationError(f"{where}: no assistant turn, so nothing to train on; "
                                "let the target answer it with `python -m dflash_lib regenerate`")
    return Conversation(name, messages, rest, tools)


def is_unicode(text: str) -> bool:
    """Whether text has a UTF-8 form. JSON's escapes can spell half of a character: an emoji that was cut in two."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _listed(value: Any, key: str, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ConversationError(f'{where}: expected an object with a non-empty list "{key}"')
    return value


def _openai(rest: dict[str, Any], where: str) -> list[Any]:
    return _listed(rest.pop("messages"), "messages", where)


def _sharegpt(rest: dict[str, Any], where: str) -> list[Any]:
    """ShareGPT's turns as messages; turns that have role and content already are taken so."""
    turns = _listed(rest.pop("conversations"), "conversations", where)
    system = rest.pop("system", None)
    messages: list[Any] = [] if not system else [{"role": "system", "content": system}]
    for i, turn in enumerate(turns):
        at = f"{where}, turn {i}"
        if not isinstance(turn, dict) or "from" not in turn:
            messages.append(turn)
            continue
        role = SHAREGPT_ROLES.get(turn["from"]) if isinstance(turn["from"], str) else None
        if role is None:
            raise ConversationError(f"{at}: unknown speaker {turn['from']!r}; known: {', '.join(SHAREGPT_ROLES)}")
        message = {"role": role, "content": turn.get("value")}
        for key in ("role", "content"):
            if turn.get(key, message[key]) != message[key]:
                raise ConversationError(f"{at}: from and value say {message[key]!r}, but {key} says {turn[key]!r}")
        message |= {key: item for key, item in turn.items() if key not in ("from", "value", "role", "content")}
        if turn["from"] == "function_call":
            calls = _json(turn.get("value"), f"{at}: a function_call's value")
            message |= {"content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}
        messages.append(message)
    return messages


def _prompt_response(rest: dict[str, Any], where: str) -> list[Any]:
    """A prompt and its response as messages; `token_ids` and what else says how it was generated go along."""
    prompt, system = rest.pop("prompt"), rest.pop("system", None)
    keys = [key for key in RESPONSE_KEYS if rest.get(key) is not None]
    if len(keys) > 1:
        raise ConversationError(f"{where}: has both {' and '.join(keys)}; leave one of them")
    messages: list[Any] = [] if not system else [{"role": "system", "content": system}]
    messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _listed(prompt, "prompt", where)
    if not keys:
        return messages
    response = rest.pop(keys[0])
    if isinstance(response, list):
        return messages + _listed(response, keys[0], where)
    answer = {"role": "assistant", "content": response}
    answer |= {key: rest.pop(key) for key in ("token_ids", "finish_reason", "tool_calls", *REASONING_KEYS)
               if rest.get(key) is not None}
    return [*messages, answer]


def _tokenised(kind: str, name: str, rest: dict[str, Any], where: str) -> Conversation:
    """A row of token ids; its mask is the file's, or 1 for what was generated."""
    parts = [rest.pop(key) for key in FORMATS[kind]]
    for key, part in zip(FORMATS[kind], parts, strict=True):
        if key != "loss_mask" and not _are_ids(part):
            raise ConversationError(f"{where}: {key} must be a non-empty list of non-negative integers")
    if kind == "generated":
        mask = [0] * len(parts[0]) + [1] * len(parts[1])
        return Conversation(name, [], rest, input_ids=[*parts[0], *parts[1]], loss_mask=mask)
    ids, mask = parts
    if not isinstance(mask, list) or len(mask) != len(ids) or not all(on in (0, 1) for on in mask):
        raise ConversationError(f"{where}: loss_mask must be a list of 0 and 1, one a token ({len(ids)} tokens)")
    return Conversation(name, [], rest, input_ids=ids, loss_mask=[int(on) for on in mask])


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int and i >= 0 for i in value)


def _message(message: Any, at: str) -> dict[str, Any]:
    """One message, checked: content as text, reasoning under one name, tool calls with arguments as a dict."""
    if not isinstance(message, dict):
        raise ConversationError(f"{at}: expected an object with role and content, found {type(message).__name__}")
    if message.get("role") not in ROLES:
        raise ConversationError(f"{at}: unknown role {message.get('role')!r}; known roles: {', '.join(ROLES)}")
    result = {key: item for key, item in message.items() if item is not None}
    if message["role"] == "assistant":
        reasoning = [result.pop(key) for key in REASONING_KEYS if key in result]
        for thought in reasoning:
            if not isinstance(thought, str):
                raise ConversationError(f"{at}: reasoning_content must be text, found {type(thought).__name__}")
        if reasoning:
            said = list(dict.fromkeys(filter(None, reasoning)))
            if len(said) > 1:
                raise ConversationError(f"{at}: has two different thoughts, under two of {', '.join(REASONING_KEYS)}")
            result["reasoning_content"] = said[0] if said else ""
        if "tool_calls" in result and not (calls := _tool_calls(result.pop("tool_calls"), at)) == []:
            result["tool_calls"] = calls
    if result.get("weight", 1) not in (0, 1):
        raise ConversationError(f"{at}: weight must be 0 (not to be learned) or 1, found {result['weight']!r}")
    result["content"] = _content(message.get("content"), at, may_lack="tool_calls" in result)
    if "token_ids" in result and not _are_ids(result["token_ids"]):
        raise ConversationError(f"{at}: token_ids must be a non-empty list of non-negative integers")
    if result.get("finish_reason") == "tool_calls" and "tool_calls" in result:
        result["finish_reason"] = "stop"
    if result.get("finish_reason", "stop") not in FINISH_REASONS:
        raise ConversationError(f"{at}: finish_reason must be 'stop' or 'length', found {result['finish_reason']!r}")
    if "token_ids" in result and "finish_reason" not in result:
        raise ConversationError(f"{at}: token_ids need finish_reason 'stop' or 'length'")
    return result


def _content(content: Any, at: str, may_lack: bool) -> str:
    """Text, also from a list of text parts; nothing at all only beside tool calls."""
    if isinstance(content, str):
        return content
    if content is None and may_lack:
        return ""
    if isinstance(content, list) and content:
        other = [part for part in content if not (isinstance(part, dict) and part.get("type", "text") == "text"
                                                  and isinstance(part.get("text"), str))]
        if not other:
            return "".join(part["text"] for part in content)
        kind = other[0].get("type") if isinstance(other[0], dict) else type(other[0]).__name__
        raise ConversationError(f"{at}: content must be text, found list with a part of type {kind!r}; the workbench "
                                "takes parts of type text only")
    raise ConversationError(f"{at}: content must be text, found {type(content).__name__}")


def _json(value: Any, what: str) -> Any:
    """The value of a JSON text; anything but text is returned as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ConversationError(f"{what} is not valid JSON ({error})") from error


def _tool_calls(calls: Any, at: str) -> list[dict[str, Any]]:
    """Tool calls in OpenAI's form, arguments as a dict whether they came as an object or as JSON text."""
    calls = _json(calls, f"{at}: tool_calls")
    if not isinstance(calls, list):
        raise ConversationError(f"{at}: tool_calls must be a list, found {type(calls).__name__}")
    result = []
    for number, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ConversationError(f"{at}: tool call {number} must be an object with a function's name and arguments")
        arguments = function.get("arguments", function.get("parameters"))
        arguments = _json(arguments, f"{at}: the arguments of tool call {number}") if arguments else {}
        if not isinstance(arguments, dict):
            raise ConversationError(f"{at}: the arguments of tool call {number} must be an object, or one as JSON "
                                    f"text, found {type(arguments).__name__}")
        kept = {key: call[key] for key in ("id",) if call.get(key) is not None}
        result.append({**kept, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return result


def _tools(tools: Any, where: str) -> list[dict[str, Any]] | None:
    """The row's `tools`, from a list or from its JSON text; None for an empty one."""
    tools = _json(tools, f"{where}: tools") if tools != "" else None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ConversationError(f"{where}: tools must be a list of objects, found {type(tools).__name__}")
    return tools or None


class RowFormat:
    """Holds all rows of a file to the form of its first one: a file in which it changes was joined by mistake.

    `check` raises OtherForm for a first row of no known form and for a later one of another form, and ConversationError
    for a later one of none.
    """

    def __init__(self) -> None:
        self.first: tuple[str, str] | None = None

    def check(self, value: Any, where: str) -> None:
        try:
            kind = detect_format(value, where)
        except ConversationError as error:
            raise (ConversationError if self.first else OtherForm)(str(error)) from error
        if self.first is None:
            self.first = kind, where
        if kind != self.first[0]:
            raise OtherForm(f"{where}: the row's form is {kind!r}, but {self.first[0]!r} in {self.first[1]}; "
                                    "a file holds rows of one form")


def read_conversations(path: Path | str, max_samples: int | None = None,
                       need_assistant: bool = True) -> Iterator[Conversation]:
    """Streams the conversations of a file or data set folder (see `sources`), at most `max_samples` of them.

    Raises FileNotFoundError, ValueError for a broken line (number named) and ConversationError for a row that is no
    conversation or of another form than the first, a repeated id, or a file without any conversation.
    """
    seen: dict[str, int] = {}
    row_format = RowFormat()
    for row in read_rows(path):
        if max_samples is not None and len(seen) >= max_samples:
            break
        value = row.value()
        row_format.check(value, row.where)
        conversation = parse_conversation(value, row.where, need_assistant, f"{row.unit}-{row.number}")
        if conversation.id in seen:
            raise ConversationError(repeated_id(row.where, conversation.id, row.unit, seen[conversation.id]))
        seen[conversation.id] = row.number
        yield conversation
    if not seen:
        raise ConversationError(f"{path}: holds no conversation")


def repeated_id(where: str, name: str, unit: str, first: int) -> str:
    """The message about an id that two rows have."""
    return f"{where}: id {name!r} was used on {unit} {first} already"
