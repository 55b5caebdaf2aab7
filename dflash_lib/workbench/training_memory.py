"""Peak memory of one training process, from config.json alone: see peak_memory.py for how.

What the trainer keeps is added up from real modules on the meta device; its loss, backward pass and validation are run
there. With precision bfloat16 the products take and give bfloat16, and each weight has a copy in it between forward
and backward pass: what autocast does, which knows no meta device, is done here in its place.
"""

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dflash_lib.drafter.attention import Packing
from dflash_lib.drafter.dataset import Batch
from dflash_lib.drafter.network import DFlashDrafter
from dflash_lib.drafter.objective import TargetEnds, batch_loss, propose_everywhere
from dflash_lib.drafter.recipe import Compute, TrainOptions, drafter_config
from dflash_lib.drafter.warm_start import projections, source_layers
from dflash_lib.target.capture import check_layer_ids
from dflash_lib.target.ends import end_modules, meta_target
from dflash_lib.target.errors import TargetError
from dflash_lib.target.loading import Target
from dflash_lib.workbench.peak_memory import (
    META,
    EfficientAttention,
    MemoryTracker,
    PeakMemory,
    bytes_of,
    sdpa_arguments,
)


class _TrainedAttention(EfficientAttention):
    """The same with a backward pass: the kernel keeps what came in, the output and the log-sum-exps. Keys and values
    that query heads share are not repeated (true of the CPU's kernel and of FlexAttention)."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = inspect.signature(sdpa_arguments).bind(*args, **(kwargs or {})).arguments
        return _AttentionMemory.apply(given["query"], given["key"], given["value"], given["attn_mask"])


class _AttentionMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, mask):
        out = _by_token(query)
        log_sum_exp = torch.empty(query.shape[:-1], dtype=torch.float32, device=META)
        ctx.save_for_backward(query, key, value, mask, out, log_sum_exp)
        return out

    @staticmethod
    def backward(ctx, _grad):
        return *(_by_token(tensor) for tensor in ctx.saved_tensors[:3]), None


def _by_token(tensor: Tensor) -> Tensor:
    """An empty tensor of this shape [1, heads, tokens, D] as the kernels lay it out: all heads of a token together."""
    return tensor.new_empty(tensor.transpose(1, 2).shape).transpose(1, 2)


class _HalfProducts(TorchFunctionMode):
    """Matrix products in bfloat16, as under autocast: weights are cast once and their copies kept till the end."""

    def __init__(self) -> None:
        super().__init__()
        self.casts: dict[Tensor, Tensor] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear:
            args = tuple(self._half(arg) if isinstance(arg, Tensor) else arg for arg in args)
        return func(*args, **(kwargs or {}))

    def _half(self, tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.float32:
            return tensor
        if not (tensor.is_leaf and tensor.requires_grad):
            return tensor.to(torch.bfloat16)
        if tensor not in self.casts:
            self.casts[tensor] = tensor.to(torch.bfloat16)
        return self.casts[tensor]


@contextmanager
def _counted_autocast() -> Iterator[None]:
    """torch.autocast as `_HalfProducts`, which it is called for here with the meta device."""
    before = torch.autocast
    torch.autocast = lambda *_, **__: _HalfProducts()
    try:
        yield
    finally:
        torch.autocast = before


def training_memory(model: Path | str, layer_ids: Sequence[int], options: TrainOptions, num_tokens: int, *,
                    dtype: torch.dtype | str = "bfloat16", device: str = "cuda",
                    compute: Compute | None = None) -> PeakMemory:
    """Peak memory of one training process on documents of `num_tokens` tokens, every anchor and slot of which is
    supervised; it has its share of a step's documents (`compute`).

    static: the target's ends in `dtype` (embedding, final norm, head, and for a warm start the layers that it copies),
    the head's rows once more where the drafter has them in another type or fewer of them, the drafter, its gradients,
    the optimizer's moments and the weight average. working: the batch, activations and loss, or validation's if that is
    more, or, where a drafter is divided among processes (`shard`), gathering all of it for a checkpoint; device: "cpu"
    or "cuda", which decides how many slots' logits exist at once. Raises ValueError for options that do not fit the
    target, and TargetError as `capture_memory` does.
    """
    target, compute = meta_target(model, dtype), compute or Compute()
    ids = check_layer_ids(layer_ids, target.num_layers)
    num_rows = options.draft_vocab_size or target.head.weight.shape[0]
    if num_rows > target.head.weight.shape[0]:
        raise ValueError(f"draft_vocab_size {num_rows} is more than the target's {target.head.weight.shape[0]} rows; "
                         "null takes the full head")
    copied = source_layers(target, options.num_layers) if options.warm_start and not options.init_from else []
    wide = torch.float64 if options.precision == "float64" else torch.float32
    half = options.precision == "bfloat16"
    network, head = _drafter(target, list(ids), options, num_rows, wide)
    if copied:
        projections(network, target)  # that they fit is to be known before the states are taken
    vocabulary = None if options.draft_vocab_size is None else torch.empty(num_rows, dtype=torch.int64, device=META)
    ends = TargetEnds(target.embedding, target.final_norm, head, vocabulary, wide, device.partition(":")[0])
    whole, shared = bytes_of(network), head.dtype == target.head.weight.dtype and vocabulary is None
    drafter = whole // compute.num_processes if compute.shard else whole
    parts = {"target's ends": bytes_of(*end_modules(target, copied), recurse=False),
             "head rows of its own": 0 if shared else head.nbytes, "drafter": drafter, "gradients": drafter,
             "optimizer's moments": _moments(network, options.optimizer) * drafter // whole,
             "weight average": drafter if options.average else 0}
    docs = math.ceil(options.batch_samples / (compute.num_processes * compute.accumulate))
    with MemoryTracker() as tracker:
        for tensor in (*network.parameters(), *target.model.parameters(), *target.model.buffers(), head):
            tracker.count(tensor)
        base = tracker.now
        batch = _meta_batch(options, docs, num_tokens, head.shape[1], len(ids))
        dpace_alpha = options.dpace_alpha if options.slot_weighting == "dpace" else None
        with _TrainedAttention(), _counted_autocast() if half else nullcontext():
            batch_loss(network, ends, batch, options.kl_weight, dpace_alpha).loss_sum.backward()
        step = tracker.peak - base - whole  # the gradients stand above
        del batch
        network.zero_grad(set_to_none=True)
        tracker.peak = tracker.now
        anchors = torch.zeros(min(256, num_tokens - 1), dtype=torch.long)
        with EfficientAttention():
            propose_everywhere(network, ends, torch.zeros(num_tokens, dtype=torch.long),
                               torch.empty(num_tokens, len(ids), head.shape[1], device=META, dtype=wide), anchors)
        validation = tracker.peak - base
    if options.average or compute.shard:
        validation += whole  # a network of its own
    if compute.num_processes == 1:
        validation -= drafter  # gradients are gone; several processes keep the buffers that they share them through
    working = {"working: a step": step, "working: validation": validation}
    if compute.shard:
        working["working: a step"] += 0 if half else _gathered(network)
        working["working: validation"] += whole  # what the network is filled with
        working["working: a checkpoint"] = _moments(network, options.optimizer) + (
            2 if options.average else 1) * whole
    return PeakMemory(static=sum(parts.values()), working=max(working.values()), parts={**parts, **working})


def _drafter(target: Target, ids: list[int], options: TrainOptions, num_rows: int,
             wide: torch.dtype) -> tuple[DFlashDrafter, Tensor]:
    """The drafter on the meta device and the head's rows, both in the types that the trainer has them in."""
    try:
        config = drafter_config(target, ids, options, options.draft_vocab_size)
    except (AttributeError, KeyError, TypeError, ZeroDivisionError) as error:
        raise TargetError(f"{target.path}/config.json: no drafter can be made for these values "
                          f"({type(error).__name__}: {error})") from error
    with META:
        head = torch.empty(num_rows, config.hidden_size,
                           dtype=torch.bfloat16 if options.precision == "bfloat16" else wide)
        return DFlashDrafter(config).to(wide), head


