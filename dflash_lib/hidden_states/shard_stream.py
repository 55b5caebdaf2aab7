"""Writes shards in a thread of its own, so that checksums, compression and the disk do not keep the target waiting.

One thread a worker. The queue is bounded: at most QUEUED batches wait in memory, beside the one being written. What
arrives is written in the order in which it came, so the bytes are those of a writer without a thread.
"""

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_lib.conversations.prepare import PreparedRows
from dflash_lib.hidden_states.plan import ExtractionPlan
from dflash_lib.hidden_states.shards import ShardWriter

QUEUED = 2
WAKE_S = 0.1  # how soon a waiting side sees that the other has failed


class _Dropped(Exception):
    """Ends a shard that nobody wants any more; never leaves this module."""


class ShardStream:
    """Context manager around the writing thread.

    `write(shard, action)` calls `action(writer)` on the shard's ShardWriter, `finish(shard)` publishes it: its file is
    in place, and `on_written(shard, bytes)` was called in the thread, once `drain` returns; `before_publishing(writer)`
    may refuse a shard. Every call, and `check`, raises what the thread raised, unchanged. Leaving the block after an
    exception drops what is queued and removes the unfinished file.
    """

    def __init__(self, store: Path | str, plan: ExtractionPlan, prepared: PreparedRows,
                 on_written: Callable[[int, int], None] = lambda _shard, _bytes: None,
                 before_publishing: Callable[[ShardWriter], None] = lambda _writer: None):
        self.store, self.plan, self.prepared = store, plan, prepared
        self.on_written, self.before_publishing = on_written, before_publishing
        self._queue: queue.Queue[tuple[int, Callable[[ShardWriter], Any] | None]] = queue.Queue(QUEUED)
        self._error: BaseException | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shard writer", daemon=True)

    def __enter__(self) -> "ShardStream":
        self._thread.start()
        return self

    def __exit__(self, kind, _error, _traceback) -> None:
        try:
            if kind is None:
                self.drain()
        finally:
            self._stopped.set()
            self._thread.join()

    def write(self, shard: int, action: Callable[[ShardWriter], Any]) -> None:
        """Queues work on a shard; waits while the queue is full."""
        self._put((shard, action))

    def finish(self, shard: int) -> None:
        """Queues the end of a shard."""
        self._put((shard, None))

    def drain(self) -> None:
        """Waits until all that was queued is done."""
        with self._queue.all_tasks_done:
            while self._queue.unfinished_tasks and self._error is None:
                self._queue.all_tasks_done.wait(WAKE_S)
        self.check()

    def check(self) -> None:
        """Raises what the thread raised, if it did."""
        if self._error is not None:
            raise self._error

    def _put(self, item: tuple[int, Callable[[ShardWriter], Any] | None]) -> None:
        while True:
            self.check()
            try:
                return self._queue.put(item, timeout=WAKE_S)
            except queue.Full:
                continue

    def _take(self) -> tuple[int, Callable[[ShardWriter], Any] | None]:
        """The next piece of work. Raises _Dropped when there will be none."""
        while not self._stopped.is_set():
            try:
                return self._queue.get(timeout=WAKE_S)
            except queue.Empty:
                continue
        raise _Dropped

    def _run(self) -> None:
        try:
            while True:
                shard, action = self._take()
                masks = [self.prepared.row(index)[1] for index in self.plan.samples_of(shard)]
                with ShardWriter(self.store, self.plan, shard, masks) as writer:
                    while action is not None:
                        action(writer)
                        action = None  # or it would keep its batch in memory while the next is awaited
                        self._queue.task_done()
                        _, action = self._take()
                    self.before_publishing(writer)
                self.on_written(shard, writer.path.stat().st_size)
                self._queue.task_done()
        except _Dropped:
            pass
        except BaseException as error:  # noqa: BLE001  it is the main thread's to deal with, whatever it is
            self._error = error
