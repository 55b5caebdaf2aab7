"""Training on a GPU: FlexAttention against a slow reference, and the loss in bfloat16 against float32.

usage: python -m tests.gpu.check_training [DEVICE]. Needs PyTorch, Transformers, h5py and safetensors, nothing else of
the workbench's requirements; weights and data are random and made on the device. Skips, and says so, where there is no
CUDA device.

Attention: packed documents, grouped heads, full and sliding windows, in float32 and bfloat16; output and the gradients
of all inputs against softmax over the whole packed row in float64. The learning task: each token follows from the state
before it, so the loss can fall. Prints a table; exits with 1 when a check fails.
"""

import sys

import torch
from torch import nn

from dflash_lib.drafter.attention import FlexAttention, Packing, attention_mask, make_attention
from dflash_lib.drafter.dataset import Batch
from dflash_lib.drafter.network import FULL, SLIDING, DFlashDrafter, DrafterConfig
from dflash_lib.drafter.objective import TargetEnds, batch_loss

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 16  # the public Qwen3.6-27B drafter's
PACKING = Packing((700, 1, 1300), (40, 1, 64))
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 2e-2}  # of the largest value; float32 products may run in TF32
STEPS, VOCAB, HIDDEN = 60, 512, 256
MAX_APART = 0.03  # bfloat16's loss from float32's, of the mean loss, in the mean of the last ten steps


def check_attention(device: str, window: int | None, dtype: torch.dtype) -> bool:
    """One layer's attention, forward and backward."""
    torch.manual_seed(0)
    num_context, num_blocks = sum(PACKING.num_context), sum(PACKING.num_blocks)
    anchors = torch.cat([torch.randint(1, tokens + 1, (blocks,)).sort().values
                         for tokens, blocks in zip(PACKING.num_context, PACKING.num_blocks, strict=True)])
    slots = torch.arange(BLOCK).expand(num_blocks, -1)
    shapes = [(HEADS, num_blocks, BLOCK, HEAD_DIM), *[(KV_HEADS, num_blocks, BLOCK, HEAD_DIM)] * 2,
              *[(KV_HEADS, num_context, HEAD_DIM)] * 2]
    inputs = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]
    weights = torch.randn(shapes[0], device=device)
    kernel = make_attention(PACKING, anchors.to(device), slots.to(device), BLOCK, window)
    out = kernel(*inputs)
    found = [out, *torch.autograd.grad((out.float() * weights).sum(), inputs)]
    exact = [value.detach().double().requires_grad_() for value in inputs]
    slow = slow_attention(exact, anchors, slots, window)
    expected = [slow, *torch.autograd.grad((slow * weights).sum(), exact)]
    apart = max(((one.double() - other).abs().max() / other.abs().max()).item()
                for one, other in zip(found, expected, strict=True))
    used = type(kernel).__name__
    good = apart < TOLERANCE[dtype] and (device == "cpu" or used == "FlexAttention" and not FlexAttention.off)
    print(f"{used}, {str(dtype)[6:]}, {f'window {window}' if window else 'full'}: output and gradients {apart:.1e} of "
          f"the largest value apart{'' if good else '   FAILED'}", flush=True)
    return good


def slow_attention(inputs: list[torch.Tensor], anchors: torch.Tensor, slots: torch.Tensor,
                   window: int | None) -> torch.Tensor:
    """Softmax over all that a slot sees, a document at a time."""
    queries, keys, values, context_keys, context_values = inputs
    group, parts, token, block = HEADS // KV_HEADS, [], 0, 0
    for num_context, num_blocks in zip(PACKING.num_context, PACKING.num_blocks, strict=True):
        own, context = slice(block, block + num_blocks), slice(token, token + num_context)
        mask = attention_mask(anchors[own], slots[own], BLOCK, num_context, window).to(queries.device)
        over_context = torch.einsum("hamd,htd->hamt", queries[:, own],
                                    context_keys[:, context].repeat_interleave(group, 0))
        over_block = torch.einsum("hamd,hasd->hams", queries[:, own], keys[:, own].repeat_interleave(group, 0))
        scores = torch.cat([over_context, over_block], dim=-1) * HEAD_DIM**-0.5
        weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
        parts.append(torch.einsum("hamt,htd->hamd", weights[..., :num_context],
                                  context_values[:, context].repeat_interleave(group, 0))
                     + torch.einsum("hams,hasd->hamd", weights[..., num_context:],
                                    values[:, own].repeat_interleave(group, 0)))
        token, block = context.stop, own.stop
    return torch.cat(parts, dim=1)