def _moments(network: DFlashDrafter, optimizer: str) -> int:
    """Bytes of what the optimizer keeps: two moments a weight, of Muon's matrices one."""
    matrices = sum(p.nbytes for p in network.parameters() if p.ndim == 2)
    return 2 * bytes_of(network) - (matrices if optimizer == "muon" else 0)


def _gathered(network: DFlashDrafter) -> int:
    """Bytes of the weights that exist whole at one time though they are divided: what is in no layer, the layer that is
    computed and the next one; in bfloat16 they are among the working memory already."""
    return bytes_of(network) - bytes_of(*network.layers) + 2 * max(bytes_of(layer) for layer in network.layers)


def _meta_batch(options: TrainOptions, docs: int, num_tokens: int, hidden_size: int, num_layers: int) -> Batch:
    """A pass of `docs` documents in the shapes that the data set makes, without values."""
    first_slot = 0 if options.sample_from_anchor else 1
    slots = min(options.slots_per_anchor, options.block_size - first_slot)
    anchors = min(options.anchors_per_sample, num_tokens - 1)
    tokens, blocks = docs * num_tokens, docs * anchors
    with META:
        asked = torch.empty(blocks, slots, dtype=torch.int64)
        return Batch(
            tuple(range(docs)), Packing((num_tokens,) * docs, (anchors,) * docs),
            torch.empty(tokens, num_layers, hidden_size, dtype=torch.bfloat16),
            torch.empty(tokens, hidden_size, dtype=torch.bfloat16) if options.kl_weight > 0 else None,
            torch.empty(tokens, dtype=torch.int64), torch.empty(blocks, dtype=torch.int64),
            torch.empty(blocks, dtype=torch.int64), torch.empty(blocks, options.block_size, dtype=torch.int64), asked,
            torch.empty_like(asked), torch.empty(blocks, slots), first_slot=first_slot)
