"""A drafter that starts from the target's own layers instead of random weights.

The drafter's layers are copied from the target's last layers, `fc` passes the last tapped layer through, `hidden_norm`
is the copied layer's input norm and `norm` the target's final norm. The target's head then already reads what comes
out, and training only has to teach the layers to look ahead. Layers without a per-head norm (Llama) get one whose
weight is the mean root-mean-square of that layer's own queries and keys, so that attention starts at its usual scale.
Where the target has experts instead of one MLP, the drafter's MLP keeps its random weights.
"""

import torch
from torch import Tensor, nn

from dflash_lib.drafter.network import DFlashDrafter
from dflash_lib.target.loading import Target

PROJECTIONS = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}


def effective_weight(norm: nn.Module) -> Tensor:
    """The factor that a norm module applies to each dimension, whether it stores weight or (1 + weight).

    Measured on the module itself: a vector of equal entries has root mean square 1 after normalisation.
    """
    weight = norm.weight
    return norm(torch.full((1, weight.shape[0]), 1e3, dtype=weight.dtype, device=weight.device))[0].detach()


def source_layers(target: Target, num_layers: int) -> list[int]:
    """Ids of the last `num_layers` target layers with ordinary attention, ascending.

    Raises ValueError when the target has too few of them.
    """
    with_attention = [i for i, layer in enumerate(target.layers) if hasattr(layer, "self_attn")]
    if len(with_attention) < num_layers:
        raise ValueError(f"warm start: {num_layers} drafter layers asked for, but only {len(with_attention)} of the "
                         "target's layers have ordinary attention; set warm_start: false")
    return with_attention[-num_layers:]


def projections(network: DFlashDrafter, target: Target) -> list[tuple[Tensor, Tensor]]:
    """(the drafter's weight, the target's that is copied into it) of all projections; targets on the meta device do.

    Raises ValueError, naming the tensor, when shapes do not fit (the drafter must have the target layer's sizes).
    """
    found = []
    sources = source_layers(target, network.config.num_layers)
    for number, (layer, source) in enumerate(zip(network.layers, sources, strict=True)):
        theirs = target.layers[source]
        for block, names in PROJECTIONS.items():
            if block == "mlp" and not hasattr(theirs.mlp, "gate_proj"):
                continue  # a router and experts: no one of them is what the layer does, so ours stays random
            for name in names:
                ours, source_weight = getattr(getattr(layer, block), name).weight, getattr(
                    getattr(theirs, block), name).weight
                if name == "q_proj" and source_weight.shape[0] == 2 * ours.shape[0]:
                    # gated attention (Qwen3.5): each head's rows are its query followed by its gate
                    heads = source_weight.view(network.config.num_attention_heads, 2, -1, source_weight.shape[1])
                    source_weight = heads[:, 0].reshape(ours.shape)
                if source_weight.shape != ours.shape:
                    raise ValueError(
                        f"warm start: layers.{number}.{block}.{name} is {tuple(ours.shape)} in the drafter and "
                        f"{tuple(source_weight.shape)} in the target's layer {source}; give the drafter the target's "
                        "sizes or set warm_start: false")
                found.append((ours, source_weight))
    return found


@torch.no_grad()
def warm_start(network: DFlashDrafter, target: Target, sample_states: Tensor) -> list[int]:
    """Initialises `network` in place from `target`; returns the ids of the layers copied.

    sample_states: float32 [T, L, H], the tapped states of any sample, from which the per-head norms are set.
    Raises ValueError, naming the tensor, when shapes do not fit (the drafter must have the target layer's sizes).
    """
    sources = source_layers(target, network.config.num_layers)
    for ours, source_weight in projections(network, target):
        ours.copy_(source_weight)
    for layer, source in zip(network.layers, sources, strict=True):
        theirs = target.layers[source]
        layer.input_layernorm.weight.copy_(effective_weight(theirs.input_layernorm))
        before_mlp = getattr(theirs, "pre_feedforward_layernorm", theirs.post_attention_layernorm)  # Gemma has both
        layer.post_attention_layernorm.weight.copy_(effective_weight(before_mlp))
        _set_head_norms(layer.self_attn, theirs, sample_states[:, -1].to(target.device))
    hidden = network.config.hidden_size
    network.fc.weight.zero_()
    network.fc.weight[:, -hidden:] = torch.eye(hidden)
    network.hidden_norm.weight.copy_(effective_weight(target.layers[sources[-1]].input_layernorm))
    network.norm.weight.copy_(effective_weight(target.final_norm))
    return sources


def _set_head_norms(ours, theirs, states: Tensor) -> None:
    for norm, projection, source in ((ours.q_norm, "q_proj", "q_norm"), (ours.k_norm, "k_proj", "k_norm")):
        if hasattr(theirs.self_attn, source):
            norm.weight.copy_(effective_weight(getattr(theirs.self_attn, source)))
            continue
        # position 0 carries massive activations and would set the scale alone
        normed = theirs.input_layernorm(states[1:].to(theirs.input_layernorm.weight.dtype))
        heads = getattr(theirs.self_attn, projection)(normed).view(-1, norm.weight.shape[0])
        norm.weight.fill_(heads.pow(2).mean(dim=-1).sqrt().mean().item())
