"""A recipe's parts, changed one at a time: what each level of a factor does to the acceptance length, beyond chance.

A level is the base recipe with one thing changed. Its difference to the base is judged with both kinds of chance in it:
over held-out prompts (paired) and over seeds (weights, split, order). Three seeds say little of the second for one pair
of recipes, so its size is taken from all of them together, as in a two-way analysis of variance, which supposes that
recipes are equally unsteady. With m levels the intervals are Bonferroni's: all of them hold together in 95 % of the
studies, so that the best of many ties is not taken for a finding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dflash_lib.decoding.acceptance import Interval
from dflash_lib.drafter.recipe import OPTIMIZERS, TrainOptions
from dflash_lib.workbench.variants import Outcome, student_quantile

BASE = "base"
CONFIDENCE = 0.95  # that all intervals of a study hold together
FACTORS = {"optimizer": "optimizer", "learning_rate": "learning rate", "warm_start": "warm start", "loss": "loss",
           "gamma": "gamma (slots)", "anchors_per_sample": "anchors a document", "slots_per_anchor": "slots a block",
           "num_layers": "drafter layers", "average": "weight average", "sample_from_anchor": "anchor's slot drafts"}
PUBLISHED_GAMMA = {16: 7.0, 10: 5.0}  # by block_size; 4 for 8
BETTER, WORSE, WITHIN, NOT_JUDGED = "better", "worse", "within noise", "not judged"


@dataclass(frozen=True)
class Level:
    """factor: a key of FACTORS; name: the value that it has here, as text; options: the base's but for that."""

    factor: str
    name: str
    options: TrainOptions

    @property
    def variant(self) -> str:
        """A name of its own among all levels."""
        return f"{self.factor}={self.name}"


def levels(base: TrainOptions, factors: Sequence[str] = ()) -> list[Level]:
    """Every level of `factors` (none = all) that is not the base itself. Raises ValueError for factors that there are
    not."""
    unknown = sorted(set(factors) - set(FACTORS))
    if unknown:
        raise ValueError(f"factors {unknown}: not among {', '.join(FACTORS)}")
    found = [Level(factor, name, replace(base, **changes)) for factor, name, changes in _table(base)
             if factor in (factors or FACTORS)]
    return [level for level in found if level.options != base]


def possible(of_levels: Sequence[Level], last_state: str, num_attention_layers: int) -> tuple[list[Level], list[str]]:
    """The levels that can be trained, and a line of text for each that cannot.

    last_state: the store's, of which a KL needs some form; num_attention_layers: the target's layers with ordinary
    attention, of which a warm start needs as many as the drafter has.
    """
    kept, lacking = [], []
    for level in of_levels:
        options = level.options
        if options.kl_weight > 0 and last_state == "none":
            lacking.append(f"{level.variant}: left out, the store has no last state for a KL")
        elif options.warm_start and options.num_layers > num_attention_layers:
            lacking.append(f"{level.variant}: left out, a warm start has only {num_attention_layers} layers with "
                           "ordinary attention to copy")
        elif level.factor == "warm_start" and options.warm_start and _own_sizes(options):
            lacking.append(f"{level.variant}: left out, the drafter's sizes are not the target's: "
                           f"{_own_sizes(options)}")
        else:
            kept.append(level)
    return kept, lacking


def _own_sizes(options: TrainOptions) -> str:
    names = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim")
    return ", ".join(f"{name} {getattr(options, name)}" for name in names if getattr(options, name) is not None)


def _table(base: TrainOptions) -> list[tuple[str, str, dict[str, Any]]]:
    """(factor, name, changed options) of every level, those that equal the base included."""
    rate, drafts = base.learning_rate, _num_drafts(base)
    every = max(drafts, base.slots_per_anchor)  # numbers from `drafts` on all mean every slot
    gamma = PUBLISHED_GAMMA.get(base.block_size, 4.0)
    return [
        *(("optimizer", name, {"optimizer": name}) for name in OPTIMIZERS),
        *(("learning_rate", f"{times * rate:.3g}", {"learning_rate": times * rate}) for times in (0.4, 2.5)),
        *(("warm_start", _on_off(warm), {"warm_start": warm}) for warm in (True, False)),
        *(("loss", _loss_name(replace(base, kl_weight=weight)), {"kl_weight": weight}) for weight in (0.0, 0.7, 1.0)),
        ("loss", f"{_kl_name(base.kl_weight)} and D-PACE (all slots)", {"slot_weighting": "dpace",
                                                                    "slots_per_anchor": every}),
        *(("gamma", f"{value:g}", {"gamma": value}) for value in (0.75, 1.5)),
        ("gamma", f"{gamma:g} (published)", {"gamma": gamma}),
        *(("anchors_per_sample", str(num), {"anchors_per_sample": num}) for num in (8, 32, 64)),
        *([("slots_per_anchor", "2", {"slots_per_anchor": min(2, drafts)})] if base.slot_weighting == "decay" else []),
        ("slots_per_anchor", f"all {drafts}", {"slots_per_anchor": every}),
        *(("num_layers", str(num), _num_layers(base, num)) for num in (1, 2, 3)),
        *(("average", _average_name(decay), {"average": decay}) for decay in (0.99, 0.0)),
        # as many drafts a step either way
        *(("sample_from_anchor", _on_off(first), {"sample_from_anchor": first, "block_size": drafts + (not first)})
          for first in (False, True)),
    ]


