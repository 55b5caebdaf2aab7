"""What each way to store states costs: relative error of each layer, the target's top-1 tokens that change, bytes.

Measured against states that are recomputed, as the target computes them: a store has lost already what bf16 costs. Of a
target that computes in bfloat16, bf16 loses nothing. Errors are per token, position 0 apart (DESIGN.md, convention 10).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import h5py
import numpy as np
import torch
from torch import Tensor

from dflash_lib.hidden_states.encode import dequantize_fp8, quantize_fp8
from dflash_lib.hidden_states.formats.speculators import quantize
from dflash_lib.hidden_states.parity import relative_errors
from dflash_lib.hidden_states.sampling import LAST_NAME, Estimate, SampleBootstrap, state_blocks
from dflash_lib.hidden_states.schema import AUX, StateDataset, create_states, to_raw, write_raw
from dflash_lib.hidden_states.store import HiddenStateStore
from dflash_lib.target.capture import capture_batch, stack_states
from dflash_lib.target.loading import Target

HEAD_TOKENS = 128  # tokens whose logits are in memory at a time


def through_bf16(states: Tensor) -> Tensor:
    """float32 states as bfloat16 stores them."""
    return states.bfloat16().float()


def through_fp16(states: Tensor) -> Tensor:
    """float32 states as float16 stores them: infinite above 65,504."""
    return states.half().float()


def through_fp8(states: Tensor) -> Tensor:
    """float32 states [..., H] as a store's fp8 keeps them: e4m3 with one float32 scale per token and layer."""
    return dequantize_fp8(*quantize_fp8(states))


def through_fp8_one_scale(states: Tensor) -> Tensor:
    """float32 states [T, K, H] as e4m3 with one scale per token over all layers, the last included: speculators'."""
    stored, scales = quantize(states)
    return stored.float() * scales


@dataclass(frozen=True)
class _Way:
    """through: what the states [T, K, H] come back as; bytes_per_token(tapped layers, hidden size)."""

    through: Callable[[Tensor], Tensor]
    bytes_per_token: Callable[[int, int], float]


WAYS = {
    "bf16": _Way(through_bf16, lambda layers, hidden: 2 * hidden * (layers + 1)),
    "fp16": _Way(through_fp16, lambda layers, hidden: 2 * hidden * (layers + 1)),
    "fp8, a scale per layer": _Way(through_fp8, lambda layers, hidden: (hidden + 4) * layers + 2 * hidden),
    "fp8, one scale": _Way(through_fp8_one_scale, lambda layers, hidden: hidden * (layers + 1) + 4),
}


@dataclass(frozen=True)
class EncodingCost:
    """name: as in WAYS. errors: [K] median over tokens behind position 0 of |stored - computed| / |computed|; at_0: [K]
    the same of position 0; changed: share of tokens whose top-1 changes when the last state is stored so (ties are no
    change), a number; infinite: values that overflow; bytes_per_token: with the last state in bf16 for fp8 with a scale
    per layer, in fp8 for one scale."""

    name: str
    errors: Estimate
    at_0: np.ndarray
    changed: Estimate
    infinite: int
    bytes_per_token: float


@dataclass(frozen=True)
class EncodingCosts:
    """names: of the K states of a token, the tapped layers and LAST_NAME; costs: one for each of WAYS;
    zstd_bytes_per_token: measured with bf16+zstd, lossless; computed_in: the target's type; num_tokens: tokens behind
    position 0 of num_samples samples."""

    names: list[str]
    costs: list[EncodingCost]
    zstd_bytes_per_token: float
    computed_in: str
    num_tokens: int
    num_samples: int

    def __getitem__(self, name: str) -> EncodingCost:
        return next(cost for cost in self.costs if cost.name == name)