def random_batch(device: str, head: torch.Tensor, generator: torch.Generator) -> Batch:
    """Two documents whose states tell the next tokens: at t, one layer each has the head's rows of t + 1 to t + 3."""
    ids = torch.randint(0, VOCAB, (2, 203), generator=generator).to(device)
    states = torch.stack([head[ids[:, k:200 + k]] for k in (1, 2, 3)], dim=2)  # [2, 200, 3, H], one layer each
    anchors = torch.stack([torch.randperm(190, generator=generator)[:32].sort().values + 1 for _ in range(2)])
    slots = torch.arange(1, 4, device=device).expand(64, -1)
    documents = torch.arange(2, device=device).repeat_interleave(32)
    flat = anchors.flatten().to(device)
    tokens = torch.full((64, 4), 0, device=device)
    tokens[:, 0] = ids[documents, flat]
    return Batch((0, 1), Packing((200, 200), (32, 32)), states.flatten(0, 1), None,
                 torch.arange(200, device=device).repeat(2), flat, documents * 200, tokens, slots,
                 ids[documents[:, None], flat[:, None] + slots], torch.ones(64, 3, device=device))


def losses(device: str, half: bool) -> list[float]:
    """The loss of each of STEPS steps: the same weights and batches in either precision."""
    torch.manual_seed(0)
    config = DrafterConfig(hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_attention_heads=4,
                           num_key_value_heads=2, head_dim=64, rms_norm_eps=1e-6, rope_theta=1e4,
                           max_position_embeddings=512, vocab_size=VOCAB, num_target_layers=8,
                           target_layer_ids=(1, 3, 5), block_size=4, mask_token_id=0, layer_types=(SLIDING, FULL),
                           sliding_window=64)
    network, head = DFlashDrafter(config).to(device), torch.randn(VOCAB, HIDDEN).to(device)
    embedding = nn.Embedding(VOCAB, HIDDEN).to(device).requires_grad_(False)
    ends = TargetEnds(embedding, nn.Identity(), head.bfloat16() if half else head, None)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.0, fused=True)
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        parts = batch_loss(network, ends, random_batch(device, head, generator), 0.0)
        (parts.loss_sum / parts.weight_sum).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found.append((parts.loss_sum / parts.weight_sum).item())
    assert all(p.dtype == torch.float32 for p in network.parameters())
    return found


def check_precision(device: str) -> bool:
    """The loss falls, and in bfloat16 as in float32."""
    curves = torch.tensor([losses(device, half) for half in (False, True)])
    ends = curves[:, -10:].mean(dim=1)
    apart = ((ends[0] - ends[1]).abs() / ends[0]).item()
    good = apart < MAX_APART and bool((ends < 0.9 * curves[:, 0]).all())
    print(f"loss of {STEPS} steps: float32 {curves[0, 0]:.3f} to {ends[0]:.3f}, bfloat16 {curves[1, 0]:.3f} to "
          f"{ends[1]:.3f}, {apart:.2%} apart at the end{'' if good else '   FAILED'}", flush=True)
    return good


def main(device: str = "cuda") -> int:
    """Exit code."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        print("skipped: PyTorch sees no CUDA device")
        return 0
    results = [check_attention(device, window, dtype) for dtype in TOLERANCE for window in (None, 256)]
    return 0 if all([*results, check_precision(device)]) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