def _num_layers(base: TrainOptions, num: int) -> dict[str, Any]:
    """As many full layers as the base has, where that many fit, sliding ones before them."""
    sliding = min(base.num_sliding_layers, max(0, num - (base.num_layers - base.num_sliding_layers)))
    return {"num_layers": num, "num_sliding_layers": sliding,
            "sliding_window": base.sliding_window if sliding else None}


def _num_drafts(options: TrainOptions) -> int:
    """Slots of a block that draft."""
    return options.block_size - (not options.sample_from_anchor)


def _on_off(value: bool) -> str:
    return "on" if value else "off"


def _kl_name(kl_weight: float) -> str:
    return {0.0: "cross-entropy", 1.0: "KL alone"}.get(kl_weight, f"KL {kl_weight:g}")


def _loss_name(options: TrainOptions) -> str:
    return _kl_name(options.kl_weight) + (" and D-PACE" if options.slot_weighting == "dpace" else "")


def _average_name(decay: float) -> str:
    return f"{decay:g}" if decay else "no average"


def base_values(base: TrainOptions) -> dict[str, str]:
    """The base's own value of each factor, as text."""
    drafts, slots = _num_drafts(base), base.slots_per_anchor
    return {"optimizer": base.optimizer, "learning_rate": f"{base.learning_rate:.3g}",
            "warm_start": _on_off(base.warm_start),
            "loss": _loss_name(base), "gamma": f"{base.gamma:g}", "anchors_per_sample": str(base.anchors_per_sample),
            "slots_per_anchor": str(slots) if slots < drafts else f"all {drafts}", "num_layers": str(base.num_layers),
            "average": _average_name(base.average),
            "sample_from_anchor": _on_off(base.sample_from_anchor)}


def levels_table(of_levels: Sequence[Level], values: dict[str, str]):
    """A row a factor, the base's value and the levels, as a pandas DataFrame of text."""
    import pandas as pd

    rows = [[FACTORS[factor], factor, values[factor],
             ", ".join(level.name for level in of_levels if level.factor == factor)]
            for factor in dict.fromkeys(level.factor for level in of_levels)]
    return pd.DataFrame(rows, columns=["factor", "name in `factors`", "base", "levels"]).set_index("factor")


