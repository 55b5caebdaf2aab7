"""Distances per token between what is stored and every candidate, and the limits that they are held against.

The limits have a basis each, no chosen constants: the stored type's largest rounding error, and what rounding does on
its way through this target (`reference.perturbed`), times a margin that was measured against vLLM.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dflash_lib.hidden_states.audit.reference import ROUNDING, Reference
from dflash_lib.hidden_states.formats.source import SourceSample

WORST_TOKEN = 4.0  # vLLM's worst token is at 2.4 times the noise: see reference.perturbed
MEDIAN_TOKEN = 2.0  # and its median token at 1.0
LARGEST_LIMIT = 0.5  # unrelated states are 0.7 to 1.4 apart: rows that rounding moves further than this tell nothing
ARITHMETIC = 1e-3  # distances come from scalar products in float32, which see no less than sqrt(2**-23), twice


@dataclass(frozen=True)
class Rounding:
    """The stored type's error: relative, largest relative error of a value; absolute: [rows, K], largest error of a
    vector from values too small for the type (their step, times sqrt(H), scales applied)."""

    relative: float
    absolute: Tensor


def stored_rounding(sample: SourceSample) -> Rounding:
    """What storing costs at most, from the type and, for fp8, from the stored scales."""
    info = torch.finfo(sample.states.dtype)
    rows, slots, hidden = sample.states.shape
    step = info.smallest_normal * info.eps / 2 * hidden ** 0.5
    scale = torch.ones(1, 1, 1) if sample.scales is None else sample.scales.float().abs()
    scale = scale.reshape(scale.shape + (1,) * (3 - scale.ndim)).amax(-1) if scale.ndim <= 3 else scale.amax(-1)
    return Rounding(info.eps / 2, (step * scale).expand(rows, slots))


@dataclass(frozen=True)
class Comparison:
    """distance, direction: [n, K, C] per token, the latter with the stored vector brought to the candidate's length;
    ratio: [n, K, C] stored length over the candidate's; stored: [n, K, C], what storing may cost; noise: [n, C], what
    computing in `level` may. first: stored row of the first of the n rows; n may be 0."""

    distance: Tensor
    direction: Tensor
    ratio: Tensor
    stored: Tensor
    noise: Tensor
    first: int

    @cached_property
    def limit(self) -> Tensor:
        """[n, K, C]: how far a row of the right states may be."""
        return (self.stored + WORST_TOKEN * self.noise[:, None] + ARITHMETIC).clamp(max=LARGEST_LIMIT)

    @cached_property
    def middle(self) -> Tensor:
        """[K, C]: how far the median row may be."""
        if not len(self.noise):
            return self.distance.new_zeros(self.distance.shape[1:])
        stored, noise = self.stored.median(dim=0).values, self.noise.median(dim=0).values[None]
        return MEDIAN_TOKEN * torch.sqrt((stored / 2) ** 2 + noise ** 2) + ARITHMETIC

    @property
    def fits(self) -> Tensor:
        """bool [n, K, C]: within the limit."""
        return self.distance <= self.limit

    def in_float32(self) -> "Comparison":
        """The same with the limits of states that were computed in float32."""
        return replace(self, noise=self.noise * ROUNDING["float32"] / ROUNDING["bfloat16"])

    def medians(self) -> Tensor:
        """[K, C]: median distance, position 0 apart where there are others."""
        inner = self.distance[1:] if self.first == 0 and len(self.distance) > 1 else self.distance
        return inner.median(dim=0).values if len(inner) else inner.new_full(inner.shape[1:], torch.inf)


def compare(states: Tensor, rounding: Rounding, reference: Reference, level: str, offset: int = 0) -> Comparison:
    """Stored row t + offset against token t of the reference, for every t where both exist.

    states: float32 [rows, K, H] as decoded, not finite values allowed (their distance is infinite). level: the type
    that the states were computed in. offset +1: the state of token t is stored at t + 1.
    """
    start, stop = max(0, -offset), max(max(0, -offset), min(len(reference), len(states) - offset))
    rows = slice(start + offset, stop + offset)
    device = reference.residual.device
    stored = states[rows].to(device)
    finite = stored.isfinite().all(-1)
    stored = stored.nan_to_num(0, 0, 0)
    square, absolute = stored.square().sum(-1), rounding.absolute[rows].to(device)
    scale = ROUNDING[level] / ROUNDING["bfloat16"]
    noise = scale * reference.noise[start:stop]
    noise = torch.maximum(noise, noise.median(dim=0).values) if len(noise) else noise
    found: list[list[Tensor]] = [[], [], [], []]
    for first, candidates in reference.chunks(start, stop):
        part = slice(first - start, first - start + len(candidates))
        own = candidates.square().sum(-1)  # [t, C]
        product = torch.einsum("tkh,tch->tkc", stored[part], candidates)
        squares = square[part][:, :, None]
        distance = (squares + own[:, None] - 2 * product).clamp(min=0).sqrt() / own[:, None].sqrt()
        cosine = product / (squares * own[:, None]).sqrt()
        same = (squares == 0) & (own[:, None] == 0)  # a zero embedding stays zero in Gated DeltaNet
        distance = torch.where(same, 0.0, distance.nan_to_num(nan=torch.inf))
        direction = torch.where(same, 0.0, (2 - 2 * cosine).clamp(min=0).sqrt().nan_to_num(nan=2.0))
        lost = ~finite[part]
        distance[lost], direction[lost] = torch.inf, 2.0
        limit = rounding.relative + absolute[part][:, :, None] / own[:, None].sqrt()
        for kept, value in zip(found, (distance, direction, (squares / own[:, None]).sqrt().nan_to_num(nan=1.0),
                                       limit.nan_to_num(nan=0, posinf=0)), strict=True):
            kept.append(value)
    if not found[0]:
        empty = torch.empty(0, states.shape[1], len(reference.candidates), device=device)
        return Comparison(empty, empty, empty, empty, empty[:, 0], rows.start)
    return Comparison(*(torch.cat(part) for part in found), noise, rows.start)


def stored_as(sample: SourceSample, slot: int, truth: Tensor) -> Tensor:
    """The truth [n, H] as that sample's type (and scales) would store it, float32."""
    if sample.scales is None:
        return truth.to(sample.states.dtype).float()
    scale = sample.scales.float().expand(*sample.states.shape[:2], 1)[:len(truth), slot].to(truth.device)
    return (truth / scale).to(sample.states.dtype).float() * scale


def unrelated_distance(reference: Reference, candidate: int) -> float:
    """The median relative distance of one token's state to another token's: what 'nothing in common' looks like."""
    states = reference.of(candidate)[1:]
    if len(states) < 2:
        return 1.0
    other = states.roll(max(1, len(states) // 2), dims=0)
    return float(((states - other).norm(dim=-1) / other.norm(dim=-1)).nan_to_num(nan=1.0, posinf=1.0).median())


def nearest_rows(rows: Tensor, pool: Tensor) -> tuple[Tensor, Tensor]:
    """For each of rows [b, H] the nearest of pool [P, H]: its index and its relative distance."""
    square = pool.square().sum(-1)
    squared = rows.square().sum(-1, keepdim=True) + square - 2 * rows @ pool.T
    nearest = (squared.clamp(min=0) / square.clamp(min=1e-30)).min(dim=1)
    index = nearest.indices
    exact = (rows - pool[index]).norm(dim=-1) / pool[index].norm(dim=-1)
    return index, exact.nan_to_num(nan=torch.inf)
