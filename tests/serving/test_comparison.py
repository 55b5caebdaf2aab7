"""The comparison: figures against sums done by hand, verdicts against planted faults, causes in the right order."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from dflash_lib.__main__ import main
from dflash_lib.decoding import served_comparison
from dflash_lib.decoding.acceptance import acceptance_length, by_slot
from dflash_lib.decoding.served import Served, ServedAnswer
from dflash_lib.decoding.served_causes import likely_causes
from dflash_lib.decoding.served_comparison import Reference, TextAgreement, compare, compare_texts, wilson
from dflash_lib.decoding.server import DraftCounts
from dflash_lib.decoding.speculative import greedy_generate
from dflash_lib.report.figures_serving import served_figure, served_table
from tests.serving.stand_in import Scripted, StandIn

BLOCK_SIZE = 4
ALL_EQUAL = TextAgreement(24, 24)


def make(num_prompts: int = 24, seed: int = 0, shares=(0.6, 0.5, 0.4)) -> list[list[int]]:
    """Accepted drafts of every step of every prompt: slot k is accepted with shares[k - 1] when the one before was."""
    rng = np.random.default_rng(seed)
    return [[int(np.cumprod(rng.random(3) < shares).sum()) for _ in range(30)] for _ in range(num_prompts)]


def references(accepted: list[list[int]]) -> list[Reference]:
    return [Reference.from_record({"id": str(i), "prompt_ids": [1, 2], "token_ids": [7] * (1 + sum(steps) + len(steps)),
                                   "finish_reason": "length", "accepted": steps, "num_new": [n + 1 for n in steps]},
                                  BLOCK_SIZE) for i, steps in enumerate(accepted)]


def served(accepted: list[list[int]], num_slots: int = 3, **changes) -> Served:
    answers = []
    for i, steps in enumerate(accepted):
        num_tokens = 1 + sum(steps) + len(steps)
        counts = DraftCounts(len(steps), tuple(sum(n >= k for n in steps) for k in range(1, num_slots + 1)),
                             num_slots * len(steps))
        answers.append(ServedAnswer(str(i), [7] * num_tokens, "", num_tokens, "length", counts))
    return Served(**{"model": "target", "engine": "vllm", "answers": answers, "accept_length": None, "warnings": [],
                     **changes})


def test_the_same_steps_agree_and_every_figure_is_the_plain_sum():
    accepted = make()
    ours, steps = references(accepted), [n for one in accepted for n in one]
    walked = [one.steps for one in references(make(seed=9))]
    result = compare(ours, served(accepted), BLOCK_SIZE, ALL_EQUAL, walked)
    assert result.verdict == "agree" and result.causes == [] and result.warnings == []
    assert result.length.ours.value == result.length.served.value == pytest.approx(1 + sum(steps) / len(steps))
    assert result.raw_length == pytest.approx(result.length.served.value)
    assert (result.length.gap.low, result.length.gap.high) == (0, 0) and result.num_same_steps == 24
    assert result.visible_gap == pytest.approx(0.01 * result.length.ours.value)
    walk_steps = [step for one in walked for step in one]
    assert result.length.walked == acceptance_length(walk_steps)
    for row in result.slots:
        share = np.mean([n >= row.slot for n in steps])
        assert row.ours.value == pytest.approx(share) and row.served.value == pytest.approx(share)
        assert (row.served.low, row.served.high) == wilson(share * len(steps), len(steps))
        assert row.walked == by_slot(walk_steps).cumulative[row.slot - 1] and not row.beyond


def test_wilson_is_the_binomial_interval():
    """Its bounds are the shares from which the observed one is 1.96 standard deviations away."""
    for num, of in ((3, 40), (20, 40), (39, 40)):
        low, high = wilson(num, of)
        for bound in (low, high):
            assert abs(num / of - bound) / (bound * (1 - bound) / of) ** 0.5 == pytest.approx(1.96)
    assert wilson(0, 40)[0] == 0 and 0 < wilson(0, 40)[1] < 0.1


def test_noise_of_other_texts_is_no_gap_and_few_prompts_decide_nothing():
    parted = TextAgreement(24, 0, num_near_ties=24)
    result = compare(references(make(seed=1)), served(make(seed=2)), BLOCK_SIZE, parted)
    assert result.warnings == [] and result.causes == []  # other texts have other steps
    assert result.verdict == "agree" and result.length.gap.low < 0 < result.length.gap.high
    assert 0.02 < result.visible_gap < 0.1 * result.length.ours.value
    few = [compare(references(make(7, seed=seed)), served(make(7, seed=99 - seed)), BLOCK_SIZE, ALL_EQUAL)
           for seed in range(20)]
    assert {one.verdict for one in few} == {"inconclusive"} and "ask more prompts" in served_table(few[0])
    noisy = [[3] * 30 if i % 2 else [0] * 30 for i in range(12)]
    blind = compare(references(noisy), served(noisy[::-1]), BLOCK_SIZE, parted)
    assert blind.visible_gap > 0.1 * blind.length.ours.value and blind.verdict == "inconclusive"


@pytest.mark.parametrize("shares, first, last", [
    ((0.3, 0.5, 0.4), "layer ids", "the server's counts"),  # slot 1 is low already
    ((0.6, 0.2, 0.4), "rope", "the server's counts"),       # only behind it
    ((0.8, 0.5, 0.4), "another drafter", "the server's counts")])
def test_a_gap_and_its_likely_causes(shares, first, last):
    result = compare(references(make(seed=1)), served(make(seed=2, shares=shares)), BLOCK_SIZE, ALL_EQUAL)
    assert result.verdict == "gap" and result.length.beyond
    assert result.causes[0].startswith(first) and result.causes[-1].startswith(last)
    assert result.slots[0].beyond == (shares[0] != 0.6)
    assert "Serving does not agree" in served_table(result) and f"  1. {first}" in served_table(result)


def test_other_steps_for_equal_texts_are_a_gap_where_acceptance_shows_nothing():
    """As in vLLM with the demo's export shifted by one layer: slot 1 0.278 for 0.292, and 2 of 8 prompts the same."""
    mine = make(seed=1)
    for num_same, is_said in ((12, False), (11, True)):
        result = compare(references(mine), served([*mine[:num_same], *make(seed=2)[num_same:]]), BLOCK_SIZE, ALL_EQUAL)
        assert result.num_same_steps == num_same and result.verdict == ("gap" if is_said else "agree")
        assert not any(row.beyond for row in [result.length, *result.slots])
        assert [w.split(":")[0] for w in result.warnings] == ["other-drafts"] * is_said
        assert [cause.split(":")[0] for cause in result.causes[:1]] == ["layer ids"] * is_said
        assert f"the same verify steps for {num_same} of 24 prompts" in served_table(result)


