"""Agreement of hidden states, per token: with another engine's states, with the same rows batched otherwise.

One norm over all tokens hides a shift by a layer, because massive activations at position 0 dominate it (DESIGN.md,
convention 10). So errors are relative, per token and layer, and position 0 stands apart.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import logging

from dflash_lib.target.capture import HiddenStateTap, capture_batch
from dflash_lib.target.loading import Target, load_target

# What two right ways of computing in bf16 may differ by at the worst token: as for another engine's bf16 states. Where
# left padding without a mask does so much that a share of it is more, that share: random weights amplify roundings
# (0.11 against 1.64 in the 27B's miniature of 64 layers, measured).
HALF_PRECISION_LIMIT, LEFT_PADDING_SHARE = 0.12, 0.25


def relative_errors(states: Tensor, reference: Tensor) -> Tensor:
    """||a - b|| / ||b|| over the hidden dimension, float32: [..., H] twice -> [...].

    Equal states have error 0, zeros too; beside a reference of zeros anything else is infinitely wrong.
    """
    states, reference = states.float(), reference.float()
    distance = (states - reference).norm(dim=-1)
    return torch.where(distance == 0, distance, distance / reference.norm(dim=-1))


@dataclass(frozen=True)
class ReferencePrompt:
    """One prompt of a reference file: token_ids [T]; layer_outputs [T, num_layers, H], the residual stream after every
    decoder layer before the final norm; greedy: the engine's greedy continuation."""

    token_ids: list[int]
    layer_outputs: Tensor
    greedy: list[int]


def read_reference(path: Path | str) -> list[ReferencePrompt]:
    """Reads a reference file (keys `prompt{k}.token_ids`, `.layer_outputs`, `.greedy_24`)."""
    with safe_open(path, framework="pt") as file:
        names = sorted({key.split(".")[0] for key in file.keys()})
        return [ReferencePrompt(file.get_tensor(f"{name}.token_ids").tolist(),
                                file.get_tensor(f"{name}.layer_outputs"),
                                file.get_tensor(f"{name}.greedy_24").tolist()) for name in names]


def find_reference(folder: Path | str, target: Target) -> list[ReferencePrompt]:
    """The reference states of this target in `folder`, an empty list when there are none.

    A file `NAME.states.safetensors` belongs to targets whose folder name begins with NAME (letters and digits count)
    and whose layers are as many and as wide.
    """
    name = re.sub(r"[^a-z0-9]", "", target.path.name.lower())
    for path in sorted(Path(folder).glob("*.states.safetensors")):
        if name.startswith(re.sub(r"[^a-z0-9]", "", path.name.removesuffix(".states.safetensors").lower())):
            prompts = read_reference(path)
            if prompts[0].layer_outputs.shape[1:] == (target.num_layers, target.hidden_size):
                return prompts
    return []


@dataclass(frozen=True)
class Agreement:
    """Our states against reference states, float32, layer by layer.

    errors: [tokens, layers] relative errors, position 0 of each prompt left out; at_0: [prompts, layers], those of
    position 0; shifted: [tokens, layers - 1], our layer k against the reference's k + 1 (what ids off by one give);
    whole: [layers] and whole_shifted: [layers - 1], one norm over all tokens, position 0 included, as a warning.
    """

    errors: np.ndarray
    at_0: np.ndarray
    shifted: np.ndarray
    whole: np.ndarray
    whole_shifted: np.ndarray

    @property
    def worst_layer_median(self) -> float:
        """Median over tokens, of the layer where it is largest."""
        return float(np.median(self.errors, axis=0).max())

    @property
    def best_shifted_median(self) -> float:
        """Median over tokens of the shifted states, of the layer where it is smallest."""
        return float(np.median(self.shifted, axis=0).min())

    @property
    def shift_ratio(self) -> float:
        """How much worse the best shifted layer is than the worst right one; infinite where those are equal."""
        return self.best_shifted_median / self.worst_layer_median if self.worst_layer_median else float("inf")


def _whole_errors(states: Tensor, reference: Tensor) -> np.ndarray:
    """One relative error a layer over all tokens: [T, L, H] twice -> [L]."""
    return ((states - reference).norm(dim=(0, 2)) / reference.norm(dim=(0, 2))).numpy()


def compare_states(states: Sequence[Tensor], reference: Sequence[Tensor]) -> Agreement:
    """Compares states of all layers, one [T, num_layers, H] a prompt on each side."""
    ours, theirs = [s.float().cpu() for s in states], [r.float().cpu() for r in reference]
    pairs = list(zip(ours, theirs, strict=True))
    all_ours, all_theirs = torch.cat(ours), torch.cat(theirs)
    return Agreement(
        errors=torch.cat([relative_errors(a, b)[1:] for a, b in pairs]).numpy(),
        at_0=torch.stack([relative_errors(a[0], b[0]) for a, b in pairs]).numpy(),
        shifted=torch.cat([relative_errors(a[1:, :-1], b[1:, 1:]) for a, b in pairs]).numpy(),
        whole=_whole_errors(all_ours, all_theirs),
        whole_shifted=_whole_errors(all_ours[:, :-1], all_theirs[:, 1:]))


