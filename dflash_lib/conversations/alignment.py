"""Where an assistant turn stands in the rendered conversation: found by rendering, never by searching for patterns.

What decides is always the template's text of the whole conversation. A turn begins where a generation prompt leads to:
the prompt that the template makes of the messages before it is the beginning of the whole. Templates that drop earlier
thinking break that for earlier turns (Qwen3.x renders `<think>` only behind the last user query): there the
turn's words are exchanged and the whole is rendered again; where the two texts part is where its words begin, and what
stands between the end of the message before and that place must be what the generation prompt begins with, too. The end
is found in the same way, and an end-of-turn token must stand there. Whatever does not fit refuses the conversation.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflash_lib.conversations.formats import Conversation, ConversationError
from dflash_lib.conversations.rendering import ChatTemplate, common_prefix, common_suffix


@dataclass(frozen=True)
class Turn:
    """One assistant turn in the text: [start, end) is what the target generates, [cut, end) its end-of-turn token (and
    white space before it, where the template puts any)."""

    start: int
    cut: int
    end: int


def words(text: str) -> str:
    """The text without white space: templates trim, and put lines of their own between reasoning and answer."""
    return "".join(text.split())


def _say(message: dict[str, Any], word: str) -> dict[str, Any]:
    return {**message, "content": word}


def _think(message: dict[str, Any], word: str) -> dict[str, Any]:
    return {**message, "reasoning_content": word}


def _think_and_say(message: dict[str, Any], word: str) -> dict[str, Any]:
    return _say(_think(message, word) if "reasoning_content" in message else message, word)


def _call(message: dict[str, Any], word: str) -> dict[str, Any]:
    """The last tool call's function under another name."""
    *calls, last = message["tool_calls"]
    return {**message, "tool_calls": [*calls, {**last, "function": {**last["function"], "name": word}}]}