def test_single_steps_that_rounding_moved_in_long_answers_are_no_other_drafts():
    """Each of 24 answers of 100 steps has one accepted draft more or less: none has the same steps, 2 % differ."""
    mine = [[1, 0] * 50 for _ in range(24)]
    theirs = [[*one[:-2], 0, 0, 0] if i % 2 else [*one[:-3], 1] for i, one in enumerate(mine)]
    result = compare(references(mine), served(theirs), BLOCK_SIZE, ALL_EQUAL)
    assert result.num_same_steps == 0 and result.verdict == "agree" and not result.warnings


def test_texts_that_nobody_judged_do_not_agree():
    accepted = make()
    texts = TextAgreement(24, 20, num_unjudged=4, positions=(3, 4, 5, 6))
    result = compare(references(accepted), served(accepted), BLOCK_SIZE, texts)
    assert result.verdict == "inconclusive" and "4 texts are not ours" in served_table(result)


def test_all_causes_of_the_issue_are_named():
    causes = " ".join(likely_causes(ours=[0.5], served=[0.1], is_higher=False, is_off=True, num_apart=1, positions=[3],
                                    num_slots=5, block_size=8))
    for name in ("layer ids", "rope", "mask id", "causal flag", "template", "thinking mode", "dtype", "vocabulary",
                 "5 tokens a step", "num_speculative_tokens"):
        assert name in causes


def test_texts_that_part_and_short_blocks_are_faults_by_themselves():
    accepted = make()
    early = TextAgreement(24, 20, num_apart=4, positions=(0, 0, 0, 5))
    late = TextAgreement(24, 20, num_apart=4, positions=(0, 9, 7, 5))
    ours = references(accepted)
    assert [compare(ours, served(accepted), BLOCK_SIZE, texts).causes[0].split(":")[0] for texts in (early, late)
            ] == ["target", "dtype and quantisation"]
    rounding = TextAgreement(24, 20, num_rounding=4, positions=(3, 4, 5, 6))
    assert compare(ours, served(accepted), BLOCK_SIZE, rounding).verdict == "agree"
    short = compare(references([[min(n, 2) for n in steps] for steps in accepted]),
                    served([[min(n, 2) for n in steps] for steps in accepted], num_slots=2), BLOCK_SIZE, ALL_EQUAL)
    assert short.verdict == "gap" and short.num_slots == 2 and "drafts 2 tokens a step" in short.causes[0]
    assert short.slots[2].served is None and not short.slots[2].beyond


