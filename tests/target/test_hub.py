"""Hub ids: what the hub refuses is said in our words, and what was downloaded before is used offline."""

import os
import subprocess
import sys
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from dflash_lib.target.errors import TargetError
from dflash_lib.target.hub import FILES, NOT_FILES, find_cached, find_target, hub_name, is_hub_id
from dflash_lib.target.loading import load_target, target_identity
from tests.conftest import REPOSITORY

COMMIT = "0123456789abcdef0123456789abcdef01234567"
RESPONSE = SimpleNamespace(headers={}, status_code=403, request=None, text="", json=dict)


def refuse(monkeypatch, error, cause=None):
    """Makes the hub answer with `error`."""
    def download(*_args, **_kwargs):
        raise error from cause

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)


@pytest.fixture
def cache(tmp_path, monkeypatch, tiny_llama_folder):
    """A download cache in huggingface_hub's layout that holds the tiny target as `some-org/tiny-llama`."""
    repository = tmp_path / "hub" / "models--some-org--tiny-llama"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for i, file in enumerate(sorted(tiny_llama_folder.iterdir())):
        (repository / "blobs" / f"blob{i}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/blob{i}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return snapshot


@pytest.mark.parametrize("name", ["some-org/tiny-llama/x", "/abs/path", "tiny", "../x", "", "a/b c", "./a/b"])
def test_what_is_no_hub_id(name):
    assert not is_hub_id(name)
    with pytest.raises(TargetError, match="no such model folder .and no hub id"):
        find_target(name or "not-here")


def test_what_is_in_the_cache_is_found_without_asking(cache, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    for name in ("some-org/tiny-llama", "some-org/tiny-llama@main", f"some-org/tiny-llama@{COMMIT}"):
        assert find_cached(name) == cache
    for name in ("some-org/other", "some-org/tiny-llama@v2", "nowhere", str(cache)):
        assert find_cached(name) is None
    (cache / "model.safetensors").unlink()
    assert find_cached("some-org/tiny-llama") is None, "a configuration alone is no target"


def test_a_folder_wins_over_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("some-org/name")
    (tmp_path / "some-org" / "name").mkdir(parents=True)
    assert not is_hub_id("some-org/name") and str(find_target("some-org/name")) == "some-org/name"
    with pytest.raises(TargetError, match="a revision .main. is for hub ids"):
        find_target("some-org/name", revision="main")


@pytest.mark.parametrize("error, what", [
    (GatedRepoError("secret", response=RESPONSE), "some-org/name.*: gated. Accept its conditions.*HF_TOKEN"),
    (RepositoryNotFoundError("secret", response=RESPONSE), "hub has no such repository, or it is private"),
    (RevisionNotFoundError("secret", response=RESPONSE), "at revision v9.*no such branch, tag or commit"),
    (HfHubHTTPError("503 unavailable", response=RESPONSE), "download failed .HfHubHTTPError: 503 unavailable"),
    (OSError("No space left on device"), "download failed .OSError: No space left"),
])
def test_what_the_hub_refuses(monkeypatch, error, what):
    refuse(monkeypatch, error)
    with pytest.raises(TargetError, match=what):
        find_target("some-org/name", revision="v9")


def test_no_network(monkeypatch):
    refuse(monkeypatch, LocalEntryNotFoundError("cannot find"), ConnectionError("Name or service not known"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(TargetError, match="hub cannot be reached .ConnectionError: Name or service not known"):
        find_target("some-org/name")


def test_offline_and_never_downloaded(cache):
    with pytest.raises(TargetError, match="some-org/other.*HF_HUB_OFFLINE=1 forbids"):
        find_target("some-org/other")
    with pytest.raises(TargetError, match="at revision v2.*HF_HUB_OFFLINE=1 forbids"):
        find_target("some-org/tiny-llama", revision="v2")


def test_offline_from_the_cache(cache, tiny_llama):
    assert find_target("some-org/tiny-llama") == cache == find_target("some-org/tiny-llama", revision=COMMIT)
    target = load_target("some-org/tiny-llama")
    assert target.path == cache and target.identity["name"] == "some-org/tiny-llama"
    assert target.identity["revision"] == COMMIT and "revision" not in tiny_llama.identity
    same = {**tiny_llama.identity, "name": "some-org/tiny-llama", "revision": COMMIT}
    assert target.identity == same == target_identity(cache) == target_identity("some-org/tiny-llama")
    assert hub_name(tiny_llama.path) == (tiny_llama.path.name, None)


def test_the_environment_is_honoured(cache, tmp_path):
    """HF_HOME and HF_HUB_OFFLINE as a user sets them, in a process of its own."""
    code = "from dflash_lib.target.hub import find_target; print(find_target('some-org/tiny-llama'))"
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stdout.strip() == str(cache), done.stderr


def test_only_what_loading_needs_is_downloaded(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download",
                        lambda name, **options: asked.append((name, options)) or str(tmp_path))
    assert find_target("some-org/name") == tmp_path
    find_target("some-org/name", revision="v1", trust_remote_code=True)
    (name, plain), (_, trusting) = asked
    assert name == "some-org/name" and plain["revision"] is None and trusting["revision"] == "v1"
    assert trusting["allow_patterns"] == [*plain["allow_patterns"], "*.py"]
    repository = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "chat_template.jinja",
                  "merges.txt", "tokenizer.model", "pytorch_model.bin", "original/model.safetensors", "modeling_x.py",
                  "model.gguf", "consolidated.00.safetensors", "README.md", "model.safetensors.index.json"]
    wanted = huggingface_hub.utils.filter_repo_objects(repository, allow_patterns=list(FILES),
                                                       ignore_patterns=list(NOT_FILES))
    assert sorted(wanted) == sorted(["config.json", "model-00001-of-00002.safetensors", "tokenizer.json",
                                     "chat_template.jinja", "merges.txt", "tokenizer.model",
                                     "model.safetensors.index.json"])
