"""The extraction's worker module with planted faults, which DFLASH_TEST_FAULT names as JSON: {"kind": ..., ...}.

oom: more than `most` padded tokens do not fit; nan: the states of rows with the token ids `rows` are NaN; lost: the
device of the ranks `ranks` fails in the second batch of their second shard; load: it fails while they load; fail: the
ranks `ranks` raise in their second shard; none. With `seconds`, every batch of all other ranks takes so much longer.
"""

import json
import os
import sys
import time

import torch

from dflash_lib.hidden_states import extraction_worker
from dflash_lib.launch import run_worker
from dflash_lib.target.loading import Target


def plant(target: Target, fault: dict) -> None:
    """Puts the fault into a loaded target by hooks; `fault["shards"]` counts the shards begun, `fault["passes"]` the
    forward passes of this shard."""

    def before(_module, args) -> None:
        rows, tokens = args[0].shape
        fault["passes"] = fault.get("passes", 0) + 1
        chosen = int(os.environ.get("RANK", "0")) in fault.get("ranks", [])
        here = chosen and fault.get("shards", 0) == 2
        if not chosen:
            time.sleep(fault.get("seconds", 0))  # so that the chosen ranks get to their second shard
        if fault["kind"] == "oom" and rows * tokens > fault["most"]:
            raise torch.OutOfMemoryError(f"CUDA out of memory (planted): {rows} x {tokens}")
        if fault["kind"] == "lost" and here and fault["passes"] == 2:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure (planted)")
        if fault["kind"] == "fail" and here:
            raise LookupError("a fault of the worker (planted)")

    def after(_module, args, output) -> torch.Tensor:
        for i, row in enumerate(args[0].tolist()):
            if any(row[:len(ids)] == ids for ids in fault.get("rows", [])):
                output[i] = float("nan")
        return output

    target.embedding.register_forward_pre_hook(before)
    target.embedding.register_forward_hook(after)


def main(path: str) -> None:
    """The real worker on a faulty target."""
    fault = json.loads(os.environ["DFLASH_TEST_FAULT"])
    load, run_shard = extraction_worker.load_target, extraction_worker._run_shard

    def load_faulty(*args, **options) -> Target:
        if fault["kind"] == "load" and int(os.environ["RANK"]) in fault["ranks"]:
            raise torch.AcceleratorError("CUDA error: device is lost (planted)")
        target = load(*args, **options)
        plant(target, fault)
        return target

    def count_shards(*args) -> None:
        fault["shards"], fault["passes"] = fault.get("shards", 0) + 1, 0
        run_shard(*args)

    extraction_worker.load_target, extraction_worker._run_shard = load_faulty, count_shards
    extraction_worker.main(path)


if __name__ == "__main__":
    run_worker(lambda: main(sys.argv[1]))
