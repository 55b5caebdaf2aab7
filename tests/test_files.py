"""files: what is published can be read by whom the umask lets; new folders are durable."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_lib import files


def test_published_files_have_the_mode_that_the_umask_leaves(tmp_path):
    """safetensors makes files that no other user may read."""
    code = ("import os, sys; os.umask(0o027); from dflash_lib.files import atomic_path, write_json; import numpy;"
            "from safetensors.numpy import save_file\n"
            "with atomic_path('a.safetensors') as path: save_file({'x': numpy.zeros(2)}, path)\n"
            "write_json('b.json', 1)")
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True,
                   env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])})
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()} == {
        "a.safetensors": "0o640", "b.json": "0o640"}


def test_a_new_folder_is_made_durable_with_those_above_it(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(files, "fsync_folder", synced.append)
    files.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir() and synced == [tmp_path, tmp_path / "a"]
    files.make_folder(tmp_path / "a" / "b")
    assert len(synced) == 2
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        files.make_folder(tmp_path / "file")


def test_a_disk_that_is_full_is_named_and_the_old_file_stays(tmp_path):
    """The kernel enforces a limit on a child's files; as with a full disk, its error names none."""
    files.write_json(tmp_path / "a.json", 1)
    code = ("import resource; from dflash_lib.files import write_json\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
            "try: write_json('a.json', 'x' * 9000)\n"
            "except OSError as error: print(error)")
    child = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True,
                           env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])})
    assert child.stdout == "[Errno 27] File too large: 'a.json'\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"] and files.read_json(tmp_path / "a.json") == 1
