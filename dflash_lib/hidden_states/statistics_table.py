"""The figures of notebook 05 as one long table, a Parquet file that pandas, DuckDB or a next analysis read as it is.

Columns: quantity; layer ("layer 14", "last, pre-norm"); of (group of tokens, encoding, the other layer, or "");
position (the first one of its group, -1 = all but 0); channel (or direction, from 1; -1 = none); value, low, high (the
95 % interval over samples; NaN where none is stated).
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from dflash_lib.files import atomic_path
from dflash_lib.hidden_states.encoding_costs import EncodingCosts
from dflash_lib.hidden_states.logit_lens import LogitLens
from dflash_lib.hidden_states.massive import MassiveChannel, massive_share
from dflash_lib.hidden_states.sampling import Estimate
from dflash_lib.hidden_states.statistics import GROUPS, StateStatistics

COLUMNS = ("quantity", "layer", "of", "position", "channel", "value", "low", "high")
QUANTITIES = {"norm": "norm", "peak": "largest over median value", "kurtosis": "kurtosis",
              "drift": "cosine to the mean state", "median": "median value"}
NUM_DIRECTIONS = 64  # of the spectrum, spread logarithmically


def _rows(quantity: str, layers: Sequence[str], estimate: Estimate, of: str = "", position: int = -1,
          channel: int = -1) -> list[tuple]:
    return [(quantity, layer, of, position, channel, *numbers) for layer, *numbers in zip(
        layers, *map(np.atleast_1d, (estimate.value, estimate.low, estimate.high)), strict=True)]


def _plain(values: np.ndarray) -> Estimate:
    """Values without a stated error."""
    return Estimate(values, np.full_like(values, np.nan), np.full_like(values, np.nan))


def statistics_table(statistics: StateStatistics, channels: Sequence[MassiveChannel], costs: EncodingCosts,
                     lens: LogitLens) -> pd.DataFrame:
    """Everything that the notebook shows, in COLUMNS."""
    names, rows = statistics.names, []
    for quantity, words in QUANTITIES.items():
        rows += _rows(words, names, statistics.median(quantity))
        rows += _rows(words, names, statistics.median(quantity, at_0=True), position=0)
        for group in GROUPS:
            rows += _rows(words, names, statistics.median(quantity, group), group)
    for quantity in ("norm", "drift"):
        found = statistics.by_position(quantity)
        for i, position in enumerate(statistics.position_edges[:-1]):
            part = Estimate(found.value[i], found.low[i], found.high[i])
            rows += _rows(QUANTITIES[quantity], names, part, "by position", int(position))
    for position, shares in zip(statistics.position_edges[:-1], massive_share(statistics), strict=True):
        rows += _rows("share of tokens with a massive activation", names, _plain(shares), "", int(position))
    for found in channels:
        at_0, elsewhere = (_plain(np.array([share])) for share in (found.share_at_0, found.share_elsewhere))
        rows += _rows("share with this channel massive", [found.layer], at_0, position=0, channel=found.channel)
        rows += _rows("share with this channel massive", [found.layer], elsewhere, channel=found.channel)
    for i, name in enumerate(names):
        part = Estimate(*(getattr(statistics.similarity, key)[i] for key in ("value", "low", "high")))
        rows += [(*row[:2], names[j], *row[3:]) for j, row in enumerate(_rows("cosine", [name] * len(names), part))]
    spectra = statistics.spectra
    rows += _rows("effective rank", names, spectra.effective_rank)
    rows += _rows("effective rank of every other sample", names, _plain(spectra.half_rank))
    hidden = spectra.spectra.shape[1]
    for direction in np.unique(np.geomspace(1, hidden, NUM_DIRECTIONS).astype(int)):
        rows += _rows("share of variance up to this direction", names,
                      _plain(spectra.spectra[:, :direction].sum(axis=1)), channel=int(direction))
    for cost in costs.costs:
        rows += _rows("relative error of storage", costs.names, cost.errors, cost.name)
        rows += _rows("relative error of storage", costs.names, _plain(cost.at_0), cost.name, 0)
        rows += _rows("share of top-1 tokens changed by storage", costs.names[-1:], cost.changed, cost.name)
        rows.append(("bytes a token", "", cost.name, -1, -1, cost.bytes_per_token, np.nan, np.nan))
    rows.append(("bytes a token", "", "bf16+zstd", -1, -1, costs.zstd_bytes_per_token, np.nan, np.nan))
    layers = [f"layer {k}" for k in range(len(lens.agreement.value))]
    rows += _rows("logit lens: the target's top-1", layers, lens.agreement)
    rows += _rows("logit lens: the token itself", layers, lens.repeats)
    rows += _rows("cosine to the next layer", layers[:-1], lens.step)
    return pd.DataFrame(rows, columns=list(COLUMNS))


def write_table(path: Path | str, table: pd.DataFrame) -> None:
    """Writes the table as Parquet, whole or not at all."""
    with atomic_path(path) as partial:
        table.to_parquet(partial, index=False)
