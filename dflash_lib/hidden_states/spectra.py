"""How many directions the states of a layer use: spectrum of their covariance, effective rank and its error.

Memory: BUDGET_BYTES or one layer at a time, whatever is more; a layer takes four matrices [H, H], of float64 up to a
hidden size of 2,048 and of float32 above (H 5,120: 420 MB in all). At most MAX_TOKENS tokens are used.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_lib.hidden_states.sampling import Estimate, Z, interval_factor, state_blocks
from dflash_lib.hidden_states.store import HiddenStateStore

BUDGET_BYTES = 1 << 30
MAX_TOKENS = 65_536
MAX_FLOAT64 = 2048  # hidden size up to which float64 is used


@dataclass(frozen=True)
class Spectra:
    """spectra: [K, H] eigenvalues of the covariance, largest first, as shares of their sum; effective_rank: [K] exp of
    the spectrum's entropy, with the error that comes from drawing samples; half_rank: [K] the same from every other
    sample: what the rank grows by with twice the tokens is not counted in its error; num_tokens: tokens used."""

    spectra: np.ndarray
    effective_rank: Estimate
    half_rank: np.ndarray
    num_tokens: int

    @property
    def rank_90(self) -> np.ndarray:
        """[K]: directions that carry 90 % of the variance."""
        return (self.spectra.cumsum(axis=-1) < 0.9).sum(axis=-1) + 1


def effective_rank(eigenvalues: np.ndarray) -> float:
    """exp of the entropy of the eigenvalues' shares (Roy and Vetterli, 2007): 1 to len(eigenvalues)."""
    shares = np.clip(eigenvalues, 0, None)
    shares = shares[shares > 0] / shares.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))


@torch.no_grad()
def covariance_spectra(store: HiddenStateStore, indices: Sequence[int], mean: Tensor, population: int,
                       device: torch.device | str = "cpu") -> Spectra:
    """Spectra of the drawn samples' states, position 0 left out. mean: [K, H], their mean; population: samples in the
    store.

    The error of the effective rank is that of its linearisation: each sample's tokens, projected on the eigenvectors,
    move the eigenvalues and these the entropy (the delta method, samples as clusters).
    """
    num_layers, hidden = mean.shape
    dtype = torch.float64 if hidden <= MAX_FLOAT64 else torch.float32
    indices = _within(store, indices)
    at_once = max(1, BUDGET_BYTES // (4 * hidden * hidden * dtype.itemsize))
    results = []
    for start in range(0, num_layers, at_once):
        layers = slice(start, start + at_once)
        results += _spectra_of(store, indices, layers, mean[layers].to(device, dtype))
    spectra, ranks, errors, half = map(np.array, zip(*results, strict=True))
    num = len(indices)
    error = Z * interval_factor(num, population) * errors
    return Spectra(spectra, Estimate(ranks, np.maximum(ranks - error, 1), ranks + error), half,
                   sum(max(0, store.length(i) - 1) for i in indices))


def _within(store: HiddenStateStore, indices: Sequence[int]) -> list[int]:
    """The samples that fit in MAX_TOKENS, spread evenly over `indices`."""
    tokens = sum(store.length(i) for i in indices)
    if tokens <= MAX_TOKENS:
        return list(indices)
    num = max(1, int(len(indices) * MAX_TOKENS / tokens))
    return [indices[i] for i in np.linspace(0, len(indices) - 1, num).astype(int)]


def _centred(store: HiddenStateStore, indices: Sequence[int], layers: slice, mean: Tensor):
    """Yields (sample number, states less their mean [t, layers, H]) without position 0."""
    for number, start, states in state_blocks(store, indices):
        rest = states[int(start == 0):, layers].to(mean.device, mean.dtype)
        if len(rest):
            yield number, rest - mean


def _spectra_of(store: HiddenStateStore, indices: Sequence[int], layers: slice,
                mean: Tensor) -> list[tuple[np.ndarray, float, float, float]]:
    """(spectrum, effective rank, its standard error before corrections, rank of every other sample) of each layer."""
    num_layers, hidden = mean.shape
    outer = torch.zeros(2, num_layers, hidden, hidden, dtype=mean.dtype, device=mean.device)
    sums = torch.zeros(2, num_layers, hidden, dtype=mean.dtype, device=mean.device)
    sizes = [0, 0]
    for number, states in _centred(store, indices, layers, mean):
        outer[number % 2].baddbmm_(states.permute(1, 2, 0), states.permute(1, 0, 2))
        sums[number % 2] += states.sum(dim=0)
        sizes[number % 2] += len(states)
    total = sum(sizes)
    shift = sums.sum(dim=0) / total  # of the samples used here, against the mean of all
    found = []
    for k in range(num_layers):
        half = 0 if sizes[0] else 1
        centre = sums[half, k] / sizes[half]
        half_rank = effective_rank(torch.linalg.eigvalsh(
            outer[half, k] / sizes[half] - torch.outer(centre, centre)).double().cpu().numpy())
        covariance = outer[0, k].add_(outer[1, k]).div_(total).sub_(torch.outer(shift[k], shift[k]))
        values, vectors = torch.linalg.eigh(covariance)
        outer[0, k] = vectors  # the covariance is not needed any more
        values = values.double().clamp(min=0)
        found.append((values, half_rank))
    scores = np.zeros((len(indices), num_layers))
    weights = [_rank_weights(values).to(mean.dtype) for values, _ in found]
    for number, states in _centred(store, indices, layers, mean):
        for k in range(num_layers):
            projected = (states[:, k] - shift[k]) @ outer[0, k]
            scores[number, k] += float((projected.square() @ weights[k]).double().sum())
    errors = np.sqrt((scores**2).sum(axis=0)) / total
    results = []
    for k, (values, half_rank) in enumerate(found):
        spectrum = values.flip(0).cpu().numpy()
        results.append((spectrum / spectrum.sum(), effective_rank(spectrum), float(errors[k]), half_rank))
    return results


def _rank_weights(values: Tensor) -> Tensor:
    """d(effective rank) / d(eigenvalue): -rank * (log share + entropy) / sum of the eigenvalues."""
    total = values.sum()
    shares = (values / total).clamp(min=1e-30)
    entropy = -(shares * shares.log()).sum()
    return -entropy.exp() * (shares.log() + entropy) / total
