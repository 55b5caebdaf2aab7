"""The drafter's forward pass against an obviously right one, block by block and head by head."""

import math

import pytest
import torch

from dflash_lib.drafter.attention import Packing
from dflash_lib.drafter.network import FULL, SLIDING, DFlashDrafter, DrafterConfig

CONFIG = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
          "head_dim": 12, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 512, "vocab_size": 100,
          "num_target_layers": 6, "target_layer_ids": (1, 3), "block_size": 4, "mask_token_id": 3}


def make_network(**changes) -> DFlashDrafter:
    torch.manual_seed(0)
    network = DFlashDrafter(DrafterConfig(**{**CONFIG, **changes})).double()
    with torch.no_grad():
        for p in network.parameters():
            p.normal_(std=0.3)
    return network


def rms(x, weight, eps=1e-6):
    return x / torch.sqrt((x * x).mean() + eps) * weight


def rope(x, position, theta):
    half, out = len(x) // 2, x.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def slow_block(network, aux, embedded, anchor, keep_layer_norm_on_context=False):
    """One block [S, H] of one document by loops over slots, heads and keys; aux [T, L, H]."""
    c, size = network.config, len(embedded)
    context = [rms(network.fc.weight @ state.flatten(), network.hidden_norm.weight) for state in aux[:anchor]]
    x = [e.clone() for e in embedded]
    for layer, kind in zip(network.layers, c.layer_types, strict=True):
        a = layer.self_attn
        normed = [rms(row, layer.input_layernorm.weight) for row in x]
        sources = list(enumerate(context)) + [(anchor + j, row) for j, row in enumerate(normed)]
        new = []
        for j in range(size):
            heads, query_position = [], anchor + j
            for h in range(c.num_attention_heads):
                g = h // (c.num_attention_heads // c.num_key_value_heads)
                rows = slice(h * c.head_dim, (h + 1) * c.head_dim)
                kv_rows = slice(g * c.head_dim, (g + 1) * c.head_dim)
                query = rope(rms(a.q_proj.weight[rows] @ normed[j], a.q_norm.weight), query_position, c.rope_theta)
                scores, values = [], []
                for position, row in sources:
                    if kind == SLIDING and not query_position - (c.sliding_window - 1) <= position <= query_position:
                        continue
                    key = rope(rms(a.k_proj.weight[kv_rows] @ row, a.k_norm.weight), position, c.rope_theta)
                    scores.append(query @ key / math.sqrt(c.head_dim))
                    values.append(a.v_proj.weight[kv_rows] @ row)
                weights = torch.stack(scores).softmax(0)
                heads.append(sum(w * v for w, v in zip(weights, values, strict=True)))
            new.append(x[j] + a.o_proj.weight @ torch.cat(heads))
        x = []
        for row in new:
            normed_row = rms(row, layer.post_attention_layernorm.weight)
            gate = layer.mlp.gate_proj.weight @ normed_row
            x.append(row + layer.mlp.down_proj.weight @ (gate * torch.sigmoid(gate)
                                                         * (layer.mlp.up_proj.weight @ normed_row)))
    return torch.stack([rms(row, network.norm.weight) for row in x])


PACKING, ANCHORS = Packing((9, 9), (3, 3)), torch.tensor([1, 4, 8, 0, 7, 9])
POSITIONS = torch.arange(9).repeat(2)


def made(layer_types):
    network = make_network(layer_types=layer_types, sliding_window=5 if SLIDING in layer_types else None)
    return network, torch.randn(18, 2, 32, dtype=torch.float64), torch.randn(6, 4, 32, dtype=torch.float64)


