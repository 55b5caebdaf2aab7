"""The doctor against planted faults: a fake nvidia-smi, versions that do not do, folders that cannot be written."""

import importlib.metadata
import os
import resource
import shutil
import stat
from collections import namedtuple

import pytest
import torch

from dflash_lib import __main__ as command
from dflash_lib.target.configuration import read_config, text_tower
from dflash_lib.workbench import doctor
from dflash_lib.workbench.doctor import AMBER, GREEN, RED, Line, exit_code
from tests.conftest import DATA

CARD = "0, GPU-1, NVIDIA RTX PRO 6000, 97887, {used}, 580.65"


@pytest.fixture
def fake_smi(tmp_path, monkeypatch):
    """Puts an nvidia-smi first on the path that answers with the given lines."""

    def plant(cards, users="", code=0):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        script = folder / "nvidia-smi"
        script.write_text(f'#!/bin/sh\ncase "$1" in\n--query-gpu*) printf "%s\\n" "{cards}";;\n'
                          f'*) [ -n "{users}" ] && printf "%s\\n" "{users}";;\nesac\n'
                          f'[ {code} = 0 ] || echo "NVIDIA-SMI has failed" >&2\nexit {code}\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    return plant


def test_a_free_gpu_that_pytorch_sees(fake_smi, monkeypatch):
    fake_smi(CARD.format(used=4))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (line,) = doctor.gpu_lines()
    assert line.level == GREEN and line.found == "NVIDIA RTX PRO 6000, 97887 MiB, 4 MiB used, driver 580.65"


def test_who_else_uses_a_gpu(fake_smi, monkeypatch):
    fake_smi(CARD.format(used=61000), "GPU-1, 4711, /usr/bin/python3, 60900")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (line,) = doctor.gpu_lines()
    assert line.level == AMBER and "process 4711 (python3, 60900 MiB)" in line.found
    assert "CUDA_VISIBLE_DEVICES" in line.to_do
    fake_smi(CARD.format(used="[N/A]"), "GPU-2, 4711, /usr/bin/python3, 60900")  # another card's user
    assert doctor.gpu_lines()[0].level == GREEN


def test_gpus_that_pytorch_does_not_see(fake_smi, monkeypatch):
    fake_smi(CARD.format(used=4))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    line = doctor.gpu_lines()[-1]
    assert line.level == RED and "CUDA build of PyTorch" in line.to_do
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert doctor.gpu_lines()[-1].to_do == "unset CUDA_VISIBLE_DEVICES"


def test_a_broken_driver_and_none(fake_smi, monkeypatch):
    fake_smi("", code=9)
    (line,) = doctor.gpu_lines()
    assert line.level == RED and "nvidia-smi fails" in line.found and "driver" in line.to_do
    fake_smi("No devices were found")
    assert doctor.gpu_lines() == [Line(AMBER, "GPUs", "nvidia-smi lists none",
                                       "is the driver's device passed to this container?")]
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert doctor.gpu_lines()[0].level == AMBER


def test_versions(monkeypatch):
    assert [line.level for line in doctor.version_lines()] == [GREEN], "this very environment runs the tests"
    monkeypatch.setattr(doctor, "requirements", lambda: (">=3.99", [
        "torch>=99", "h5py>=3", "no-such-package>=1", "ruff>=99; extra == 'test'"]))
    python, torch_line, absent = doctor.version_lines()
    assert python.level == torch_line.level == absent.level == RED
    assert "needed >=3.99" in python.found and "needed >=99" in torch_line.found
    assert absent.found.startswith("no-such-package absent") and absent.to_do == "pip install 'no-such-package>=1'"


def test_requirements_come_from_the_installed_package_or_the_checkout(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    Metadata = namedtuple("Metadata", "get_all")
    monkeypatch.setattr(importlib.metadata, "metadata", absent)
    python, needed = doctor.requirements()
    assert python.startswith(">=3.") and any(text.startswith("transformers>=") for text in needed)

    class Installed(Metadata):
        def __getitem__(self, key):
            return {"Requires-Python": ">=3.12"}[key]

    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: Installed(lambda key: ["x>=1"]))
    assert doctor.requirements() == (">=3.12", ["x>=1"])


def test_the_kernels_and_what_their_absence_costs(tiny_llama, monkeypatch):
    hybrid = text_tower(read_config(DATA / "qwen3.6-27b"), DATA / "qwen3.6-27b")
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    line = doctor.kernel_line(hybrid, on_gpu=True)
    assert line.level == AMBER and "several times slower" in line.found
    assert line.to_do == "pip install flash-linear-attention causal-conv1d"
    assert doctor.kernel_line(hybrid, on_gpu=False).level == GREEN
    assert "needed" in doctor.kernel_line(tiny_llama.config, on_gpu=True).found
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object() if name == "fla" else None)
    assert "a little slower" in doctor.kernel_line(hybrid, on_gpu=True).found
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    assert doctor.kernel_line(hybrid, on_gpu=True).level == GREEN


def test_flex_attention_is_tried(monkeypatch):
    assert doctor.flex_line().found == "does not train on cpu (FlexAttention does not support backward on CPU)"
    monkeypatch.setattr("torch.nn.attention.flex_attention.flex_attention", lambda q, k, v: q * 2)
    assert doctor.flex_line() == Line(GREEN, "FlexAttention", "trains on cpu")


