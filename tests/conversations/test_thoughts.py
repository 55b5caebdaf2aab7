"""thoughts: which supervised tokens are thoughts, told from what templates render."""

import numpy as np
import pytest

from dflash_lib.conversations.formats import Conversation
from dflash_lib.conversations.prepare import PrepareOptions, prepare
from dflash_lib.conversations.templates import ChatTemplate, encode_conversation
from dflash_lib.conversations.thoughts import ANSWER, PROMPT, THOUGHT, TokenGroups, find_thought_marks
from dflash_lib.target.loading import load_tokenizer
from tests.conftest import REPOSITORY
from tests.tiny import make_tokenizer

HEAD = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
TAIL = "{{ m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n"
WRITES_IT = (HEAD + "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
             + TAIL + "' }}{% endif %}")  # as Qwen3's: the target opens the thought itself
OPENED = WRITES_IT.removesuffix("' }}{% endif %}") + "<think>\n' }}{% endif %}"  # as Qwen3.5's: the prompt does
CHANNELS = (HEAD + "{% if m.reasoning_content %}{{ '<|channel|>analysis<|message|>' + m.reasoning_content + "
            "'<|end|><|im_start|>assistant' }}{% endif %}{% if m.role == 'assistant' %}"
            "{{ '<|channel|>final<|message|>' }}{% endif %}" + TAIL + "' }}{% endif %}")  # as gpt-oss's


@pytest.fixture(scope="module")
def hybrid():
    return load_tokenizer(REPOSITORY / "data" / "tiny_hybrid")


def tokenizer_with(template):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def conversation(*answers):
    messages = []
    for thought, said in answers:
        messages += [{"role": "user", "content": "what is rain"}, {"role": "assistant", "content": said} | (
            {"reasoning_content": thought} if thought else {})]
    return Conversation("c", messages)


def grouped(tokenizer, *answers):
    """The row's texts by group, in order: [(group, text), ...]."""
    ids, mask = encode_conversation(ChatTemplate(tokenizer), conversation(*answers))
    groups = TokenGroups(tokenizer).of(ids, mask)
    assert ((groups == PROMPT) == (np.array(mask) == 0)).all()
    edges = [0, *np.flatnonzero(np.diff(groups)) + 1, len(ids)]
    return [(int(groups[a]), tokenizer.decode(ids[a:b])) for a, b in zip(edges, edges[1:], strict=False)]


def test_a_template_without_thoughts_has_no_marks():
    tokenizer = make_tokenizer()
    assert find_thought_marks(tokenizer) is None
    assert [group for group, _ in grouped(tokenizer, ("", "it is water"))] == [PROMPT, ANSWER]


def test_marks_of_a_template_that_drops_thoughts_are_known_from_the_vocabulary():
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    assert find_thought_marks(tokenizer) == ("<think>", "</think>")


@pytest.mark.parametrize("template, opening", [(WRITES_IT, "<think>"), (OPENED, "<think>"),
                                               (CHANNELS, "<|channel|>analysis<|message|>")])
def test_thought_and_answer_are_told_apart(template, opening):
    """Marks that are no tokens of their own, spelt in pieces; with a second turn that does not think."""
    tokenizer = tokenizer_with(template)
    assert find_thought_marks(tokenizer)[0] == opening
    parts = grouped(tokenizer, ("water falls", "it is water"), ("", "yes"))
    thought = [text for group, text in parts if group == THOUGHT]
    answers = [text for group, text in parts if group == ANSWER]
    assert len(thought) == 1 and "water falls" in thought[0] and "it is water" not in thought[0]
    assert "it is water" in answers[0] and "falls" not in answers[0] and "yes" in answers[-1]


def test_a_thought_that_was_cut_off_is_one_to_its_end():
    tokenizer = tokenizer_with(WRITES_IT)
    ids = tokenizer("<|im_start|>assistant\n<think>\nwater falls and")["input_ids"]
    start = next(i for i in range(len(ids)) if tokenizer.decode(ids[:i]).endswith("assistant\n"))
    mask = [int(i >= start) for i in range(len(ids))]
    assert (TokenGroups(tokenizer).of(ids, mask)[start:] == THOUGHT).all()


def test_the_tiny_hybrids_own_rows(hybrid):
    """Every shipped row: its thought ends with the token </think>; slow reference: look for that id."""
    rows = prepare(REPOSITORY / "data" / "tiny_hybrid_conversations.jsonl", hybrid, PrepareOptions(max_samples=60))
    close = hybrid.convert_tokens_to_ids("</think>")
    groups, num_thoughts = TokenGroups(hybrid), 0
    for i in range(len(rows)):
        ids, mask = rows.row(i)
        found = groups.of(ids, mask)
        supervised = np.flatnonzero(mask)
        last_turn = supervised[supervised > (np.flatnonzero(mask == 0).max())]
        ends = np.flatnonzero(ids[last_turn] == close)
        num = int(ends[0]) + 1 if len(ends) else len(last_turn)
        assert (found[last_turn[:num]] == THOUGHT).all() and (found[last_turn[num:]] == ANSWER).all()
        num_thoughts += int((found == THOUGHT).any())
    assert num_thoughts == len(rows) >= 50
