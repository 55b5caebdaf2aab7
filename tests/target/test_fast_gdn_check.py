"""The GPU check of the fast kernels, as far as a machine without a GPU can try it: its worker and its verdict."""

import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.gpu import check_fast_gdn


def sides(error: float, seed: int = 0):
    """(kernels, fallback, truth) of random states, the first two with relative rounding `error` and 0.01."""
    generator = torch.Generator().manual_seed(seed)

    def noisy(states, size):
        return {name: value * (1 + size * torch.randn(value.shape, generator=generator))
                for name, value in states.items()}

    truth = {f"{kind}{i}": torch.randn(n, 8, 32, generator=torch.Generator().manual_seed(i))
             for i, n in enumerate(check_fast_gdn.LENGTHS) for kind in ("alone", "batch")}
    kernels = noisy({name: value for name, value in truth.items() if name.startswith("alone")}, error)
    return {**kernels, **{name.replace("alone", "batch"): value for name, value in kernels.items()}}, \
        noisy(truth, 0.01), truth


def test_rounding_holds_and_more_does_not(capsys):
    assert check_fast_gdn.compare(*sides(0.01))
    assert "FAILED" not in capsys.readouterr().out
    assert not check_fast_gdn.compare(*sides(0.05))
    kernels, fallback, truth = sides(0.01)
    kernels["batch5"] = kernels["batch5"].roll(1, 0)  # another token's states
    assert not check_fast_gdn.compare(kernels, fallback, truth)
    kernels, fallback, truth = sides(0.01)
    kernels["alone3"][0, 0, 0] = float("nan")
    assert not check_fast_gdn.compare(kernels, fallback, truth)
    assert capsys.readouterr().out.count("FAILED") == len(check_fast_gdn.LENGTHS) + 2


def test_nothing_to_check_here(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_fast_gdn.main() == 0 and "skipped: PyTorch sees no CUDA device" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(check_fast_gdn.importlib.util, "find_spec", lambda name: None)
    assert check_fast_gdn.main() == 0 and "skipped: flash-linear-attention is not" in capsys.readouterr().out


def test_the_worker_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(check_fast_gdn, "LENGTHS", (1, 70))
    monkeypatch.setattr(check_fast_gdn, "NUM_LAYERS", 4)
    monkeypatch.setattr(check_fast_gdn, "LONG", 8)
    monkeypatch.setattr(check_fast_gdn, "HIDDEN_SIZE", 64)
    for name in check_fast_gdn.HIDDEN:
        monkeypatch.setitem(sys.modules, name, None)  # restored afterwards
    for dtype in ("float32", "bfloat16"):
        check_fast_gdn.worker("fallback", dtype, "cpu", str(tmp_path / dtype))
    exact, rounded = load_file(tmp_path / "float32"), load_file(tmp_path / "bfloat16")
    assert exact["alone1"].shape == (70, 4, 64) and exact["rate"] > 0
    assert 1e-4 < check_fast_gdn.relative_error(rounded["alone1"], exact["alone1"]).median() < 0.02
    assert check_fast_gdn.relative_error(exact["batch0"], exact["alone0"]).max() < 1e-4
    with pytest.raises(SystemExit, match="did not take the kernels"):
        check_fast_gdn.worker("kernels", "float32", "cpu", str(tmp_path / "x"))