def test_drafts_behind_the_end_are_no_gap():
    """vLLM counts the whole last step; ours ends with the answer, two tokens into it."""
    accepted = [[*steps, 3] for steps in make()]
    ours, theirs = [], served(accepted)
    answers = []
    for reference, answer in zip(references(accepted), theirs.answers, strict=True):
        steps = [*reference.steps[:-1], reference.steps[-1].__class__(0, 3, 2, 2)]
        ours.append(Reference(reference.id, [1, 2], reference.token_ids[:-2], "length", steps))
        answers.append(ServedAnswer(answer.id, answer.token_ids[:-2], "", answer.num_tokens - 2, "length",
                                    answer.counts))
    result = compare(ours, Served("target", "vllm", answers, None, []), BLOCK_SIZE, ALL_EQUAL)
    mine = [step for one in ours for step in one.steps]
    assert result.length.served.value == result.length.ours.value == pytest.approx(acceptance_length(mine))
    assert result.raw_length > result.length.served.value and result.verdict == "agree"
    third = result.slots[2]
    assert third.gap.low <= 0 <= third.gap.high


def test_prompts_without_counts_are_left_out_on_both_sides():
    accepted, theirs = make(), served(make())
    lost = theirs.answers[5]
    theirs.answers[5] = ServedAnswer(lost.id, lost.token_ids, "", lost.num_tokens, "length", None, "another client")
    result = compare(references(accepted), theirs, BLOCK_SIZE, ALL_EQUAL)
    kept = [n for i, one in enumerate(accepted) if i != 5 for n in one]
    assert result.num_counted == 23 and result.num_prompts == 24 and result.num_steps == len(kept)
    assert result.length.ours.value == result.length.served.value == pytest.approx(1 + sum(kept) / len(kept))


def test_steps_without_slots_an_average_and_nothing():
    accepted, only_steps = make(), served(make())
    only_steps = [ServedAnswer(a.id, a.token_ids, "", a.num_tokens, "length", DraftCounts(a.counts.num_steps))
                  for a in only_steps.answers]
    result = compare(references(accepted), Served("t", "sglang", only_steps, None, []), BLOCK_SIZE, ALL_EQUAL)
    assert result.verdict == "agree" and result.length.served.value == pytest.approx(result.length.ours.value)
    assert [row.served for row in result.slots] == [None] * 3 and result.num_slots is None
    nothing = [ServedAnswer(a.id, a.token_ids, "", a.num_tokens, "length", None, "") for a in only_steps]
    ours = result.length.ours
    for average, verdict in ((ours.value, "agree"), (ours.value - 0.5, "gap"), (None, "inconclusive")):
        result = compare(references(accepted), Served("t", "sglang", nothing, average, []), BLOCK_SIZE, ALL_EQUAL)
        assert result.verdict == verdict
        served_figure(result).canvas.draw()  # nothing to draw is no error
        assert "SGLang, model t: 24 prompts, 0 with counts" in served_table(result)


def test_texts_are_judged_by_the_targets_own_logits(tiny_talker, monkeypatch):
    prompt = [5, 9, 40, 41]
    answer = greedy_generate(tiny_talker, prompt, 12).token_ids
    logits = tiny_talker.model(input_ids=torch.tensor([prompt + answer[:4]])).logits[0, -1].float()
    best, second = logits.topk(2)
    assert best[0] == logits[answer[4]]
    gap, other = float(best[0] - best[1]), int(second[1])
    ours = Reference("a", prompt, answer, "length", [])

    def judged(token_ids, target=tiny_talker, text=""):
        return compare_texts([ours], [ServedAnswer("a", token_ids, text, 12, "length", None)], target)

    changed = [*answer[:4], other, *answer[5:]]
    assert judged(answer) == TextAgreement(1, 1)
    monkeypatch.setattr(served_comparison, "ROUNDING", gap * 1.01)
    assert judged(changed) == TextAgreement(1, 0, num_rounding=1, positions=(4,))
    monkeypatch.setattr(served_comparison, "ROUNDING", gap * 0.99)
    assert judged(changed) == TextAgreement(1, 0, num_apart=1, positions=(4,))
    monkeypatch.setattr("dflash_lib.decoding.agreement.NEAR_TIE", gap * 1.01)
    assert judged(changed) == TextAgreement(1, 0, num_near_ties=1)
    assert judged(changed, target=None) == TextAgreement(1, 0, num_unjudged=1, positions=(4,))
    assert judged([*answer[:4], 10**6]).num_apart == 1  # a token that the target does not have
    assert judged(answer[:-1]).num_apart == 1  # cut short, which no rounding explains
    text = tiny_talker.tokenizer.decode(answer, skip_special_tokens=True)
    assert judged(None, text=text) == TextAgreement(1, 1)
    found = judged(None, text=tiny_talker.tokenizer.decode(answer[:3], skip_special_tokens=True) + "~~~~")
    assert found.num_unjudged == 1 and found.positions[0] >= 3


