"""recipe_study: levels that change one thing, intervals that hold for all of them together, verdicts that follow."""

import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from dflash_lib.decoding.acceptance import Interval, ratio_difference
from dflash_lib.drafter.recipe import TrainOptions
from dflash_lib.report.figures_recipe import differences_figure
from dflash_lib.workbench import recipe_study
from dflash_lib.workbench.recipe_study import (
    BETTER,
    FACTORS,
    NOT_JUDGED,
    WITHIN,
    WORSE,
    Comparison,
    Level,
    base_values,
    compare,
    comparison_table,
    corrected_difference,
    judge,
    levels,
    possible,
    prompt_variance,
    seed_variance,
    spread,
    summary,
)
from dflash_lib.workbench.variants import Outcome, student_quantile
from tests.report.drawn import check, lines

BASE = TrainOptions(block_size=8, mask_token_id=3)


def changes(level: Level) -> dict:
    base, here = asdict(BASE), asdict(level.options)
    return {name: here[name] for name in here if here[name] != base[name]}


def test_a_level_changes_one_thing():
    found = levels(BASE)
    names = [level.variant for level in found]
    assert len(set(names)) == len(names)
    together = {"slot_weighting", "slots_per_anchor"}, {"sample_from_anchor", "block_size"}
    assert all(len(changes(level)) == 1 or set(changes(level)) in together for level in found)
    by_factor = {factor: [changes(level) for level in found if level.factor == factor] for factor in FACTORS}
    assert by_factor["learning_rate"] == [{"learning_rate": pytest.approx(0.002)},
                                          {"learning_rate": pytest.approx(0.0125)}]
    assert by_factor["optimizer"] == [{"optimizer": "muon"}]
    assert by_factor["warm_start"] == [{"warm_start": False}] and by_factor["average"] == [{"average": 0.0}]
    assert by_factor["loss"] == [{"kl_weight": 0.0}, {"kl_weight": 1.0},
                                 {"slot_weighting": "dpace", "slots_per_anchor": 7}]
    assert by_factor["sample_from_anchor"] == [{"sample_from_anchor": True, "block_size": 7}], "7 drafts either way"
    assert by_factor["gamma"] == [{"gamma": 0.75}, {"gamma": 4.0}]
    assert by_factor["anchors_per_sample"] == [{"anchors_per_sample": 8}, {"anchors_per_sample": 64}]
    assert by_factor["slots_per_anchor"] == [{"slots_per_anchor": 7}]
    assert by_factor["num_layers"] == [{"num_layers": 2}, {"num_layers": 3}]


def test_levels_of_another_base():
    base = TrainOptions(block_size=16, mask_token_id=3, slots_per_anchor=15, kl_weight=0.0, average=0.0, num_layers=5)
    names = {level.variant for level in levels(base)}
    assert {"gamma=7 (published)", "slots_per_anchor=2", "average=0.99", "num_layers=1", "loss=KL 0.7"} <= names
    assert "slots_per_anchor=all 15" not in names, "that is the base"
    values = base_values(base)
    assert (values["num_layers"], values["slots_per_anchor"], values["loss"]) == ("5", "all 15", "cross-entropy")
    anchored = replace(BASE, sample_from_anchor=True, block_size=7, slots_per_anchor=7, slot_weighting="dpace")
    assert base_values(anchored)["slots_per_anchor"] == "all 7"
    assert base_values(anchored)["loss"] == "KL 0.7 and D-PACE"
    back, = levels(anchored, ["sample_from_anchor"])
    assert levels(anchored, ["slots_per_anchor"]) == [], "D-PACE needs them all"
    mixed = levels(replace(BASE, num_layers=5, num_sliding_layers=4, sliding_window=64), ["num_layers"])
    assert [(level.name, level.options.num_sliding_layers) for level in mixed] == [("1", 0), ("2", 1), ("3", 2)]
    assert (back.options.block_size, back.options.sample_from_anchor) == (8, False)
    assert {level.factor for level in levels(base, ["gamma", "average"])} == {"gamma", "average"}
    with pytest.raises(ValueError, match=r"factors \['depth'\]: not among optimizer, learning_rate, "):
        levels(base, ["depth"])