def spread(items: Sequence[Any], num: int | None) -> list[Any]:
    """`num` of the items, evenly spaced over all of them; None or more than there are = all."""
    if num is None or num >= len(items):
        return list(items)
    return [items[i * len(items) // num] for i in range(num)]


@dataclass(frozen=True)
class Comparison:
    """One level against the base.

    difference: acceptance length minus the base's, with the interval that holds for all levels together (module's
    docstring); prompts, seeds: its 95 % intervals over either alone; cost: seconds of training over the base's, of
    either the seed that took least, for other jobs on a machine can only add to them; verdict: BETTER, WORSE, WITHIN,
    or NOT_JUDGED without two seeds and two prompts.
    """

    level: Level
    outcome: Outcome
    difference: Interval
    prompts: Interval
    seeds: Interval
    cost: float
    verdict: str


def compare(base: Outcome, outcomes: Sequence[Outcome], of_levels: Sequence[Level]) -> list[Comparison]:
    """outcomes: of the levels, in their order, with the base's seeds and prompts."""
    found = []
    lengths = np.array([base.by_seed, *(outcome.by_seed for outcome in outcomes)])
    for level, outcome in zip(of_levels, outcomes, strict=True):
        difference = corrected_difference(base, outcome, lengths, len(outcomes))
        judged = lengths.shape[1] > 1 and base.counts.shape[1] > 1
        verdict = NOT_JUDGED if not judged else BETTER if difference.low > 0 else (
            WORSE if difference.high < 0 else WITHIN)
        cost = min(outcome.seconds) / min(base.seconds)
        found.append(Comparison(level, outcome, difference, outcome.ahead_of(base), outcome.ahead_by_seed(base), cost,
                                verdict))
    return found


def corrected_difference(base: Outcome, outcome: Outcome, lengths: np.ndarray, num_comparisons: int) -> Interval:
    """The mean over seeds of the difference, with Bonferroni's interval. lengths: acceptance lengths [recipes, seeds]
    of the whole study."""
    num_seeds, num_prompts = base.counts.shape[:2]
    value = float(np.mean(outcome.by_seed) - np.mean(base.by_seed))
    if num_seeds < 2 or num_prompts < 2:
        return Interval(value, value, value)
    over_prompts, over_seeds = prompt_variance(outcome, base), seed_variance(lengths)
    total = over_prompts + over_seeds
    if total == 0:
        return Interval(value, value, value)
    free_seeds = (lengths.shape[0] - 1) * (num_seeds - 1)
    free = total**2 / (over_prompts**2 / (num_prompts - 1) + over_seeds**2 / free_seeds)  # Welch and Satterthwaite
    half = student_quantile(1 - (1 - CONFIDENCE) / (2 * num_comparisons), free) * total**0.5
    return Interval(value, value - half, value + half)


def seed_variance(lengths: np.ndarray) -> float:
    """Variance over seeds of the difference of two recipes' means, from all of them: what is left of the acceptance
    lengths [recipes, seeds] without each recipe's and each seed's mean."""
    num_recipes, num_seeds = lengths.shape
    left = lengths - lengths.mean(axis=1, keepdims=True) - lengths.mean(axis=0) + lengths.mean()
    return 2 * float((left**2).sum()) / ((num_recipes - 1) * (num_seeds - 1)) / num_seeds


def prompt_variance(one: Outcome, other: Outcome) -> float:
    """Variance over prompts of the difference of two acceptance lengths (ratios of sums, linearised), paired. Some of
    the chance over seeds is in it, so the sum with `seed_variance` is rather too large than too small."""
    parts = []
    for outcome in (one, other):
        counts = outcome.counts.sum(axis=0)
        tokens, steps = counts.sum(axis=0)
        parts.append((counts[:, 0] - tokens / steps * counts[:, 1]) / steps)
    difference, num = parts[0] - parts[1], len(parts[0])
    return float((difference**2).sum()) * num / (num - 1)


@dataclass(frozen=True)
class FactorVerdict:
    """state: "beaten" (another level is better beyond noise and costs no more than was allowed), "dearer" (better ones
    cost more), "supported" (every other level is worse), "tie" (nothing is better; some level is not worse), or
    "not judged". text: that in words."""

    factor: str
    base: str
    state: str
    text: str


def judge(comparisons: Sequence[Comparison], values: dict[str, str], max_cost: float) -> list[FactorVerdict]:
    """What the comparisons say of each factor's base value, factors in their order.

    values: of `base_values`; max_cost: times the base's seconds that a level may take to replace it.
    """
    verdicts = []
    for factor in dict.fromkeys(c.level.factor for c in comparisons):
        found = [c for c in comparisons if c.level.factor == factor]
        by_verdict = {v: [c for c in found if c.verdict == v] for v in (BETTER, WORSE, WITHIN, NOT_JUDGED)}
        better = sorted(by_verdict[BETTER], key=lambda c: -c.difference.value)
        cheap = [c for c in better if c.cost <= max_cost]
        worse = f"; worse: {_names(by_verdict[WORSE])}" if by_verdict[WORSE] else ""
        if by_verdict[NOT_JUDGED]:
            state, text = NOT_JUDGED, "one seed or one prompt: no noise to compare with"
        elif better:
            state = "beaten" if cheap else "dearer"
            text = "better beyond noise: " + ", ".join(
                f"{c.level.name} ({c.difference.value:+.3f} at {c.cost:.2f} times the seconds)" for c in better) + worse
        elif by_verdict[WITHIN]:
            widest = max((c.difference.high - c.difference.low) / 2 for c in by_verdict[WITHIN])
            state = "tie"
            text = f"within noise: {_names(by_verdict[WITHIN])} (more than ±{widest:.3f} would show){worse}"
        else:
            state, text = "supported", f"every other level is worse beyond noise: {_names(found)}"
        verdicts.append(FactorVerdict(factor, values[factor], state, text))
    return verdicts


def _names(comparisons: Sequence[Comparison]) -> str:
    return ", ".join(c.level.name for c in comparisons)


def comparison_table(base: Outcome, comparisons: Sequence[Comparison]):
    """A row a recipe, the base first, as a pandas DataFrame of text."""
    import pandas as pd

    rows = [[BASE, "", str(base.acceptance), "", "", "", f"{min(base.seconds):.1f}", "1.00", ""]]
    rows += [[FACTORS[c.level.factor], c.level.name, str(c.outcome.acceptance),
              c.difference.signed(), c.prompts.signed(), c.seeds.signed(), f"{min(c.outcome.seconds):.1f}",
              f"{c.cost:.2f}", c.verdict] for c in comparisons]
    return pd.DataFrame(rows, columns=[
        "factor", "level", "acceptance length", "difference", "over prompts alone", "over seeds alone", "seconds",
        "times the base's", "verdict"]
        ).set_index(["factor", "level"])


def summary(verdicts: Sequence[FactorVerdict]) -> str:
    """One sentence a state: which factors' base values are in it."""
    words = {"supported": "Supported", "tie": "Ties", "beaten": "Beaten", "dearer": "Beaten only by what costs more",
             NOT_JUDGED: "Not judged"}
    found = {state: [FACTORS[v.factor] for v in verdicts if v.state == state] for state in words}
    return " ".join(f"{words[state]}: {', '.join(names)}." for state, names in found.items() if names)


def verdict_table(verdicts: Sequence[FactorVerdict]):
    """A row a factor, as a pandas DataFrame of text."""
    import pandas as pd

    return pd.DataFrame([[FACTORS[v.factor], v.base, v.state, v.text] for v in verdicts],
                        columns=["factor", "base", "verdict", "evidence"]).set_index("factor")
