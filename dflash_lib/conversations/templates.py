"""From messages to segments of text, supervised or not, and from those to token ids with their loss mask.

Supervised is what the target generates: the assistant's rendered content and its end-of-turn token; not the newline
after it, not the template's own tokens, such as a `<think>` that the generation prompt opened (DESIGN.md, convention
11). `alignment` finds where that is in the rendered conversation. Segments are tokenised one by one: that is how a
server sees them, prompt first and then token after token, so no token ever straddles prompt and answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash_lib.conversations.alignment import Alignment, words
from dflash_lib.conversations.formats import Conversation, ConversationError
from dflash_lib.conversations.rendering import ChatTemplate, TemplateOptions, tokenizer_hash

__all__ = ["ChatTemplate", "Segment", "TemplateOptions", "encode_conversation", "encode_prompt", "render",
           "segment_conversation", "tokenize_rows", "tokenize_segments", "tokenizer_hash"]


GUARD = "\ue000"  # of the private use area: no vocabulary has it, so it is bytes, or unknown, and merges with nothing


@dataclass(frozen=True)
class Segment:
    """A run of rendered text. `token_ids`, where given, are the generated tokens themselves and win over the text."""

    text: str
    supervised: bool
    token_ids: tuple[int, ...] | None = None


def render(tokenizer, messages: list[dict[str, Any]], add_generation_prompt: bool = False) -> str:
    """The chat template's text for `messages`. Raises ConversationError when the tokenizer has no template."""
    return ChatTemplate(tokenizer).text(messages, generation_prompt=add_generation_prompt)


def as_template(template) -> ChatTemplate:
    """A ChatTemplate as it is; of a tokenizer its own with the default options."""
    return template if isinstance(template, ChatTemplate) else ChatTemplate(template)


def segment_conversation(template, conversation: Conversation) -> list[Segment]:
    """Splits a conversation into segments that alternate between context and answers.

    template: a ChatTemplate, or a tokenizer for the default options. With turns "last" the earlier answers are
    context, and so are those of weight 0. Raises ConversationError, naming conversation and message, where a supervised
    turn cannot be aligned: such a row is refused, never guessed.
    """
    template = as_template(template)
    alignment = Alignment(template, conversation)
    supervised = alignment.indices if template.options.turns == "all" else alignment.indices[-1:]
    supervised = [i for i in supervised if conversation.messages[i].get("weight", 1)]
    return _segments(alignment, supervised)


def _segments(alignment: Alignment, supervised: Sequence[int]) -> list[Segment]:
    """The alignment's text in pieces. A turn that is not supervised and cannot be aligned stays part of the context."""
    segments, at = [], 0
    for i in alignment.indices:
        message = alignment.messages[i]
        try:
            turn = alignment.turn(i)
            ids = generated_ids(alignment, i, turn)
        except ConversationError:
            if i in supervised:
                raise
            continue
        finished = message.get("finish_reason", "stop") == "stop"
        if ids and not finished:  # at its limit of tokens it may have ended all the same
            finished = alignment.template.tokenizer.convert_ids_to_tokens(ids[-1]) in alignment.template.end_tokens
        end = turn.end if finished else turn.cut
        segments.append(Segment(alignment.text[at:turn.start], supervised=False))
        segments.append(Segment(alignment.text[turn.start:end], i in supervised, ids))
        at = end
    if at < len(alignment.text):
        segments.append(Segment(alignment.text[at:], supervised=False))
    return segments


def generated_ids(alignment: Alignment, i: int, turn) -> tuple[int, ...] | None:
    """The turn's `token_ids` where the template renders what they say (white space apart), with the end-of-turn token
    of a finished turn whose ids lack it; None where the template drops the thoughts from what they say, so that the
    text is tokenised as a server would. Raises ConversationError else: ids and text are then not of one answer."""
    message = alignment.messages[i]
    ids = message.get("token_ids")
    if not ids:
        return None
    tokenizer = alignment.template.tokenizer
    where = f"conversation {alignment.conversation.id}, message {i}"
    _check_vocabulary(tokenizer, ids, where)  # decoding passes over ids that it does not know
    said = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    ending = next((token for token in alignment.template.end_tokens if said.endswith(token)), "")
    said, rendered = words(said.removesuffix(ending)), words(alignment.text[turn.start:turn.cut])
    if said == rendered:
        lacks_end = not ending and message.get("finish_reason", "stop") == "stop"
        end = alignment.text[turn.cut:turn.end].strip()
        return (*ids, tokenizer.convert_tokens_to_ids(end)) if lacks_end else tuple(ids)
    if said.endswith(rendered) and _is_thought(alignment.template, message, said.removesuffix(rendered)):
        return None
    reason = ("its token_ids decode to another text than the template renders there (is thinking set as it was when "
              "they were generated?)")
    raise ConversationError(f"{where}: {reason}", reason)


