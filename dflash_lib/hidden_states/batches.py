"""Runs batches of a plan through the target: splits those that do not fit into memory, brings the states to the host.

On CUDA the encoded states are copied into pinned memory on a stream of their own while the next batch is computed; the
thread that writes them waits for the copy.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_lib.conversations.prepare import PreparedRows
from dflash_lib.hidden_states.encode import EncodedSample, encode_sample
from dflash_lib.hidden_states.plan import ExtractionPlan
from dflash_lib.hidden_states.shards import ShardWriter
from dflash_lib.target.capture import capture_batch
from dflash_lib.target.loading import Target
from dflash_lib.target.memory import is_out_of_memory


@dataclass(frozen=True)
class _OnHost:
    """A part of a batch on its way to the host: row, token ids, loss mask and encoded states of each sample (or the
    reason why it has none), and the event after which the copies are there (None = they are)."""

    samples: list[tuple[int, np.ndarray, np.ndarray, EncodedSample | str]]
    copied: torch.cuda.Event | None

    def write(self, writer: ShardWriter) -> None:
        """Adds the samples to the shard, once they are there."""
        if self.copied is not None:
            self.copied.synchronize()
        for index, ids, mask, encoded in self.samples:
            if isinstance(encoded, str):
                writer.leave_out(index, encoded)
            else:
                writer.add(index, ids, mask, encoded)


class BatchRunner:
    """Captures and encodes batches of one plan on one target.

    A batch that does not fit into memory is halved until its parts do; from then on batches of as many padded tokens
    are halved at once. A row that does not fit alone is left out, with the reason. num_splits: batches split so far.
    """

    def __init__(self, target: Target, prepared: PreparedRows, plan: ExtractionPlan):
        self.target, self.prepared, self.plan = target, prepared, plan
        self.too_large: int | None = None  # the fewest padded tokens that did not fit
        self.num_splits = 0
        self.stream = torch.cuda.Stream(target.device) if target.device.type == "cuda" else None
        self._copied: deque[torch.cuda.Event] = deque()  # of the newest batches

    def run(self, batch: Sequence[int], write: Callable[[Callable[[ShardWriter], None]], None]) -> None:
        """Captures the samples `batch` and passes what has to be done with the shard's writer, in order, to `write`."""
        parts = self._run(list(batch), write)
        if len(parts) > 1:
            self.num_splits += 1
            whole = list(batch)
            write(lambda writer: writer.note_split(whole, parts))

    def _run(self, batch: list[int], write: Callable[[Callable[[ShardWriter], None]], None]) -> list[list[int]]:
        """Returns the parts in which the batch was computed."""
        longest = max(int(self.prepared.lengths[index]) for index in batch)
        padded = longest * len(batch)
        done = None
        if len(batch) == 1 or self.too_large is None or padded < self.too_large:
            done = self._try(batch)
        if done is not None:
            write(done.write)
            return [batch]
        self.too_large = padded if self.too_large is None else min(padded, self.too_large)
        if len(batch) == 1:
            ids, mask = self.prepared.row(batch[0])
            reason = f"out of memory: {len(ids)} tokens alone do not fit ({self.target.device.type})"
            write(_OnHost([(batch[0], ids, mask, reason)], None).write)
            return [batch]
        half = (len(batch) + 1) // 2
        return [*self._run(batch[:half], write), *self._run(batch[half:], write)]

    def _try(self, batch: list[int]) -> _OnHost | None:
        """The batch's encoded states; None when memory did not suffice. Then all of it is free again on return: the
        error, whose traceback holds the tensors, is gone."""
        try:
            return self._capture(batch)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        if self.stream is not None:
            self._copied.clear()
            self.stream.synchronize()  # what is being copied goes, too
            torch.cuda.empty_cache()
        return None

    def _capture(self, batch: list[int]) -> _OnHost:
        rows = [self.prepared.row(index) for index in batch]
        # The states of two batches may be on the device: those being copied, and those being computed. Kernels run
        # behind this thread, so it waits here, for the batch before the last, while the device has the last to do.
        while len(self._copied) > 1:
            self._copied.popleft().synchronize()
        samples = capture_batch(self.target, [ids for ids, _ in rows], self.plan.target_layer_ids,
                                self.plan.last_state != "none")
        encoded = [encode_sample(self.target, self.plan, mask, sample)
                   for (_, mask), sample in zip(rows, samples, strict=True)]
        on_host, event = self._to_host(encoded)
        if event is not None:
            self._copied.append(event)
        return _OnHost([(index, ids, mask, states) for index, (ids, mask), states
                        in zip(batch, rows, on_host, strict=True)], event)

    def _to_host(self, encoded: list[EncodedSample]) -> tuple[list[EncodedSample], torch.cuda.Event | None]:
        """The samples on the CPU, and the event after which they hold their values."""
        if self.stream is None:
            return encoded, None
        self.stream.wait_stream(torch.cuda.current_stream(self.target.device))
        with torch.cuda.stream(self.stream):
            on_host = [EncodedSample({name: self._copy(values) for name, values in sample.tensors.items()})
                       for sample in encoded]
            event = torch.cuda.Event(blocking=True)  # its waiter sleeps, and leaves the core alone
            event.record(self.stream)
        return on_host, event

    def _copy(self, values: Tensor) -> Tensor:
        if values.device.type == "cpu":
            return values
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)  # PyTorch keeps pinned blocks for reuse
        host.copy_(values, non_blocking=True)
        values.record_stream(self.stream)  # its memory is not given to another tensor before the copy has ended
        return host
