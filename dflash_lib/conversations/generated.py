"""What a target generated, as a message that its chat template renders into the very text that was generated.

The tokens that end a thought and begin an answer differ from model to model (`</think>`, gpt-oss's channels), so the
template itself is asked where it puts them. Whether a message is right is found by rendering, too: the mask of the row
that it makes must hold the generated ids.
"""

from typing import Any

from dflash_lib.conversations.alignment import Alignment
from dflash_lib.conversations.formats import Conversation, ConversationError
from dflash_lib.conversations.rendering import ChatTemplate
from dflash_lib.conversations.templates import generated_ids


def assistant_message(template: ChatTemplate, conversation: Conversation, text: str,
                      generated: dict[str, Any]) -> dict[str, Any]:
    """The answer to `conversation` as a message with content and, where the target thought, reasoning_content.

    template: with the options that the prompt was rendered with; text: what the ids say, without the token that ended
    it; generated: token_ids and finish_reason, which go along. An answer that the template cannot render as it was
    generated (a thought that was never closed, though the turn ended) is returned all the same; the preparation refuses
    its row.
    """
    plain = {"role": "assistant", "content": text, **generated}
    parts = _split(template, text)
    if parts is None and not template.answer_mark:
        return plain
    thought, content = parts or (None, text.removeprefix(template.answer_mark))
    apart = {"role": "assistant", "content": content, **({} if thought is None else {"reasoning_content": thought}),
             **generated}
    return next((message for message in (apart, plain) if _is_rendered(template, conversation, message)), apart)


def _split(template: ChatTemplate, text: str) -> tuple[str, str] | None:
    """(thought, content), or None where no thought was begun; all of it is thought where none was ended."""
    if template.thought_marks is None:
        return None
    opening, closing = template.thought_marks
    for mark in (opening, opening.strip()):
        if text.startswith(mark):
            text = text.removeprefix(mark)
            break
    else:
        return None
    for mark in filter(None, (closing, closing.strip())):
        thought, found, content = text.partition(mark)
        if found:
            return thought, content
    return text, ""


def _is_rendered(template: ChatTemplate, conversation: Conversation, message: dict[str, Any]) -> bool:
    """Whether the row of the conversation with this message at its end holds the generated ids."""
    messages = [*conversation.messages, message]
    try:
        alignment = Alignment(template, Conversation(conversation.id, messages, tools=conversation.tools))
        i = len(messages) - 1
        return generated_ids(alignment, i, alignment.turn(i)) is not None
    except ConversationError:
        return False
