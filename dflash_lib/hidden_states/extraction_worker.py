"""The extraction job: what torchrun starts, in one process a device.

A rank loads the target, takes its part of the missing shards and writes them one by one. A kill at any moment loses at
most the shard that was being written.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from dflash_lib.conversations.prepare import PreparedRows
from dflash_lib.hidden_states.encode import encode_sample
from dflash_lib.hidden_states.plan import ExtractionPlan
from dflash_lib.hidden_states.schema import StoreError
from dflash_lib.hidden_states.shards import ShardWriter
from dflash_lib.hidden_states.store import missing_shards
from dflash_lib.launch import report_progress, run_worker
from dflash_lib.target.capture import capture_batch
from dflash_lib.target.loading import Target, load_target


def extract_shard(target: Target, prepared: PreparedRows, plan: ExtractionPlan, store: Path | str, shard: int,
                  on_tokens: Callable[[int], None] | None = None) -> None:
    """Runs one shard's batches through the target and writes the shard. `on_tokens` gets each batch's real tokens."""
    masks = [prepared.row(index)[1] for index in plan.samples_of(shard)]
    with ShardWriter(store, plan, shard, masks) as writer:
        for batch in plan.shards[shard]:
            rows = [prepared.row(index) for index in batch]
            samples = capture_batch(target, [ids for ids, _ in rows], plan.target_layer_ids, plan.last_state != "none")
            for index, (ids, mask), sample in zip(batch, rows, samples, strict=True):
                writer.add(index, ids, mask, encode_sample(target, plan, mask, sample).cpu())
            if on_tokens is not None:
                on_tokens(sum(len(ids) for ids, _ in rows))


def share_out(shards: list[int], shard_tokens: list[int], num_ranks: int) -> list[list[int]]:
    """Shares shards out so that ranks have about as many tokens each: the largest first, to whoever has least."""
    parts: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for shard in sorted(shards, key=lambda i: (-shard_tokens[i], i)):
        rank = loads.index(min(loads))
        parts[rank].append(shard)
        loads[rank] += shard_tokens[shard]
    return parts


def _todo_of_all_ranks(store: Path, plan: ExtractionPlan) -> list[int]:
    """The missing shards as rank 0 sees them, so that all ranks share out one and the same list."""
    if int(os.environ["WORLD_SIZE"]) == 1:
        return missing_shards(store, plan)[0]
    dist.init_process_group("gloo")
    box = [missing_shards(store, plan)[0] if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    dist.destroy_process_group()
    return box[0]


def main() -> None:
    """One rank: its share of the missing shards."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    for name in ("store", "model", "prepared", "dtype", "device"):
        parser.add_argument(f"--{name}", required=True)
    args = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = Path(args.store)
    plan, prepared = ExtractionPlan.load(store), PreparedRows.load(args.prepared)
    if prepared.fingerprint != plan.data["fingerprint"]:
        raise StoreError(f"{args.prepared}: not the rows that {store} was planned for")
    torch.set_num_threads(plan.threads)
    todo = share_out(_todo_of_all_ranks(store, plan), plan.shard_tokens, world)[rank]
    device = f"cuda:{os.environ['LOCAL_RANK']}" if args.device == "cuda" else args.device
    target = load_target(args.model, args.dtype, device, audit="quick")
    began, tokens = time.monotonic(), 0

    def report(num: int, shard: int) -> None:
        nonlocal tokens
        tokens += num
        report_progress(rank=rank, pid=os.getpid(), shard=shard, tokens=tokens, seconds=time.monotonic() - began)

    report(0, -1)
    for shard in todo:
        extract_shard(target, prepared, plan, store, shard, lambda num, shard=shard: report(num, shard))
        report(0, shard)


if __name__ == "__main__":
    run_worker(main)
