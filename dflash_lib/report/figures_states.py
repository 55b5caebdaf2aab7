"""Figures of notebooks 02 to 04: what the hooks see, the final norm, the loss mask."""

import html
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dflash_lib.conversations.prepare import PreparedRows
from dflash_lib.hidden_states.normalization import WAYS, LogitComparison
from dflash_lib.hidden_states.parity import Agreement, PaddingErrors
from dflash_lib.hidden_states.plan import ExtractionPlan
from dflash_lib.report.style import COLOURS, label, new_figure, plain_axis, styled

FLOOR = 1e-8  # where exact zeros are drawn on a logarithmic axis


# ---- 02_layout -------------------------------------------------------------------------------------------------------

@styled
def alignment_figure(matrix: np.ndarray, tapped: Sequence[int]) -> Figure:
    """Relative difference of every hook output (row) to every entry of HF's hidden_states (column)."""
    figure, axis = new_figure(height=4.4)
    image = axis.imshow(np.maximum(matrix, 1e-3), norm=LogNorm(1e-3, max(float(matrix.max()), 1e-2)), aspect="auto")
    rows, columns = np.nonzero(matrix == 0)
    axis.scatter(columns, rows, marker="s", s=14, color=COLOURS["vermilion"], label="equal to the last bit")
    axis.set_yticks(list(tapped), [f"{k} (tapped)" for k in tapped])
    plain_axis(axis)
    label(axis, x="index i into HF's hidden_states", y="hook on decoder layer k",
          title="Hook output k is hidden_states[k + 1], and no other")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16))
    figure.colorbar(image, ax=axis, label="relative difference, median over tokens")
    return figure


@styled
def token_figure(change: np.ndarray, layer_ids: Sequence[int], position: int) -> Figure:
    """Relative change of each token's states [T, L] when the token at `position` was replaced."""
    figure, axis = new_figure(height=2.9)
    for k, values in zip(layer_ids, change.T, strict=True):
        axis.plot(100 * values, linewidth=1.4, label=f"layer {k}")
    axis.axvline(position, color=COLOURS["black"], linewidth=1, linestyle="--", label="the replaced token")
    label(axis, x="position", y="change of the state (%)", title="One token replaced: no earlier state moves")
    axis.legend(loc="upper left")
    return figure


@styled
def padding_figure(errors: PaddingErrors) -> Figure:
    """Largest relative difference of a row in a batch against the same row alone, by row."""
    order = [i for i in np.argsort(errors.lengths, kind="stable") if np.isfinite(errors.right[i])]
    lengths = [errors.lengths[i] for i in order]
    figure, axis = new_figure(height=3.2)
    x = np.arange(len(order))
    for values, colour, marker, name in (
            (errors.left, "vermilion", "v", "left-padded without a mask"),
            (errors.storage, "grey", "_", "rounding to bf16, for scale"),
            (errors.right, "blue", "o", "right-padded, as extraction does it")):
        axis.plot(x, [max(values[i], FLOOR) for i in order], marker=marker, linestyle="none", color=COLOURS[colour],
                  markersize=8, label=name)
    axis.set_yscale("log")
    axis.set_xticks(x, lengths)
    label(axis, x="tokens in the row (the longest one needs no padding)", y="largest relative difference",
          title="A row in a batch against the same row alone")
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


@styled
def reference_figure(agreements: Mapping[str, Agreement]) -> Figure:
    """Per layer, our states against vLLM's: right layer and the layer next to it, one panel a target."""
    figure, axes = new_figure(1, len(agreements), height=3.4, sharey=True, squeeze=False)
    for axis, (name, agreement) in zip(axes[0], agreements.items(), strict=True):
        layers = np.arange(agreement.errors.shape[1])
        axis.plot(layers[:-1], np.median(agreement.shifted, axis=0), color=COLOURS["vermilion"], marker="v",
                  label="shifted by one layer, median token")
        axis.plot(layers, agreement.errors.max(axis=0), color=COLOURS["sky"], marker=".", label="worst token")
        axis.plot(layers, np.median(agreement.errors, axis=0), color=COLOURS["blue"], marker="o", label="median token")
        axis.set_yscale("log")
        label(axis, x="decoder layer", y="relative difference to vLLM (bf16)" if axis is axes[0][0] else "", title=name)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


# ---- 03_normalization ------------------------------------------------------------------------------------------------

@styled
def ways_figure(ways: Mapping[str, LogitComparison]) -> Figure:
    """How far logits are from the target's own, and how many top tokens change, by way of making them."""
    figure, (left, right) = new_figure(1, 2, height=2.9, sharey=True)
    rows = np.arange(len(WAYS))
    colours = [COLOURS["blue"], COLOURS["sky"]] + [COLOURS["vermilion"]] * (len(WAYS) - 2)
    worst = [ways[name].max_difference for name in WAYS]
    left.barh(rows, [max(value - FLOOR, 0) for value in worst], left=FLOOR, color=colours)
    left.set_xscale("log")
    left.set_xlim(FLOOR, 100 * max(worst))
    right.barh(rows, [100 * ways[name].changed_share for name in WAYS], color=colours)
    right.set_xlim(0, 118)
    for row, name in enumerate(WAYS):
        left.text(max(worst[row], FLOOR) * 1.4, row, "0 exactly" if worst[row] == 0 else f"{worst[row]:.2g}",
                  va="center", fontsize=9)
        right.text(100 * ways[name].changed_share + 1.5, row, f"{100 * ways[name].changed_share:.3g} %", va="center",
                   fontsize=9)
    left.set_yticks(rows, WAYS)
    left.invert_yaxis()
    for axis in (left, right):
        axis.grid(axis="y", visible=False)
    label(left, x="largest difference of a logit (log scale)", y="", title="Logits against the target's own")
    label(right, x="tokens with another top-1 (%)", y="", title="Predictions that change")
    return figure


