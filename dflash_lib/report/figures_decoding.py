"""Figures of notebook 07: acceptance of the trained drafter beside toys, by slot, by kind, by block size; speed."""

import html
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from dflash_lib.decoding.acceptance import Interval, SlotAcceptance
from dflash_lib.decoding.side_by_side import BlockLength, SideBySide, Speed
from dflash_lib.decoding.speculative import SpeculativeDecoded
from dflash_lib.report.style import COLOURS, label, new_figure, plain_axis, styled

MARKERS = "osD^vPX"


def _intervals(axis, intervals: Mapping[str, Interval], colours: Sequence[str], digits: int = 2) -> None:
    """One row per entry, first on top: a dot with its interval and the value written above it."""
    for row, (interval, colour) in enumerate(zip(intervals.values(), colours, strict=True)):
        axis.plot([interval.low, interval.high], [row, row], color=colour, linewidth=2.4, solid_capstyle="butt")
        axis.plot(interval.value, row, marker="o", color=colour, markersize=7, linestyle="none")
        axis.annotate(f"{interval.value:.{digits}f}", (interval.value, row), xytext=(0, 7), textcoords="offset points",
                      ha="center", fontsize=9, color=colour)
    axis.set_yticks(range(len(intervals)), list(intervals))
    axis.set_ylim(len(intervals) - 0.5, -0.7)
    axis.grid(axis="y", visible=False)


@styled
def proposers_figure(acceptance: Mapping[str, Interval], gains: Mapping[str, Interval]) -> Figure:
    """Acceptance length of every proposer on the same answers, and how far the trained one is ahead of each other one.

    acceptance: by name, the trained drafter first. gains: by name of a baseline, trained minus baseline, paired.
    """
    figure, (left, right) = new_figure(1, 2, height=0.9 + 0.5 * len(acceptance), sharey=True)
    colours = [COLOURS["blue"]] + [COLOURS["grey"]] * (len(acceptance) - 1)
    _intervals(left, acceptance, colours)
    left.axvline(1, color=COLOURS["black"], linewidth=0.8)
    left.set_xlim(left=0.9)
    label(left, x="tokens a verify step, bonus counted", y="", title="Acceptance length")
    names = list(acceptance)
    for name, gain in gains.items():
        row, colour = names.index(name), COLOURS["green"] if gain.low > 0 else COLOURS["vermilion"]
        right.plot([gain.low, gain.high], [row, row], color=colour, linewidth=2.4, solid_capstyle="butt")
        right.plot(gain.value, row, marker="D", color=colour, linestyle="none")
        right.annotate(f"{gain.value:+.2f}", (gain.value, row), xytext=(0, 7), textcoords="offset points", ha="center",
                       fontsize=9, color=colour)
    right.axvline(0, color=COLOURS["black"], linewidth=0.8)
    right.grid(axis="y", visible=False)
    label(right, x="tokens a verify step", y="", title="Lead of the trained drafter (paired)")
    return figure


@styled
def kinds_figure(kinds: Mapping[str, Interval], overall: Interval) -> Figure:
    """Acceptance length by kind of prompt with bootstrap intervals; the band is the interval over all prompts."""
    figure, axis = new_figure(height=1.0 + 0.42 * len(kinds))
    axis.axvspan(overall.low, overall.high, color=COLOURS["sky"], alpha=0.25, linewidth=0)
    axis.axvline(overall.value, color=COLOURS["blue"], linewidth=1.2, label=f"all prompts: {overall}")
    ordered = dict(sorted(kinds.items(), key=lambda item: -item[1].value))
    _intervals(axis, ordered, [COLOURS["black"]] * len(ordered))
    label(axis, x="tokens a verify step, bonus counted", y="", title="Acceptance length by kind of prompt")
    axis.legend(loc="lower right")
    return figure


@styled
def slots_figure(slots: Mapping[str, SlotAcceptance]) -> Figure:
    """Acceptance by slot for each named proposer, the trained one first: given the slots before, and of all steps."""
    figure, (left, right) = new_figure(1, 2, height=3.4, sharey=True)
    for i, (name, slot) in enumerate(slots.items()):
        x = np.arange(1, len(slot.cumulative) + 1)
        style = {"marker": MARKERS[i % len(MARKERS)], "linewidth": 2.4 if i == 0 else 1.2, "label": name}
        left.plot(x, 100 * np.array(slot.conditional), **style)
        right.plot(x, 100 * np.array(slot.cumulative), **style)
    label(left, x="slot (draft token behind the anchor)", y="accepted (%)", title="When all slots before were accepted")
    label(right, x="slot (draft token behind the anchor)", y="", title="Of all verify steps", legend=True)
    left.set_ylim(-2, 102)
    for axis in (left, right):
        axis.set_xticks(range(1, 1 + max(len(slot.cumulative) for slot in slots.values())))
    return figure


