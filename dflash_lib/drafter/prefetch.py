"""Makes what a loop needs next while the loop still computes: one background thread, a few items ahead."""

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Prefetched(Generic[T]):
    """Context manager whose `next()` gives make(first), make(first + 1), ..., make(last), both ends included.

    A single thread calls `make`, in this order, and is at most `depth` items ahead of the newest one that `next()`
    gave: with that one, depth + 1 items are in memory. `make` must not use what the loop uses meanwhile unless that may
    be used by two threads (a HiddenStateStore may), and no global random generator, or results would depend on timing.

    What `make` raises is raised by the `next()` that would have given that item, with its own traceback; items before
    it are given first, and nothing is made after it. PyTorch's operators use one core in the thread, for a second team
    of OpenMP threads would fight the loop's for the same cores.

    Leaving the block, by whatever way, lets an item that is being made be finished, makes no other, drops what is
    ready, and returns when the thread has ended. A block that is never left does not keep Python from ending: the
    thread is then stopped before the interpreter is taken down.

    Raises ValueError for a depth below 1.
    """

    def __init__(self, make: Callable[[int], T], first: int, last: int, depth: int = 2):
        if depth < 1:
            raise ValueError(f"depth: {depth}; at least one item has to be made ahead")
        self.make, self.first, self.last, self.depth = make, first, last, depth
        self.wait_s = 0.0  # seconds that the newest `next()` waited
        self._given = 0
        self._ready: deque[T] = deque()
        self._error: BaseException | None = None
        self._stopped = True
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Prefetched[T]":
        if self._thread is not None:
            raise ValueError("this Prefetched was entered before; make another one")
        self._stopped = False
        # a daemon, and stopped by atexit: a thread of the other kind, waiting for room in a block that nobody leaves,
        # would keep the interpreter from ever ending
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()
        atexit.register(self._stop)
        return self

    def __exit__(self, *_) -> None:
        atexit.unregister(self._stop)
        self._stop()
        self._error = None  # its traceback holds what was being made

    def next(self) -> T:
        """The next item; blocks until it is made. Raises what making it raised, and ValueError when the last item was
        given already or the block is not entered."""
        number = self.first + self._given
        if self._stopped:
            raise ValueError(f"item {number}: asked for outside the with block")
        if number > self.last:
            raise ValueError(f"item {number}: the last one is {self.last}")
        started = time.perf_counter()
        with self._changed:
            waited = not self._ready and self._error is None
            while not self._ready and self._error is None:
                self._changed.wait()
            self.wait_s = time.perf_counter() - started if waited else 0.0
            if not self._ready:
                raise self._error
            self._given += 1
            self._changed.notify_all()
            return self._ready.popleft()

    def _stop(self) -> None:
        """Ends the thread and waits for its end."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()
        self._ready.clear()

    def _run(self) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(1)  # of this thread and of ones begun meanwhile; the loop's keeps its own
        try:
            self._make_all()
        finally:
            torch.set_num_threads(before)

    def _make_all(self) -> None:
        for number in range(self.first, self.last + 1):
            with self._changed:
                while not self._stopped and number - self.first - self._given >= self.depth:
                    self._changed.wait()
                if self._stopped:
                    return
            try:
                item = self.make(number)
            except BaseException as error:  # noqa: BLE001  it is the loop's to deal with, whatever it is
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._ready.append(item)
                self._changed.notify_all()
            del item  # or it would stay in memory, though the loop is done with it, while the next one is made
