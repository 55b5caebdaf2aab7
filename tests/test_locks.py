"""Locks: who is kept out, whose lock is taken over, and what a holder that lost its lock learns."""

import errno
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time

import pytest

from dflash_lib import locks
from dflash_lib.locks import LOCK_NAME, Locked, folder_lock, lock_holder

WAIT_S = 120  # for something that takes a moment: only a hang reaches it


def write_lock(folder, **changes):
    """The lock of this process, with `changes`, left behind."""
    with folder_lock(folder, "extraction"):
        holder = json.loads((folder / LOCK_NAME).read_text())
    (folder / LOCK_NAME).write_text(json.dumps({**holder, **changes}))


def wait_for(condition):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_live_holder_keeps_others_out(tmp_path):
    with folder_lock(tmp_path, "extraction"):
        holder = lock_holder(tmp_path)
        assert (holder["pid"], holder["what"]) == (os.getpid(), "extraction")
        with pytest.raises(Locked, match=f"process {os.getpid()} on {holder['host']} .* is working on this extraction"
                           f".*remove {tmp_path / LOCK_NAME}"), folder_lock(tmp_path, "run"):
            pass
        assert lock_holder(tmp_path) == holder
        with folder_lock(tmp_path, "training", name=".other.lock"):
            pass
    assert lock_holder(tmp_path) is None and list(tmp_path.iterdir()) == []


def test_an_exception_releases_the_lock_and_is_the_one_that_is_raised(tmp_path):
    with pytest.raises(KeyboardInterrupt), folder_lock(tmp_path, "run"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="full"), folder_lock(tmp_path, "run"):
        (tmp_path / LOCK_NAME).unlink()
        raise OSError("the disk is full")