@styled
def block_size_figure(lengths: Sequence[BlockLength], measured: Sequence[Speed]) -> Figure:
    """Acceptance length against what a verify step costs, and the speed-up that follows, for every block size."""
    figure, (left, right) = new_figure(1, 2, height=3.4)
    sizes = [b.block_size for b in lengths]
    left.plot(sizes, [b.acceptance_length for b in lengths], color=COLOURS["blue"], marker="o",
              label="acceptance length")
    left.plot(sizes, [b.break_even for b in lengths], color=COLOURS["vermilion"], marker="s", linestyle="--",
              label="break-even: cost of a step")
    label(left, x="block_size (anchor + drafts)", y="tokens, or plain steps", title="What a step brings and costs",
          legend=True)
    left.set_ylim(bottom=min(1.0, left.get_ylim()[0]))
    right.plot(sizes, [b.speedup for b in lengths], color=COLOURS["blue"], marker="o", label="from walk and step costs")
    for i, speed in enumerate(measured):
        error = [[speed.speedup.value - speed.speedup.low], [speed.speedup.high - speed.speedup.value]]
        right.errorbar(speed.block_size, speed.speedup.value, yerr=error, color=COLOURS["orange"], marker="D",
                       capsize=3, linestyle="none", label="decoded for real" if i == 0 else None)
    right.axhline(1, color=COLOURS["black"], linewidth=0.8)
    label(right, x="block_size (anchor + drafts)", y="times plain decoding", title="Speed-up", legend=True)
    for axis in (left, right):
        axis.set_xticks(sizes)
    return figure


@styled
def speed_figure(results: Sequence[SideBySide], speed: Speed, way: Hashable = None) -> Figure:
    """Tokens a second of each prompt with and without drafter, and where the time goes.

    way: whose results are shown; None = those under the block size.
    """
    way = speed.block_size if way is None else way
    figure, (left, right) = new_figure(1, 2, height=3.6, gridspec_kw={"width_ratios": [3, 2]})
    rates = np.array([[len(r.plain.token_ids) / r.plain.seconds,
                       len(r.speculative[way].token_ids) / r.speculative[way].seconds]
                      for r in results])
    order, x = np.argsort(rates[:, 1] / rates[:, 0]), np.arange(len(rates))
    left.vlines(x, rates[order, 0], rates[order, 1], color=COLOURS["grey"], linewidth=1.2)
    left.plot(x, rates[order, 0], color=COLOURS["black"], marker="s", linestyle="none", label="plain")
    left.plot(x, rates[order, 1], color=COLOURS["blue"], marker="o", linestyle="none",
              label=f"with drafter, block_size {speed.block_size}")
    left.set_xticks([])
    left.set_ylim(bottom=0)
    label(left, x="prompts, by speed-up", y="tokens a second", title="Each prompt", legend=True)
    drafted = [r.speculative[way] for r in results]
    plain_s = sum(r.plain.seconds for r in results)
    parts = {"prompt": sum(d.prefill_seconds for d in drafted), "verify": sum(d.verify_seconds for d in drafted),
             "draft": sum(d.draft_seconds for d in drafted)}
    plain_parts = {"prompt": sum(r.plain.prefill_seconds for r in results)}
    plain_parts["plain steps"] = plain_s - plain_parts["prompt"]
    colours = {"prompt": COLOURS["grey"], "plain steps": COLOURS["black"], "verify": COLOURS["blue"],
               "draft": COLOURS["orange"]}
    for row, bar in enumerate((plain_parts, parts)):
        begin, shown = 0.0, set()
        for name, seconds in bar.items():
            right.barh(row, seconds, left=begin, color=colours[name], height=0.5,
                       label=name if name not in shown and (row == 0 or name != "prompt") else None)
            shown.add(name)
            begin += seconds
        right.annotate(f"{begin:.1f} s", (begin, row), xytext=(4, 0), textcoords="offset points", va="center",
                       fontsize=9)
    plain_axis(right)
    right.set_yticks([0, 1], ["plain", "with drafter"])
    right.set_ylim(1.6, -0.9)
    right.set_xlim(right=right.get_xlim()[1] * 1.12)
    label(right, x="seconds for all prompts", y="", title="Where the time goes")
    right.legend(loc="upper center", ncols=2, bbox_to_anchor=(0.5, -0.2))
    return figure


def answer_html(tokenizer, prompt: str, decoded: SpeculativeDecoded) -> str:
    """An answer as HTML: accepted draft tokens on coloured ground, shades taking turns by verify step; the target's own
    tokens plain."""
    texts = [html.escape(tokenizer.decode([token], clean_up_tokenization_spaces=False)) for token in decoded.token_ids]
    shades, parts, at = ("#CFE8F7", "#FBE3B5"), [texts[0]], 1
    for number, step in enumerate(decoded.steps):
        for i in range(step.num_new):
            shade = f' style="background:{shades[number % 2]}"' if i < step.accepted else ""
            parts.append(f"<span{shade}>{texts[at]}</span>")
            at += 1
    body = "".join(parts).replace("\n", "<br>")
    return (f'<div style="max-width:60em;line-height:1.7;color:#222;background:#fff;padding:0.4em">'
            f"<p><b>{html.escape(prompt)}</b></p><p>{body}</p></div>")
