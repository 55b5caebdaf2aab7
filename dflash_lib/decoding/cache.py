"""The target's cache while decoding: Transformers' own, with the newest tokens of a verify step taken back again.

What a layer keeps, and what forgetting the newest r of n verified tokens means for it:

- full attention (DynamicLayer): keys and values of every token. The last r are cut off.
- sliding window (DynamicSlidingWindowLayer): those of the last window - 1 tokens. A forward drops what has left the
  window, and a rollback would need it again, so a verify step keeps everything (Transformers' `record_past`) and the
  rollback cuts off the last r, then what has left the window.
- linear attention (LinearAttentionLayer), convolution state: the inputs of the last kernel tokens; treated the same.
- linear attention, recurrent state: one matrix a head that sums up all tokens, so nothing can be cut off, and
  Transformers' `crop` leaves it as it is. A verify step keeps the matrix from before the block, and of each token its
  key, value, gate and beta; the rollback computes from these what the matrix was behind the n - r tokens that stay,
  for all layers at once. No part of the target is run again. (BENCHMARKS.md: measured against replaying the accepted
  tokens, running the model's own rule over them, and keeping the matrix of every token.)
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from dflash_lib.target.loading import Target

CHUNK_RULE = "torch_chunk_gated_delta_rule"
STATE_TOLERANCE = 0.02  # relative; kernels may multiply in tf32


class DecodingError(ValueError):
    """A request that cannot be decoded; the message says why and what to do."""


def cache_argument(model) -> str:
    """The name under which the model's forward takes its cache: `cache` (Transformers 5.24) or `past_key_values`."""
    parameters = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise DecodingError(f"{type(model).__name__}.forward takes neither `cache` nor `past_key_values`, so tokens cannot "
                        "be decoded one after another with it")


@dataclass(frozen=True)
class RuleCall:
    """What one linear-attention layer handed to its gated delta rule for a block of n tokens.

    inputs: key [1, n, key heads, key width], value [1, n, heads, value width], g, beta [1, n, heads]; state: [1, heads,
    key width, value width], from before the block (a copy: Transformers writes the new state over it); normalise: keys
    are to be brought to length 1.
    """

    inputs: dict[str, Tensor]
    state: Tensor
    normalise: bool


