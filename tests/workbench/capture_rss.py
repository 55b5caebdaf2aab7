"""Run by a test in a process of its own: the resident memory that loading and capturing a batch add, at most.

usage: python -m tests.workbench.capture_rss MODEL ROWS TOKENS LAYER_ID...   prints bytes.
"""

import sys
from pathlib import Path

import torch

from dflash_lib.target.capture import capture_batch
from dflash_lib.target.loading import load_target


def resident(name: str) -> int:
    """VmRSS (now) or VmHWM (the most so far) of this process in bytes."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def main(model: str, num_rows: str, num_tokens: str, *layer_ids: str) -> None:
    torch.set_num_threads(1)
    ids = [int(k) for k in layer_ids]
    target = load_target(model, audit="quick")
    capture_batch(target, [[5, 6, 7]], ids)  # libraries, code, thread pools
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from what is resident now
    capture_batch(target, [[5] * int(num_tokens)] * int(num_rows), ids, dtype=torch.bfloat16)
    print(resident("VmHWM") - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