def test_the_data_folder(tmp_path, monkeypatch):
    line = doctor.disk_line(tmp_path)
    assert "MB/s" in line.found and line.level in (GREEN, AMBER) and list(tmp_path.iterdir()) == []
    speed = doctor.disk_speed(tmp_path, 2_000_000)
    assert speed.write_mb_s > 0 and speed.read_mb_s > 0 and speed.free > 0
    assert doctor.disk_speed(tmp_path / "not" / "yet", 1).free > 0 and list(tmp_path.iterdir()) == []
    (tmp_path / "a file").write_text("")
    assert doctor.disk_line(tmp_path / "a file").level == RED
    monkeypatch.setattr(doctor, "disk_speed", lambda folder: doctor.DiskSpeed(20, 900, 10**12))
    assert doctor.disk_line(tmp_path).level == AMBER
    monkeypatch.setattr(doctor, "disk_speed", lambda folder: doctor.DiskSpeed(900, 900, 10**9))
    assert "free space" in doctor.disk_line(tmp_path).to_do


def test_locks(tmp_path, monkeypatch):
    def refuses(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuses)  # HDF5 has its own
    assert [line.level for line in doctor.lock_lines(tmp_path)] == [GREEN]

    def keeps_nobody_out(source, target):
        shutil.copy(source, target)

    monkeypatch.setattr(os, "link", keeps_nobody_out)
    assert doctor.lock_lines(tmp_path)[0].level == RED
    monkeypatch.setattr(os, "link", refuses)
    line = doctor.lock_lines(tmp_path)[0]
    assert line.level == RED and "No locks available" in line.found
    monkeypatch.setattr("h5py.File", lambda *_: refuses())
    assert "HDF5_USE_FILE_LOCKING" in doctor.lock_lines(tmp_path)[1].to_do


@pytest.mark.parametrize("where", ["a file", "a file/below", "no writing"])
def test_a_data_folder_that_cannot_be(where, tmp_path, capsys):
    """Every line is said all the same; /proc takes no files, not even from root."""
    (tmp_path / "a file").write_text("")
    folder = "/proc/nothing" if where == "no writing" else tmp_path / where
    assert command.main(["doctor", "--data", str(folder)]) == 1
    printed = capsys.readouterr().out
    assert "red    data folder" in printed and "red    file locks" in printed and "shared memory" in printed


def test_limits(monkeypatch):
    for limits, level, words in (((1024, 8192), AMBER, "ulimit -n 8192"), ((1024, 2048), AMBER, "hard limit"),
                                 ((1024, -1), AMBER, "ulimit -n 65536"), ((65536, 65536), GREEN, "")):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        line = doctor.files_line()
        assert line.level == level and words in line.to_do
    Usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(67_108_864, 0, 67_108_864))
    assert "--shm-size" in doctor.shared_memory_line("/").to_do
    assert doctor.shared_memory_line("/no/such/folder").level == AMBER


def test_the_hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "secret")
    line = doctor.hub_line()
    assert "token set" in line.found and "secret" not in str(line)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert "HF_TOKEN" in doctor.hub_line().to_do


def test_the_target(tiny_llama_folder, monkeypatch):
    (line,) = doctor.model_lines(str(tiny_llama_folder), "float32", "cpu")
    assert line.level == GREEN and line.found.startswith("llama")
    monkeypatch.setattr(doctor, "free_memory", lambda device: 10)
    assert doctor.model_lines(str(tiny_llama_folder), "float32", "cpu")[0].level == RED
    assert "no such model folder" in doctor.model_lines("nowhere", "float32", "cpu")[0].found
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name in ("Org/model", "Org/model@main"):
        assert doctor.model_lines(name, "float32", "cpu")[0].level == AMBER, "nothing is downloaded"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert doctor.model_lines("Org/model", "float32", "cpu")[0].level == RED


@pytest.mark.parametrize(("file", "text", "words"), [
    (None, "", "no config.json here"), ("config.json", "", "is"), ("config.json", "[]", "holds no JSON object"),
    ("config.json", "{}", "names no model_type"),
    ("config.json", '{"model_type": "llama", "hidden_size": 0}', "config.json")])
def test_folders_that_are_no_target(file, text, words, tmp_path):
    if file:
        (tmp_path / file).write_text(text)
    lines = doctor.examine(tmp_path, str(tmp_path))
    assert lines[-1].level == RED and lines[-1].what == "target" and words in lines[-1].found and lines[-1].to_do
    (tmp_path / "a file").write_text("")
    assert doctor.model_lines(str(tmp_path / "a file"), "float32", "cpu")[0].level == RED


def test_a_dtype_and_a_device_that_are_none(tiny_llama_folder):
    for dtype, device, words in (("float31", "cpu", "dtype 'float31'"), ("float32", "gpu", "device 'gpu'")):
        (line,) = doctor.model_lines(str(tiny_llama_folder), dtype, device)
        assert line.level == RED and words in line.found and line.to_do == "change dtype or device"


def test_the_command(tiny_llama_folder, tmp_path, capsys):
    arguments = ["doctor", str(tiny_llama_folder), "--data", str(tmp_path / "not yet")]
    code = command.main(arguments)
    printed = capsys.readouterr().out
    assert code == int("\nred" in f"\n{printed}")
    for what in ("versions", "GPUs" if shutil.which("nvidia-smi") is None else "GPU 0", "data folder", "file locks",
                 "open files", "shared memory", "hub", "target"):
        assert what in printed
    assert command.main(["doctor", "nowhere", "--data", str(tmp_path)]) == 1
    assert "red    target" in capsys.readouterr().out


def test_the_exit_code_and_the_table():
    lines = [Line(GREEN, "a", "fine"), Line(AMBER, "b", "look", "do it")]
    assert exit_code(lines) == 0 and exit_code([*lines, Line(RED, "c", "no", "stop")]) == 1
    assert doctor.table(lines).loc[AMBER, "what to do"] == "do it"
    assert str(lines[1]).splitlines()[1].strip() == "-> do it"
    for level in (AMBER, RED):
        with pytest.raises(AssertionError, match="says what to do"):
            Line(level, "d", "bad")
