"""What the target says the states are: every layer, the embedding, the normed ones, and how far rounding moves each.

Shapes: T tokens, N layers, H hidden size, C candidates (what a slot may hold).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dflash_lib.hidden_states.parity import relative_errors
from dflash_lib.target.capture import HiddenStateTap
from dflash_lib.target.loading import Target

LAYER, EMBEDDING, NORMED = "layer", "embedding", "normed"
OTHER_NORM, NORM_TWICE, UNIT_LENGTH = "other norm", "norm twice", "unit length"
ROUNDING = {"float32": 2.0 ** -24, "bfloat16": 2.0 ** -8}  # largest relative error of one rounding
CHUNK_BYTES = 128 << 20  # candidates are made for so many tokens at a time


@dataclass(frozen=True)
class Candidate:
    """kind: LAYER, EMBEDDING, NORMED (the target's final norm of that layer), OTHER_NORM ((1 + w) where the target
    scales by w, or the reverse), NORM_TWICE, UNIT_LENGTH (normed without weight); layer: the layer id, -1 for the
    embedding."""

    kind: str
    layer: int

    @property
    def name(self) -> str:
        """In words, for tables."""
        return {LAYER: f"layer {self.layer}", EMBEDDING: "embedding", NORMED: f"norm(layer {self.layer})",
                OTHER_NORM: f"wrong norm(layer {self.layer})", NORM_TWICE: f"norm(norm(layer {self.layer}))",
                UNIT_LENGTH: f"layer {self.layer} at RMS 1"}[self.kind]


class FinalNorm:
    """The target's final norm, and the one that a tool applies which takes (1 + w) for w or the reverse.

    gain: float32 [H], what the norm multiplies the normalised state by; other_gain: the mistaken one, None when the
    norm is neither kind (a LayerNorm with a bias, say).
    """

    def __init__(self, target: Target):
        self.module = target.final_norm
        weight = getattr(self.module, "weight", None)
        self.gain = self.other_gain = None
        if weight is None:
            return
        probe = torch.ones(1, weight.numel(), dtype=weight.dtype, device=weight.device)
        probe[:, ::2] = -1  # RMS 1, mean 0
        gain, weight = (self.module(probe) * probe)[0].float(), weight.float()
        if torch.allclose(gain, weight, rtol=0.02, atol=1e-3):
            self.gain, self.other_gain = weight, 1 + weight
        elif torch.allclose(gain, 1 + weight, rtol=0.02, atol=1e-3):
            self.gain, self.other_gain = 1 + weight, weight

    def __call__(self, states: Tensor) -> Tensor:
        """The norm in its module's own dtype, returned as float32."""
        dtype = next(self.module.parameters()).dtype
        return self.module(states.to(dtype)).float()

    def other(self, states: Tensor) -> Tensor:
        """With the mistaken gain."""
        return unit_length(states) * self.other_gain


def unit_length(states: Tensor) -> Tensor:
    """At RMS 1: an RMS norm without weight."""
    return states * states.square().mean(-1, keepdim=True).add(1e-6).rsqrt()


