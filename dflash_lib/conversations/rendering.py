"""The target's own chat template: its text for messages, its generation prompts, the tokens that end a turn."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from dflash_lib.conversations.formats import ConversationError, is_unicode
from dflash_lib.files import hash_value, read_json

TURNS = ("all", "last")
THINKING = ("default", "on", "off")
# What templates call the switch: enable_thinking Qwen3.x, GLM, SmolLM3; force_thinking some copies of Qwen3.6's;
# thinking DeepSeek-V3.1, Granite. A template does not notice names that it does not use.
THINKING_SWITCHES = ("enable_thinking", "force_thinking", "thinking")
RESERVED = ("messages", "conversation", "conversations", "tools", "tokenize", "add_generation_prompt", "chat_template",
            "documents", "continue_final_message", "return_dict", "return_assistant_tokens_mask")
MESSAGE_KEYS = ("role", "content", "reasoning_content", "thinking", "tool_calls", "tool_call_id", "name")
FOUR = {"role": "user", "content": "four"}  # a plain question
WORDS = ("one", "two")  # stand in for what was said: they differ in the first letter and in the last


@dataclass(frozen=True, kw_only=True)
class TemplateOptions:
    """How conversations are rendered, and which turns are supervised.

    turns: "all" assistant turns or the "last"; thinking: "on" or "off" pass the template's switch, "default" passes
    none and lets each turn follow the generation prompt that leads to it; template_kwargs: more variables for the
    template, such as preserve_thinking, reasoning_effort or a date, which win over `thinking`.
    """

    turns: str = "all"
    thinking: str = "default"
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.turns not in TURNS:
            raise ValueError(f"turns: {self.turns!r} is not one of {', '.join(TURNS)}")
        if self.thinking not in THINKING:
            raise ValueError(f"thinking: {self.thinking!r} is not one of {', '.join(THINKING)}")
        if reserved := sorted(set(self.template_kwargs) & set(RESERVED)):
            raise ValueError(f"template_kwargs: {', '.join(reserved)} cannot be set here; it is for the template's own "
                             "variables, such as preserve_thinking")


def tokenizer_hash(tokenizer) -> str:
    """sha256 of the vocabulary, merges and chat template: two tokenizers with one hash give the same rows."""
    return hash_value([tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template or ""])


def _checked(text: str) -> str:
    if not is_unicode(text):
        raise ConversationError("its text holds half of a character (a lone surrogate), which no tokenizer takes")
    return text


def common_prefix(a: str, b: str) -> int:
    """How many characters two texts share at their beginning."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_suffix(a: str, b: str) -> int:
    """How many characters two texts share at their end."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[len(a) - middle:len(a) - low] == b[len(b) - middle:len(b) - low]:
            low = middle
        else:
            high = middle - 1
    return low


class ChatTemplate:
    """A tokenizer's chat template with the options that it is rendered with. Make one for many conversations."""

    def __init__(self, tokenizer, options: TemplateOptions | None = None):
        self.tokenizer, self.options = tokenizer, options or TemplateOptions()
        if not tokenizer.chat_template:
            where = f" of {tokenizer.name_or_path}" if tokenizer.name_or_path else ""
            raise ConversationError(f"the tokenizer{where} has no chat template; give the model folder a "
                                    "chat_template.jinja")

    def _variables(self, thinking: str) -> dict[str, Any]:
        mode = thinking if self.options.thinking == "default" else self.options.thinking
        switches = {} if mode == "default" else dict.fromkeys(THINKING_SWITCHES, mode == "on")
        return switches | self.options.template_kwargs

    def _plain(self, messages: Sequence[dict[str, Any]], as_text: bool | None = None) -> list[dict[str, Any]]:
        """Messages with the keys that templates know, a tool call's arguments in the form that this one takes."""
        plain = [{key: message[key] for key in MESSAGE_KEYS if key in message} for message in messages]
        for message in plain:
            if "reasoning_content" in message and self.thought_is_thinking:
                message["thinking"] = message.pop("reasoning_content")
            if "tool_calls" in message and (self.arguments_as_text if as_text is None else as_text):
                message["tool_calls"] = [
                    {**call, "function": {**call["function"], "arguments": json.dumps(
                        call["function"]["arguments"], ensure_ascii=False)}} for call in message["tool_calls"]]
        return plain

    def text(self, messages: Sequence[dict[str, Any]], tools=None, generation_prompt: bool = False,
             thinking: str = "default", as_text: bool | None = None) -> str:
        """The template's text. `thinking` chooses the mode where the options leave it to the template.

        Raises ConversationError with the template's own words when it refuses the messages.
        """
        plain = self._plain(messages, as_text)
        try:
            text = self.tokenizer.apply_chat_template(plain, tools=tools, tokenize=False,
                                                      add_generation_prompt=generation_prompt,
                                                      **self._variables(thinking))
        except Exception as error:  # templates raise through jinja2 (TemplateError) with their own words
            raise ConversationError(f"the chat template refused the conversation: {error}") from error
        return _checked(text)

    @cached_property
    def has_marks(self) -> bool:
        """Whether the template marks what is generated, with `{% generation %}`."""
        return "endgeneration" in self.tokenizer.chat_template

    def marked(self, messages: Sequence[dict[str, Any]], tools=None,
               generation_prompt: bool = False) -> tuple[str, list[tuple[int, int]]]:
        """The template's text and the spans that it marks as generated, as (start, end) characters."""
        try:
            texts, spans = render_jinja_template(
                [self._plain(messages)], tools=tools, chat_template=self.tokenizer.chat_template,
                return_assistant_tokens_mask=True, add_generation_prompt=generation_prompt,
                **{**self.tokenizer.special_tokens_map, **self._variables("default")})
        except Exception as error:
            raise ConversationError(f"the chat template refused the conversation: {error}") from error
        return _checked(texts[0]), spans[0]

    def prompts(self, messages: Sequence[dict[str, Any]], tools=None) -> list[str]:
        """The prompts that the template makes of `messages`, the default one first; more than one only where the
        options leave the thinking mode to the template, and it has a switch for it."""
        modes = THINKING if self.options.thinking == "default" else THINKING[:1]
        return list(dict.fromkeys(self.text(messages, tools, True, mode) for mode in modes))

    @cached_property
    def thought_is_thinking(self) -> bool:
        """Whether the template reads a message's thought under the name `thinking`, as gpt-oss's does."""
        try:
            first, second = self.varied([{"role": "user", "content": "one"}, {"role": "assistant", "content": "three"}],
                                        1, lambda m, word: {**m, "thinking": word})
        except ConversationError:
            return False  # a template with demands that a plain conversation does not meet
        return first != second

    @cached_property
    def arguments_as_text(self) -> bool:
        """Whether the template joins a tool call's arguments as text (JSON) instead of taking a mapping.

        A mapping is the rule in Transformers. A template that wants text raises on one, or writes it as Python does.
        """
        call = {"type": "function", "function": {"name": "one", "arguments": {"two": "three"}}}
        messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        for as_text in (False, True):
            try:
                text = self.text(messages, as_text=as_text)
            except ConversationError:
                continue
            if "{'two': 'three'}" not in text:
                return as_text
        return False

    @cached_property
    def end_tokens(self) -> tuple[str, ...]:
        """The tokens that end a turn: the tokenizer's eos_token, those that the folder's generation_config.json names,
        and the special token that the template puts behind an answer (Gemma's `<end_of_turn>`, gpt-oss's `<|end|>`
        in earlier turns), which it is asked for with a plain conversation.

        Raises ConversationError when the tokenizer names no eos_token.
        """
        tokenizer = self.tokenizer
        if not tokenizer.eos_token:
            raise ConversationError("the tokenizer names no eos_token, so the end of a turn is not known")
        config = Path(tokenizer.name_or_path or "") / "generation_config.json"
        ids = (read_json(config).get("eos_token_id") if tokenizer.name_or_path and config.is_file() else None) or []
        tokens = [tokenizer.eos_token, *map(tokenizer.convert_ids_to_tokens, [ids] if isinstance(ids, int) else ids)]
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        for asked in (2, 4):
            messages = [{"role": ("user", "assistant")[i % 2], "content": "three"} for i in range(asked)]
            try:
                first, second = self.varied(messages, 1, lambda m, word: {**m, "content": word})
            except ConversationError:
                continue  # a template with demands that a plain conversation does not meet
            behind = first[len(first) - common_suffix(first, second):].lstrip()
            tokens += [token for token in special if behind.startswith(token)]
        return tokenizer.eos_token, *sorted({token for token in tokens if token} - {tokenizer.eos_token})

    @cached_property
    def thought_marks(self) -> tuple[str, str] | None:
        """(opening, closing): what the template puts between the generation prompt and an answer's thought, which the
        target has to write itself (`<think>` where the prompt does not open it), and between thought and content. None
        where it renders no thoughts, or none behind the generation prompt that the options lead to.
        """
        said = {"role": "assistant", "content": "three", "reasoning_content": WORDS[0]}
        try:
            prompt = self.text([FOUR], generation_prompt=True)
            text, other = self.varied([FOUR, said], 1, lambda m, word: {**m, "reasoning_content": word})
            start, end = common_prefix(text, other), len(text) - common_suffix(text, other)
            content = common_prefix(text, self.text([FOUR, {**said, "content": WORDS[0]}]))
        except ConversationError:
            return None  # a template with demands that a plain conversation does not meet
        if text == other or not text.startswith(prompt) or not len(prompt) <= start < end < content:
            return None
        return text[len(prompt):start], text[end:content]

    @cached_property
    def answer_mark(self) -> str:
        """What the template puts between the generation prompt and the content of an answer without a thought, which
        the target has to write itself: gpt-oss's final channel; "" as a rule."""
        try:
            prompt = self.text([FOUR], generation_prompt=True)
            text, other = self.varied([FOUR, {"role": "assistant", "content": ""}], 1,
                                      lambda m, word: {**m, "content": word})
        except ConversationError:
            return ""
        return text[len(prompt):common_prefix(text, other)] if text.startswith(prompt) else ""

    def varied(self, messages: Sequence[dict[str, Any]], i: int, change: Callable[[dict, str], dict], tools=None,
               generation_prompt: bool = False) -> tuple[str, str]:
        """Two texts of the messages, the i-th of them changed with each of WORDS: where they part and where they meet
        again is where the template puts what was changed."""
        texts = []
        for word in WORDS:
            changed = list(messages)
            changed[i] = change(changed[i], word)
            texts.append(self.text(changed, tools, generation_prompt))
        return texts[0], texts[1]

    def end_token_at(self, text: str, at: int) -> int:
        """Where the end-of-turn token ends that stands at `at`, or behind white space there; 0 when there is none."""
        while at < len(text) and text[at].isspace():
            at += 1
        return max((at + len(token) for token in self.end_tokens if text.startswith(token, at)), default=0)
