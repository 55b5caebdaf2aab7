"""Refused drafts against a drafter that is told what to get wrong."""

from dflash_lib.decoding.evaluation import answer_prompts, draft_answers, walk_block_sizes
from dflash_lib.decoding.rejections import find_rejections, rejection_examples, rejection_table, token_text
from tests.decoding.scripted import Scripted
from tests.decoding.test_evaluation import LAYER_IDS, PROMPTS
from tests.tiny import VOCAB_SIZE, make_tokenizer


class Wrong:
    """Drafts the answers' own tokens, with those at the `bad` positions of a text replaced by the next id."""

    name = "wrong"

    def __init__(self, texts, bad):
        self.texts, self.bad = texts, bad

    def begin(self):
        self.known = []

    def extend(self, token_ids, states):
        self.known = [*self.known, *token_ids]

    def propose(self, anchor, num_tokens):
        start = [*self.known, anchor]
        text = next(text for text in self.texts if text[:len(start)] == start)
        drafts = []
        for at in range(len(start), len(start) + num_tokens):
            token = text[at] if at < len(text) else 7
            drafts.append((token + 1) % VOCAB_SIZE if at in self.bad else token)
        return drafts


def test_rejections_are_those_that_were_planted(tiny_talker):
    answers = answer_prompts(tiny_talker, PROMPTS, 10, LAYER_IDS)
    texts = [answer.text_ids for answer in answers]
    bad = {9, 10, 13}
    drafts = draft_answers(Wrong(texts, bad), answers, 4)
    walk = walk_block_sizes(drafts, answers, 4)[4]
    found = find_rejections(drafts, answers, walk)
    expected = []
    for answer, text, steps in zip(answers, texts, walk, strict=True):
        for step in steps:  # slow and obvious: look at each drafted token until one is wrong
            for slot in range(1, 4):
                at = step.position + slot
                if at < len(text) and at in bad:
                    expected.append((answer.prompt.id, slot, text[:at], (text[at] + 1) % VOCAB_SIZE, text[at]))
                    break
    assert [(r.prompt_id, r.slot, r.context_ids, r.drafted, r.wanted) for r in found] == expected
    assert len(expected) >= 3
    right = draft_answers(Scripted(texts[0]), answers[:1], 4)
    assert find_rejections(right, answers[:1], walk_block_sizes(right, answers[:1], 4)[4]) == []


def test_the_tables_count_and_show(tiny_talker):
    answers = answer_prompts(tiny_talker, PROMPTS, 10, LAYER_IDS)
    drafts = draft_answers(Wrong([a.text_ids for a in answers], set(range(0, 40, 2))), answers, 4)
    found = find_rejections(drafts, answers, walk_block_sizes(drafts, answers, 4)[4])
    table = rejection_table(tiny_talker.tokenizer, found, num_rows=100)
    assert sum(row["times"] for row in table) == len(found) == sum(sum(row["slots"].values()) for row in table)
    assert abs(sum(row["share"] for row in table) - 1) < 1e-9
    assert [row["times"] for row in table] == sorted((row["times"] for row in table), reverse=True)
    for row in table:
        pair = [r for r in found if (token_text(tiny_talker.tokenizer, r.drafted),
                                     token_text(tiny_talker.tokenizer, r.wanted)) == (row["drafted"], row["wanted"])]
        assert len(pair) >= row["times"]
    examples = rejection_examples(tiny_talker.tokenizer, found, num_rows=2)
    assert [e["slot"] for e in examples] == [found[0].slot, found[len(found) // 2].slot]
    assert rejection_table(tiny_talker.tokenizer, []) == rejection_examples(tiny_talker.tokenizer, []) == []


def test_tokens_can_be_read():
    tokenizer = make_tokenizer()
    for text, shown in (("\n", "“\\n”"), (" the", "“ the”")):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert "".join(token_text(tokenizer, i)[1:-1] for i in ids) == shown[1:-1]
    half = tokenizer("é", add_special_tokens=False)["input_ids"]
    assert len(half) == 2 and token_text(tokenizer, half[0]) == f"part of a character (id {half[0]})"