def test_levels_that_cannot_be_trained_are_left_out_with_a_reason():
    found = levels(BASE)
    assert possible(found, "supervised", 3) == (found, [])
    kept, lacking = possible(found, "supervised", 2)
    assert [level.variant for level in found if level not in kept] == ["num_layers=3"]
    assert lacking == ["num_layers=3: left out, a warm start has only 2 layers with ordinary attention to copy"]
    base = replace(BASE, warm_start=False, kl_weight=0.0, intermediate_size=96)
    kept, lacking = possible(levels(base), "none", 1)
    assert [line.partition(":")[0] for line in lacking] == ["warm_start=on", "loss=KL 0.7", "loss=KL alone"]
    assert lacking[0].endswith("the drafter's sizes are not the target's: intermediate_size 96")
    assert {"num_layers=3"} <= {level.variant for level in kept}


def test_prompts_are_spread_over_all_files():
    assert spread("abcdefgh", 4) == ["a", "c", "e", "g"] and spread("abc", None) == spread("abc", 9) == ["a", "b", "c"]
    assert len(set(spread(range(112), 50))) == 50


def test_student_quantiles_against_a_table():
    for free, probability, value in ((1, 0.975, 12.7062), (2, 0.975, 4.30265), (4, 0.95, 2.13185), (7, 0.975, 2.36462),
                                     (34, 0.995, 2.72839), (1e5, 0.975, 1.95999), (2, 0.9995, 31.5991)):
        assert student_quantile(probability, free) == pytest.approx(value, rel=1e-4)
    assert student_quantile(0.975, 2) > student_quantile(0.975, 2.5) > student_quantile(0.975, 3)


def outcomes(rng, means, num_seeds=3, num_prompts=60, seed_noise=0.0):
    """Outcomes whose prompts differ in length and difficulty, the same for all, each with noise of its own."""
    steps = rng.integers(15, 40, num_prompts).astype(float)
    hard = rng.normal(0, 0.5, num_prompts)
    found = []
    for number, mean in enumerate(means):
        noise = rng.normal(0, seed_noise, (num_seeds, 1)) + rng.normal(0, 0.1, (num_seeds, num_prompts))
        tokens = steps * (mean + hard + noise)
        found.append(Outcome(str(number), np.stack([tokens, np.broadcast_to(steps, tokens.shape)], axis=-1),
                             [1.0] * num_seeds))
    return found


def levels_like(num: int) -> list[Level]:
    return [Level("gamma", str(i), BASE) for i in range(num)]


def test_variance_over_prompts_against_the_bootstrap():
    one, other = outcomes(np.random.default_rng(0), [2.0, 2.3])
    interval = ratio_difference(one.counts.sum(axis=0), other.counts.sum(axis=0))
    assert math.sqrt(prompt_variance(one, other)) == pytest.approx((interval.high - interval.low) / 2 / 2.0, rel=0.1)


def test_variance_over_seeds_is_what_differences_scatter():
    """Means of three seeds of two recipes with noise 0.2, drawn many times, differ with the stated variance; what all
    recipes of a seed share and what sets recipes apart is no part of it."""
    rng = np.random.default_rng(0)
    draws = rng.normal(0, 0.2, (4000, 6, 3))
    stated = np.mean([seed_variance(d + rng.normal(0, 5, (6, 1)) + rng.normal(0, 5, 3)) for d in draws])
    assert stated == pytest.approx(np.var(draws[:, 0].mean(axis=1) - draws[:, 1].mean(axis=1)), rel=0.05)


def test_of_recipes_that_are_the_same_hardly_one_study_finds_a_difference():
    """12 levels, none of them different: at most 1 in 20 studies may find one; uncorrected, every third would."""
    rng, wrong = np.random.default_rng(1), 0
    for _ in range(150):
        base, *others = outcomes(rng, [2.0] * 13, num_prompts=30, seed_noise=0.05)
        lengths = np.array([outcome.by_seed for outcome in (base, *others)])
        intervals = [corrected_difference(base, other, lengths, len(others)) for other in others]
        wrong += any(interval.low > 0 or interval.high < 0 for interval in intervals)
    assert wrong <= 13


def slowed(outcome: Outcome) -> Outcome:
    """As if it cost half as much again and other jobs had disturbed two seeds of three."""
    return replace(outcome, seconds=[9.0, 1.5, 4.0])


def test_real_differences_are_found_and_have_their_sign():
    base, *others = outcomes(np.random.default_rng(2), [2.0, 2.4, 1.6, 2.0], seed_noise=0.03)
    found = compare(base, others, levels_like(3))
    assert [c.verdict for c in found] == [BETTER, WORSE, WITHIN]
    assert found[0].cost == 1.0 and compare(base, [slowed(others[0])], levels_like(1))[0].cost == 1.5
    assert found[0].difference.low < found[0].prompts.low, "wider than over prompts alone"
    assert found[0].difference.value == pytest.approx(np.mean(others[0].by_seed) - np.mean(base.by_seed))


