"""gpus: which devices a job gets, with a planted nvidia-smi; and what an error of a computation means."""

import os
import stat

import pytest
import torch

from dflash_lib.target import gpus
from dflash_lib.target.errors import TargetError
from dflash_lib.target.gpus import choose_gpus
from dflash_lib.target.memory import is_device_lost, is_out_of_memory

CARD = "{index}, GPU-{index}{index}, NVIDIA RTX PRO 6000, 97887, {used}, 580.65"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Four cards; `users` maps a card to (pid, MiB) of a process on it, `used` to MiB in use."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def plant(users=None, used=None, num=4, code=0, own=0):
        users, used = users or {}, used or {}
        cards = "\n".join(CARD.format(index=i, used=used.get(i, users.get(i, (0, 4))[1])) for i in range(num))
        apps = "\n".join(f"GPU-{i}{i}, {pid}, /usr/bin/python3, {mib}" for i, (pid, mib) in users.items())
        (tmp_path / "bin").mkdir(exist_ok=True)
        script = tmp_path / "bin" / "nvidia-smi"
        script.write_text(f"#!/bin/sh\ncase \"$1\" in\n--query-gpu*) cat <<'X'\n{cards}\nX\n;;\n"
                          f"*) cat <<'X'\n{apps}\nX\n;;\nesac\nexit {code}\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num)

    return plant


def test_all_that_nobody_else_uses(machine):
    machine(users={1: (4711, 60900)}, used={3: 50_000})
    choice = choose_gpus(None)
    assert choice.numbers == [0, 2]
    assert choice.notes == ["GPU 1 was left out: process 4711 (python3, 60900 MiB)",
                            "GPU 3 was left out: 50000 of 97887 MiB in use"]


def test_what_this_process_has_there_does_not_count(machine, monkeypatch):
    machine(users={0: (os.getpid(), 60900)})
    assert choose_gpus(None).numbers == [0, 1, 2, 3]
    machine(used={0: 60900})  # in a container, which names no process
    assert choose_gpus(None).numbers == [1, 2, 3]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda number: 60_000 * 2**20)
    assert choose_gpus(None).numbers == [0, 1, 2, 3]


def test_named_devices(machine):
    machine(users={1: (4711, 60900)})
    assert choose_gpus([2, 0]) == gpus.GpuChoice([2, 0], [])
    choice = choose_gpus([1, 3])
    assert choice.numbers == [1, 3]
    assert choice.notes == ["GPU 1 is used though it is in use already: process 4711 (python3, 60900 MiB)"]


@pytest.mark.parametrize(("wanted", "words"), [
    ([4], "there is no device 4; PyTorch sees 4, from 0 to 3"), ([-1], "no device -1"), ([True], "no device True"),
    ([0, 2, 0], "device 0 stands there twice"), ([], "an empty list")])
def test_devices_that_cannot_be(machine, wanted, words):
    machine()
    with pytest.raises(TargetError, match=words):
        choose_gpus(wanted)


def test_none_left_and_none_there(machine):
    machine(users={0: (1, 90_000), 1: (2, 90_000)}, num=2)
    with pytest.raises(TargetError, match="every device is in use: GPU 0: process 1 .*; GPU 1: process 2"):
        choose_gpus(None)
    machine(num=0)
    with pytest.raises(TargetError, match="PyTorch sees no CUDA device"):
        choose_gpus(None)


def test_an_nvidia_smi_that_fails_is_noted(machine):
    machine(code=9)
    choice = choose_gpus(None)
    assert choice.numbers == [0, 1, 2, 3] and "nvidia-smi does not answer" in choice.notes[0]


def test_numbers_are_those_of_the_visible_devices(machine, monkeypatch):
    machine(users={1: (4711, 60900)})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert choose_gpus(None).numbers == [0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-11, GPU-0")
    choice = choose_gpus(None)
    assert choice.numbers == [1] and "GPU 0 was left out: process 4711" in choice.notes[0]


def test_what_an_error_means():
    lost = [torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
            RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`")]
    memory = [torch.OutOfMemoryError("CUDA out of memory."), torch.AcceleratorError("CUDA error: out of memory"),
              MemoryError(), RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate"),
              RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")]
    other = [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("CUDA error"), KeyError("x")]
    assert [is_device_lost(e) for e in lost + memory + other] == [True] * 2 + [False] * 8
    assert [is_out_of_memory(e) for e in lost + memory + other] == [False] * 2 + [True] * 5 + [False] * 3
