"""Peak memory of capturing hidden states, and the means to tell that of training (training_memory.py), from config.json
alone.

The very code that runs later is run here on PyTorch's meta device, where a tensor has a shape and no memory, while a
tracker adds up what its tensors would take: `capture_batch`'s forward through real decoder layers. On a CPU that is
what PyTorch's allocator is asked for, nearly to the byte. Attention is counted as its memory-efficient kernels take it,
and Gated DeltaNet as its PyTorch fallback or, on request, as flash-linear-attention's kernels take it. Not counted:
what PyTorch and CUDA need to be there at all (0.3 to 1 GB), and memory that an allocator keeps though nothing is in it.
"""

import importlib.util
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from dflash_lib.target.capture import HiddenStateTap, check_layer_ids
from dflash_lib.target.configuration import configuration_faults
from dflash_lib.target.ends import meta_target
from dflash_lib.target.errors import TargetError
from dflash_lib.target.loading import Target

META = torch.device("meta")
FLA_CHUNK = 64
aten = torch.ops.aten
INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)


class MemoryTracker(TorchDispatchMode):
    """Bytes of the meta tensors that live inside the `with` block: `now`, and `peak` so far.

    Answers what a meta tensor cannot: a bool is taken for true (the models ask "is nothing packed here?"), a mask for
    one that is true everywhere (the loss asks which slots are supervised: at most all of them).
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._live: dict[int, tuple[weakref.ref, int]] = {}

    def count(self, tensor: Tensor) -> None:
        """Counts a tensor's storage from now to its end, once."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if tensor.device.type != "meta" or key in self._live:
            return
        size = storage.nbytes()

        def ended(_reference: weakref.ref) -> None:
            del self._live[key]
            self.now -= size

        self._live[key] = (weakref.ref(storage, ended), size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            if args[0].dtype != torch.bool:
                raise TargetError("peak memory: this model's computation depends on the values of its tensors, so its "
                                  "memory cannot be told from the configuration")
            return True
        if func is aten._grouped_mm.default:  # experts; PyTorch's own meta function knows bfloat16 only
            out = args[0].new_empty(args[0].shape[0], args[1].shape[-1])
        elif func is aten.nonzero.default:
            out = torch.empty(args[0].numel(), args[0].dim(), dtype=torch.int64, device=META)
        else:
            if func in INDEXING:
                args = (args[0], _mask_as_ids(args[1]), *args[2:])
            elif func is aten._to_copy.default and str(kwargs.get("device")) == "cpu":
                kwargs = {**kwargs, "device": None}  # what would come to main memory stays here
            out = func(*args, **kwargs)
        tree_map(lambda value: self.count(value) if isinstance(value, Tensor) else None, out)
        return out


def _mask_as_ids(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Boolean masks among the indices as the ids of all their elements, one tensor a dimension."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype == torch.bool:
            found += [torch.empty(index.numel(), dtype=torch.int64, device=META) for _ in range(index.dim())]
        else:
            found.append(index)
    return found


class EfficientAttention(TorchFunctionMode):
    """Scaled dot product attention that allocates what the memory-efficient kernels do: the output, a log-sum-exp a
    query, and a boolean mask once more in the queries' type; never the scores."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = inspect.signature(sdpa_arguments).bind(*args, **(kwargs or {})).arguments
        query, value, mask = given["query"], given["value"], given.get("attn_mask")
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.empty(mask.shape, dtype=query.dtype, device=META)
        log_sum_exp = torch.empty(query.shape[:-1], dtype=torch.float32, device=META)
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        del mask, log_sum_exp
        return out


def sdpa_arguments(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """The parameters of F.scaled_dot_product_attention, whose own signature cannot be asked."""


def fla_gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_) -> tuple:
    """The tensors that flash-linear-attention's chunked forward allocates, without their values.

    query, key [B, T, G, K], value [B, T, H, V], g and beta [B, T, H]. Read in its Python code of early 2026
    (fla/ops/gated_delta_rule/chunk.py at commit 0315a70: the chunks' scores in float32 until they are solved, all else
    alive until the output is there), not measured: tests/gpu/check_capacity.py would, where it is installed. Other
    releases may fuse more, and take less.
    """
    batch, tokens, heads, value_dim = value.shape
    wide, chunks = (batch, tokens, heads, key.shape[-1]), -(-tokens // FLA_CHUNK)
    query, key = torch.empty_like(query), torch.empty_like(key)  # normalised
    g = torch.empty_like(g, dtype=torch.float32)  # summed up within chunks
    scores = torch.empty(batch, tokens, heads, FLA_CHUNK, dtype=torch.float32, device=META)
    solved = torch.empty_like(scores, dtype=key.dtype)
    del scores
    kept = [solved, key.new_empty(wide), torch.empty_like(value)]  # w and u
    kept += [key.new_empty(batch, chunks, heads, key.shape[-1], value_dim), torch.empty_like(value)]
    out = torch.empty_like(value)
    del kept, solved
    return out, None


def _fast_conv(hidden_states: Tensor, *_, **__) -> Tensor:
    return torch.empty_like(hidden_states)


@contextmanager
def _linear_attention(layers: Sequence[nn.Module], fast: bool) -> Iterator[None]:
    """Gated DeltaNet's functions as their PyTorch fallback, or as the kernels' allocations: the kernels themselves
    cannot run without memory, whichever are installed here."""
    stand_ins: dict[str, Callable] = {"torch_chunk_gated_delta_rule": fla_gated_delta_rule,
                                      "causal_conv1d_fn": _fast_conv} if fast else {}
    modules = {sys.modules[type(part).__module__] for layer in layers for part in layer.children()}
    before = [(module, name, vars(module)[name]) for module in modules
              for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn") if name in vars(module)]
    for module, name, function in before:
        setattr(module, name, stand_ins.get(name) or inspect.unwrap(function))
    try:
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)


def fast_kernels_on(device: str) -> bool:
    """Whether a target on `device` would take flash-linear-attention's kernels: they run on GPUs, where installed."""
    return device.startswith("cuda") and importlib.util.find_spec("fla") is not None


def bytes_of(*modules: nn.Module, recurse: bool = True) -> int:
    """Bytes of the parameters and buffers of modules (without their children's, where `recurse` is false), shared ones
    once."""
    tensors = [t for module in modules for t in (*module.parameters(recurse), *module.buffers(recurse))]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """Bytes at the worst moment: `static` (weights and whatever stays) and `working` (comes and goes); parts: what
    `static` consists of, and the peaks of the phases of the work."""

    static: int
    working: int
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return self.static + self.working


@torch.no_grad()
def capture_memory(model: Path | str, layer_ids: Sequence[int], num_rows: int, num_tokens: int, *,
                   dtype: torch.dtype | str = "bfloat16", last: bool = True, fast_kernels: bool = False,
                   target: Target | None = None) -> PeakMemory:
    """Peak memory of `capture_batch` on `num_rows` rows of `num_tokens` tokens, the states cast to bf16, beside the
    target's weights.

    One decoder layer of each kind is run, the last of its kind, with as many kept states as there are then. target: a
    `meta_target` made before. Raises TargetError for layer ids that do not fit, and for models whose computation
    cannot be followed without values.
    """
    target = target or meta_target(model, dtype)
    ids = check_layer_ids(layer_ids, target.num_layers)
    depth = target.num_layers if last else ids[-1] + 1
    kept_ids = sorted({*ids, *([target.num_layers - 1] if last else [])})
    state = (num_rows, num_tokens, target.hidden_size)
    kind_of = [_kind(target, i) for i in range(depth)]
    phases: dict[str, int] = {}
    for kind in dict.fromkeys(kind_of):
        number = depth - 1 - kind_of[::-1].index(kind)
        held = sum(k < number for k in kept_ids) + (number > 0 and number - 1 not in kept_ids)  # its input, too
        with (configuration_faults(model), _one_layer(target, number),
              _linear_attention(target.layers, fast_kernels), MemoryTracker() as tracker):
            for tensor in (*target.model.parameters(), *target.model.buffers()):
                tracker.count(tensor)
            weights = tracker.now
            kept = torch.empty(held, *state, dtype=target.model.dtype, device=META)
            ids_tensor = torch.zeros(num_rows, num_tokens, dtype=torch.long, device=META)
            with EfficientAttention(), HiddenStateTap(target, [0], stop_early=True):
                target.decoder(input_ids=ids_tensor, use_cache=False)
            del kept
        phases[f"layer {number} ({kind[0]})"] = tracker.peak - weights
    size, itemsize = num_rows * num_tokens * target.hidden_size, target.model.dtype.itemsize
    casts = 0 if itemsize == 2 and target.model.dtype == torch.bfloat16 else size * (len(ids) + last) * 2
    phases["stacking the states"] = (len(kept_ids) + len(ids)) * size * itemsize + casts
    return PeakMemory(static=bytes_of(target.model), working=max(phases.values()), parts=phases)


def _kind(target: Target, number: int) -> tuple:
    """What makes decoder layers alike: their type and the shapes of their parameters."""
    kinds = getattr(target.config, "layer_types", None)
    shapes = tuple((name, tuple(p.shape)) for name, p in target.layers[number].named_parameters())
    return ((kinds[number] if kinds else "full_attention"), shapes)


@contextmanager
def _one_layer(target: Target, number: int) -> Iterator[None]:
    """Makes the decoder one of a single layer, `number`, and puts all back."""
    decoder, config = target.decoder, target.config
    layers, kinds, num_layers = decoder.layers, getattr(config, "layer_types", None), config.num_hidden_layers
    decoder.layers = nn.ModuleList([layers[number]])
    config.num_hidden_layers = 1
    if kinds:
        config.layer_types = [kinds[number]]
    try:
        yield
    finally:
        decoder.layers, config.num_hidden_layers = layers, num_layers
        if kinds:
            config.layer_types = kinds


@dataclass(frozen=True, kw_only=True)
class LargestBatch:
    """num_rows of num_tokens that fit (0 = not even one), as a token_budget, and the bytes that they take."""

    num_rows: int
    num_tokens: int
    peak: int

    @property
    def token_budget(self) -> int:
        return self.num_rows * self.num_tokens


def largest_batch(model: Path | str, layer_ids: Sequence[int], num_tokens: int, free: int, *,
                  dtype: torch.dtype | str = "bfloat16", fast_kernels: bool = False,
                  headroom: float = 0.1) -> LargestBatch:
    """How many rows of `num_tokens` tokens a capture batch may have on a device with `free` bytes.

    headroom: the share of `free` that stays unused. Working memory is affine in the rows, so two batches tell it.
    """
    target = meta_target(model, dtype)
    one, two = (capture_memory(model, layer_ids, rows, num_tokens, dtype=dtype, fast_kernels=fast_kernels,
                               target=target) for rows in (1, 2))
    row = two.working - one.working
    left = free * (1 - headroom) - one.total
    rows = 1 + int(left // row) if left >= 0 else 0
    return LargestBatch(num_rows=rows, num_tokens=num_tokens, peak=one.total + max(rows - 1, 0) * row)
