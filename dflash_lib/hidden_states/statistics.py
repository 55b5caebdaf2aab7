"""What stored hidden states look like: norms, massive activations, similarity of layers, effective rank, final norm.

Everything is accumulated sample by sample in float64, so that memory does not grow with the number of samples.
Position 0 carries massive activations in many targets and stands apart in every figure (DESIGN.md, convention 10).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from dflash_lib.hidden_states.schema import StoreError
from dflash_lib.hidden_states.store import HiddenStateStore

NUM_POSITIONS = 128  # positions shown one by one
MAGNITUDE_BINS = np.logspace(-4, 4, 129)


@dataclass(frozen=True)
class MassiveChannel:
    """A channel that is far larger than the rest: its median value at position 0 and its mean at all others."""

    layer: str
    channel: int
    at_0: float
    elsewhere: float


@dataclass(frozen=True)
class StateStatistics:
    """Figures of notebook 05. K = tapped layers, plus the last layer before the norm where stored.

    names: [K], "layer 14" or "last, pre-norm"; num_tokens: tokens counted, position 0 left out.
    norms: [tokens, K] norm of every token but position 0; norms_at_0: [samples, K].
    norm_by_position: [positions, K] median norm, NaN where fewer than 5 samples reach.
    median_magnitude: [K] median |value| elsewhere; largest_at_0, largest_elsewhere: [K] median over tokens of the
    largest |value| of a token. massive: the three largest channels of every layer at position 0.
    similarity: [K, K] mean cosine between layers of one token; spectra: [K, H] eigenvalues of the covariance, largest
    first, as shares of their sum; effective_rank: [K] exp of the spectrum's entropy; rank_90: [K] directions that carry
    90 % of the variance.
    magnitude_bins: edges; before_norm, after_norm: shares of the last state's values whose magnitude is in each bin.
    """

    names: list[str]
    num_samples: int
    num_tokens: int
    norms: np.ndarray
    norms_at_0: np.ndarray
    norm_by_position: np.ndarray
    median_magnitude: np.ndarray
    largest_at_0: np.ndarray
    largest_elsewhere: np.ndarray
    massive: list[MassiveChannel]
    similarity: np.ndarray
    spectra: np.ndarray
    effective_rank: np.ndarray
    rank_90: np.ndarray
    magnitude_bins: np.ndarray
    before_norm: np.ndarray
    after_norm: np.ndarray


def spread_indices(indices: Sequence[int], num: int) -> list[int]:
    """At most `num` of the indices, evenly spread over them."""
    return [indices[i] for i in np.linspace(0, len(indices) - 1, min(num, len(indices))).astype(int)]


def effective_rank(eigenvalues: np.ndarray) -> float:
    """exp of the entropy of the eigenvalues' shares (Roy and Vetterli, 2007): 1 to len(eigenvalues)."""
    shares = np.clip(eigenvalues, 0, None)
    shares = shares[shares > 0] / shares.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))


@torch.no_grad()
def collect_statistics(store: HiddenStateStore, sample_indices: Sequence[int],
                       final_norm: nn.Module) -> StateStatistics:
    """Reads the samples and accumulates. final_norm: the target's own module.

    Raises StoreError when the store lacks the last state, or when fewer than two tokens are left.
    """
    if not store.plan.last:
        raise StoreError(f"{store.folder}: stored without the last hidden state, which these statistics need")
    names = [f"layer {k}" for k in store.target_layer_ids] + ["last, pre-norm"]
    num_layers, hidden = len(names), store.hidden_size
    norms, norms_at_0, first_tokens, largest, medians = [], [], [], [], []
    by_position: list[list[Tensor]] = [[] for _ in range(NUM_POSITIONS)]
    cosine = torch.zeros(num_layers, num_layers, dtype=torch.float64)
    total = torch.zeros(num_layers, hidden, dtype=torch.float64)
    outer = torch.zeros(num_layers, hidden, hidden, dtype=torch.float64)
    counts = {name: np.zeros(len(MAGNITUDE_BINS) - 1) for name in ("before", "after")}
    device = next(final_norm.parameters()).device
    num_tokens = 0
    for index in sample_indices:
        sample = store.read(index)
        last = sample.last_hidden_state_prenorm.float()
        states = torch.cat([sample.aux_hidden_states.float(), last[:, None]], dim=1)  # [T, K, H]
        norm = states.norm(dim=-1)
        for position in range(min(len(states), NUM_POSITIONS)):
            by_position[position].append(norm[position])
        norms_at_0.append(norm[0])
        first_tokens.append(states[0])
        rest = states[1:]
        if not len(rest):
            continue
        norms.append(norm[1:])
        largest.append(rest.abs().amax(dim=-1))
        medians.append(rest.abs().median(dim=-1).values)
        unit = (rest / norm[1:, :, None]).double()
        cosine += torch.einsum("tkh,tlh->kl", unit, unit)
        rest = rest.double()
        total += rest.sum(dim=0)
        outer += torch.einsum("tkh,tkg->khg", rest, rest)
        num_tokens += len(rest)
        for name, values in (("before", last[1:]), ("after", final_norm(last[1:].to(device)).float().cpu())):
            counts[name] += np.histogram(values.abs().numpy(), MAGNITUDE_BINS)[0]
    if num_tokens < 2:
        raise StoreError(f"{store.folder}: {num_tokens} tokens behind position 0 in the chosen samples; too few")
    mean = total / num_tokens
    covariance = outer / num_tokens - mean[:, :, None] * mean[:, None, :]
    spectra = torch.linalg.eigvalsh(covariance).flip(-1).clamp(min=0)
    spectra = (spectra / spectra.sum(dim=-1, keepdim=True)).numpy()
    return StateStatistics(
        names=names, num_samples=len(sample_indices), num_tokens=num_tokens,
        norms=torch.cat(norms).numpy(), norms_at_0=torch.stack(norms_at_0).numpy(),
        norm_by_position=np.stack([
            torch.stack(rows).median(dim=0).values.numpy() if len(rows) >= 5 else np.full(num_layers, np.nan)
            for rows in by_position]),
        median_magnitude=torch.cat(medians).median(dim=0).values.numpy(),
        largest_at_0=torch.stack(first_tokens).abs().amax(dim=-1).median(dim=0).values.numpy(),
        largest_elsewhere=torch.cat(largest).median(dim=0).values.numpy(),
        massive=_massive_channels(names, torch.stack(first_tokens), mean),
        similarity=(cosine / num_tokens).numpy(), spectra=spectra,
        effective_rank=np.array([effective_rank(spectrum) for spectrum in spectra]),
        rank_90=(spectra.cumsum(axis=-1) < 0.9).sum(axis=-1) + 1, magnitude_bins=MAGNITUDE_BINS,
        before_norm=counts["before"] / (num_tokens * hidden), after_norm=counts["after"] / (num_tokens * hidden))


def _massive_channels(names: Sequence[str], first_tokens: Tensor, mean: Tensor, num: int = 3) -> list[MassiveChannel]:
    """The `num` largest channels of every layer at position 0: first_tokens [samples, K, H], mean elsewhere [K, H]."""
    median = first_tokens.median(dim=0).values
    found = []
    for layer, name in enumerate(names):
        for channel in median[layer].abs().topk(min(num, median.shape[1])).indices.tolist():
            found.append(MassiveChannel(name, channel, float(median[layer, channel]), float(mean[layer, channel])))
    return found
