"""Spreads pieces of work over the calling thread and a few others."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")


class SideThreads:
    """`num` threads, one of them the caller's; the others are started when there is work for them, and end soon after
    this object is let go. May be used by several threads. Raises ValueError for less than one."""

    def __init__(self, num: int):
        if num < 1:
            raise ValueError(f"threads: {num}; there is at least the calling one")
        self.num = num
        self._pool = ThreadPoolExecutor(num - 1, thread_name_prefix="chunk reader") if num > 1 else None

    def each(self, work: Callable[[Sequence[T]], None], items: Sequence[T]) -> None:
        """Calls `work` on runs of neighbouring items, as many runs as there are threads; returns, or raises what the
        first run that failed raised, when none is at work any more."""
        num = min(self.num, len(items))
        if num < 2:
            work(items)
            return
        cuts = [len(items) * i // num for i in range(num + 1)]
        runs = [items[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
        others = [self._pool.submit(work, run) for run in runs[1:]]
        try:
            work(runs[0])
        finally:
            wait(others)  # they may use what the caller lets go of
        while others:  # a name for the one that failed would tie its error and this frame into a ring
            others.pop(0).result()
