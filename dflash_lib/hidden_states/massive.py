"""Massive activations: single values of a state that are far larger than the rest of it.

Massive is a value of at least MASSIVE_RATIO times the median |value| of its own token and layer (Sun et al., 2024, who
ask for 1,000 times and an absolute 100; a ratio alone fits targets of any scale, and 100 keeps the runners-up). Which
channels carry them, at which positions, on which tokens: not only position 0.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dflash_lib.hidden_states.sampling import state_blocks
from dflash_lib.hidden_states.store import HiddenStateStore

MASSIVE_RATIO = 100.0
NUM_CHANNELS = 4  # of a token and layer that are kept, the largest ones


@dataclass(frozen=True)
class Massive:
    """The massive activations of the drawn samples, at most NUM_CHANNELS of a token and layer; m of them.

    token: int64 [m], row in the TokenTable; layer: int64 [m], 0 to K - 1; channel: int64 [m]; value: float32 [m];
    at_0, elsewhere: float32 [K, H], median state at position 0, and root mean square of each channel elsewhere.
    """

    token: np.ndarray
    layer: np.ndarray
    channel: np.ndarray
    value: np.ndarray
    at_0: np.ndarray
    elsewhere: np.ndarray


@dataclass(frozen=True)
class MassiveChannel:
    """A channel of a layer, as a row of a table. share_at_0, share_elsewhere: of tokens at position 0, and of all
    others, whose value there is massive; at_0: median value at position 0; elsewhere: root mean square of the others;
    positions, tokens: where else it is massive, most frequent first, with counts (tokens: of how many in all)."""

    layer: str
    channel: int
    share_at_0: float
    share_elsewhere: float
    at_0: float
    elsewhere: float
    positions: str
    tokens: str


@torch.no_grad()
def find_massive(store: HiddenStateStore, samples: Sequence[int], median: np.ndarray) -> Massive:
    """Massive activations of whole samples. median: [n, K], median |value| of every token's states, in their order."""
    found: dict[str, list[np.ndarray]] = {"token": [], "layer": [], "channel": [], "value": []}
    first, squares, num_rest, row = [], 0.0, 0, 0
    for _, start, states in state_blocks(store, samples):
        if start == 0:
            first.append(states[0])
        squares += states[int(start == 0):].double().square().sum(dim=0)
        num_rest += len(states) - int(start == 0)
        largest, channel = states.abs().topk(min(NUM_CHANNELS, states.shape[-1]), dim=-1)
        limit = MASSIVE_RATIO * torch.from_numpy(median[row:row + len(states)])[..., None].clamp(min=1e-30)
        token, layer, rank = torch.nonzero(largest >= limit, as_tuple=True)
        channels = channel[token, layer, rank]
        for name, values in (("token", token + row), ("layer", layer), ("channel", channels),
                             ("value", states[token, layer, channels])):
            found[name].append(values.numpy())
        row += len(states)
    return Massive(**{name: np.concatenate(arrays) for name, arrays in found.items()},
                   at_0=torch.stack(first).median(dim=0).values.numpy(),
                   elsewhere=(squares / max(num_rest, 1)).sqrt().float().numpy())


def massive_channels(statistics, text_of, num: int = 3) -> list[MassiveChannel]:
    """The `num` channels of each layer that are most often massive (then: largest at position 0).

    statistics: a StateStatistics; text_of: the text of a token id.
    """
    massive, table = statistics.massive, statistics.tokens
    in_all = Counter(table.token[table.rest].tolist())
    rows = []
    for layer, name in enumerate(statistics.names):
        here = massive.layer == layer
        times = Counter(massive.channel[here].tolist())
        largest = np.argsort(-np.abs(massive.at_0[layer]), kind="stable")
        channels = [channel for channel, _ in times.most_common(num)]
        channels += [int(channel) for channel in largest[:num + len(channels)] if int(channel) not in channels]
        for channel in channels[:num]:
            tokens = massive.token[here & (massive.channel == channel)]
            elsewhere = tokens[table.rest[tokens]]
            ids = Counter(table.token[elsewhere].tolist())
            rows.append(MassiveChannel(
                layer=name, channel=channel, at_0=float(massive.at_0[layer, channel]),
                elsewhere=float(massive.elsewhere[layer, channel]),
                share_at_0=(len(tokens) - len(elsewhere)) / max(1, int((~table.rest).sum())),
                share_elsewhere=len(elsewhere) / max(1, statistics.num_tokens),
                positions=", ".join(f"{position} ({count})" for position, count in
                                    Counter(table.position[elsewhere].tolist()).most_common(3)),
                tokens=", ".join(f"{text_of(token)!r} ({count} of {in_all[token]})"
                                 for token, count in ids.most_common(3))))
    return rows


def massive_share(statistics) -> np.ndarray:
    """[groups of positions, K]: share of tokens with a massive activation; NaN for groups without tokens."""
    massive, table = statistics.massive, statistics.tokens
    edges = statistics.position_edges
    num_layers = len(statistics.names)
    has = np.zeros((len(table.position), num_layers), bool)
    has[massive.token, massive.layer] = True
    which = np.digitize(table.position, edges) - 1
    return np.stack([has[which == i].mean(axis=0) if (which == i).any() else np.full(num_layers, np.nan)
                     for i in range(len(edges) - 1)])