def _is_thought(template: ChatTemplate, message: dict[str, Any], dropped: str) -> bool:
    """Whether what a template does not render of generated text (without white space) is the message's thought: its
    reasoning_content, or what stands before the answer in its content."""
    if dropped and dropped in words(message["content"]):
        return True
    added = [token.content for token in template.tokenizer.added_tokens_decoder.values()]
    for mark in filter(None, map(words, (*(template.thought_marks or ()), *added))):
        dropped = dropped.replace(mark, "")
    thought = words(message.get("reasoning_content", ""))
    return dropped.startswith(thought) if thought else not dropped


def _check_vocabulary(tokenizer, ids: Sequence[int], where: str) -> None:
    if max(ids) >= len(tokenizer):
        raise ConversationError(f"{where}: token id {max(ids)} is not in the tokenizer's vocabulary of "
                                f"{len(tokenizer)}", "a token id that is not in the tokenizer's vocabulary")


def tokenize_rows(tokenizer, rows: Sequence[Sequence[Segment]]) -> list[tuple[list[int], list[int]]]:
    """Token ids and loss mask (1 = supervised), both of one length, of each row's segments one after another. All texts
    go through the tokenizer in one call, which is what makes it fast."""
    encoded = iter(_continued(tokenizer, rows) if _depends_on_text_before(tokenizer) else _ids(
        tokenizer, [segment.text for row in rows for segment in row if segment.token_ids is None]))
    result = []
    for row in rows:
        input_ids: list[int] = []
        loss_mask: list[int] = []
        for segment in row:
            ids = next(encoded) if segment.token_ids is None else segment.token_ids
            input_ids.extend(ids)
            loss_mask.extend([int(segment.supervised)] * len(ids))
        result.append((input_ids, loss_mask))
    return result


def _ids(tokenizer, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False,
                     verbose=False)["input_ids"] if texts else []


def _depends_on_text_before(tokenizer) -> bool:
    """Whether a text alone has other tokens than behind another: tokenizers in the manner of Llama 2 (Mistral, Phi-3)
    put a space before the first word, and some of their tokens swallow the line end behind them."""
    alone, other, together = _ids(tokenizer, ["a", GUARD, GUARD + "a"])
    return together != other + alone or any(token.rstrip for token in tokenizer.added_tokens_decoder.values())


def _continued(tokenizer, rows: Sequence[Sequence[Segment]]) -> list[list[int]]:
    """The ids of the segments that are text, each as it is behind the segments before it: tokenised behind the special
    token that stands there, or else behind a character that joins with nothing, whose own ids are then taken off."""
    special = sorted((token.content for token in tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
    guards, texts = [], []
    for row in rows:
        before = ""
        for segment in row:
            if segment.token_ids is None:
                guards.append(next(filter(before.endswith, special), GUARD) if before else "")
                texts.append(segment.text)
            before = segment.text or before
    taken = dict(zip(known := sorted(set(guards)), _ids(tokenizer, known), strict=True))
    result = []
    for guard, text, ids in zip(guards, texts, _ids(tokenizer, list(map("".join, zip(guards, texts, strict=True)))),
                                strict=True):
        if ids[:len(taken[guard])] != taken[guard]:
            raise ConversationError(f"the tokenizer joins {text[:20]!r} with what stands before it ({guard!r}), so no "
                                    "mask can be told there")
        result.append(ids[len(taken[guard]):] if text else [])
    return result


def tokenize_segments(tokenizer, segments: Sequence[Segment]) -> tuple[list[int], list[int]]:
    """`tokenize_rows` for one row."""
    return tokenize_rows(tokenizer, [segments])[0]


def row_segments(template, conversation: Conversation) -> list[Segment]:
    """The segments of a conversation's row. Raises ConversationError (see `segment_conversation`).

    The template's text after the last supervised token is left out: nothing is predicted from it. A row that is
    tokenised already is taken as it is; ids that the tokenizer does not have are refused.
    """
    template = as_template(template)
    if conversation.input_ids is not None:
        segments, mask = [], conversation.loss_mask
        _check_vocabulary(template.tokenizer, conversation.input_ids, f"conversation {conversation.id}")
        start = 0
        for end in range(1, len(mask) + 1):
            if end == len(mask) or mask[end] != mask[start]:
                segments.append(Segment("", bool(mask[start]), tuple(conversation.input_ids[start:end])))
                start = end
    else:
        segments = segment_conversation(template, conversation)
    while segments and not segments[-1].supervised:
        segments.pop()
    return segments


def encode_conversation(template, conversation: Conversation) -> tuple[list[int], list[int]]:
    """Token ids and loss mask of a conversation's row. Raises ConversationError (see `row_segments`)."""
    template = as_template(template)
    return tokenize_segments(template.tokenizer, row_segments(template, conversation))


def encode_prompt(template, conversation: Conversation) -> list[int]:
    """Token ids of the conversation so far plus the generation prompt: what the target continues."""
    template = as_template(template)
    segments = _segments(Alignment(template, conversation, as_prompt=True), supervised=())
    return tokenize_segments(template.tokenizer, segments)[0]
