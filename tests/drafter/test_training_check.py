"""The GPU check of training (tests/gpu/check_training.py), in miniature on a CPU: it agrees, and sees what is wrong."""

import pytest
import torch

from dflash_lib.drafter import attention
from dflash_lib.drafter.attention import Packing
from tests.gpu import check_training


@pytest.fixture(autouse=True)
def miniature(monkeypatch):
    for name, value in {"HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 16, "BLOCK": 4, "HIDDEN": 64, "VOCAB": 96,
                        "PACKING": Packing((30, 1, 50), (6, 1, 9))}.items():
        monkeypatch.setattr(check_training, name, value)


def test_it_agrees_on_a_cpu(capsys):
    assert check_training.main("cpu") == 0
    assert capsys.readouterr().out.count("SdpaAttention, ") == 4


def test_a_wrong_kernel_is_seen(monkeypatch, capsys):
    """One context position more than the convention has."""
    real = attention.attention_mask

    def wrong(anchors, slots, block_size, num_context, window):
        return real(anchors + 1, slots, block_size, num_context, window)

    monkeypatch.setattr(attention, "attention_mask", wrong)
    assert not check_training.check_attention("cpu", None, torch.float32)
    assert "FAILED" in capsys.readouterr().out


def test_without_a_gpu_it_skips(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_training.main() == 0 and "skipped" in capsys.readouterr().out
