"""The two sides of benchmarks/training.py: our training step and that of speculators' DFlashDraftModel, on the same
documents, states, weights and anchors.

Documents and states are random, or those of a real target. Ours is `drafter.objective.batch_loss` on the batch that
`TrainingData` makes; theirs gets the documents packed into one row by the package's own collator, and our anchors in
the place of its drawing. Everything around the loss is the same on both: gradient clipping and AdamW. Only `Theirs`
imports the package.
"""

import argparse
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_lib.drafter.dataset import Batch, TrainingData
from dflash_lib.drafter.network import FULL, DFlashDrafter, DrafterConfig, RMSNorm
from dflash_lib.drafter.objective import TargetEnds, batch_loss
from dflash_lib.hidden_states.store import StoredSample

MASK, GAMMA, PROMPT = 3, 4.0, 0.4  # mask token; decay of the slot weights; share of a document that is its prompt
SHAPES = {  # hidden size: query heads, kv heads, head_dim, intermediate size
    576: (9, 3, 64, 1536),  # SmolLM2-135M
    5120: (32, 8, 128, 17408),  # the public drafter of Qwen3.6-27B
    64: (4, 2, 16, 96)}  # --tiny


class Held:
    """Documents in memory, read as from a store."""

    def __init__(self, samples: list[StoredSample]):
        self.samples = samples

    def read(self, index: int) -> StoredSample:
        return self.samples[index]


@dataclass(frozen=True)
class World:
    """What both sides train on: documents with their states, the target's ends, the drafter's configuration."""

    samples: list[StoredSample]
    ends: TargetEnds
    config: DrafterConfig
    num_anchors: int

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.input_ids) for sample in self.samples)

    def batch(self, kl: bool) -> Batch:
        """Our batch: all documents, every slot of each block. kl: with the last state, which only that loss reads."""
        data = TrainingData(Held(self.samples), range(len(self.samples)), batch_samples=len(self.samples),
                            anchors_per_sample=self.num_anchors // len(self.samples),
                            slots_per_anchor=self.config.block_size - 1, block_size=self.config.block_size,
                            mask_token_id=self.config.mask_token_id, gamma=GAMMA, need_last=kl, seed=0)
        return data.collate([(0, i) for i in range(len(self.samples))])

    def packed_anchors(self) -> Tensor:
        """The same anchors as places in the packed row, int64 [A], ascending."""
        batch = self.batch(kl=False)
        return batch.anchors + batch.starts


def make_world(options: argparse.Namespace, num_layers: int) -> World:
    """Documents of options.tokens in all, less a block that their row needs behind the last one."""
    torch.manual_seed(0)
    room = options.tokens - options.block
    if options.model is not None:
        return real_world(options, num_layers, room)
    heads, kv_heads, head_dim, intermediate = SHAPES[options.hidden]
    generator = np.random.default_rng(0)
    shares = generator.uniform(0.6, 1.4, options.documents)
    lengths = (shares / shares.sum() * room).astype(int)
    lengths[-1] += room - lengths.sum()
    samples = []
    for index, length in enumerate(lengths):
        states = torch.randn(length, options.aux_layers + 1, options.hidden).bfloat16()
        ids = generator.integers(4, options.vocab, length).astype(np.int32)
        samples.append(StoredSample(index, ids, (np.arange(length) >= PROMPT * length).astype(np.uint8),
                                    states[:, :-1].contiguous(), states[:, -1].contiguous()))
    table = torch.nn.Embedding(options.vocab, options.hidden).requires_grad_(False)
    torch.nn.init.normal_(table.weight, std=0.02)
    ends = TargetEnds(table, RMSNorm(options.hidden, 1e-5).requires_grad_(False), table.weight.detach(), None)
    return World(samples, ends, DrafterConfig(
        hidden_size=options.hidden, intermediate_size=intermediate, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, rms_norm_eps=1e-5, rope_theta=1e5,
        max_position_embeddings=max(8192, options.tokens), vocab_size=options.vocab,
        num_target_layers=options.aux_layers + 2, target_layer_ids=tuple(range(options.aux_layers)),
        block_size=options.block, mask_token_id=MASK, layer_types=(FULL,) * num_layers), options.anchors)


def real_world(options: argparse.Namespace, num_layers: int, room: int) -> World:
    """A real target's ends, and its states on as many conversations as the row has room for."""
    from benchmarks.common import demo_parameters
    from dflash_lib.conversations.prepare import PrepareOptions, prepare
    from dflash_lib.drafter.recipe import TrainOptions, drafter_config
    from dflash_lib.target.capture import capture_batch, default_layer_ids
    from dflash_lib.target.loading import load_target

    target = load_target(options.model, "float32", options.device, audit="quick")
    ids = default_layer_ids(target.num_layers, options.aux_layers)
    prepared = prepare(options.conversations, target.tokenizer,
                       PrepareOptions(max_samples=400, max_length=demo_parameters()["max_length"]))
    samples = []
    for index in range(len(prepared)):
        row, mask = prepared.row(index)
        if len(row) <= room:
            room -= len(row)
            captured, = capture_batch(target, [row.tolist()], ids)
            samples.append(StoredSample(index, row, mask, captured.aux_hidden_states.bfloat16().cpu(),
                                        captured.last_hidden_state_prenorm.bfloat16().cpu()))
    config = drafter_config(target, ids, TrainOptions(block_size=options.block, mask_token_id=MASK,
                                                      num_layers=num_layers), None)
    ends = TargetEnds(target.embedding, target.final_norm, target.head.weight.detach().float(), None)
    return World(samples, ends, config, max(len(samples), options.anchors))