def test_a_dead_holders_lock_is_taken_over(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    write_lock(tmp_path, pid=dead.pid)
    assert lock_holder(tmp_path) is None
    with folder_lock(tmp_path, "run"):
        assert lock_holder(tmp_path)["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_a_zombie_is_dead(tmp_path):
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    wait_for(lambda: locks.psutil.Process(zombie.pid).status() == locks.psutil.STATUS_ZOMBIE)
    write_lock(tmp_path, pid=zombie.pid, started=locks.psutil.Process(zombie.pid).create_time())
    assert lock_holder(tmp_path) is None
    zombie.wait()


def test_a_pid_that_another_process_got_since_is_no_holder(tmp_path):
    write_lock(tmp_path, started=1000.0)  # this very process, but the holder started decades ago
    assert lock_holder(tmp_path) is None
    with folder_lock(tmp_path, "run"):
        pass


def test_a_holder_before_the_machine_was_started_anew_is_dead(tmp_path):
    write_lock(tmp_path, boot="another")
    assert lock_holder(tmp_path) is None


@pytest.mark.parametrize("elsewhere", [{"host": "elsewhere"}, {"pids": "pid:[1]"}],
                         ids=["another host", "a container with its host's name"])
def test_a_holder_elsewhere_is_refused_when_its_heartbeat_changes_and_taken_over_when_not(tmp_path, elsewhere, capsys):
    path = tmp_path / LOCK_NAME
    write_lock(tmp_path, **elsewhere, pid=1, heartbeat_s=0.5)
    assert lock_holder(tmp_path)["pid"] == 1
    ended = threading.Event()

    def beat():
        while not ended.wait(0.05):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(Locked, match="process 1 on"), folder_lock(tmp_path, "run"):
            pass
    finally:
        ended.set()
        thread.join()
    said = capsys.readouterr().err
    assert "Watching its heartbeat for up to 2 s" in said and "remove the file" in said and str(path) in said
    os.utime(path, (4e9, 4e9))  # a clock that is a century ahead
    began = time.monotonic()
    with folder_lock(tmp_path, "run"):
        assert time.monotonic() - began >= locks.STALE_INTERVALS * 0.5
        assert lock_holder(tmp_path)["pid"] == os.getpid()
    assert "no heartbeat in 2 s" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_a_lock_elsewhere_that_is_given_back_while_it_is_watched_is_taken(tmp_path):
    write_lock(tmp_path, host="elsewhere", heartbeat_s=100.0)
    threading.Timer(0.3, (tmp_path / LOCK_NAME).unlink).start()
    with folder_lock(tmp_path, "run"):
        assert lock_holder(tmp_path)["pid"] == os.getpid()


@pytest.mark.parametrize("content", [b"", b'{"pid": 1, "sta', b"\xff\x00", b"{}", b"[]", b'{"pid": "1"}'])
def test_a_lock_that_cannot_be_read_is_taken_over(tmp_path, content):
    """What a power cut leaves."""
    (tmp_path / LOCK_NAME).write_bytes(content)
    assert lock_holder(tmp_path) is None
    with folder_lock(tmp_path, "run"):
        assert lock_holder(tmp_path)["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_is_on_the_disk_before_it_is_one(tmp_path, monkeypatch):
    seen, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (real(fd), seen.append(
        (os.fstat(fd).st_ino, os.fstat(fd).st_size, (tmp_path / LOCK_NAME).exists()))))
    with folder_lock(tmp_path, "run"):
        stat = (tmp_path / LOCK_NAME).stat()
    assert (stat.st_ino, stat.st_size, False) in seen and stat.st_size > 0


def test_the_heartbeat_changes_and_the_content_does_not(tmp_path):
    path = tmp_path / LOCK_NAME
    with folder_lock(tmp_path, "run", heartbeat_s=0.02):
        content, first = path.read_text(), path.stat().st_mtime_ns
        wait_for(lambda: path.stat().st_mtime_ns != first)
        assert path.read_text() == content


@pytest.mark.parametrize("taken", [False, True])
def test_a_holder_whose_lock_is_gone_says_so_at_once_and_raises_at_the_end(tmp_path, capfd, taken):
    path, said = tmp_path / LOCK_NAME, ""
    with pytest.raises(Locked, match="is lost while it works"), folder_lock(tmp_path, "run", heartbeat_s=0.02):
        other = {**json.loads(path.read_text()), "host": "elsewhere", "token": "its own"}
        path.unlink()
        if taken:
            path.write_text(json.dumps(other))
        end = time.monotonic() + WAIT_S
        while "is lost" not in said:
            assert time.monotonic() < end
            said += capfd.readouterr().err
            time.sleep(0.01)
    assert ("on elsewhere" if taken else "it was removed") in said
    assert path.exists() is taken, "another's lock is left alone"


def hold_now_and_then(folder, inside, faults, seconds):
    """A process that takes the lock again and again, over locks of the dead, and looks whether it is alone."""
    end = time.monotonic() + seconds
    dead = json.dumps({"pid": 2 ** 22 + 1, "started": 1.0, "host": locks.socket.gethostname(), "what": "run"})
    while time.monotonic() < end:
        try:
            with folder_lock(folder, "run"):
                with inside.get_lock():
                    inside.value += 1
                    faults.value += inside.value != 1
                time.sleep(0.001)
                with inside.get_lock():
                    inside.value -= 1
        except Locked:
            continue
        try:
            with open(folder / LOCK_NAME, "x") as file:  # a holder that is killed leaves this
                file.write(dead)
        except FileExistsError:
            continue


def test_of_several_processes_that_set_a_dead_lock_aside_one_wins(tmp_path):
    context = multiprocessing.get_context("fork")
    inside, faults = context.Value("i", 0), context.Value("i", 0)
    processes = [context.Process(target=hold_now_and_then, args=(tmp_path, inside, faults, 1.5)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(WAIT_S)
        assert process.exitcode == 0
    assert faults.value == 0


def test_the_lock_of_a_process_that_was_killed_while_it_removed_a_dead_one_is_removed_too(tmp_path):
    write_lock(tmp_path, pid=2 ** 22 + 1)
    for name in (".lock.heir", ".lock.heir.heir"):
        (tmp_path / name).write_bytes((tmp_path / LOCK_NAME).read_bytes())
    with folder_lock(tmp_path, "run"):
        assert lock_holder(tmp_path)["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_another_placed_since_the_look_is_left_alone(tmp_path):
    """The dead lock that this process looked at is another's by the time that it comes to remove it."""
    write_lock(tmp_path)
    found = (tmp_path / LOCK_NAME).read_text()
    own = tmp_path / "own"
    own.write_text("{}")
    locks._remove_dead(tmp_path / LOCK_NAME, own, {}, {"pid": 1, "started": 1.0, "host": "dead"})
    assert (tmp_path / LOCK_NAME).read_text() == found and not (tmp_path / ".lock.heir").exists()


def test_it_works_where_the_file_system_has_no_hard_links(tmp_path, monkeypatch):
    def no_links(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    with folder_lock(tmp_path, "run"):
        with pytest.raises(Locked), folder_lock(tmp_path, "run"):
            pass
    (tmp_path / LOCK_NAME).write_bytes(b"")
    with folder_lock(tmp_path, "run"):
        assert lock_holder(tmp_path)["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_what_killed_processes_left_beside_the_lock_is_removed_and_a_live_ones_is_not(tmp_path):
    dead = tmp_path / f"{LOCK_NAME}.{locks.socket.gethostname()}.{2 ** 22 + 1}.abc"
    live = tmp_path / f"{LOCK_NAME}.{locks.socket.gethostname()}.{os.getpid()}.abc"
    dead.write_text("")
    live.write_text("")
    with folder_lock(tmp_path, "run"):
        pass
    assert list(tmp_path.iterdir()) == [live]


def test_a_forked_child_does_not_give_the_lock_back(tmp_path):
    with folder_lock(tmp_path, "run"):
        lock = folder_lock(tmp_path, "extraction", name="other")
        lock.__enter__()
        child = os.fork()
        if child == 0:
            try:
                lock.__exit__(None, None, None)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert (tmp_path / "other").exists()
        lock.__exit__(None, None, None)


def test_a_lock_that_could_not_be_removed_does_not_refuse_its_own_process(tmp_path):
    """As on a disk that had turned read-only, in a notebook's kernel that lives on and starts again."""
    with folder_lock(tmp_path, "run"):
        lock = (tmp_path / ".lock").read_bytes()
        with pytest.raises(Locked, match=f"process {os.getpid()} on "), folder_lock(tmp_path, "run"):
            pass
    (tmp_path / ".lock").write_bytes(lock)
    assert lock_holder(tmp_path) is None
    with folder_lock(tmp_path, "run"):
        assert lock_holder(tmp_path)["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []
