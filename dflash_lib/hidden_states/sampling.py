"""Statistics of a store of any size: which samples to look at, in what portions, and how far off a figure may be.

Whole samples are drawn, because tokens of one sample are alike: treating them as independent would state errors several
times too small. Errors are 95 % intervals of a bootstrap that draws samples, not tokens (Davison and Hinkley, 1997,
section 3.8), widened as Student's t is for few samples, and narrowed by the share of the store that was looked at: of a
whole store nothing is left to chance. (Means of very skewed values need more: with 8 samples 82 % of such intervals
held the truth, measured. The figures here are medians, shares and cosines.)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_lib.hidden_states.store import HiddenStateStore

BLOCK_BYTES = 64 << 20  # float32 states in memory at a time
NUM_RESAMPLES = 200
Z = 1.96  # of a 95 % interval
LAST_NAME = "last, pre-norm"
MIN_SAMPLES = 5  # a figure that fewer samples contribute to is not shown


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % interval: value, low, high, each a float64 array of one shape. low = high = value where
    the whole store was looked at; NaN where too few samples contribute."""

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @property
    def error(self) -> np.ndarray:
        """Half the width of the interval."""
        return (self.high - self.low) / 2

    def text(self, digits: int = 3) -> list[str]:
        """"12.3 ± 0.4" for each value of a one-dimensional estimate."""
        return [f"{value:.{digits}g} ± {error:.2g}" if np.isfinite(value) else "too few samples"
                for value, error in zip(np.atleast_1d(self.value), np.atleast_1d(self.error), strict=True)]


def choose_samples(indices: Sequence[int], num: int, seed: int = 0) -> list[int]:
    """`num` of the indices, or all, drawn at random without replacement, in ascending order."""
    if num >= len(indices):
        return sorted(indices)
    return sorted(np.random.default_rng(seed).choice(np.asarray(indices), num, replace=False).tolist())


def state_names(store: HiddenStateStore) -> list[str]:
    """Names of a token's K states as `state_blocks` stacks them: "layer 14" for each tapped layer, and LAST_NAME where
    every token's last state is stored."""
    return [f"layer {k}" for k in store.target_layer_ids] + [LAST_NAME] * store.plan.last


def state_blocks(store: HiddenStateStore, indices: Sequence[int]) -> Iterator[tuple[int, int, Tensor]]:
    """Yields (number of the sample in `indices`, first position, states float32 [t, K, H]) over all samples, in blocks
    of at most BLOCK_BYTES (or one token)."""
    num_layers = len(state_names(store))
    step = max(1, BLOCK_BYTES // (4 * num_layers * store.hidden_size))
    for number, index in enumerate(indices):
        sample = store.read(index)
        for start in range(0, len(sample.input_ids), step):
            tokens = slice(start, start + step)
            parts = [sample.aux_hidden_states[tokens].float()]
            if store.plan.last:
                parts.append(sample.last_hidden_state_prenorm[tokens, None].float())
            yield number, start, torch.cat(parts, dim=1)


def interval_factor(num_samples: int, population: float, z: float = Z) -> float:
    """What turns a deviation that holds for many samples of an endless store into one of `num_samples` out of
    `population`: the finite population's factor; S / (S - 1) for the variance of S samples; Student's t over the normal
    quantile `z` (its expansion to second order). 0 for a whole store, NaN for one sample of several, which says nothing
    about the others."""
    if num_samples >= population:
        return 0.0
    if num_samples < 2:
        return float("nan")
    free = num_samples - 1
    student = 1 + (z**2 + 1) / (4 * free) + (5 * z**4 + 16 * z**2 + 3) / (96 * free**2)
    return float(np.sqrt((1 - num_samples / population) * num_samples / free) * student)


class SampleBootstrap:
    """Estimates from tokens of drawn samples.

    sample_of: int [n], the sample (0 to num_samples - 1) of each token; population: samples in the store.
    """

    def __init__(self, sample_of: np.ndarray, num_samples: int, population: int, seed: int = 0,
                 num_resamples: int = NUM_RESAMPLES):
        self.sample_of, self.num_samples, self.population = np.asarray(sample_of), num_samples, population
        self.factor = interval_factor(num_samples, population)
        generator = np.random.default_rng(seed)
        self.counts = generator.multinomial(num_samples, [1 / num_samples] * num_samples, num_resamples)

    def interval(self, value: np.ndarray, resampled: np.ndarray) -> Estimate:
        """value [...] with the interval of `resampled` [resamples, ...] around it."""
        value = np.asarray(value, np.float64)
        low, high = np.nanpercentile(resampled, [2.5, 97.5], axis=0) if np.isfinite(resampled).any() else (
            np.full_like(value, np.nan),) * 2
        return Estimate(value, value - self.factor * np.maximum(value - low, 0),
                        value + self.factor * np.maximum(high - value, 0))

    def median(self, values: np.ndarray, where: np.ndarray | None = None) -> Estimate:
        """Median over the tokens of each column of values [n, K]. where: bool [n], the tokens that count; with fewer
        than MIN_SAMPLES samples among them (or all that there are) all is NaN."""
        samples = self.sample_of if where is None else self.sample_of[where]
        values = values if where is None else values[where]
        num_columns = values.shape[1]
        if len(np.unique(samples)) < (1 if where is None else min(MIN_SAMPLES, self.num_samples)):
            return Estimate(*np.full((3, num_columns), np.nan))
        resampled = np.full((len(self.counts), num_columns), np.nan)
        for column in range(num_columns):
            order = np.argsort(values[:, column], kind="stable")
            ordered, owner = values[order, column], samples[order]
            for i, counts in enumerate(self.counts):
                weight = np.cumsum(counts[owner])
                if weight[-1]:
                    resampled[i, column] = ordered[np.searchsorted(weight, weight[-1] / 2)]
        return self.interval(np.median(values, axis=0), resampled)

    def mean(self, values: np.ndarray) -> Estimate:
        """Mean over the tokens of values [n, ...]."""
        sums = np.zeros((self.num_samples, *values.shape[1:]))
        np.add.at(sums, self.sample_of, values)
        return self.ratio(sums, np.bincount(self.sample_of, minlength=self.num_samples))

    def share(self, events: np.ndarray) -> Estimate:
        """Share of the tokens with an event, bool [n, ...]. Where no token has one, which says little about the rest of
        the store, the interval ends at 3 / n (the rule of three, for tokens on their own)."""
        found = self.mean(events.astype(np.float64))
        limit = 3 / len(events) if self.factor else 0.0
        high = np.where(found.value == 0, limit, np.minimum(found.high, 1))
        return Estimate(found.value, np.maximum(found.low, 0), high)

    def ratio(self, sums: np.ndarray, sizes: np.ndarray) -> Estimate:
        """sum(sums) / sum(sizes) over the samples: sums [samples, ...], sizes [samples], such as a mean over tokens."""
        resampled = np.tensordot(self.counts, sums, axes=1)
        size = (self.counts @ sizes).reshape(-1, *[1] * (sums.ndim - 1))
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.interval(sums.sum(axis=0) / sizes.sum(), np.where(size > 0, resampled / size, np.nan))