def test_an_end_of_turn_that_a_server_keeps_to_itself_is_no_difference():
    ours = Reference("a", [1], [7, 8, 2], "stop", [])
    for token_ids, finish, equal in (([7, 8], "stop", 1), ([7, 8], "length", 0), ([7], "stop", 0)):
        answer = ServedAnswer("a", token_ids, "", len(token_ids), finish, None)
        assert compare_texts([ours], [answer], None).num_identical == equal


def test_the_figure_draws_what_it_is_given():
    result = compare(references(make(seed=1)), served(make(seed=2, shares=(0.3, 0.5, 0.4))), BLOCK_SIZE, ALL_EQUAL)
    figure = served_figure(result)
    figure.canvas.draw()
    left, right = figure.axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in left.lines}
    points = [list(container[0].get_ydata()) for container in left.containers]
    assert points == [pytest.approx([100 * row.ours.value for row in result.slots]),
                      pytest.approx([100 * row.served.value for row in result.slots])]
    assert "training's walk" not in drawn
    colours = [line.get_color() for line in right.lines if line.get_marker() == "D"]
    assert colours == [served_figure.__globals__["COLOURS"]["vermilion" if row.beyond else "green"]
                       for row in result.slots]


def test_the_command(tmp_path, capsys):
    """`evaluate --server` on a run folder: prompts and steps of 07_evaluate's record, files beside them, exit codes."""
    accepted = make(10)
    decoded = [{"id": f"p{i}", "kind": "", "prompt_ids": [1, i], "token_ids": [7] * (1 + sum(steps) + len(steps)),
                "finish_reason": "length", "accepted": steps, "num_new": [n + 1 for n in steps]}
               for i, steps in enumerate(accepted)]
    (tmp_path / "results").mkdir()
    record = {"results": {"block_size": BLOCK_SIZE, "decoded": decoded}, "parameters": {"eval_max_new_tokens": 99}}
    (tmp_path / "results" / "07_evaluate.json").write_text(json.dumps(record))
    right = {(1, i): Scripted(one["token_ids"], one["accepted"]) for i, one in enumerate(decoded)}
    command = ["evaluate", "--drafter", str(tmp_path), "--no-target", "--server"]
    with StandIn(right) as stand_in:
        assert main([*command, stand_in.url]) == 0
    assert "Serving agrees" in capsys.readouterr().out
    assert json.loads((tmp_path / "served" / "comparison.json").read_text())["verdict"] == "agree"
    assert (tmp_path / "served" / "served.png").stat().st_size > 1000
    wrong = {prompt: Scripted(one.token_ids, [0] * (len(one.token_ids) - 1)) for prompt, one in right.items()}
    with StandIn(wrong) as stand_in:
        assert main([*command, stand_in.url, "--num-prompts", "8"]) == 1
    assert "8 prompts" in (said := capsys.readouterr().out) and "1. layer ids" in said
    assert len((tmp_path / "served" / "answers.jsonl").read_text().splitlines()) == 8
    record["results"]["sample_from_anchor"] = True
    (tmp_path / "results" / "07_evaluate.json").write_text(json.dumps(record))
    with StandIn(wrong) as stand_in:
        assert main([*command, stand_in.url, "--num-prompts", "8"]) == 1
    assert "1. sample_from_anchor: slot k" in capsys.readouterr().out
    assert main(["evaluate", "--drafter", str(tmp_path / "nowhere"), "--server", "localhost:1"]) == 2
    for more in (["--model", "x"], ["--out", "x"], ["--drafter", "x"], ["--dtype", "bfloat16"], ["--thinking", "on"]):
        assert main([*command, "localhost:1", *more]) == 2
    assert main(["evaluate", "--drafter", str(tmp_path)]) == 2
    assert "no results of 07_evaluate" in capsys.readouterr().err


def test_answers_that_the_server_cuts_are_said():
    accepted = make()
    result = served(accepted)
    short = [replace(answer, num_tokens=3, counts=None) if i == 4 else answer
             for i, answer in enumerate(result.answers)]
    parted = TextAgreement(24, 23, num_apart=1, positions=(3,))
    found = compare(references(accepted), replace(result, answers=short), BLOCK_SIZE, parted)
    assert [w for w in found.warnings if w.startswith("cut: the server ended 1 answers")]


def test_rounding_excuses_some_texts_and_not_most():
    accepted = make()
    for num_rounding, verdict in ((12, "agree"), (13, "inconclusive")):
        texts = TextAgreement(24, 24 - num_rounding, num_rounding=num_rounding, positions=(3,) * num_rounding)
        result = compare(references(accepted), served(accepted), BLOCK_SIZE, texts)
        assert result.verdict == verdict
    assert "13 of 24 texts part where 16-bit rounding may be the reason" in served_table(result)