@torch.no_grad()
def encoding_costs(target: Target, rows: Sequence[Sequence[int]], layer_ids: Sequence[int], population: int,
                   max_length: int = 512) -> EncodingCosts:
    """Recomputes rows, cut to `max_length`, and stores each in each of WAYS. population: samples in the store."""
    rows = [list(row[:max_length]) for row in rows if len(row) > 1]
    errors: dict[str, list[np.ndarray]] = {name: [] for name in WAYS}
    at_0, changed, infinite = ({name: [] for name in WAYS} for _ in range(3))
    sample_of, raws = [], []
    for number, row in enumerate(rows):
        sample, = capture_batch(target, [row], layer_ids)
        last, states = sample.last_hidden_state_prenorm, stack_states(sample).float()
        raws.append(to_raw(states.bfloat16()))
        kept = {name: way.through(states) for name, way in WAYS.items()}
        for name, stored in kept.items():
            error = relative_errors(stored, states).cpu().numpy()
            errors[name].append(error[1:])
            at_0[name].append(error[0])
            infinite[name].append(int((~torch.isfinite(stored)).sum()))
        for name, flips in _changed(target, last[1:], {n: s[1:, -1].to(last.dtype) for n, s in kept.items()}).items():
            changed[name].append(flips)
        sample_of.append(np.full(len(row) - 1, number))
    bootstrap = SampleBootstrap(np.concatenate(sample_of), len(rows), population)
    costs = [EncodingCost(
        name, bootstrap.median(np.concatenate(errors[name])), np.median(at_0[name], axis=0),
        bootstrap.share(np.concatenate(changed[name])), sum(infinite[name]),
        float(way.bytes_per_token(len(layer_ids), target.hidden_size))) for name, way in WAYS.items()]
    names = [*(f"layer {k}" for k in layer_ids), LAST_NAME]
    return EncodingCosts(names, costs, zstd_bytes_per_token(raws), str(target.head.weight.dtype).removeprefix("torch."),
                         len(bootstrap.sample_of), len(rows))


def _changed(target: Target, last: Tensor, stored: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """bool [t] by name: whether head(norm(stored)) chooses a token that the target finds less likely than its own."""
    found: dict[str, list[np.ndarray]] = {name: [] for name in stored}
    for start in range(0, len(last), HEAD_TOKENS):
        part = slice(start, start + HEAD_TOKENS)
        truth = target.head(target.final_norm(last[part])).float()
        for name, states in stored.items():
            chosen = target.head(target.final_norm(states[part])).argmax(dim=-1, keepdim=True)
            found[name].append((truth.gather(1, chosen)[:, 0] < truth.amax(dim=-1)).cpu().numpy())
    return {name: np.concatenate(arrays) for name, arrays in found.items()}


def recomputed_error(target: Target, store: HiddenStateStore, indices: Sequence[int]) -> float:
    """Stored states of whole samples against the target's own, computed again one by one: median relative error over
    tokens behind position 0, of the state where it is largest. NaN when the samples have one token each."""
    errors = []
    for index in indices:
        sample, = capture_batch(target, [store.read_tokens(index)[0].tolist()], store.target_layer_ids)
        states = stack_states(sample).float().cpu()
        stored = torch.cat([block for _, _, block in state_blocks(store, [index])])
        errors.append(relative_errors(stored, states[:, :stored.shape[1]])[1:])
    return float(torch.cat(errors).median(dim=0).values.max()) if sum(map(len, errors)) else float("nan")


def zstd_bytes_per_token(raws: Sequence[np.ndarray]) -> float:
    """Bytes of a token as bf16+zstd stores it: raw uint16 states [T, K, H] through the store's own HDF5 filters, in
    memory."""
    raw = np.concatenate(raws)
    with h5py.File("measured", "w", driver="core", backing_store=False) as file:
        dataset = create_states(file, StateDataset(AUX, torch.bfloat16, raw.shape[1:], zstd=True), len(raw))
        step = dataset.chunks[0]
        for start in range(0, len(raw), step):
            write_raw(dataset, start, raw[start:start + step])
        file.flush()
        return dataset.id.get_storage_size() / len(raw)