class Side:
    """One side: `loss()` makes the scalar to go back from, `step()` is a whole training step."""

    network: torch.nn.Module

    def _begin(self, device: torch.device) -> None:
        self.device = device
        self.trained = [p for p in self.network.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4, betas=(0.9, 0.95), fused=True)

    def loss(self) -> tuple[Tensor, Tensor, Tensor]:
        """(to go back from, what to divide its gradients by, supervised slots)."""
        raise NotImplementedError

    def step(self) -> None:
        """Forward, loss, backward, clipping, optimizer. On a GPU the arithmetic is bfloat16, the weights float32."""
        total, weight, _ = self.loss()
        total.backward()
        torch._foreach_div_([p.grad for p in self.trained], weight)
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Ours(Side):
    """This project's step."""

    def __init__(self, world: World, kind: str, device: torch.device):
        torch.manual_seed(1)
        self.network = DFlashDrafter(world.config).to(device)
        precision = torch.bfloat16 if device.type == "cuda" else torch.float32  # that of the head is the step's
        self.ends = TargetEnds(world.ends.embedding.to(device), world.ends.final_norm.to(device),
                               world.ends.head.to(device, precision), None)
        self.kl_weight = float(kind == "kl")
        self.batch = world.batch(kind == "kl").to(device)
        self._begin(device)

    def loss(self) -> tuple[Tensor, Tensor, Tensor]:
        parts = batch_loss(self.network, self.ends, self.batch, self.kl_weight)
        return parts.loss_sum, parts.weight_sum, parts.slot_counts.sum()


class Theirs(Side):
    """speculators 0.9.0's, as its trainer runs it on this kind of device."""

    def __init__(self, world: World, kind: str, device: torch.device):
        import speculators.models.dflash.core as core
        from speculators.losses import resolve_loss_config
        from speculators.models.dflash import DFlashSpeculatorConfig
        from speculators.train.data import CollateFn

        from dflash_lib.drafter.export import speculators_config
        from dflash_lib.drafter.folder import TrainedDrafter

        gpu = device.type == "cuda"
        torch.manual_seed(1)
        ours = DFlashDrafter(world.config)
        said = speculators_config(TrainedDrafter(ours, None, {}), "float32", "", [])
        config = DFlashSpeculatorConfig(**{key: value for key, value in said.items() if key != "architectures"})
        # FlexAttention has no backward on a CPU, the fused losses need Triton
        config.transformer_layer_config._attn_implementation = "simple_flex_attention" if gpu else "sdpa"
        self.network = core.DFlashDraftModel(config).float()
        with torch.no_grad():
            parameters = dict(self.network.named_parameters())
            for name, value in ours.named_parameters():
                parameters.pop(name).copy_(value)
            for name, value in (("embed_tokens", world.ends.embedding.weight), ("lm_head", world.ends.head),
                                ("verifier_lm_head", world.ends.head), ("verifier_norm", world.ends.final_norm.weight)):
                parameters.pop(f"{name}.weight").copy_(value)
        if parameters:
            raise SystemExit(f"parameters of theirs that ours lacks: {sorted(parameters)}")
        self.network.to(device).train()
        items = [{"hidden_states": s.aux_hidden_states.flatten(1), "input_ids": torch.from_numpy(s.input_ids).long(),
                  "verifier_last_hidden_states": s.last_hidden_state_prenorm,
                  "loss_mask": torch.from_numpy(s.loss_mask).long(), "lengths": torch.tensor([len(s.input_ids)]),
                  "position_ids": torch.arange(len(s.input_ids))} for s in world.samples]
        collate = CollateFn(world.num_tokens + world.config.block_size, world.config.hidden_size,
                            len(world.config.target_layer_ids), torch.bfloat16 if gpu else torch.float32)
        self.row = {name: value.to(device) for name, value in collate(items).items() if isinstance(value, Tensor)}
        anchors = world.packed_anchors().to(device)
        valid = torch.ones(len(anchors), dtype=torch.bool, device=device)
        core.select_anchors = lambda *_: (anchors, valid)
        self.arguments = {"gamma": GAMMA, "max_anchors": len(anchors), "per_position_loss_weight": "fixed-exp-decay",
                          "loss_config": resolve_loss_config("kl_div" if kind == "kl" else "ce",
                                                             "fused" if gpu else "eager")}
        self._begin(device)

    def loss(self) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            _, loss, metrics = self.network(**self.row, **self.arguments)
        return loss, torch.ones((), device=self.device), metrics["full_acc_total"]


def step_flops(world: World, num_slots: int, kl: bool) -> float:
    """Floating-point operations that a step needs, a multiply-add as two: no slot without a label reaches the head,
    context keys and values are made once, nothing is recomputed. Backward costs twice the forward, but once where no
    weight is trained (the head) or nothing lies before (fc)."""
    c, tokens, anchors = world.config, world.num_tokens, world.packed_anchors()
    starts = torch.tensor(np.cumsum([0, *[len(s.input_ids) for s in world.samples]])[:-1])
    seen = (anchors - starts[torch.searchsorted(starts, anchors, right=True) - 1]).sum().item()  # context of all blocks
    block_tokens, q, kv = len(anchors) * c.block_size, c.num_attention_heads * c.head_dim, \
        2 * c.num_key_value_heads * c.head_dim
    attention = 2 * q * (seen * c.block_size + block_tokens * c.block_size)
    layer = (tokens * c.hidden_size * kv + block_tokens * c.hidden_size * (2 * q + kv) + attention
             + 3 * block_tokens * c.hidden_size * c.intermediate_size)
    head = num_slots * c.hidden_size * c.vocab_size
    fc = tokens * len(c.target_layer_ids) * c.hidden_size**2
    return 2.0 * (3 * layer * c.num_layers + 2 * fc + (3 if kl else 2) * head)


