"""The GPU check of predicted memory, as far as a machine without a GPU can try it: its work, on the miniature."""

import json

import pytest
import torch

from tests.gpu import check_capacity
from tests.miniature import miniature_config
from tests.workbench.measuring import peak_bytes

SMALL = {"anchors_per_sample": 24, "draft_vocab_size": None}


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The miniature's configuration, and PyTorch's CPU allocator in the GPU's place. Returns layer ids and target."""
    (tmp_path / "real.json").write_text(json.dumps(miniature_config()))
    monkeypatch.setattr(check_capacity, "CONFIG", tmp_path / "real.json")
    monkeypatch.setattr(check_capacity, "BATCHES", ((2, 200), (1, 300)))
    monkeypatch.setattr(check_capacity, "TRAINING_TOKENS", 100)
    monkeypatch.setattr(check_capacity, "TRAINING", check_capacity.TRAINING | {"mask_token_id": 3})
    monkeypatch.setattr(check_capacity.importlib.util, "find_spec", lambda name: None)
    ids = check_capacity.write_config(tmp_path, 8)
    target = check_capacity.random_target(tmp_path, "cpu")
    weights = sum(p.nbytes for p in target.model.parameters())
    monkeypatch.setattr(check_capacity, "measured", lambda work, device: (weights + peak_bytes(work), 0))
    return ids, target


def test_its_work_and_its_verdict_on_a_cpu(small, tmp_path, capsys):
    ids, target = small
    assert check_capacity.check_capture(target, tmp_path, ids, "cpu")
    for changes in ({"slots_per_anchor": 15, "kl_weight": 0.0}, {"slots_per_anchor": 2, "kl_weight": 0.7},
                    {"slots_per_anchor": 15, "kl_weight": 0.7, "draft_vocab_size": 100}):
        assert check_capacity.check_training(target, tmp_path, ids, "cpu", SMALL | changes)
    assert capsys.readouterr().out.count("\n") == 5
    assert not check_capacity.compare("off by a fifth", 80, (100, 100)) and "FAILED" in capsys.readouterr().out


def test_nothing_to_check_here(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_capacity.main() == 0 and "skipped: PyTorch sees no CUDA device" in capsys.readouterr().out