def compare_with_reference(target: Target, prompts: Sequence[ReferencePrompt]) -> Agreement:
    """Captures every layer of the target for the reference's prompts, each alone, and compares."""
    states = [capture_batch(target, [prompt.token_ids], range(target.num_layers), last=False)[0].aux_hidden_states
              for prompt in prompts]
    return compare_states(states, [prompt.layer_outputs for prompt in prompts])


def reference_agreements(folder: Path | str, target: Target) -> dict[str, Agreement]:
    """Agreement of this target with its reference states, if `folder` has some, and of every reference model that lies
    there with its weights, loaded in float32; by name."""
    found = {}
    prompts = find_reference(folder, target)
    if prompts:
        found[target.path.name] = compare_with_reference(target, prompts)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # that fast kernels are missing is of no interest for these tiny models
    try:
        for model in sorted(path.parent for path in Path(folder).glob("*/config.json")):
            reference = load_target(model, device=str(target.device))
            found[model.name] = compare_with_reference(reference, find_reference(folder, reference))
    finally:
        logging.set_verbosity(verbosity)
    return found


def compare_rounded(target: Target, rows: Sequence[Sequence[int]]) -> Agreement:
    """The target's states rounded to bf16 against the states themselves, all layers: for targets without reference.

    A target that computes in less than float32 has rounded states already: those of the rows in one right-padded batch
    stand against those of each row alone, which differ by the roundings on the way.
    """
    layers = range(target.num_layers)
    states = [capture_batch(target, [row], layers, last=False)[0].aux_hidden_states for row in rows]
    if states[0].dtype == torch.float32:
        return compare_states([s.bfloat16() for s in states], states)
    return compare_states([s.aux_hidden_states for s in capture_batch(target, rows, layers, last=False)], states)


def token_alignment(target: Target, row: Sequence[int], layer_ids: Sequence[int], position: int) -> np.ndarray:
    """Relative change of every token's states, [T, L], when the token at `position` is replaced by another.

    A state belongs to its token, and to nothing later: no change before `position`, a change from there on.
    """
    changed = list(row)
    changed[position] = next(token for token in row if token != row[position])
    states, other = (capture_batch(target, [ids], layer_ids, last=False)[0].aux_hidden_states for ids in (row, changed))
    return relative_errors(other, states).cpu().numpy()


@torch.no_grad()
def layer_alignment(target: Target, row: Sequence[int]) -> np.ndarray:
    """Which of HF's `hidden_states` each hook output is: median relative error over tokens, position 0 left out.

    Returns [num_layers, num_layers + 1]: row k is layer k's hook output, column i is `hidden_states[i]` of a second,
    ordinary forward. HF puts the normed state into the last column.
    """
    captured, = capture_batch(target, [row], range(target.num_layers), last=False)
    output = target.model(torch.tensor([list(row)], device=target.device), output_hidden_states=True)
    columns = [relative_errors(captured.aux_hidden_states[1:], hidden[0, 1:, None]).median(dim=0).values
               for hidden in output.hidden_states]
    return torch.stack(columns, dim=1).cpu().numpy()


@dataclass(frozen=True)
class PaddingErrors:
    """Per row, the largest relative error of any token and layer against the row captured alone, position 0 left out.

    lengths: tokens of each row; right: padded on the right, as extraction does; left: padded on the left without an
    attention mask, as a warning; storage: the row alone, rounded to bf16, for scale. NaN for a one-token row.
    half_precision: whether the target computes in less than float32.
    """

    lengths: list[int]
    right: list[float]
    left: list[float]
    storage: list[float]
    half_precision: bool = False

    @property
    def limit(self) -> float:
        """What `right` may be: what rounding to bf16 costs once; where every layer rounds, and kernels round
        differently in a batch of another shape, HALF_PRECISION_LIMIT or LEFT_PADDING_SHARE of `left`."""
        if self.half_precision:
            return max(HALF_PRECISION_LIMIT, LEFT_PADDING_SHARE * float(np.nanmax(self.left)))
        return float(np.nanmax(self.storage))


@torch.no_grad()
def padding_errors(target: Target, rows: Sequence[Sequence[int]], layer_ids: Sequence[int]) -> PaddingErrors:
    """Captures rows alone, in one right-padded batch, and in one left-padded batch without a mask."""
    alone = [capture_batch(target, [row], layer_ids, last=False)[0].aux_hidden_states for row in rows]
    right = [sample.aux_hidden_states for sample in capture_batch(target, rows, layer_ids, last=False)]
    longest = max(map(len, rows))
    padded = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows], device=target.device)
    with HiddenStateTap(target, layer_ids, stop_early=True) as tap:
        target.decoder(input_ids=padded, use_cache=False)
    left = [tap.aux[i, longest - len(row):] for i, row in enumerate(rows)]
    stored = [states.bfloat16() for states in alone]
    return PaddingErrors(list(map(len, rows)), *[
        [float(relative_errors(a[1:], b[1:]).max()) if len(a) > 1 else float("nan")
         for a, b in zip(states, alone, strict=True)] for states in (right, left, stored)],
        half_precision=alone[0].dtype != torch.float32)
