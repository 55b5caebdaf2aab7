"""Which worker does which shard: claimed one by one through the key-value store of torchrun's agent.

A counter in that store gives out the positions of a list, so nothing is shared out beforehand and a slow worker delays
its own shard only. What a worker with a lost device had claimed is given back and taken by another. The store dies with
the job: what is finished, only the shards on the disk say.

Any `torch.distributed.Store` will do: the agent's, or a `HashStore` for one process.
"""

import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

POLL_S = 0.1
WAIT = timedelta(hours=24)  # for what node 0 publishes; a job that ends meanwhile ends its waiting workers, too
BEAT_S = 5.0
SILENCE_S = 120.0  # a worker of another machine that was not heard for so long is dead


class WorkerFailed(RuntimeError):
    """Another worker of the job failed; the message is what it said."""


class Claims:
    """One worker's hand on the job's shards: rank and world as torchrun has them.

    `publish` (one worker) before anyone's `receive`. `held` are the shards that this worker claimed and has not
    reported as done.
    """

    def __init__(self, store: dist.Store, rank: int = 0, world: int = 1, spans_nodes: bool = False):
        self.store = dist.PrefixStore("dflash", store)
        self.rank, self.world, self.spans_nodes = rank, world, spans_nodes
        self.todo: list[int] = []
        self.held: list[int] = []
        self._queue_empty = False
        self._beats: dict[int, tuple[bytes, float]] = {}

    @classmethod
    def connect(cls) -> "Claims":
        """Of a worker that torchrun started, on the agent's own store. No process group is formed: a group would end
        with its first lost member."""
        store, rank, world = next(dist.rendezvous("env://", timeout=WAIT))
        return cls(store, rank, world, spans_nodes=int(os.environ["LOCAL_WORLD_SIZE"]) != world)

    @classmethod
    def alone(cls, todo: list[int]) -> "Claims":
        """Of one worker in one process."""
        claims = cls(dist.HashStore())
        claims.publish(todo)
        claims.receive()
        return claims

    def publish(self, todo: list[int], num_quarantined: int = 0, job: dict[str, Any] | None = None) -> None:
        """Tells all workers the job's shards in the order in which they are claimed, and the job; num_quarantined:
        samples that finished shards left out."""
        self.store.add("quarantined", num_quarantined)
        self.store.set("job", json.dumps({"todo": todo, "job": job}))

    def receive(self) -> dict[str, Any] | None:
        """Waits for what was published: takes the shards, returns the job."""
        published = json.loads(self.store.get("job"))
        self.todo = published["todo"]
        return published["job"]

    def next(self, while_waiting: Callable[[], None] = lambda: None) -> int | None:
        """Claims a shard; None when all are done.

        Once all are claimed it waits, because another worker may still give some back; `while_waiting` is called
        meanwhile. Raises WorkerFailed when a worker of another machine failed or is not heard any more.
        """
        while True:
            self.check()
            shard = self._claim()
            if shard is not None:
                self.held.append(shard)
                return shard
            if self.store.add("done", 0) >= len(self.todo):
                return None
            while_waiting()
            self._look_for_dead()
            time.sleep(POLL_S)

    def wait_for_the_end(self, while_waiting: Callable[[], None]) -> None:
        """Waits until all shards are done. Raises WorkerFailed as `next` does."""
        while self.store.add("done", 0) < len(self.todo):
            self.check()
            while_waiting()
            self._look_for_dead()
            time.sleep(POLL_S)

    def _claim(self) -> int | None:
        if self.store.add("num_lost", 0):
            for rank in range(self.world):
                for i, shard in enumerate(self.lost_by(rank).get("shards", [])):
                    if self.store.add(f"retaken/{rank}/{i}", 1) == 1:
                        return shard
        if not self._queue_empty:
            position = self.store.add("claimed", 1) - 1
            if position < len(self.todo):
                return self.todo[position]
            self._queue_empty = True
        return None

    def done(self, shard: int) -> None:
        """Reports a shard of this worker as written. May be called from the writing thread."""
        self.held.remove(shard)
        self.store.add("done", 1)

    def give_back(self, device: str, error: BaseException) -> bool:
        """Gives back what this worker holds, because its device is lost; whether another worker is left to take it."""
        self.store.set(f"lost/{self.rank}", json.dumps(
            {"device": device, "shards": self.held, "error": f"{type(error).__name__}: {error}"}))
        self.held = []
        return self.store.add("num_lost", 1) < self.world

    def lost_by(self, rank: int) -> dict[str, Any]:
        """What a lost worker left: device, shards, error. {} of one that is not lost."""
        return json.loads(self.store.get(f"lost/{rank}")) if self.store.check([f"lost/{rank}"]) else {}

    def all_lost(self) -> list[dict[str, Any]]:
        """`lost_by` of every lost worker."""
        return [lost for rank in range(self.world) if (lost := self.lost_by(rank))]

    def count_quarantined(self, shown: list[str], num: int) -> int:
        """Adds `num` samples to those that the job left out and returns how many there are; shown: some in words."""
        mine = self._get(f"quarantined/{self.rank}", [])
        self.store.set(f"quarantined/{self.rank}", json.dumps([*mine, *shown][:10]))
        return self.store.add("quarantined", num)

    def quarantined(self) -> list[str]:
        """What workers noted of the samples that they left out."""
        return [text for rank in range(self.world) for text in self._get(f"quarantined/{rank}", [])]

    def _get(self, key: str, default: Any) -> Any:
        return json.loads(self.store.get(key)) if self.store.check([key]) else default

    @contextmanager
    def failure_told(self) -> Iterator[None]:
        """An exception that leaves the block is told to the workers of other machines, whose agents would not know."""
        try:
            yield
        except Exception as error:
            if self.spans_nodes and not isinstance(error, WorkerFailed):
                text = "".join(traceback.format_exception(error))
                self.store.set("failed", json.dumps(f"rank {self.rank} of {self.world} failed:\n{text}"))
            raise

    def check(self) -> None:
        """Raises WorkerFailed when a worker of another machine has said that it failed."""
        if self.spans_nodes and self.store.check(["failed"]):
            raise WorkerFailed(json.loads(self.store.get("failed")))

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """While it lasts, other machines' workers see that this one lives. Nothing to do on one machine."""
        ended = threading.Event()

        def beat() -> None:
            with suppress(dist.DistError):  # the job has ended; the worker's next claim says so
                while not ended.wait(BEAT_S):
                    self.store.add(f"beat/{self.rank}", 1)

        thread = threading.Thread(target=beat, daemon=True, name="heartbeat")
        if self.spans_nodes:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            if self.spans_nodes:
                thread.join()

    def _look_for_dead(self) -> None:
        """Raises WorkerFailed when a worker was not heard for SILENCE_S: its machine is gone, and torchrun does not
        tell."""
        if not self.spans_nodes:
            return
        now = time.monotonic()
        for rank in range(self.world):
            beat = str(self.store.add(f"beat/{rank}", 0)).encode()
            before, since = self._beats.get(rank, (b"", now))
            if beat != before:
                self._beats[rank] = (beat, now)
            elif now - since > SILENCE_S and not self.lost_by(rank):
                raise WorkerFailed(f"rank {rank} of {self.world}, on another machine, was not heard for "
                                   f"{SILENCE_S:.0f} s. Look after it, then start again: finished shards are kept.")

    def tell_progress(self, fields: dict[str, Any]) -> None:
        """Leaves a report for the machine that shows the progress of all."""
        self.store.set(f"progress/{self.rank}", json.dumps(fields))

    def told_progress(self) -> list[dict[str, Any]]:
        """The newest report of each worker of another machine."""
        return [fields for rank in range(self.world) if (fields := self._get(f"progress/{rank}", None)) is not None]
