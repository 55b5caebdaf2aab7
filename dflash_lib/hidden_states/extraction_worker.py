"""The extraction job: what torchrun starts, in one process a device, with the path of the job file.

A worker loads the target and claims one missing shard after the other. While it computes, a thread writes what it has
computed. A kill at any moment loses at most the shards that were not yet in their place.
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dflash_lib.conversations.prepare import PreparedRows
from dflash_lib.hidden_states.batches import BatchRunner
from dflash_lib.hidden_states.claims import Claims
from dflash_lib.hidden_states.job import NUM_SHOWN, ExtractionJob, check_quarantined, describe_quarantined
from dflash_lib.hidden_states.plan import ExtractionPlan
from dflash_lib.hidden_states.schema import StoreError
from dflash_lib.hidden_states.shard_stream import ShardStream
from dflash_lib.hidden_states.shards import ShardWriter
from dflash_lib.launch import Nodes, report_progress, run_worker
from dflash_lib.target.loading import Target, load_target
from dflash_lib.target.memory import is_device_lost

GPUS = "DFLASH_GPUS"  # environment variable: this machine's CUDA device numbers, "0,2", one a worker
TELL_S = 1.0  # between two reports to another machine
LAST_WORD_S = 5.0  # how long the last reports of other machines are waited for
SWITCH_S = 0.0005  # how long a thread of Python keeps the others waiting: the writer's calls are short and many


def extract_shard(target: Target, prepared: PreparedRows, plan: ExtractionPlan, store: Path | str, shard: int,
                  on_tokens: Callable[[int], None] | None = None) -> None:
    """Runs one shard's batches through the target and writes the shard. `on_tokens` gets each batch's real tokens."""
    with ShardStream(store, plan, prepared) as stream:
        _run_shard(BatchRunner(target, prepared, plan), stream, shard, on_tokens or (lambda _num: None))


def _run_shard(runner: BatchRunner, stream: ShardStream, shard: int, on_tokens: Callable[[int], None]) -> None:
    for batch in runner.plan.shards[shard]:
        stream.check()
        runner.run(batch, lambda action: stream.write(shard, action))
        on_tokens(int(sum(runner.prepared.lengths[index] for index in batch)))
    stream.finish(shard)


class _Worker:
    """One worker's counts, and what it reports: rank, pid, device, shard, tokens and seconds since its first batch,
    tokens and bytes of its finished shards, batches split, state ("working", "waiting", "done" or "lost"), and why it
    is lost."""

    def __init__(self, claims: Claims, device: str, report: Callable[..., None]):
        self.claims, self.device, self.report = claims, device, report
        self.tokens = self.written_tokens = self.bytes_written = self.num_splits = 0
        self.shard, self.state, self.error = -1, "working", ""
        self.began: float | None = None
        self.said = 0.0

    def say(self, tokens: int = 0, **changes: Any) -> None:
        """Adds `tokens`, sets `changes`, reports."""
        self.tokens += tokens
        for name, value in changes.items():
            setattr(self, name, value)
        self.said = time.monotonic()
        seconds = self.said - self.began if self.began is not None else 0.0
        self.report(rank=self.claims.rank, pid=os.getpid(), device=self.device, shard=self.shard, tokens=self.tokens,
                    written_tokens=self.written_tokens, seconds=seconds, bytes_written=self.bytes_written,
                    num_splits=self.num_splits, state=self.state, error=self.error)

    def wait(self, stream: ShardStream) -> None:
        """What is done while no shard can be had."""
        stream.check()
        if self.state != "waiting" or time.monotonic() - self.said > TELL_S:
            self.say(state="waiting")


def work(job: ExtractionJob, target: Target, claims: Claims, report: Callable[..., None] = lambda **_fields: None,
         opened: tuple[ExtractionPlan, PreparedRows] | None = None) -> None:
    """One worker's whole loop with a loaded target, until every shard of the job is written; needs no torchrun.

    claims: from which it takes shards (`Claims.alone(job.todo)` for one worker in one process); report: gets keyword
    fields, see `_Worker`; opened: `job.open()`, where it was called already. An error that says that the device is lost
    leaves the shards in `claims.held`.
    """
    plan, prepared = opened or job.open()
    worker = _Worker(claims, str(target.device), report)
    runner = BatchRunner(target, prepared, plan)

    def before_publishing(writer: ShardWriter) -> None:
        if writer.quarantined and writer.sample_index:  # a shard with none that is usable is refused by its writer
            shown = describe_quarantined(writer.quarantined[:NUM_SHOWN], prepared.sample_ids)
            num = claims.count_quarantined(shown, len(writer.quarantined))
            check_quarantined(num, [*job.quarantined, *claims.quarantined()], plan.num_samples)

    def on_written(shard: int, num_bytes: int) -> None:
        worker.bytes_written += num_bytes
        worker.written_tokens += plan.shard_tokens[shard]
        claims.done(shard)

    try:
        with ShardStream(job.store, plan, prepared, on_written, before_publishing) as stream:
            worker.say()
            while (shard := claims.next(lambda: worker.wait(stream))) is not None:
                worker.began = time.monotonic() if worker.began is None else worker.began
                worker.say(shard=shard, state="working")
                _run_shard(runner, stream, shard, lambda num: worker.say(num, num_splits=runner.num_splits))
    except Exception as error:
        if is_device_lost(error):
            worker.say(worker.written_tokens - worker.tokens, state="lost", error=str(error))
        raise
    worker.say(state="done")


class _Reporter:
    """Sends a worker's reports to the launcher: on node 0 through its own output, and with them what the workers of
    other machines left in the job's store; on other machines into that store."""

    def __init__(self, claims: Claims, node: int, local: int, num_local: int):
        self.claims, self.node, self.leads = claims, node, node == 0 and local == 0
        self.num_elsewhere = claims.world - num_local
        self.told, self.last, self.state = -TELL_S, {}, ""

    def __call__(self, **fields: Any) -> None:
        if self.node > 0:
            fields["device"] = f"node {self.node} {fields['device']}"
        now = time.monotonic()
        often = now - self.told < TELL_S and fields["state"] == self.state
        if self.node == 0:
            report_progress(**fields)
        if self.claims.spans_nodes and not often:
            self.told, self.state = now, fields["state"]
            self.claims.check()
            if self.node > 0:
                self.claims.tell_progress(fields)
            elif self.leads:
                self.pass_on()

    def pass_on(self) -> None:
        """What other machines' workers have left since."""
        for fields in self.claims.told_progress():
            if self.last.get(fields["rank"]) != fields:
                self.last[fields["rank"]] = fields
                report_progress(**fields)


    def finish(self) -> None:
        """Passes on the last words of other machines' workers, which end at about the same time."""
        end = time.monotonic() + LAST_WORD_S
        while self.leads and time.monotonic() < end:
            self.pass_on()
            if sum(fields["state"] in ("done", "lost") for fields in self.last.values()) >= self.num_elsewhere:
                return
            time.sleep(0.05)