@dataclass(frozen=True)
class Reference:
    """One row recomputed. residual: float32 [T, N + 1, H], the embedding and every layer's output; noise: [T, C], the
    relative distance by which perturbing every module's output by one rounding to bfloat16 moves each candidate."""

    residual: Tensor
    noise: Tensor
    candidates: list[Candidate]
    norm: FinalNorm

    def __len__(self) -> int:
        return len(self.residual)

    def expand(self, residual: Tensor) -> Tensor:
        """[t, N + 1, H] -> [t, C, H]: every candidate, in the order of `candidates`."""
        layers = residual[:, 1:]
        last = layers[:, -1:]
        parts = [residual, self.norm(layers), self.norm(self.norm(last)), unit_length(last)]
        if self.norm.other_gain is not None:
            parts.append(self.norm.other(last))
        return torch.cat(parts, dim=1)

    def chunks(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yields (first token, candidates [t, C, H]) over tokens start:stop, little at a time."""
        stop = len(self) if stop is None else stop
        step = max(1, CHUNK_BYTES // (4 * len(self.candidates) * self.residual.shape[-1]))
        for first in range(start, stop, step):
            yield first, self.expand(self.residual[first:min(first + step, stop)])

    def of(self, candidate: int) -> Tensor:
        """One candidate's states, [T, H]."""
        wanted = self.candidates[candidate]
        if wanted.kind in (LAYER, EMBEDDING):
            return self.residual[:, wanted.layer + 1]
        layer = self.residual[:, wanted.layer + 1]
        if wanted.kind in (OTHER_NORM, UNIT_LENGTH):
            return self.norm.other(layer) if wanted.kind == OTHER_NORM else unit_length(layer)
        return self.norm(layer) if wanted.kind == NORMED else self.norm(self.norm(layer))


def list_candidates(target: Target, norm: FinalNorm) -> list[Candidate]:
    """Everything that a slot may hold, in the order of `Reference.expand`."""
    layers = range(target.num_layers)
    last = target.num_layers - 1
    return [Candidate(EMBEDDING, -1), *[Candidate(LAYER, k) for k in layers], *[Candidate(NORMED, k) for k in layers],
            Candidate(NORM_TWICE, last), Candidate(UNIT_LENGTH, last),
            *([] if norm.other_gain is None else [Candidate(OTHER_NORM, last)])]


@contextmanager
def perturbed(target: Target, unit: float, seed: int = 0) -> Iterator[None]:
    """Every module's output times (1 + e), e uniform in +-unit: what arithmetic of that precision does to the states.

    Measured against vLLM's bfloat16 states (SmolLM2-135M, a Qwen3.5 hybrid): their error over this noise is 0.8 to 1.0
    in the median token, 2.4 in the worst.
    """
    generator = torch.Generator(target.device).manual_seed(seed)

    def hook(_module: nn.Module, _args, output):
        value = output[0] if isinstance(output, tuple) else output
        if not torch.is_tensor(value) or not value.is_floating_point():
            return output
        noise = torch.rand(value.shape, generator=generator, device=value.device, dtype=torch.float32) * 2 - 1
        value = (value.float() * (1 + unit * noise)).to(value.dtype)
        return (value, *output[1:]) if isinstance(output, tuple) else value

    decoder = target.decoder
    whole = {id(layer) for layer in decoder.layers}
    handles = [module.register_forward_hook(hook) for name, module in decoder.named_modules()
               if name and "rotary" not in name and (id(module) in whole or not list(module.children()))]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def run_batch(target: Target, rows: Sequence[Sequence[int]], positions: Sequence[int] | None = None) -> Tensor:
    """float32 [B, T, N + 1, H]: the embedding and every layer's output of rows of equal length, on the target's device.
    positions: position ids of every row, None = counted from 0."""
    ids = torch.tensor([list(row) for row in rows], device=target.device)
    more = {} if positions is None else {"position_ids": torch.tensor([list(positions)], device=target.device)}
    embedded: list[Tensor] = []
    handle = target.embedding.register_forward_hook(lambda _module, _args, output: embedded.append(output))
    try:
        with HiddenStateTap(target, range(target.num_layers), stop_early=True) as tap:
            target.decoder(input_ids=ids, use_cache=False, **more)
    finally:
        handle.remove()
    return torch.cat([embedded[0][:, :, None], tap.aux], dim=2).float()


def run_row(target: Target, row: Sequence[int], positions: Sequence[int] | None = None) -> Tensor:
    """float32 [T, N + 1, H]: one row alone."""
    return run_batch(target, [row], positions)[0]


@torch.no_grad()
def recompute(target: Target, row: Sequence[int], norm: FinalNorm, seed: int = 0) -> Reference:
    """The row's states and their noise: two forwards."""
    reference = Reference(run_row(target, row), torch.empty(0), list_candidates(target, norm), norm)
    with perturbed(target, ROUNDING["bfloat16"], seed):
        noisy = run_row(target, row)
    parts = [relative_errors(reference.expand(noisy[first:first + len(states)]), states)
             for first, states in reference.chunks()]
    return Reference(reference.residual, torch.cat(parts), reference.candidates, norm)