def test_noise_of_seeds_alone_keeps_a_difference_within_noise():
    """Over prompts each is clear of zero; over seeds the sign changes."""
    base, other = outcomes(np.random.default_rng(3), [2.0, 2.0])
    shifted = other.counts.copy()
    shifted[:, :, 0] += shifted[:, :, 1] * np.array([0.9, 0.5, -0.4])[:, None]
    found, = compare(base, [Outcome("1", shifted, [1.0] * 3)], levels_like(1))
    assert found.prompts.low > 0.2 and found.verdict == WITHIN


def test_one_seed_or_prompt_is_not_judged():
    for kind in ({"num_seeds": 1}, {"num_prompts": 1}):
        base, other = outcomes(np.random.default_rng(0), [2.0, 3.0], **kind)
        found, = compare(base, [other], levels_like(1))
        assert found.verdict == NOT_JUDGED and found.difference.low == found.difference.high
        assert judge([found], base_values(BASE), 1.25)[0].state == NOT_JUDGED
        shown = comparison_table(base, [found]).iloc[1]
        assert shown["difference"] == f"{found.difference.value:+.3f}", "no interval where nothing tells the noise"
    base, _ = outcomes(np.random.default_rng(0), [2.0, 3.0])
    assert compare(base, [base], levels_like(1))[0].verdict == WITHIN, "no noise, no difference"


def comparison(factor: str, name: str, verdict: str, value: float = 0.1, cost: float = 1.0) -> Comparison:
    counts = np.full((2, 3, 2), 4.0)
    interval = Interval(value, value - 0.05, value + 0.05)
    return Comparison(Level(factor, name, BASE), Outcome(name, counts, [1.0, 2.0]), interval, interval, interval, cost,
                      verdict)


COMPARISONS = [comparison("gamma", "0.75", WORSE, -0.2), comparison("gamma", "4 (published)", WORSE, -0.3),
               comparison("loss", "KL alone", WITHIN, 0.01), comparison("loss", "cross-entropy", WORSE, -0.2),
               comparison("num_layers", "2", BETTER, 0.2, 1.9), comparison("num_layers", "3", BETTER, 0.3, 2.7),
               comparison("average", "none", BETTER, 0.2, 0.9)]


def test_what_the_verdicts_say_of_the_base():
    found = judge(COMPARISONS, base_values(BASE), max_cost=1.25)
    assert {v.factor: v.state for v in found} == {"gamma": "supported", "loss": "tie", "num_layers": "dearer",
                                                  "average": "beaten"}
    text = {v.factor: v.text for v in found}
    assert text["loss"] == "within noise: KL alone (more than ±0.050 would show); worse: cross-entropy"
    assert text["num_layers"].startswith("better beyond noise: 3 (+0.300 at 2.70 times the seconds), 2 (")
    assert {v.factor: v.state for v in judge(COMPARISONS, base_values(BASE), max_cost=2.0)}["num_layers"] == "beaten"
    assert summary(found) == ("Supported: gamma (slots). Ties: loss. Beaten: weight average. Beaten only by what costs "
                              "more: drafter layers.")
    assert recipe_study.verdict_table(found).loc["loss", "base"] == "KL 0.7"


def test_table_and_figure_show_every_level():
    base = Outcome("base", np.full((2, 3, 2), 4.0), [1.0, 2.0])
    table = comparison_table(base, COMPARISONS)
    assert len(table) == len(COMPARISONS) + 1 and table.loc[("gamma (slots)", "0.75"), "verdict"] == WORSE
    assert table.loc[("weight average", "none"), "difference"] == "+0.200 (+0.150 to +0.250)"
    assert table.loc[("drafter layers", "3"), "times the base's"] == "2.70"
    left, right = check(differences_figure(COMPARISONS, base_values(BASE)), 2)
    ticks = [text.get_text() for text in left.get_yticklabels()]
    assert ticks[:3] == ["gamma (slots), base 1.5", "0.75", "4 (published)"] and len(ticks) == 4 + len(COMPARISONS)
    row = ticks.index("3")
    assert [x for x, y in lines(left) if y == [row, row]] == [pytest.approx([0.25, 0.35])] * 2
    assert ([0, 2.7], [row, row]) in lines(right)
    markers = {line.get_marker() for line in left.lines if len(line.get_xdata()) == 1}
    assert markers == {"v", "^", "o"}, "a verdict has its own form, not only its colour"
