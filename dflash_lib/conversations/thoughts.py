"""Which supervised tokens are the target's thoughts and which its answers, told from the rows' own text.

The chat template is asked what stands before and behind a thought (`<think>` and `</think>`, gpt-oss's channels): no
token ids are written down here. A turn is a run of supervised tokens (each is fenced by template tokens). It begins
with a thought when the prompt opened one just before it, or when the target wrote the opening itself; the thought ends
with its closing mark, or with the turn when that was cut off.
"""

from collections.abc import Sequence

import numpy as np

from dflash_lib.conversations.formats import ConversationError
from dflash_lib.conversations.rendering import FOUR, ChatTemplate, TemplateOptions

PLAIN_MARKS = ("<think>", "</think>")  # of templates that leave thoughts out, with tokens for them all the same
PROMPT, ANSWER, THOUGHT = 0, 1, 2
GROUP_NAMES = ("prompt", "answer", "thought")


def find_thought_marks(tokenizer) -> tuple[str, str] | None:
    """(opening, closing) of a thought as the target's rows have them, without white space around; None where the
    template renders no thoughts and the vocabulary has no token that ends one."""
    for thinking in ("default", "on"):
        try:
            template = ChatTemplate(tokenizer, TemplateOptions(thinking=thinking))
            marks, prompt = template.thought_marks, template.text([FOUR], generation_prompt=True)
        except ConversationError:
            break  # no chat template, or one with demands that a plain question does not meet
        if marks is not None and marks[1].strip():
            opening = marks[0].strip() or prompt.split()[-1]  # "": the generation prompt opens the thought
            return opening, marks[1].strip()
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    return PLAIN_MARKS if set(PLAIN_MARKS) <= added else None


class TokenGroups:
    """Tells the tokens of rows apart. marks: what `find_thought_marks` found."""

    def __init__(self, tokenizer):
        self.tokenizer, self.marks = tokenizer, find_thought_marks(tokenizer)
        self._pieces: dict[int, str] = {}

    def text_of(self, token: int) -> str:
        """The text of one token alone, special tokens by their names."""
        if token not in self._pieces:
            self._pieces[token] = self.tokenizer.decode([token], skip_special_tokens=False,
                                                        clean_up_tokenization_spaces=False)
        return self._pieces[token]

    def of(self, input_ids: Sequence[int], loss_mask: Sequence[int]) -> np.ndarray:
        """int8 [T]: PROMPT where nothing is supervised, else THOUGHT (its marks with it) or ANSWER."""
        groups = np.where(np.asarray(loss_mask) > 0, ANSWER, PROMPT).astype(np.int8)
        if self.marks is None:
            return groups
        opening, closing = self.marks
        pieces = [self.text_of(int(token)) for token in input_ids]
        ends = np.cumsum([len(piece) for piece in pieces])  # in characters
        text = "".join(pieces)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], groups, [0]])))
        for first, behind in edges.reshape(-1, 2):
            start, stop = (int(ends[i - 1]) if i else 0 for i in (first, behind))
            said = text[start:stop]
            opened = text[:start].rstrip().endswith(opening)
            if not opened and not said.lstrip().startswith(opening):
                continue
            at = said.find(closing, 0 if opened else said.find(opening) + len(opening))
            end = stop if at < 0 else start + at + len(closing)
            thought = first + int(np.searchsorted(ends[first:behind], end)) + 1  # the token in which the mark ends
            groups[first:min(thought, behind)] = THOUGHT
        return groups
