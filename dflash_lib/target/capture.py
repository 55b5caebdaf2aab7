"""Captures the target's hidden states with forward hooks, the same way for dense models and Gated DeltaNet hybrids.

Layer id k is the OUTPUT of decoder layer k (DESIGN.md, convention 1): HF's `hidden_states[k + 1]`, except that HF puts
the normed state behind the last layer, while `last` here is that layer's raw output (convention 2).

Shapes: B rows, T tokens, L tapped layers, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_lib.target.loading import Target, TargetError


def default_layer_ids(num_layers: int, num_ids: int = 5) -> list[int]:
    """`num_ids` layers spread over the target: `round(1 + i * (num_layers - 4) / (num_ids - 1))`, half to even.

    64 layers and 5 ids give 1 16 31 46 61. Source: z-lab's rule (DESIGN.md, convention 1). Raises TargetError when the
    target has too few layers for so many different ids.
    """
    if num_ids == 1:
        return [num_layers // 2]
    ids = [round(1 + i * (num_layers - 4) / (num_ids - 1)) for i in range(num_ids)] if num_ids > 1 else []
    if not ids or len(set(ids)) < num_ids or ids[-1] >= num_layers:
        raise TargetError(f"num_aux_layers: {num_ids} different layers cannot be spread over a target of {num_layers} "
                          "layers; ask for fewer, or name them in target_layer_ids")
    return ids


def check_layer_ids(layer_ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """`layer_ids` as a tuple. Raises TargetError unless they are whole numbers of existing layers that ascend."""
    ids = tuple(layer_ids)
    if any(type(k) is not int for k in ids) or list(ids) != sorted(set(ids)) or not ids:
        raise TargetError(f"target_layer_ids: whole numbers that ascend are needed, got {list(ids)}")
    if ids[0] < 0 or ids[-1] >= num_layers:
        raise TargetError(f"target_layer_ids: {list(ids)} does not fit a target of {num_layers} layers "
                          f"(ids 0 to {num_layers - 1}; id k is the output of layer k)")
    return ids


class _StopForward(Exception):
    """Ends a forward pass after the last tapped layer; caught by HiddenStateTap only."""


class HiddenStateTap:
    """Context manager that keeps the outputs of chosen decoder layers of every forward inside it.

    layer_ids: ascending ids (id k = output of layer k). last: keep the last decoder layer's raw output, too, before the
    final norm. stop_early: end the forward after the last layer that is needed; since the model's call cannot return
    then, the `with` block ends there (without an error), so the call must be its last statement.

    `aux` [B, T, L, H] and `last` [B, T, H] are those of the newest forward, in the model's dtype and on its device.
    Hooks are removed on every exit. Raises TargetError for ids that the target lacks, and when `aux` or `last` is read
    though no forward has passed the layers.
    """

    def __init__(self, target: Target, layer_ids: Sequence[int], last: bool = False, stop_early: bool = False):
        self.target = target
        self.layer_ids = check_layer_ids(layer_ids, len(target.layers))
        self.last_id = len(target.layers) - 1 if last else None
        self.stop_after = max(self.layer_ids[-1], self.last_id or 0) if stop_early else None
        self._outputs: dict[int, Tensor] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def _hook(self, layer_id: int):
        def keep(_module, _args, output):
            self._outputs[layer_id] = output[0] if isinstance(output, tuple) else output
            if layer_id == self.stop_after:
                raise _StopForward
        return keep

    def __enter__(self) -> "HiddenStateTap":
        wanted = {*self.layer_ids, *([] if self.last_id is None else [self.last_id])}
        self._handles = [self.target.layers[k].register_forward_hook(self._hook(k)) for k in sorted(wanted)]
        return self

    def __exit__(self, kind, _error, _traceback) -> bool:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        return kind is _StopForward

    def _output(self, layer_id: int) -> Tensor:
        if layer_id not in self._outputs:
            raise TargetError(f"no forward pass went through layer {layer_id} inside the tap")
        return self._outputs[layer_id]

    @property
    def aux(self) -> Tensor:
        """[B, T, L, H]: the tapped layers' outputs in the order of `layer_ids`."""
        return torch.stack([self._output(k) for k in self.layer_ids], dim=2)

    @property
    def last(self) -> Tensor:
        """[B, T, H]: the last decoder layer's output before the final norm."""
        if self.last_id is None:
            raise TargetError("the tap was made without last=True")
        return self._output(self.last_id)


@dataclass(frozen=True)
class CapturedSample:
    """aux_hidden_states: [T, L, H]; last_hidden_state_prenorm: [T, H], or None when it was not asked for. Both on the
    model's device."""

    aux_hidden_states: Tensor
    last_hidden_state_prenorm: Tensor | None


def stack_states(sample) -> Tensor:
    """[T, L + 1, H]: the tapped layers of a captured or stored sample and behind them its last state; [T, L, H] where
    it has none."""
    if sample.last_hidden_state_prenorm is None:
        return sample.aux_hidden_states
    return torch.cat([sample.aux_hidden_states, sample.last_hidden_state_prenorm[:, None]], dim=1)


@torch.no_grad()
def capture_batch(target: Target, rows: Sequence[Sequence[int]], layer_ids: Sequence[int],
                  last: bool = True, dtype: torch.dtype | None = None) -> list[CapturedSample]:
    """Runs token rows through the target as one right-padded batch and returns each row's states without the padding.

    No attention mask is passed: padding stands behind every real token, and attention and Gated DeltaNet both look
    back only, so no real token can see it (and attention stays on its fast causal path). The decoder is called without
    the head, and stops after the last layer that is needed. dtype: what the states are cast to (None = as computed).
    Raises TargetError for an empty batch or row and for token ids outside the vocabulary.
    """
    if not rows or not all(len(row) for row in rows):
        raise TargetError("capture: a batch needs at least one row and every row at least one token")
    padded = np.zeros((len(rows), max(map(len, rows))), np.int64)  # id 0 pads: any id will do
    for i, row in enumerate(rows):
        padded[i, :len(row)] = row
    input_ids = torch.from_numpy(padded)
    vocabulary = target.embedding.weight.shape[0]
    if input_ids.min() < 0 or input_ids.max() >= vocabulary:
        raise TargetError(f"capture: token ids from {int(input_ids.min())} to {int(input_ids.max())} do not fit the "
                          f"target's vocabulary of {vocabulary}; was the data tokenised for another model?")
    with HiddenStateTap(target, layer_ids, last=last, stop_early=True) as tap:
        target.decoder(input_ids=input_ids.to(target.device), use_cache=False)
    aux, final = tap.aux, tap.last if last else None
    if dtype is not None:
        aux, final = aux.to(dtype), None if final is None else final.to(dtype)
    return [CapturedSample(aux[i, :len(row)], None if final is None else final[i, :len(row)])
            for i, row in enumerate(rows)]


def plan_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Groups samples into batches of at most `token_budget` padded tokens (longest row times rows).

    Longest first, so that neighbours are of like length, little is wasted on padding, and memory that does not suffice
    shows at once. A sample longer than the budget is a batch alone. A pure function of its arguments; every index of
    `lengths` occurs exactly once.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= token_budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def padding_share(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> float:
    """The share of computed tokens that is padding, 0 to 1."""
    padded = sum(max(lengths[i] for i in batch) * len(batch) for batch in batches)
    return 1.0 - sum(lengths[i] for batch in batches for i in batch) / padded
