"""SIGTERM in a training process: noted, so that it saves and ends by itself, and watched, so that it ends in any case.

A process that waits in a collective operation for one that was killed never hears of the signal: Python's handlers run
between its own instructions, and NCCL's calls come back after hours. So a thread looks whether the main thread still
executes anything.
"""

import ctypes
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType

PATIENCE_S = 30.0  # in one call that does not come back, before the process is taken for stuck
TICK_S = 0.5
PENDING = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)  # what Py_AddPendingCall takes
_calls = []  # never let go: one that was freed while it is pending would be called all the same


class Termination:
    """Context manager for the main thread. SIGTERM no longer ends the process; calling this says whether one came.

    From the signal on, a main thread that executes no Python instruction for `patience` seconds while `saving()` is
    false ends the process with exit code 1, after the call that it is stuck in was said on stderr. saving: whether a
    checkpoint is being written, which may be one call of minutes; it is asked from the watching thread.
    """

    def __init__(self, patience: float = PATIENCE_S):
        self.patience = patience
        self.saving: Callable[[], bool] = lambda: False
        self._came = False
        self._beats = 0

    def __call__(self) -> bool:
        return self._came

    def __enter__(self) -> "Termination":
        self._main = threading.get_ident()
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._handler_before = signal.signal(signal.SIGTERM, self._note)
        self._fd_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)  # written to at once, in C
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="termination", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None,
                 _traceback: TracebackType | None) -> None:
        self._done.set()
        signal.set_wakeup_fd(self._fd_before)
        signal.signal(signal.SIGTERM, self._handler_before)
        os.close(self._write)
        self._thread.join()
        os.close(self._read)

    def _note(self, *_) -> None:
        self._came = True

    def _watch(self) -> None:
        while True:
            signals = os.read(self._read, 64)
            if not signals:
                return
            if signal.SIGTERM in signals:
                break
        beat = PENDING(self._beat)
        _calls.append(beat)
        still, beats = 0.0, -1
        while not self._done.wait(TICK_S):
            if self._beats != beats or self.saving():
                still, beats = 0.0, self._beats
            else:
                still += TICK_S
            if still >= self.patience:
                self._leave()
            ctypes.pythonapi.Py_AddPendingCall(beat, None)  # the main thread makes it between two instructions

    def _beat(self, _argument: None) -> int:
        self._beats += 1
        return 0

    def _leave(self) -> None:
        stack = "".join(traceback.format_stack(sys._current_frames()[self._main])[-3:])
        message = (f"SIGTERM: this process could not save and end, for {self.patience:g} s it has been stuck in the "
                   "call below (did another process of this training end?). It ends now; the newest checkpoint is "
                   f"whole, and training goes on from there.\n{stack}")
        os.write(sys.stderr.fileno(), message.encode())
        os._exit(1)