class Alignment:
    """One conversation with its text: of the whole, or, with `as_prompt`, of the prompt that the target continues."""

    def __init__(self, template: ChatTemplate, conversation: Conversation, as_prompt: bool = False):
        self.template, self.conversation, self.as_prompt = template, conversation, as_prompt
        self.messages, self.tools = conversation.messages, conversation.tools
        self.indices = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        self.spans: dict[int, tuple[int, int]] = {}
        if template.has_marks:
            self.text, spans = template.marked(self.messages, self.tools, as_prompt)
            if len(spans) != len(self.indices):
                reason = f"the template marks {len(spans)} generated spans for {len(self.indices)} assistant turns"
                raise ConversationError(f"conversation {conversation.id}: {reason}", reason)
            self.spans = dict(zip(self.indices, spans, strict=True))
        else:
            self.text = template.text(self.messages, self.tools, as_prompt)

    def turn(self, i: int) -> Turn:
        """Where message i stands, an assistant's. Raises ConversationError, naming it, when that cannot be told."""
        try:
            if i == 0:
                raise ConversationError("begins with an assistant turn, so no prompt leads to it")
            self._refuse_end_inside(i)
            return self._marked_turn(i) if self.spans else self._found_turn(i)
        except ConversationError as error:
            message = f"conversation {self.conversation.id}, message {i}: {error}"
            raise ConversationError(message, error.reason or str(error)) from error

    def _refuse_end_inside(self, i: int) -> None:
        """The target would have stopped at an end-of-turn token inside a turn: what follows it is nobody's text."""
        message = self.messages[i]
        for what, key in (("content", "content"), ("reasoning_content", "reasoning_content"),
                          ("tool calls", "tool_calls")):
            text = message.get(key) or ""
            text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
            if inside := [token for token in self.template.end_tokens if token in text]:
                verb = "contain" if key == "tool_calls" else "contains"
                raise ConversationError(f"its {what} {verb} the end-of-turn token {inside[0]!r}")

    def _marked_turn(self, i: int) -> Turn:
        """The span that the template marks, without what its generation prompt opens, up to its end-of-turn token."""
        start, end = self.spans[i]
        prompts = self._prompts(i)
        if fitting := [len(prompt) for prompt in prompts if self.text.startswith(prompt)]:
            start = max([start, *(n for n in fitting if n <= end)])
        else:  # marks may hold the turn's header, too, of which only a part of the prompt may be there
            before = self.template.text(self.messages[:i], self.tools)
            if any(common_prefix(self.text[start:end], prompt.removeprefix(before)) for prompt in prompts):
                start = min(max(start, self._start(i, prompts)), end)
        marked = self.text[start:end].rstrip()
        for token in self.template.end_tokens:
            if marked.endswith(token):
                return Turn(start, start + len(marked) - len(token), start + len(marked))
        return Turn(start, end, self._end_of_turn(end))

    def _found_turn(self, i: int) -> Turn:
        message, text = self.messages[i], self.text
        if "reasoning_content" not in message and "tool_calls" not in message:  # the common case needs no more
            prompt = self.template.text(self.messages[:i], self.tools, generation_prompt=True)
            start = len(prompt)
            for content in (message["content"], message["content"].strip()) if text.startswith(prompt) else ():
                cut = start + len(content)
                if text.startswith(content, start) and (end := self.template.end_token_at(text, cut)):
                    return Turn(start, cut, end)
        thought = self._end_of_thought(i)
        start = self._start(i, self._prompts(i))
        if "tool_calls" in message:
            return self._end_of_calls(i, start)
        turn = self._end_of_content(i, start)
        if thought and message.get("finish_reason") == "length" and not message["content"].strip():
            return Turn(start, max(thought, start), turn.end)  # cut off in its thoughts, which the template closes
        return turn

    def _prompts(self, i: int) -> list[str]:
        return self.template.prompts(self.messages[:i], self.tools)

    def _varied(self, i: int, change: Callable[[dict, str], dict]) -> tuple[str, str]:
        return self.template.varied(self.messages, i, change, self.tools, self.as_prompt)

    def _end_of_thought(self, i: int) -> int:
        """Where the turn's reasoning_content ends in the text; 0 where it has none or the template drops it. It must be
        rendered as it is, and with thinking "off" no turn may think."""
        thought = self.messages[i].get("reasoning_content")
        if thought is None:
            return 0
        first, second = self._varied(i, _think)
        if first == second:
            return 0
        if self.template.options.thinking == "off":
            raise ConversationError("it thinks (reasoning_content), but thinking is off; set thinking to on or default")
        end = len(self.text) - common_suffix(first, second)
        if self.text[end:] != first[len(first) - len(self.text) + end:] or not words(self.text[:end]).endswith(
                words(thought)):
            raise ConversationError("its reasoning_content is not what the template renders")
        return end

    def _start(self, i: int, prompts: list[str]) -> int:
        """Where the target's own words begin: behind the longest generation prompt that leads there (generated ids
        have followed the default one), or, where the template renders the turn otherwise in the whole, behind that part
        of the prompt which is there."""
        fitting = [len(prompt) for prompt in prompts if self.text.startswith(prompt)]
        if fitting:
            generated = "token_ids" in self.messages[i] and self.text.startswith(prompts[0])
            return len(prompts[0]) if generated else max(fitting)
        before = self.template.text(self.messages[:i], self.tools)
        begin = self._end_of_message_before(i, before)
        first, second = self._varied(i, _think_and_say)
        said = common_prefix(first, second)
        if first == second or said < begin or not self.text.startswith(first[:said]):
            raise ConversationError("none of the template's generation prompts leads to it, and what stands before its "
                                    "words depends on them, so the mask cannot be aligned (see the option thinking)")
        header = self.text[begin:said]
        for prompt in prompts:
            generation_prompt = prompt.removeprefix(before) if prompt.startswith(before) else ""
            if header and generation_prompt.startswith(header):
                return said
            if generation_prompt and header.startswith(generation_prompt):
                return begin + len(generation_prompt)
        raise ConversationError(f"the template puts {header!r} before it, which is not how its generation prompt "
                                "begins, so the mask cannot be aligned")

    def _end_of_message_before(self, i: int, before: str) -> int:
        """Where in the whole the messages before message i end; `before` is the text of those messages alone."""
        if self.text.startswith(before):
            return len(before)
        change = _call if "tool_calls" in self.messages[i - 1] else _say
        alone = self.template.varied(self.messages[:i], i - 1, change, self.tools)
        inside = self._varied(i - 1, change)
        slots, behind = [], []
        for text, (first, second) in ((before, alone), (self.text, inside)):
            start, length = common_prefix(first, second), common_suffix(first, second)
            tail = first[len(first) - length:]
            if first == second or not (text.startswith(first[:start]) and text.endswith(tail)):
                raise ConversationError(REWRITTEN)
            slots.append(text[start:len(text) - length])
            behind.append(tail)
        if slots[0] != slots[1] or not behind[1].startswith(behind[0]):
            raise ConversationError(REWRITTEN)
        return len(self.text) - len(behind[1]) + len(behind[0])

    def _end_of_content(self, i: int, start: int) -> Turn:
        """The end of a turn that ends with its content."""
        content = self.messages[i]["content"]
        first, second = self._varied(i, _say)
        length = common_suffix(first, second)
        if first == second or not self.text.endswith(first[len(first) - length:]):
            raise ConversationError(NOT_ITS_CONTENT)
        cut = max(len(self.text) - length, start)
        said = common_prefix(first, second)
        said = said if start <= said <= cut and self.text.startswith(first[:said]) else start
        rendered = words(self.text[said:cut])
        if not words(content).endswith(rendered):  # shorter where the template drops thoughts before the answer
            raise ConversationError(NOT_ITS_CONTENT)
        return Turn(start, cut, self._end_of_turn(cut))

    def _end_of_calls(self, i: int, start: int) -> Turn:
        """The end of a turn that ends with tool calls: the first end-of-turn token behind the last call's name, which
        is the template's since no argument contains one, and before the next message's words."""
        first, second = self._varied(i, _call)
        length = common_suffix(first, second)
        if first == second or not self.text.endswith(first[len(first) - length:]):
            raise ConversationError("its tool calls are not what the template renders after the prompt")
        named, limit = max(len(self.text) - length, start), len(self.text)
        if i + 1 < len(self.messages):
            limit = common_prefix(*self._varied(i + 1, _call if "tool_calls" in self.messages[i + 1] else _say))
        found = [(at, at + len(token)) for token in self.template.end_tokens
                 if (at := self.text.find(token, named, limit)) >= 0]
        if not found:
            raise ConversationError(f"the template puts none of {', '.join(self.template.end_tokens)} behind its tool "
                                    "calls, so the end of the turn could not be learned")
        return Turn(start, *min(found))

    def _end_of_turn(self, cut: int) -> int:
        end = self.template.end_token_at(self.text, cut)
        if not end:
            raise ConversationError(f"the template does not put an end-of-turn token ("
                                    f"{', '.join(self.template.end_tokens)}) behind its content, so its end could not "
                                    "be learned")
        return end


REWRITTEN = ("the template renders the turns before it differently in the whole conversation than as a prompt, so the "
             "mask cannot be aligned")
NOT_ITS_CONTENT = "its content is not what the template renders after the prompt"
