"""The GPU check of the extraction's worker, as far as a machine without a GPU can try it: on the miniature."""

import json

import pytest
import torch

from tests.gpu import check_capacity, check_extraction
from tests.miniature import miniature_config


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The miniature with its layer ids, and a few rows."""
    (tmp_path / "real.json").write_text(json.dumps(miniature_config()))
    monkeypatch.setattr(check_capacity, "CONFIG", tmp_path / "real.json")
    ids = check_capacity.write_config(tmp_path, 8)
    target = check_capacity.random_target(tmp_path, "cpu")
    return target, ids, check_extraction.make_rows(24, (10, 40), target.embedding.weight.shape[0])


def test_its_checks_hold_on_a_cpu(small, tmp_path, capsys):
    target, ids, rows = small
    assert check_extraction.check_all(target, ids, rows, tmp_path / "stores", "cpu", 200, least_ratio=0.0)
    printed = capsys.readouterr().out
    assert printed.count("tokens/s = ") == 3 and "FAILED" not in printed and "24 of 24" in printed
    assert "largest error 0.00e+00 of a token's norm, 0.00% of the values differ" in printed


def test_it_sees_wrong_values_and_a_slow_worker(small, tmp_path, capsys):
    target, ids, rows = small
    assert not check_extraction.check_speed(target, rows, ids, tmp_path / "stores", "cpu", 200, least_ratio=1e9)
    plan = check_extraction.make_job(tmp_path / "stores" / "other", target, rows, ids, 200)[0]
    with torch.no_grad():
        target.embedding.weight.mul_(1.5)
    assert not check_extraction.check_values(target, rows, plan, tmp_path / "stores", "cpu")
    assert capsys.readouterr().out.count("FAILED") == 2


def test_nothing_to_check_here(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_extraction.main() == 0 and "skipped: PyTorch sees no CUDA device" in capsys.readouterr().out
