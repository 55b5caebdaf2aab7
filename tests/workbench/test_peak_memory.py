"""Predicted peak memory against PyTorch's own allocation record, and once against a process's resident memory."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from dflash_lib.conversations.prepare import PreparedRows, PrepareOptions
from dflash_lib.drafter.network import DFlashDrafter
from dflash_lib.drafter.recipe import Compute, TrainOptions, drafter_config
from dflash_lib.drafter.training import Trainer
from dflash_lib.hidden_states.store import HiddenStateStore
from dflash_lib.target.capture import capture_batch
from dflash_lib.target.ends import load_ends, meta_target
from dflash_lib.target.errors import TargetError
from dflash_lib.target.loading import load_target
from dflash_lib.workbench import peak_memory
from dflash_lib.workbench.peak_memory import capture_memory, largest_batch
from dflash_lib.workbench.training_memory import training_memory
from tests.conftest import DATA
from tests.families import FAMILIES, make_family
from tests.hidden_states.rows import make_store
from tests.tiny import make_tokenizer
from tests.workbench.measuring import peak_bytes

TOLERANCE = 0.10
REAL = DATA / "qwen3.6-27b"
REAL_IDS = [1, 16, 31, 46, 61]


@pytest.mark.parametrize("family", FAMILIES)
def test_capture_of_every_family(family, tmp_path):
    target = load_target(make_family(tmp_path, family), audit="quick")
    for ids, dtype in (([0, 2], torch.float32), ([0, 1, 2, 3], torch.float32)):
        predicted = capture_memory(tmp_path, ids, 4, 300, dtype=dtype)
        measured = peak_bytes(lambda ids=ids: capture_batch(target, [[5] * 300] * 4, ids, True, torch.bfloat16))
        assert predicted.working == pytest.approx(measured, rel=TOLERANCE)
        assert predicted.static == pytest.approx(sum(p.nbytes for p in target.model.parameters()), rel=0.01)
        assert capture_memory(tmp_path, ids, 3, 300, dtype=dtype).working < (1 - TOLERANCE) * measured, "a blunt test"


def test_capture_in_bfloat16_without_the_last_state(tiny_qwen3_5_folder):
    target = load_target(tiny_qwen3_5_folder, "bfloat16", audit="quick")
    predicted = capture_memory(target.path, [1, 4], 2, 200, last=False)
    measured = peak_bytes(lambda: capture_batch(target, [[5] * 200] * 2, [1, 4], False, torch.bfloat16))
    assert predicted.working == pytest.approx(measured, rel=TOLERANCE)


def test_many_layers_are_stacked(tiny_llama):
    """With many layers tapped it is the states themselves that decide."""
    ids = list(range(6))
    predicted = capture_memory(tiny_llama.path, ids, 2, 64, dtype="float32")
    measured = peak_bytes(lambda: capture_batch(tiny_llama, [[5] * 64] * 2, ids, True, torch.bfloat16))
    assert predicted.working == predicted.parts["stacking the states"] == pytest.approx(measured, rel=TOLERANCE)


def test_the_process_itself_takes_what_is_predicted(tmp_path):
    """Resident memory of a process, on a target that is large beside what libraries take."""
    config = LlamaConfig(vocab_size=384, hidden_size=512, intermediate_size=1408, num_attention_heads=8,
                         num_key_value_heads=4, num_hidden_layers=4, tie_word_embeddings=True, eos_token_id=2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    save_file({n: t.contiguous() for n, t in model.state_dict().items() if n != "lm_head.weight"},
              tmp_path / "model.safetensors", {"format": "pt"})
    config.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    predicted = capture_memory(tmp_path, [0, 1, 2], 8, 1024, dtype="float32")
    done = subprocess.run(
        [sys.executable, "-m", "tests.workbench.capture_rss", str(tmp_path), "8", "1024", "0", "1", "2"],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"},  # freed blocks go back at once
        capture_output=True, text=True, check=True)
    assert predicted.working == pytest.approx(int(done.stdout), rel=TOLERANCE)


def uniform_rows(target, num_samples, num_tokens):
    """Rows of one length, every token supervised: the most that a batch of this size can hold."""
    total = num_samples * num_tokens
    return PreparedRows(
        input_ids=np.random.default_rng(0).integers(4, 384, total).astype(np.int32),
        loss_mask=np.ones(total, np.uint8), offsets=np.arange(0, total + 1, num_tokens, dtype=np.int64),
        sample_ids=[f"row-{i}" for i in range(num_samples)], kinds=["facts"] * num_samples, options=PrepareOptions(),
        tokenizer_hash=target.identity["tokenizer"], source_sha256="0" * 64)


HALF = {"precision": "bfloat16", "num_layers": 2}


@pytest.mark.parametrize(("changes", "dtype"), [
    ({}, "float32"), ({"draft_vocab_size": 100, "num_layers": 2, "average": 0.0}, "float32"),
    ({"kl_weight": 0.0, "batch_samples": 1, "anchors_per_sample": 4}, "float32"), ({"batch_samples": 1}, "bfloat16"),
    ({"slots_per_anchor": 2, "num_layers": 2}, "float32"), ({"slots_per_anchor": 1, "kl_weight": 0.0}, "float32"),
    ({"warm_start": True, "num_layers": 3}, "float32"),
    ({"num_sliding_layers": 1, "sliding_window": 24, **HALF}, "bfloat16"),
    ({"kl_weight": 0.0, "average": 0.0, **HALF}, "bfloat16"), (HALF, "float32"), ({"accumulate": 3}, "float32"),
    ({"optimizer": "muon", "num_layers": 3, "batch_samples": 1, "anchors_per_sample": 4}, "float32")])
def test_training(changes, dtype, tiny_llama_folder, tmp_path):
    """Of what the training job does: the ends alone, and then the trainer."""
    make_store(tmp_path / "states", load_target(tiny_llama_folder, dtype, audit="quick"),
               uniform_rows(load_target(tiny_llama_folder, dtype, audit="quick"), 6, 128))
    compute = Compute(accumulate=changes.get("accumulate", 1))
    options = TrainOptions(**{"block_size": 8, "mask_token_id": 3, "draft_vocab_size": None, "warm_start": False,
                              "steps": 2, "batch_samples": 3, "anchors_per_sample": 48, "slots_per_anchor": 7,
                              "validation_samples": 2, "validation_interval": 2, "checkpoint_interval": 50}
                           | {name: value for name, value in changes.items() if name != "accumulate"})
    predicted = training_memory(tiny_llama_folder, [1, 3, 4], options, 128, dtype=dtype, device="cpu", compute=compute)
    layers = range(6)[-options.num_layers:] if options.warm_start else ()
    ends = load_ends(tiny_llama_folder, dtype, layers=layers)
    held = {p.data_ptr(): p.nbytes for p in ends.model.parameters() if not p.is_meta}
    assert predicted.parts["target's ends"] == sum(held.values()) < sum(p.nbytes for p in ends.model.parameters())

    def work():
        trainer = Trainer(HiddenStateStore.open(tmp_path / "states"), ends, tmp_path / "drafter", options, compute)
        for _ in range(2):
            trainer.train_step()
        trainer.validate()
        return trainer

    (tmp_path / "drafter").mkdir()
    measured = peak_bytes(work) + sum(held.values())
    assert predicted.total == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_can_be_predicted_for_every_family(family, tmp_path):
    options = TrainOptions(block_size=4, mask_token_id=3, draft_vocab_size=None)
    predicted = training_memory(make_family(tmp_path, family), [0, 2], options, 64)
    drafter = drafter_config(meta_target(tmp_path, "bfloat16"), [0, 2], options, None)
    assert predicted.parts["drafter"] == 4 * sum(p.numel() for p in DFlashDrafter(drafter).parameters())
    assert drafter.rope_theta == {"gemma3": 1e6, "gemma3_text": 1e6, "gpt_oss": 150_000.0}.get(family, 10_000.0)


def test_which_kernels_are_counted(monkeypatch):
    monkeypatch.setattr(peak_memory.importlib.util, "find_spec", lambda name: object())
    assert peak_memory.fast_kernels_on("cuda:0") and not peak_memory.fast_kernels_on("cpu")
    monkeypatch.setattr(peak_memory.importlib.util, "find_spec", lambda name: None)
    assert not peak_memory.fast_kernels_on("cuda")


def test_the_27b():
    """By hand: what a linear-attention layer of the fallback has in float32, and weights in bf16."""
    slow = capture_memory(REAL, REAL_IDS, 1, 1024)
    fast = capture_memory(REAL, REAL_IDS, 1, 1024, fast_kernels=True)
    assert slow.static == fast.static == pytest.approx(53_791_996_928, rel=1e-6)
    heads = 48 * 128 * 4 * 1024  # one float32 tensor over all value heads
    assert slow.working > 10 * heads > fast.working / 2
    assert slow.working > 1.5 * fast.working, "what the kernels save"


def test_the_largest_batch(tiny_llama_folder):
    """Its peak fits, and one row more would not."""
    free = 4_000_000
    batch = largest_batch(tiny_llama_folder, [1, 3], 100, free, dtype="float32", headroom=0.1)
    assert batch.num_rows > 1 and batch.token_budget == batch.num_rows * 100
    exact = capture_memory(tiny_llama_folder, [1, 3], batch.num_rows, 100, dtype="float32").total
    more = capture_memory(tiny_llama_folder, [1, 3], batch.num_rows + 1, 100, dtype="float32").total
    assert exact == batch.peak <= 0.9 * free < more
    assert largest_batch(tiny_llama_folder, [1, 3], 100, 500_000, dtype="float32").num_rows == 0


def test_what_cannot_be_predicted_is_refused(tiny_llama_folder):
    with pytest.raises(TargetError, match="does not fit a target of 6 layers"):
        capture_memory(tiny_llama_folder, [1, 9], 1, 8)


def test_a_warm_start_into_other_sizes_is_refused_before_the_states_are_taken(tiny_llama_folder):
    options = TrainOptions(block_size=8, mask_token_id=3, draft_vocab_size=None, intermediate_size=96)
    with pytest.raises(ValueError, match="warm start: layers.0.mlp.gate_proj .*set warm_start: false"):
        training_memory(tiny_llama_folder, [1, 3, 4], options, 16, dtype="float32", device="cpu")
