import json
import os
import subprocess
import sys

import pytest

from dflash_lib.workbench.locks import LOCK_NAME, RunLocked, lock_holder, run_lock


def write_lock(folder, **changes):
    with run_lock(folder):
        holder = json.loads((folder / LOCK_NAME).read_text())
    (folder / LOCK_NAME).write_text(json.dumps({**holder, **changes}))


def test_a_live_holder_keeps_others_out(tmp_path):
    with run_lock(tmp_path):
        assert lock_holder(tmp_path) == os.getpid()
        with pytest.raises(RunLocked, match=f"process {os.getpid()} on .* is working on this run"), run_lock(tmp_path):
            pass
        assert lock_holder(tmp_path) == os.getpid()
    assert lock_holder(tmp_path) is None and list(tmp_path.iterdir()) == []


def test_a_dead_holders_lock_is_taken_over(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    write_lock(tmp_path, pid=dead.pid)
    assert lock_holder(tmp_path) is None
    with run_lock(tmp_path):
        assert lock_holder(tmp_path) == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_a_pid_that_another_process_got_since_is_no_holder(tmp_path):
    write_lock(tmp_path, started=1000.0)  # this very process, but the holder started decades ago
    assert lock_holder(tmp_path) is None
    with run_lock(tmp_path):
        pass


def test_a_holder_on_another_host_is_believed(tmp_path):
    write_lock(tmp_path, host="elsewhere", pid=1)
    with pytest.raises(RunLocked, match="on elsewhere"), run_lock(tmp_path):
        pass


@pytest.mark.parametrize("content", [b"", b'{"pid": 1, "sta', b"\xff\x00", b"{}", b"[]"])
def test_a_lock_that_cannot_be_read_is_taken_over(tmp_path, content):
    """What a power cut leaves."""
    (tmp_path / LOCK_NAME).write_bytes(content)
    assert lock_holder(tmp_path) is None
    with run_lock(tmp_path):
        assert lock_holder(tmp_path) == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_is_on_the_disk_before_it_is_one(tmp_path, monkeypatch):
    seen, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (real(fd), seen.append(
        (os.fstat(fd).st_ino, os.fstat(fd).st_size, (tmp_path / LOCK_NAME).exists()))))
    with run_lock(tmp_path):
        stat = (tmp_path / LOCK_NAME).stat()
    assert (stat.st_ino, stat.st_size, False) in seen and stat.st_size > 0