class TargetCache:
    """An empty cache for one sequence of the target, under the name by which its forward takes it (`arguments`).

    Tokens can be taken back only when the forward that added them ran inside `recording()`; every such forward is to be
    followed by `forget`, also of 0 tokens. Raises DecodingError when a forward takes no cache, and, with rollback, for
    a layer that keeps something which could not be taken back (named by its type).
    """

    def __init__(self, target: Target, rollback: bool = True):
        self.kept = DynamicCache(config=target.config)
        self.arguments = {cache_argument(target.model): self.kept}
        self.linear = [layer for layer in self.kept.layers if isinstance(layer, LinearAttentionLayer)]
        self.module_name = type(target.layers[0]).__module__  # not the module itself: a cache can be deep-copied
        self.calls: list[RuleCall] | None = None  # of the newest recorded forward; None = nothing was recorded
        self.num_before = 0  # tokens in the cache before that forward
        self.rule_is_known = False
        if rollback:
            _check_layers(self.kept, target, self.modelling)

    @property
    def modelling(self) -> ModuleType:
        """Transformers' module of the target's family."""
        return sys.modules[self.module_name]

    @property
    def num_tokens(self) -> int:
        return self.kept.get_seq_length()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, one forward of at least 2 tokens keeps what `forget` needs."""
        if self.calls is not None:
            raise DecodingError("two recorded forwards without `forget` between them")
        self.calls, self.num_before = [], self.num_tokens
        self._record_past(True)
        try:
            if self.linear:
                with _recorded_rule(self.modelling, self.calls):
                    yield
            else:
                yield
        finally:
            self._record_past(False)

    def _record_past(self, on: bool) -> None:
        for layer in self.kept.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = on

    def forget(self, num_tokens: int) -> None:
        """Takes back the newest tokens of the forward that was recorded. Raises DecodingError for more than those."""
        if self.calls is None:
            raise DecodingError("tokens can be taken back once, after a forward that was recorded")
        calls, self.calls = self.calls, None
        block = self.num_tokens - self.num_before
        if not 0 <= num_tokens <= block:
            raise DecodingError(f"{num_tokens} tokens cannot be taken back from a block of {block}")
        recurrent = [layer for layer in self.linear if layer.recurrent_states[0] is not None]
        if len(calls) != len(recurrent):
            raise DecodingError(f"{len(recurrent)} linear-attention layers keep a recurrent state, but "
                                f"{self.module_name}.{CHUNK_RULE} was called {len(calls)} times in a verify step, "
                                "so their states cannot be taken back (another kernel in its place?)")
        if calls and not self.rule_is_known:
            _check_rule(calls, recurrent, self.module_name)
            self.rule_is_known = True
        self._record_past(True)  # `crop` asks for it, for 0 tokens, too
        self.kept.crop(-num_tokens)
        self._record_past(False)
        if num_tokens and calls:
            for layer, state in zip(recurrent, states_behind(calls, block - num_tokens), strict=True):
                layer.recurrent_states[0] = state


def states_behind(calls: list[RuleCall], num_tokens: int) -> Tensor:
    """[layers, 1, heads, key width, value width] float32: recurrent states behind the first tokens of a block.

    The gated delta rule turns a state S into exp(g_i) S + k_i w_i^T at token i, where w_i = beta_i (v_i - what the
    faded S holds for k_i) depends on the tokens before i, but on none behind. With G the running sum of g, the written
    w solve the triangular system w_i + beta_i sum_(j<i) exp(G_i - G_j) (k_i k_j) w_j = beta_i (v_i - exp(G_i) S k_i),
    and S behind n tokens is exp(G_n) S + sum_i exp(G_n - G_i) k_i w_i^T: the state is read once and written once.
    Layers (in the place of the batch) and heads go together.
    """
    state = torch.cat([call.state for call in calls]).float()
    if num_tokens:
        key, value, g, beta = (torch.cat([call.inputs[name][:, :num_tokens] for call in calls]).transpose(1, 2).float()
                               for name in ("key", "value", "g", "beta"))
        if calls[0].normalise:
            key = key * torch.rsqrt(key.square().sum(dim=-1, keepdim=True) + 1e-6)
        key = key.repeat_interleave(value.shape[1] // key.shape[1], dim=1)  # a key head serves several value heads
        fade = g.cumsum(dim=-1)
        between = (fade[..., :, None] - fade[..., None, :]).tril().exp()
        system = beta[..., None] * between * (key @ key.transpose(-1, -2))
        wanted = beta[..., None] * (value - fade.exp()[..., None] * (key @ state))
        written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        faded_key = key * between[..., -1, :, None]
        state.mul_(fade[..., -1:, None].exp())
        state.flatten(0, 1).baddbmm_(faded_key.flatten(0, 1).transpose(-1, -2), written.flatten(0, 1))  # in place
    return state[:, None]


def _check_rule(calls: list[RuleCall], layers: list[LinearAttentionLayer], module_name: str) -> None:
    """Raises DecodingError unless `states_behind` gives the states that the model has just computed itself."""
    num_tokens = calls[0].inputs["key"].shape[1]
    for layer, state in zip(layers, states_behind(calls, num_tokens), strict=True):
        own = layer.recurrent_states[0]
        if not (state - own).norm() <= STATE_TOLERANCE * own.norm():
            raise DecodingError(f"{module_name}.{CHUNK_RULE} makes other states than the gated delta rule "
                                "would (another kernel in its place?), so its layers cannot be rolled back")


@contextmanager
def _recorded_rule(modelling: ModuleType, calls: list[RuleCall]) -> Iterator[None]:
    """Inside, every call of the model's chunked rule is noted, in the order of the layers.

    The rule's inputs exist nowhere else: they are made inside the layer's forward, which takes the rule from its
    module. So it is put there with a note-taker around it, and put back on any exit.
    """
    rule: Callable = getattr(modelling, CHUNK_RULE)

    def noting(query, key, value, g, beta, *, initial_state, use_qk_l2norm_in_kernel=False, **more):
        inputs = {"key": key, "value": value, "g": g, "beta": beta}
        calls.append(RuleCall(inputs, initial_state.clone(), use_qk_l2norm_in_kernel))
        return rule(query, **inputs, initial_state=initial_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                    **more)

    setattr(modelling, CHUNK_RULE, noting)
    try:
        yield
    finally:
        setattr(modelling, CHUNK_RULE, rule)


def _check_layers(cache: DynamicCache, target: Target, modelling: ModuleType) -> None:
    """Raises DecodingError for layers that `forget` would leave wrong."""
    kinds = getattr(target.config, "layer_types", None) or ["?"] * len(cache.layers)
    croppable = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer)
    for kind, layer in zip(kinds, cache.layers, strict=True):
        start = f"{target.path.name}: drafts cannot be verified with this target, since its layers of type {kind}"
        if type(layer) not in croppable:
            raise DecodingError(f"{start} keep something ({type(layer).__name__}) that cannot be rolled back")
        if type(layer) is LinearAttentionLayer and not hasattr(modelling, CHUNK_RULE):
            raise DecodingError(f"{start} keep a state ({type(layer).__name__}) that cannot be rolled back: "
                                f"{modelling.__name__} has no {CHUNK_RULE}, and only Gated DeltaNet's can be")
