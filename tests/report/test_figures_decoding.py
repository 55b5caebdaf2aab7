"""Figures of notebook 07: what they draw is what they were given."""

import numpy as np
import pytest

from dflash_lib.decoding.acceptance import Interval, SlotAcceptance
from dflash_lib.decoding.eval_prompts import EvalPrompt
from dflash_lib.decoding.side_by_side import BlockLength, SideBySide, Speed
from dflash_lib.decoding.speculative import Decoded, SpeculativeDecoded, Step
from dflash_lib.report import figures_decoding as figures
from tests.report.drawn import check, lines
from tests.tiny import make_tokenizer

ACCEPTANCE = {"trained drafter": Interval(1.5, 1.4, 1.6), "bigram table": Interval(1.2, 1.1, 1.3),
              "zeroed states": Interval(1.45, 1.3, 1.6)}
LEADS = {"bigram table": Interval(0.3, 0.2, 0.4), "zeroed states": Interval(0.05, -0.1, 0.2)}
SPEED = Speed(block_size=4, num_prompts=2, num_identical=2, num_near_ties=0, num_different=0, acceptance_length=1.5,
              tokens_per_second=2.0, plain_tokens_per_second=1.0,
              speedup=Interval(1.2, 1.1, 1.3), plain_step_s=0.1, step_s=0.12, verify_s=0.1,
              draft_s=0.02, output_token_s=0.08)
PROMPT = EvalPrompt("a", "facts", "What <b>?", [1, 2])


def test_proposers():
    left, right = check(figures.proposers_figure(ACCEPTANCE, LEADS), 2)
    assert [text.get_text() for text in left.get_yticklabels()] == list(ACCEPTANCE)
    assert ([1.4, 1.6], [0, 0]) in lines(left) and ([1.3, 1.6], [2, 2]) in lines(left)
    assert ([0.2, 0.4], [1, 1]) in lines(right) and ([-0.1, 0.2], [2, 2]) in lines(right)
    colours = {line.get_color() for line in right.lines if list(line.get_ydata()) == [2, 2]}
    assert colours == {figures.COLOURS["vermilion"]}  # not beyond its interval: seen at once


def test_kinds_are_sorted():
    axis, = check(figures.kinds_figure({"a": Interval(1, 1, 1), "b": Interval(2, 1.5, 2.5)}, Interval(1.5, 1, 2)), 1)
    assert [text.get_text() for text in axis.get_yticklabels()] == ["b", "a"]
    assert ([1.5, 2.5], [0, 0]) in lines(axis)


def test_slots_in_percent_with_gaps():
    slots = {"trained drafter": SlotAcceptance([0.5, 0.4], [0.5, 0.2], [10, 5]),
             "bigram table": SlotAcceptance([0.0, float("nan")], [0.0, 0.0], [10, 0])}
    left, right = check(figures.slots_figure(slots), 2)
    assert lines(left)[0] == ([1, 2], [50.0, 40.0]) and lines(right)[0] == ([1, 2], [50.0, 20.0])
    assert np.isnan(lines(left)[1][1][1])


def test_block_sizes():
    lengths = [BlockLength(2, 1.4, 1.1), BlockLength(3, 1.5, 1.6)]
    left, right = check(figures.block_size_figure(lengths, [SPEED]), 2)
    assert lines(left)[:2] == [([2, 3], [1.4, 1.5]), ([2, 3], [1.1, 1.6])]
    assert lines(right)[0][1] == pytest.approx([1.4 / 1.1, 1.5 / 1.6])
    assert any(x == [4] and y == [1.2] for x, y in lines(right))


def test_speed():
    steps = [Step(2, 3, 1, 2, 0.3, 0.1)] * 2
    results = [SideBySide(PROMPT, Decoded([1] * 5, "length", 5.0, 1.0),
                          {4: SpeculativeDecoded([1] * 5, "length", 2.0, 1.0, steps)})] * 2
    left, right = check(figures.speed_figure(results, SPEED), 2)
    assert ([0, 1], [1.0, 1.0]) in lines(left) and ([0, 1], [2.5, 2.5]) in lines(left)
    assert [bar.get_width() for bar in right.patches] == pytest.approx([2.0, 8.0, 2.0, 1.2, 0.4])


def test_the_coloured_answer():
    tokenizer = make_tokenizer()
    ids = tokenizer("a<b\nc1e", add_special_tokens=False)["input_ids"]
    text = [tokenizer.decode([i]) for i in ids]
    assert text == ["a", "<", "b", "\n", "c", "1", "e"]
    steps = [Step(2, 3, 2, 3), Step(5, 3, 0, 1), Step(6, 3, 2, 2)]
    page = figures.answer_html(tokenizer, PROMPT.text, SpeculativeDecoded(ids, "length", 1.0, 0.5, steps))
    assert "What &lt;b&gt;?" in page
    blue, sand = '<span style="background:#CFE8F7">', '<span style="background:#FBE3B5">'
    assert (f'<p>a{blue}&lt;</span>{blue}b</span><span><br></span><span>c</span>'
            f'{blue}1</span>{blue}e</span></p>') in page
    assert sand not in page  # the second step had nothing accepted