@styled
def storage_figure(stored: LogitComparison) -> Figure:
    """What bf16 storage of the last state does to each token: KL, and which tokens flip."""
    figure, (left, right) = new_figure(1, 2, height=3.2)
    kl = np.maximum(stored.kl, 1e-9)
    left.hist(kl, bins=np.logspace(-9, np.log10(kl.max()) + 0.5, 55), color=COLOURS["blue"])
    left.axvline(np.median(kl), color=COLOURS["black"], linewidth=1.2, label=f"median {np.median(kl):.1e}")
    left.set_xscale("log")
    label(left, x="KL from the target's distribution (nats; first bin: 1e-9 or less)", y="tokens",
          title="How far bf16 moves a distribution")
    left.legend(loc="upper left")
    margin = np.maximum(stored.margin, 1e-4)
    bins = np.logspace(-4, np.log10(margin.max()) + 0.1, 50)
    right.hist(margin, bins=bins, color=COLOURS["sky"], label="all tokens")
    right.hist(margin[stored.changed], bins=bins, color=COLOURS["vermilion"],
               label=f"top-1 changed ({int(stored.changed.sum())} of {len(margin)})")
    right.set_xscale("log")
    right.set_yscale("symlog", linthresh=1)
    label(right, x="target's lead of its top token (logits)", y="tokens", title="Only close calls flip", legend=True)
    return figure


@styled
def position_0_figure(agreement: Agreement, what: str) -> Figure:
    """One norm over all tokens against errors per token without position 0: right layer and shifted, by layer."""
    figure, (left, right) = new_figure(1, 2, height=3.3, sharey=True)
    layers = np.arange(len(agreement.whole))
    for axis, good, bad, title in (
            (left, agreement.whole, agreement.whole_shifted, "One norm over all tokens"),
            (right, np.median(agreement.errors, axis=0), np.median(agreement.shifted, axis=0),
             "Per token, position 0 apart (median)")):
        axis.plot(layers[:-1], bad, color=COLOURS["vermilion"], marker="v", label="ids off by one (wrong)")
        axis.plot(layers, np.maximum(good, FLOOR), color=COLOURS["blue"], marker="o", label="right layer")
        axis.set_yscale("log")
        label(axis, x="decoder layer", y=f"relative difference to {what}" if axis is left else "", title=title)
    right.legend(loc="best")
    return figure


# ---- 04_extract ------------------------------------------------------------------------------------------------------

def loss_mask_html(tokenizer, input_ids: Sequence[int], loss_mask: Sequence[int]) -> str:
    """One row token by token as static HTML: supervised tokens green, context grey, alternating shades."""
    shades = {0: ("#eceef2", "#e0e3ea"), 1: ("#bfe6d3", "#a5dcc2")}
    parts = []
    for i, (token, supervised) in enumerate(zip(input_ids, loss_mask, strict=True)):
        text = html.escape(tokenizer.decode([int(token)])).replace("\n", "&#9166;<br>")
        parts.append(f'<span title="position {i}, id {int(token)}" style="background:{shades[int(supervised)][i % 2]};'
                     f'color:#222;border-radius:2px">{text}</span>')
    legend = ('<span style="background:#a5dcc2;color:#222">&nbsp;supervised: what the target generates&nbsp;</span> '
              '<span style="background:#e0e3ea;color:#222">&nbsp;context: no loss&nbsp;</span>')
    return ('<div style="font-family:monospace;font-size:13px;line-height:1.6;white-space:pre-wrap;max-width:60em">'
            f'{legend}<br><br>{"".join(parts)}</div>')


@styled
def rows_figure(prepared: PreparedRows, plan: ExtractionPlan) -> Figure:
    """Lengths of the rows, and the padded tokens that each batch computes."""
    figure, (left, right) = new_figure(1, 2, height=3.2)
    lengths = prepared.lengths
    supervised = np.array([int(prepared.row(i)[1].sum()) for i in range(len(prepared))])
    bins = np.linspace(0, lengths.max() * 1.02, 40)
    left.hist(lengths, bins=bins, color=COLOURS["sky"], label=f"tokens (mean {lengths.mean():.0f})")
    left.hist(supervised, bins=bins, histtype="step", color=COLOURS["green"], linewidth=1.8,
              label=f"supervised (mean {supervised.mean():.0f})")
    label(left, x="tokens of a row", y="rows", title="Lengths", legend=True)
    batches = [batch for shard in plan.shards for batch in shard]
    real = np.array([lengths[batch].sum() for batch in batches])
    padded = np.array([lengths[batch].max() * len(batch) for batch in batches])
    x = np.arange(1, len(batches) + 1)
    right.bar(x, padded, width=1.0, color=COLOURS["vermilion"], label="padding")
    right.bar(x, real, width=1.0, color=COLOURS["blue"], label="tokens")
    right.axhline(plan.token_budget, color=COLOURS["black"], linewidth=1, linestyle="--", label="token_budget")
    right.set_ylim(0, 1.35 * max(plan.token_budget, padded.max()))
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    share = plan.padding_share(lengths.tolist())
    label(right, x="batch", y="computed tokens", title=f"Batches: {100 * share:.1f} % padding")
    right.legend(ncols=3, loc="upper right")
    return figure
