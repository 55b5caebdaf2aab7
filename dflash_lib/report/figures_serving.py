"""Figure and table of the comparison with a server: training's walk, Transformers, served, slot by slot."""

import numpy as np
from matplotlib.figure import Figure

from dflash_lib.decoding.served_comparison import TOLERANCE, Comparison, Row
from dflash_lib.report.style import COLOURS, label, new_figure, styled

ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
SHIFT = 0.16  # of a slot's width, between marks that stand side by side


@styled
def served_figure(comparison: Comparison) -> Figure:
    """Left: share of verify steps that accept each slot, three ways; right: the server's gap with its paired interval.

    Bars left: of Transformers over prompts (bootstrap), of the server over its steps (binomial), both 95 %. Right: the
    band is what counts as equal; red gaps are beyond noise and band. Without figures by slot only Transformers' are
    drawn, and the title says so.
    """
    figure, (left, right) = new_figure(1, 2, height=3.6)
    slots = comparison.slots
    x = np.array([row.slot for row in slots], dtype=float)
    if any(row.walked is not None for row in slots):
        left.plot(x, [np.nan if row.walked is None else 100 * row.walked for row in slots], color=COLOURS["grey"],
                  marker="s", label="training's walk", zorder=1)
    _marks(left, x - SHIFT, [row.ours for row in slots], COLOURS["black"], "o", "Transformers")
    served = [row for row in slots if row.served is not None]
    _marks(left, np.array([row.slot for row in served]) + SHIFT, [row.served for row in served], COLOURS["blue"], "D",
           ENGINES.get(comparison.engine, "server"))
    label(left, x="slot (draft token behind the anchor)", y="verify steps that accept it (%)",
          title="Accepted, of all verify steps" if served else "The server gives no figures by slot", legend=True)
    left.set_ylim(bottom=min(0.0, left.get_ylim()[0]))
    for row in slots:
        if row.gap is not None:
            colour = COLOURS["vermilion"] if row.beyond else COLOURS["green"]
            right.plot([row.slot, row.slot], [100 * row.gap.low, 100 * row.gap.high], color=colour, linewidth=2.4)
            right.plot(row.slot, 100 * row.gap.value, color=colour, marker="D", linestyle="none")
    right.axhline(0, color=COLOURS["black"], linewidth=0.8)
    right.axhspan(-100 * TOLERANCE, 100 * TOLERANCE, color=COLOURS["sky"], alpha=0.25, linewidth=0)
    low, high = right.get_ylim()
    right.set_ylim(min(low, -200 * TOLERANCE), max(high, 200 * TOLERANCE))
    label(right, x="slot (draft token behind the anchor)", y="served minus Transformers (points)",
          title=_length_text(comparison.length))
    for axis in (left, right):
        axis.set_xticks(x)
        axis.set_xlim(0.5, len(slots) + 0.5)
    return figure


def _marks(axis, x, intervals, colour: str, marker: str, name: str) -> None:
    """Points in percent with their intervals as bars; nothing for no intervals."""
    if not intervals:
        return
    value, low, high = (100 * np.array([getattr(one, part) for one in intervals]) for part in ("value", "low", "high"))
    axis.errorbar(x, value, yerr=[np.maximum(value - low, 0), np.maximum(high - value, 0)], color=colour, marker=marker,
                  capsize=3, linestyle="none", label=name)


def _length_text(length: Row) -> str:
    if length.served is None or length.gap is None:
        return "No length from the server"
    return f"Length {length.served.value:.3f} served, {length.ours.value:.3f} ours"


def served_table(comparison: Comparison) -> str:
    """The comparison as text: texts, figures by slot, the verdict, its likely causes, warnings."""
    texts, engine = comparison.texts, ENGINES.get(comparison.engine, "unknown engine")
    lines = [f"{engine}, model {comparison.model}: {comparison.num_prompts} prompts, {comparison.num_counted} with "
             f"counts, {comparison.num_steps} verify steps"]
    lines.append(f"texts: {texts.num_identical} of {texts.num_prompts} equal to Transformers' greedy ones; of the "
                 f"others {texts.num_near_ties} part at a near-tie, {texts.num_rounding} within 16-bit rounding, "
                 f"{texts.num_apart} apart, {texts.num_unjudged} not judged")
    lines.append(f"{'':<8} {'walk':>7} {'Transformers, 95 %':>24} {'served, its noise':>24} {'gap, paired':>26}")
    for row in [*comparison.slots, comparison.length]:
        name = f"slot {row.slot}" if row.slot else "length"
        walk = "-" if row.walked is None else f"{row.walked:.3f}"
        cells = ["-" if one is None else f"{one.value:{sign}.3f} ({one.low:{sign}.3f} to {one.high:{sign}.3f})"
                 for one, sign in ((row.ours, ""), (row.served, ""), (row.gap, "+"))]
        lines.append(f"{name:<8} {walk:>7} {cells[0]:>24} {cells[1]:>24} {cells[2]:>26}"
                     f"{'  beyond noise' if row.beyond else ''}")
    if comparison.num_same_steps is not None:
        lines.append(f"the same verify steps for {comparison.num_same_steps} of {comparison.num_counted} prompts")
    if comparison.raw_length is not None:
        lines.append(f"1 + accepted over steps as the server counts, drafts behind an answer's end included: "
                     f"{comparison.raw_length:.3f}")
    lines += [f"warning: {warning}" for warning in comparison.warnings]
    lines.append(verdict_text(comparison))
    lines += [f"  {number}. {cause}" for number, cause in enumerate(comparison.causes, 1)]
    return "\n".join(lines)


def verdict_text(comparison: Comparison) -> str:
    """The verdict in a sentence."""
    if comparison.verdict == "agree":
        return f"Serving agrees: a gap above {comparison.visible_gap:.3f} tokens a step would have shown."
    if comparison.verdict == "gap":
        return "Serving does not agree. Likely causes (their order is a rough guess):"
    if comparison.texts.num_unjudged:
        return (f"Inconclusive: {comparison.texts.num_unjudged} texts are not ours, and nothing here says whether they "
                "may be: leave --no-target out, and let the server return token ids.")
    if comparison.texts.num_rounding * 2 > comparison.texts.num_prompts:
        return (f"Inconclusive: {comparison.texts.num_rounding} of {comparison.texts.num_prompts} texts part where "
                "16-bit rounding may be the reason, once; so many want another: compare with a float32 server, or in "
                "the server's dtype (dtype of this run).")
    if comparison.visible_gap is None:
        return "Inconclusive: the server gave nothing from which acceptance could be read."
    return (f"Inconclusive: {comparison.num_counted or comparison.num_prompts} prompts, and a gap of "
            f"{comparison.visible_gap:.3f} tokens a step would pass for noise; ask more prompts.")