def worker_device(job: ExtractionJob, local: int) -> str:
    """The device of this machine's worker number `local`: of the GPUs that the launcher chose, else the job's."""
    gpus = os.environ.get(GPUS)
    return f"cuda:{gpus.split(',')[local]}" if gpus else job.device


def _leave_without_device(claims: Claims, device: str, reporter: _Reporter, error: Exception) -> None:
    """Ends this process with code 0, its shards given back. Raises StoreError when it was the last."""
    print(f"rank {claims.rank}: {device} is lost: {error}", file=sys.stderr, flush=True)
    if not claims.give_back(device, error):
        told = "".join(f"\n  {lost['device']}: {lost['error']}" for lost in claims.all_lost())
        raise StoreError(f"no worker is left: every device was lost.{told}\nLook after the devices (nvidia-smi, the "
                         "kernel's log); the same command goes on from the finished shards.") from error
    if claims.spans_nodes:  # the agent of a machine without workers would end, and may be the one that has the store
        claims.wait_for_the_end(reporter.pass_on if reporter.leads else lambda: None)
        reporter.finish()
    os._exit(0)  # no clean-up: it would touch the device, and abort


def main(path: str) -> None:
    """One worker: as many shards as it gets to."""
    local, node = int(os.environ["LOCAL_RANK"]), Nodes.from_environment().rank
    claims = Claims.connect()
    reporter = _Reporter(claims, node, local, int(os.environ["LOCAL_WORLD_SIZE"]))
    if reporter.leads:
        job = ExtractionJob.load(path)
        claims.publish(job.todo, job.num_quarantined, asdict(job))
    job = ExtractionJob(**claims.receive())
    if not job.todo:
        return  # only to let the other machines know
    device = worker_device(job, local)
    torch.set_num_threads(job.threads)
    sys.setswitchinterval(SWITCH_S)
    with claims.failure_told(), claims.heartbeat():
        opened = job.open()
        try:
            target = _load(job, device, claims, reporter)
            work(job, target, claims, reporter, opened)
            reporter.finish()
        except Exception as error:
            if not is_device_lost(error):
                raise
            _leave_without_device(claims, device, reporter, error)


def _load(job: ExtractionJob, device: str, claims: Claims, report: Callable[..., None]) -> Target:
    """The job's target on `device`; one that is lost already is reported."""
    try:
        if device.startswith("cuda"):
            torch.cuda.set_device(device)  # or pinned memory would take a context on the first device
        return load_target(job.model, job.dtype, device, audit="quick")
    except Exception as error:
        if is_device_lost(error):
            _Worker(claims, device, report).say(state="lost", error=str(error))
        raise


if __name__ == "__main__":
    run_worker(lambda: main(sys.argv[1]))
