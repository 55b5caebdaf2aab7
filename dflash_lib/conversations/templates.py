"""From messages to segments of text, supervised or not, by rendering the target's own chat template.

Supervised is what the target generates: the assistant's rendered content and its end-of-turn token; not the newline
after it, not the template's own tokens (DESIGN.md, convention 11). Segments are found by rendering each prefix of the
conversation and comparing, never by regular expressions, and are tokenised one by one: that is how a server sees
them, prompt first and then token after token, so no token ever straddles prompt and answer.
"""

from dataclasses import dataclass
from typing import Any

from dflash_lib.conversations.formats import Conversation, ConversationError
from dflash_lib.files import hash_value


@dataclass(frozen=True)
class Segment:
    """A run of rendered text. `token_ids`, where given, are the generated tokens themselves and win over the text."""

    text: str
    supervised: bool
    token_ids: tuple[int, ...] | None = None


def tokenizer_hash(tokenizer) -> str:
    """sha256 of the vocabulary, merges and chat template: two tokenizers with one hash give the same rows."""
    return hash_value([tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template or ""])


def render(tokenizer, messages: list[dict[str, Any]], add_generation_prompt: bool = False) -> str:
    """The chat template's text for `messages`. Raises ConversationError when the tokenizer has no template."""
    if not tokenizer.chat_template:
        raise ConversationError("the tokenizer has no chat template; give the model folder a chat_template.jinja")
    plain = [{"role": m["role"], "content": m["content"]} for m in messages]
    try:
        return tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=add_generation_prompt)
    except Exception as error:  # templates raise through jinja2 (TemplateError) with their own words
        raise ConversationError(f"the chat template refused the conversation: {error}") from error


def segment_conversation(tokenizer, conversation: Conversation) -> list[Segment]:
    """Splits a conversation into segments that alternate between context and supervised text.

    Raises ConversationError, naming conversation and message, when a template rewrites an earlier turn or content
    cannot be found in its rendering: such a row is refused, never guessed.
    """
    messages, end_of_turn = conversation.messages, tokenizer.eos_token
    if not end_of_turn:
        raise ConversationError("the tokenizer names no eos_token, so the end of a turn is not known")
    whole = render(tokenizer, messages)
    segments, at = [], 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        where = f"conversation {conversation.id}, message {i}"
        if i == 0:
            raise ConversationError(f"{where}: begins with an assistant turn, so no prompt leads to it")
        prompt = render(tokenizer, messages[:i], add_generation_prompt=True)
        if not whole.startswith(prompt):
            raise ConversationError(f"{where}: the template renders the turns before it differently in the whole "
                                    "conversation than as a prompt, so the mask cannot be aligned")
        segments.append(Segment(whole[at:len(prompt)], supervised=False))
        rest = whole[len(prompt):]
        content = message["content"] if rest.startswith(message["content"]) else message["content"].strip()
        if not rest.startswith(content):
            raise ConversationError(f"{where}: its content is not what the template renders after the prompt")
        at = len(prompt) + len(content)
        ids = message.get("token_ids")
        if message.get("finish_reason", "stop") == "stop":
            if not whole.startswith(end_of_turn, at):
                raise ConversationError(f"{where}: the template does not put the tokenizer's end-of-turn token "
                                        f"{end_of_turn!r} behind its content, so its end could not be learned")
            at += len(end_of_turn)
        text = whole[len(prompt):at]
        segments.append(Segment(text, True, tuple(ids) if ids else None))
    if at < len(whole):
        segments.append(Segment(whole[at:], supervised=False))
    return segments


def tokenize_segments(tokenizer, segments: list[Segment]) -> tuple[list[int], list[int]]:
    """Token ids and loss mask (1 = supervised), both of the same length, of the segments one after another."""
    input_ids: list[int] = []
    loss_mask: list[int] = []
    for segment in segments:
        ids = segment.token_ids
        if ids is None:
            ids = tokenizer(segment.text, add_special_tokens=False)["input_ids"]
        input_ids.extend(ids)
        loss_mask.extend([int(segment.supervised)] * len(ids))
    return input_ids, loss_mask


def encode_conversation(tokenizer, conversation: Conversation) -> tuple[list[int], list[int]]:
    """Token ids and loss mask of a conversation. Raises ConversationError (see `segment_conversation`).

    The template's text after the last supervised token is left out: nothing is predicted from it.
    """
    segments = segment_conversation(tokenizer, conversation)
    while segments and not segments[-1].supervised:
        segments.pop()
    return tokenize_segments(tokenizer, segments)


def encode_prompt(tokenizer, conversation: Conversation) -> list[int]:
    """Token ids of the conversation so far plus the generation prompt: what the target continues."""
    answer = {"role": "assistant", "content": "", "finish_reason": "length"}
    closed = Conversation(conversation.id, [*conversation.messages, answer])
    segments = segment_conversation(tokenizer, closed)
    last = max(i for i, segment in enumerate(segments) if segment.supervised)
    return tokenize_segments(tokenizer, segments[:last])[0]
