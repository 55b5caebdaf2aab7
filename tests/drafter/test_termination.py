"""SIGTERM in a training process: noted while it works, the end of it when it is stuck, unless it saves."""

import os
import signal
import subprocess
import sys
import textwrap
import time

from dflash_lib.drafter.termination import Termination
from dflash_lib.drafter.training import Trainer
from tests.drafter.running import OPTIONS

STUCK = """
    import ctypes, os, signal, sys, threading, time
    from dflash_lib.drafter.termination import Termination

    def sleep_in_c(seconds):  # no signal interrupts it, as with a collective operation: another thread takes them
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        ctypes.CDLL(None).sleep(seconds)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
    with Termination(patience=1.0) as stopping:
        stopping.saving = lambda: time.monotonic() < began + SAVING
        began = time.monotonic()
        print("ready", flush=True)
        WORK
        print("came" if stopping() else "never came", flush=True)
"""


def run(work: str, saving: float = 0.0) -> tuple[int, str, str, float]:
    """Exit code, stdout, stderr and seconds after SIGTERM of a process that does `work` when the signal comes."""
    script = textwrap.dedent(STUCK).replace("WORK", work).replace("SAVING", str(saving))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    began = time.monotonic()
    process.terminate()
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err, time.monotonic() - began


def test_one_that_works_on_ends_by_itself():
    code, out, err, _ = run("end = time.monotonic() + 4\n    while time.monotonic() < end: sum(range(1000))")
    assert (code, out, err) == (0, "came\n", "")


def test_one_that_is_stuck_ends_and_says_where():
    code, out, err, seconds = run("sleep_in_c(90)")
    assert (code, out) == (1, "") and seconds < 60
    assert "SIGTERM" in err and "sleep_in_c" in err and "the newest checkpoint is whole" in err


def test_one_that_saves_is_left_to_it():
    code, out, err, seconds = run("sleep_in_c(5)", saving=60.0)
    assert (code, out, err) == (0, "came\n", "") and seconds > 3


def test_afterwards_signals_do_what_they_did():
    before = signal.getsignal(signal.SIGTERM)
    with Termination() as stopping:
        assert not stopping()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopping()
    assert signal.getsignal(signal.SIGTERM) == before and signal.set_wakeup_fd(-1) == -1


def test_a_process_saves_as_long_as_the_writer_lives(tiny_store, tiny_llama, tmp_path, monkeypatch):
    trainer, seen = Trainer(tiny_store, tiny_llama, tmp_path, OPTIONS), []
    assert not trainer.is_saving()
    monkeypatch.setattr("dflash_lib.drafter.parallel.barrier", lambda: seen.append(trainer.is_saving()))
    trainer.save()
    assert seen == [True] and not trainer.is_saving()
    ended = subprocess.Popen(["true"])
    ended.wait()
    trainer._writer = ended.pid  # the first process was killed, and the others wait for it
    trainer.save()
    assert seen == [True, False]
