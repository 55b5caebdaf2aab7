"""The recipe of a training, what it is computed on, and what follows from both: the drafter's shape, learning rates."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from dflash_lib.drafter.network import FULL, SLIDING, DrafterConfig
from dflash_lib.target.loading import Target

PRECISIONS = ("float32", "bfloat16", "float64")
SLOT_WEIGHTINGS = ("decay", "dpace")
OPTIMIZERS = ("adamw", "muon")
LATER = {"optimizer": "adamw"}  # fields that releases added, with what was done before


class TrainingError(ValueError):
    """Training that cannot start or go on; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What the weights depend on. The defaults are those of the demo; BENCHMARKS.md has what they reach.

    block_size counts the anchor; mask_token_id is always explicit; num_sliding_layers: the first ones, with
    sliding_window, the others see the whole context; num_heads, num_kv_heads, head_dim, intermediate_size None = the
    target's; draft_vocab_size None = the full head; warm_start: from the target's layers; init_from: folder of a
    drafter to start from instead, "" = none; sample_from_anchor: the anchor's slot drafts, too.

    optimizer: "adamw", or "muon" for the weight matrices (momentum orthogonalised by a Newton-Schulz iteration in
    bfloat16, its size matched to AdamW's, so that the same learning_rate serves; vectors keep AdamW): it learns more of
    as many tokens, and its step costs some 15 products of each matrix with itself, which is little beside many anchors
    on a GPU and much on a CPU. batch_samples: conversations a step, over all processes; slots_per_anchor: slots of each
    block that are trained, the first and drawn later ones (`blocks.draw_slots`), block_size or more = all; gamma: decay
    of the slot weights in slots (the published 4 for block 8 suits long training; where only the first slots are ever
    accepted, a smaller one learns faster); slot_weighting: "decay" (gamma's) or "dpace" (`blocks.dpace_weights` with
    dpace_alpha; all slots); kl_weight: share of the KL to the target's distribution in the loss, the rest is
    cross-entropy; average: decay of the weight average that is validated and saved, 0 = none; final_learning_rate:
    share of learning_rate where the cosine ends; precision: of the drafter's arithmetic; weights, optimizer and loss
    are float32 with "bfloat16" as well ("float64", of everything, is for comparing implementations).

    spike_factor: a step whose gradient norm is more than this many times the median of the last 100 changes nothing and
    is counted; max_skipped such steps in a row end the training.
    """

    block_size: int
    mask_token_id: int
    num_layers: int = 1
    num_sliding_layers: int = 0
    sliding_window: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    draft_vocab_size: int | None = 8192
    warm_start: bool = True
    init_from: str = ""
    sample_from_anchor: bool = False
    steps: int = 4000
    batch_samples: int = 2
    anchors_per_sample: int = 32
    slots_per_anchor: int = 2
    optimizer: str = "adamw"
    learning_rate: float = 5e-3
    final_learning_rate: float = 0.02
    warmup_steps: int = 20
    weight_decay: float = 0.0
    clip: float = 1.0
    gamma: float = 1.5
    slot_weighting: str = "decay"
    dpace_alpha: float = 0.5
    kl_weight: float = 0.7
    average: float = 0.99
    precision: str = "float32"
    spike_factor: float = 10.0
    max_skipped: int = 20
    seed: int = 0
    validation_samples: int = 24
    validation_interval: int = 250
    checkpoint_interval: int = 250

    def __post_init__(self) -> None:
        for name in ("steps", "batch_samples", "anchors_per_sample", "slots_per_anchor", "max_skipped",
                     "validation_samples", "validation_interval", "checkpoint_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: at least 1 is needed, got {getattr(self, name)}")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: more than 0 is needed, or nothing is learnt, got {getattr(self, name)}")
        if not 0.1 <= self.gamma:
            raise ValueError(f"gamma: at least 0.1 is needed, got {self.gamma}: slot k weighs exp(-(k-1)/gamma), and "
                             "below the second slot would weigh nothing beside the first")
        for name in ("warmup_steps", "weight_decay", "final_learning_rate"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: 0 or more is needed, got {getattr(self, name)}")
        if not 0 <= self.kl_weight <= 1 or not 0 <= self.average < 1:
            raise ValueError(f"kl_weight must be 0 to 1 and average 0 to less than 1, got {self.kl_weight} and "
                             f"{self.average}")
        if self.slot_weighting not in SLOT_WEIGHTINGS or self.precision not in PRECISIONS:
            raise ValueError(f"slot_weighting is one of {SLOT_WEIGHTINGS} and precision one of {PRECISIONS}, got "
                             f"{self.slot_weighting!r} and {self.precision!r}")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer is one of {OPTIMIZERS}, got {self.optimizer!r}")
        if not 0 <= self.dpace_alpha <= 1:
            raise ValueError(f"dpace_alpha must be 0 to 1, got {self.dpace_alpha}")
        if self.slot_weighting == "dpace" and self.slots_per_anchor < self.block_size - (not self.sample_from_anchor):
            raise ValueError(f"slot_weighting: dpace weighs a slot by all slots of its block; set slots_per_anchor to "
                             f"{self.block_size} (all), got {self.slots_per_anchor}")
        if self.spike_factor <= 1:
            raise ValueError(f"spike_factor must be more than 1, got {self.spike_factor}: it multiplies the usual norm")
        if not 0 <= self.num_sliding_layers <= self.num_layers:
            raise ValueError(f"num_sliding_layers must be 0 to num_layers ({self.num_layers}), got "
                             f"{self.num_sliding_layers}")
        if self.num_sliding_layers and (self.sliding_window or 0) < 1:
            raise ValueError(f"num_sliding_layers {self.num_sliding_layers} needs a sliding_window (tokens), got "
                             f"{self.sliding_window}")
        if self.sliding_window is not None and not self.num_sliding_layers:
            raise ValueError(f"sliding_window {self.sliding_window} with num_sliding_layers 0: no layer would have it; "
                             "set num_sliding_layers, or sliding_window: null")

    @property
    def layer_types(self) -> tuple[str, ...]:
        """Sliding-window layers first, as in the public Qwen3.6-27B drafter (four of them and one full)."""
        return (SLIDING,) * self.num_sliding_layers + (FULL,) * (self.num_layers - self.num_sliding_layers)


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How a step is computed, which changes nothing but rounding: num_processes, one a GPU; accumulate: forward passes
    a step and process, among which its conversations are divided; shard: weights, gradients and optimizer divided among
    the processes (FSDP2) for a drafter that does not fit on each (DDP); flex_attention: on CUDA, FlexAttention's
    compiled kernel while it compiles, False = SDPA from the start (a CPU has SDPA)."""

    num_processes: int = 1
    accumulate: int = 1
    shard: bool = False
    flex_attention: bool = True

    def __post_init__(self) -> None:
        if self.num_processes < 1 or self.accumulate < 1:
            raise ValueError(f"num_processes and accumulate: at least 1 is needed, got {self.num_processes} and "
                             f"{self.accumulate}")
        if self.shard and self.num_processes < 2:
            raise ValueError("shard: weights can be divided among processes only; set num_processes to 2 or more")


def check_compute(options: TrainOptions, compute: Compute) -> None:
    """Raises TrainingError for a recipe that cannot be computed so, or leaves a process with nothing to compute."""
    if compute.shard and options.optimizer == "muon":
        raise TrainingError("optimizer: muon needs whole matrices; set shard: false, or optimizer: adamw")
    passes = compute.num_processes * compute.accumulate
    if passes > options.batch_samples:
        raise TrainingError(f"batch_samples: {options.batch_samples} conversations a step leave some of num_processes "
                            f"{compute.num_processes} x accumulate {compute.accumulate} = {passes} passes with nothing "
                            f"to compute; set batch_samples to {passes} or more, or the others lower")


def identity(options: TrainOptions) -> dict[str, Any]:
    """The options that a training is known by, as plain values. Fields that came later than trainings which lie in
    folders are left out at their default, which is what those did: a new release goes on with them."""
    return {name: value for name, value in asdict(options).items() if name not in LATER or value != LATER[name]}


def rope_theta(config) -> float:
    """The target's RoPE base; where its layer types have one each (Gemma 3), that of full attention."""
    parameters = config.rope_parameters
    return float(parameters.get("full_attention", parameters)["rope_theta"])


def drafter_config(target: Target, layer_ids: list[int], options: TrainOptions,
                   draft_vocab_size: int | None) -> DrafterConfig:
    """The drafter for `target`: its hidden size, RoPE theta and, unless the options say otherwise, heads, but full
    rotary width and plain norms."""
    c = target.config
    head_dim = options.head_dim or getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return DrafterConfig(
        hidden_size=c.hidden_size, intermediate_size=options.intermediate_size or c.intermediate_size,
        num_attention_heads=options.num_heads or c.num_attention_heads,
        num_key_value_heads=options.num_kv_heads or c.num_key_value_heads, head_dim=head_dim,
        rms_norm_eps=c.rms_norm_eps, rope_theta=rope_theta(c),
        max_position_embeddings=c.max_position_embeddings, vocab_size=target.embedding.weight.shape[0],
        num_target_layers=target.num_layers, target_layer_ids=layer_ids, block_size=options.block_size,
        mask_token_id=options.mask_token_id, layer_types=options.layer_types, sliding_window=options.sliding_window,
        draft_vocab_size=draft_vocab_size, sample_from_anchor=options.sample_from_anchor)


def learning_rate(step: int, options: TrainOptions) -> float:
    """Linear warm-up to `learning_rate`, then a cosine down to `final_learning_rate` of it; step from 0."""
    if step < options.warmup_steps:
        return options.learning_rate * (step + 1) / options.warmup_steps
    share = (step - options.warmup_steps) / max(1, options.steps - options.warmup_steps)
    low = options.final_learning_rate
    return options.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * share)))