@pytest.mark.parametrize("layer_types", [(FULL,), (FULL, FULL), (SLIDING, FULL)])
def test_forward_equals_loops(layer_types):
    network, aux, embedded = made(layer_types)
    out = network(embedded, ANCHORS, aux, POSITIONS, PACKING)
    for block in range(6):
        document = aux[:9] if block < 3 else aux[9:]
        slow = slow_block(network, document, embedded[block], ANCHORS[block].item())
        # RoPE angles are float32 by design, the loop's are float64
        assert torch.allclose(out[block], slow, atol=2e-5, rtol=2e-5), block


@pytest.mark.parametrize("layer_types", [(FULL, FULL), (SLIDING, FULL)])
def test_blocks_on_a_kept_context_are_those_of_the_whole_pass(layer_types):
    network, aux, embedded = made(layer_types)
    out = network(embedded, ANCHORS, aux, POSITIONS, PACKING)
    for first, states in ((0, aux[:9]), (3, aux[9:])):
        kept = network.context(states, torch.arange(9))
        own = slice(first, first + 3)
        assert torch.allclose(network.blocks(embedded[own], ANCHORS[own], kept), out[own], atol=1e-12)


@pytest.mark.parametrize("layer_types", [(FULL,), (SLIDING, FULL), (FULL, SLIDING)])
def test_asked_slots_are_rows_of_the_whole_block(layer_types):
    network, aux, embedded = made(layer_types)
    slots = torch.randint(0, 4, (6, 2))
    whole = network(embedded, ANCHORS, aux, POSITIONS, PACKING)
    asked = network(embedded, ANCHORS, aux, POSITIONS, PACKING, slots)
    assert asked.shape == (6, 2, 32)
    for block in range(6):
        for column, k in enumerate(slots[block].tolist()):
            assert torch.allclose(asked[block, column], whole[block, k], atol=1e-12)


def test_states_at_and_after_the_anchor_other_blocks_and_other_documents_are_invisible():
    network, aux, embedded = made((FULL, FULL))
    before = network(embedded, ANCHORS, aux, POSITIONS, PACKING)
    changed, others = aux.clone(), embedded.clone()
    changed[4:] += 100  # from the second block's anchor on, and the whole other document
    others[[0, 2, 3, 4, 5]] += 1
    assert torch.equal(before[1], network(others, ANCHORS, changed, POSITIONS, PACKING)[1])
    changed[3] += 1
    assert not torch.equal(before[1], network(others, ANCHORS, changed, POSITIONS, PACKING)[1])


def test_autocast_computes_in_bfloat16_with_float32_weights():
    network, aux, embedded = made((SLIDING, FULL))
    network.float()
    exact = network(embedded.float(), ANCHORS, aux.float(), POSITIONS, PACKING)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = network(embedded.float(), ANCHORS, aux.float(), POSITIONS, PACKING)
    rounded.sum().backward()
    assert rounded.dtype == torch.float32 and all(p.grad.dtype == torch.float32 for p in network.parameters())
    assert 0 < (rounded - exact).norm() / exact.norm() < 0.05


def test_rope_frequencies_stay_float32():
    network = make_network().bfloat16()
    cos, _ = network.rotary(torch.tensor([3072]))
    exact = torch.cos(3072 * 1e4 ** (-torch.arange(0, 12, 2, dtype=torch.float64) / 12))
    assert cos.dtype == torch.float32 and torch.allclose(cos[0, :6].double(), exact, atol=1e-3)


@pytest.mark.parametrize(("changes", "words"), [
    ({"mask_token_id": 100}, "mask_token_id 100"), ({"block_size": 1}, "block_size 1"),
    ({"target_layer_ids": (3, 1)}, "ascending"), ({"target_layer_ids": (1, 6)}, "within"),
    ({"num_key_value_heads": 3}, "query heads"), ({"layer_types": (SLIDING,)}, "sliding_window"),
    ({"layer_types": ("linear",)}, "layer_types"), ({"target_layer_ids": ()}, "ascending")])
def test_bad_configurations_are_refused_by_name(changes, words):
    with pytest.raises(ValueError, match=words):
        DrafterConfig(**{**CONFIG, **changes})
