"""The figure of an audit: each slot against every layer, and every recomputed row against its limit."""

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from dflash_lib.hidden_states.audit.result import Audit
from dflash_lib.report.style import COLOURS, CYCLE, label, new_figure, plain_axis, styled

FLOOR, CEILING = 1e-4, 10.0  # the axes' ends: equal states, and rows that are zero, infinite or of something else


@styled
def audit_figure(audit: Audit) -> Figure:
    """Left: median distance of each slot (row) to the embedding and each layer's output (column). Right: distance of
    every recomputed row to what its slot holds, and the largest limit of a row."""
    figure, (matrix, tokens) = new_figure(1, 2, height=3.6, width_ratios=[1, 1.15])
    if not audit.slots:
        for axis in (matrix, tokens):
            axis.set_axis_off()
        matrix.text(0, 0.5, "no sample could be recomputed")
        return figure
    values = np.clip(np.nan_to_num(audit.layers, nan=CEILING, posinf=CEILING), FLOOR, CEILING)
    image = matrix.imshow(values, norm=LogNorm(1e-3, 2), aspect="auto", extent=(-1.5, values.shape[1] - 1.5,
                                                                               len(values) - 0.5, -0.5))
    best = values.argmin(axis=1) - 1
    matrix.scatter(best, np.arange(len(values)), marker="s", s=18, color=COLOURS["vermilion"], label="nearest")
    matrix.set_yticks([s.slot for s in audit.slots], [f"{s.slot}: {s.stated or 'not stated'}" for s in audit.slots])
    plain_axis(matrix)
    label(matrix, x="layer whose output is compared (-1: the embedding)", y="slot: what it is stated to hold",
          title="Each slot against every layer")
    figure.colorbar(image, ax=matrix, label="relative distance, median over tokens")
    for slot in audit.slots:
        points = [(t, d[slot.slot]) for _, rows in audit.by_token for t, d in enumerate(rows)]
        x, y = np.array(points).T
        y = np.clip(np.nan_to_num(y, nan=CEILING, posinf=CEILING), FLOOR, CEILING)
        tokens.plot(x, y, ".", markersize=2.5, color=CYCLE[slot.slot % len(CYCLE)], label=f"slot {slot.slot}")
    longest = max(map(len, audit.limits))
    limit = np.full(longest, np.nan)
    for rows in audit.limits:
        limit[:len(rows)] = np.fmax(limit[:len(rows)], rows.max(axis=1))
    tokens.plot(limit, color=COLOURS["black"], linewidth=1, linestyle="--", label="largest limit")
    tokens.set_yscale("log")
    tokens.set_ylim(FLOOR, CEILING * 1.5)
    label(tokens, x="position of the token", y="relative distance to what the slot holds", title="Every recomputed row")
    tokens.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), markerscale=4)
    return figure
