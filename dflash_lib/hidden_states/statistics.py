"""What stored hidden states look like: norms, tails, massive activations, drift by position, groups of tokens,
similarity of layers, the final norm.

A few numbers of each token are kept (about 24 bytes a token and layer), never its states, so memory does not grow with
the hidden size; samples are drawn whole (sampling.py), and each figure has its error. Position 0 carries massive
activations in many targets and stands apart in every figure (DESIGN.md, convention 10).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dflash_lib.conversations.thoughts import ANSWER, PROMPT, THOUGHT, TokenGroups
from dflash_lib.hidden_states.massive import Massive, find_massive
from dflash_lib.hidden_states.sampling import Estimate, SampleBootstrap, state_blocks, state_names
from dflash_lib.hidden_states.schema import StoreError
from dflash_lib.hidden_states.spectra import Spectra, covariance_spectra
from dflash_lib.hidden_states.store import HiddenStateStore

MAGNITUDE_BINS = np.logspace(-4, 4, 129)
GROUPS = {"prompt": (PROMPT,), "supervised": (ANSWER, THOUGHT), "thought": (THOUGHT,), "answer": (ANSWER,)}


@dataclass(frozen=True)
class TokenTable:
    """A few numbers of every token that was looked at, position 0 too. n tokens, K layers.

    sample: int32 [n], number of its sample; position, token: int32 [n]; group: int8 [n], PROMPT, ANSWER or THOUGHT.
    norm; largest: largest |value|; median: median |value|; kurtosis: of its H values (3 for a normal distribution, H
    where one value is all); drift: cosine to the mean state: float32 [n, K].
    """

    sample: np.ndarray
    position: np.ndarray
    token: np.ndarray
    group: np.ndarray
    norm: np.ndarray
    largest: np.ndarray
    median: np.ndarray
    kurtosis: np.ndarray
    drift: np.ndarray

    @cached_property
    def rest(self) -> np.ndarray:
        """bool [n]: behind position 0."""
        return self.position > 0

    @cached_property
    def peak(self) -> np.ndarray:
        """[n, K]: largest over median |value|."""
        return self.largest / np.maximum(self.median, 1e-30)


@dataclass(frozen=True)
class StateStatistics:
    """Figures of notebook 05. K = tapped layers, plus the last layer before the norm where every token's is stored.

    names: [K], "layer 14" or "last, pre-norm"; samples: the sample indices that were drawn; population: samples in the
    store; num_tokens: tokens counted, position 0 left out. mean: [K, H] mean state. similarity: [K, K] mean cosine
    between layers of one token. magnitude_bins: edges; before_norm, after_norm: shares of the last state's values whose
    magnitude is in each bin, over its num_last_rows stored rows behind position 0 (zeros when there are none).
    """

    names: list[str]
    samples: list[int]
    population: int
    num_tokens: int
    tokens: TokenTable
    mean: np.ndarray
    massive: Massive
    similarity: Estimate
    spectra: Spectra
    magnitude_bins: np.ndarray
    before_norm: np.ndarray
    after_norm: np.ndarray
    num_last_rows: int
    has_thoughts: bool
    why_no_thoughts: str

    @property
    def num_samples(self) -> int:
        return len(self.samples)

    def bootstrap(self, where: np.ndarray) -> SampleBootstrap:
        """For the tokens in `where` (bool [n])."""
        return SampleBootstrap(self.tokens.sample[where], self.num_samples, self.population)

    def median(self, quantity: str, group: str = "", at_0: bool = False) -> Estimate:
        """[K]: median over tokens of a column of `tokens` ("norm", "peak", "kurtosis", "drift", ...) with its error:
        of all tokens behind position 0, of those of a group in GROUPS, or of position 0."""
        values = getattr(self.tokens, quantity)
        where = ~self.tokens.rest if at_0 else self.tokens.rest
        chosen = np.isin(self.tokens.group[where], GROUPS[group]) if group else None
        return self.bootstrap(where).median(values[where], chosen)

    @cached_property
    def position_edges(self) -> np.ndarray:
        """Edges of groups of positions: one by one at the beginning, then each a quarter wider than the one before."""
        edges = [0, 1]
        while edges[-1] <= self.tokens.position.max():
            edges.append(max(edges[-1] + 1, int(edges[-1] * 1.25)))
        return np.array(edges)

    def by_position(self, quantity: str) -> Estimate:
        """[groups of positions, K]: median over tokens, NaN where fewer than MIN_SAMPLES samples reach."""
        values = getattr(self.tokens, quantity)
        everything = self.bootstrap(np.ones(len(values), bool))
        which = np.digitize(self.tokens.position, self.position_edges) - 1
        found = [everything.median(values, which == i) for i in range(len(self.position_edges) - 1)]
        return Estimate(*(np.stack([getattr(f, part) for f in found]) for part in ("value", "low", "high")))

    def nearest_layers(self) -> tuple[str, str, float, float]:
        """The two tapped layers that are most alike: names, mean cosine, its error; of a single one itself, 1."""
        num = len(self.names) - 1
        if num < 2:
            return self.names[0], self.names[0], 1.0, 0.0
        pairs = [(i, j) for i in range(num) for j in range(i)]
        i, j = max(pairs, key=lambda pair: self.similarity.value[pair])
        return self.names[j], self.names[i], float(self.similarity.value[i, j]), float(self.similarity.error[i, j])


@torch.no_grad()
def collect_statistics(store: HiddenStateStore, samples: Sequence[int], final_norm: nn.Module,
                       tokenizer) -> StateStatistics:
    """Reads the samples and accumulates. final_norm: the target's own module, on whose device the spectra are computed;
    tokenizer: tells thoughts from answers.

    Raises StoreError when fewer than two tokens are left.
    """
    names, samples = state_names(store), list(samples)
    groups = TokenGroups(tokenizer)
    columns: dict[str, list] = {name: [] for name in ("sample", "position", "token", "group")}
    for number, index in enumerate(samples):
        input_ids, loss_mask = store.read_tokens(index)
        columns["sample"].append(np.full(len(input_ids), number, np.int32))
        columns["position"].append(np.arange(len(input_ids), dtype=np.int32))
        columns["token"].append(input_ids)
        columns["group"].append(groups.of(input_ids, loss_mask))
    table = {name: np.concatenate(column) if column else np.zeros(0, np.int32) for name, column in columns.items()}
    num_tokens = int((table["position"] > 0).sum())
    if num_tokens < 2:
        raise StoreError(f"{store.folder}: {num_tokens} tokens behind position 0 in the chosen samples; too few")
    device = next(final_norm.parameters()).device
    num_layers, hidden = len(names), store.hidden_size
    parts: dict[str, list[np.ndarray]] = {name: [] for name in ("norm", "largest", "median", "kurtosis")}
    cosines = np.zeros((len(samples), num_layers, num_layers))
    total = torch.zeros(num_layers, hidden, dtype=torch.float64)
    for number, start, states in state_blocks(store, samples):
        for name, values in _numbers_of(states).items():
            parts[name].append(values)
        rest = states[int(start == 0):]
        unit = nn.functional.normalize(rest, dim=-1)
        cosines[number] += (unit @ unit.transpose(1, 2)).double().sum(dim=0).numpy()
        total += rest.double().sum(dim=0)
    mean = total / num_tokens
    rest_of = table["position"] > 0
    bootstrap = SampleBootstrap(table["sample"][rest_of], len(samples), store.num_samples)
    tokens = TokenTable(**table, **{name: np.concatenate(arrays) for name, arrays in parts.items()},
                        drift=_cosine_to(mean.float(), store, samples))
    return StateStatistics(
        names=names, samples=samples, population=store.num_samples, num_tokens=num_tokens, tokens=tokens,
        mean=mean.numpy(), massive=find_massive(store, samples, tokens.median),
        similarity=bootstrap.ratio(cosines, np.bincount(table["sample"][rest_of], minlength=len(samples))),
        spectra=covariance_spectra(store, samples, mean, store.num_samples, device), magnitude_bins=MAGNITUDE_BINS,
        **_last_magnitudes(store, samples, final_norm),
        has_thoughts=bool((table["group"] == THOUGHT).any()), why_no_thoughts=_why_none(groups, table["group"]))


def _last_magnitudes(store: HiddenStateStore, samples: Sequence[int], final_norm: nn.Module) -> dict[str, Any]:
    """before_norm, after_norm and num_last_rows of `StateStatistics`."""
    counts, num_rows = np.zeros((2, len(MAGNITUDE_BINS) - 1)), 0
    device = next(final_norm.parameters()).device
    for index in samples if store.plan.last_state in ("all", "supervised") else []:
        sample = store.read(index)
        last = sample.last_hidden_state_prenorm
        last = last[1:] if sample.last_rows is None else last[sample.last_rows > 0]
        num_rows += len(last)
        for row, values in enumerate((last.float(), final_norm(last.float().to(device)).float().cpu())):
            counts[row] += np.histogram(values.abs().numpy(), MAGNITUDE_BINS)[0]
    before, after = counts / max(1, num_rows * store.hidden_size)
    return {"before_norm": before, "after_norm": after, "num_last_rows": num_rows}


def _numbers_of(states: Tensor) -> dict[str, np.ndarray]:
    """Norm, largest, median and kurtosis of each token's values: states float32 [t, K, H], each result [t, K]."""
    magnitude = states.abs()
    centred = states - states.mean(dim=-1, keepdim=True)
    variance = centred.square().mean(dim=-1)
    fourth = (centred / variance.clamp(min=1e-30).sqrt()[..., None]).pow(4).mean(dim=-1)
    return {"norm": states.norm(dim=-1).numpy(), "largest": magnitude.amax(dim=-1).numpy(),
            "median": magnitude.median(dim=-1).values.numpy(), "kurtosis": fourth.numpy()}


def _cosine_to(mean: Tensor, store: HiddenStateStore, samples: Sequence[int]) -> np.ndarray:
    """float32 [n, K]: cosine of every token's states to the mean state [K, H] of their layer."""
    return np.concatenate([nn.functional.cosine_similarity(states, mean, dim=-1).numpy()
                           for _, _, states in state_blocks(store, samples)])


def _why_none(groups: TokenGroups, found: np.ndarray) -> str:
    """Why there are no thoughts to compare, "" where there are."""
    if (found == THOUGHT).any():
        return ""
    if groups.marks is None:
        return "this target's chat template renders no thoughts"
    return f"no supervised turn of the drawn samples has a thought ({groups.marks[0]} ... {groups.marks[1]})"
