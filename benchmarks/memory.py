"""Memory of one extraction worker over many shards, in a process of its own: it must not grow with their number.

The worker's own loop (`extraction_worker.work`) runs with a tiny random target; after a warm-up, memory that is its
alone (USS: other processes' pages do not count) is noted every few shards. A leak: bytes that a planted fault keeps of
every batch.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parent.parent
if str(REPOSITORY) not in sys.path:
    sys.path.insert(0, str(REPOSITORY))

from benchmarks.common import json_lines, make_rows, table  # noqa: E402

SAMPLES_PER_SHARD, TOKENS = 16, 96
EVERY = 3  # shards between two looks
PLANTED = 64 << 10
WARM_UP = 1 / 3  # of the shards: allocators settle
ALLOWANCE = 2 << 20  # bytes between the medians of the middle and of the last third, whatever the number of shards
SHARD_BYTES = SAMPLES_PER_SHARD * TOKENS * 4 * 64 * 2  # states of one shard, so what keeping one of each would add


def worker(num_shards: int, leaks: list[int]) -> None:
    """Runs the loop in this process, once for each leak, and prints its memory behind each tenth shard, in bytes."""
    import psutil
    import torch

    from dflash_lib.hidden_states import batches
    from dflash_lib.hidden_states.claims import Claims
    from dflash_lib.hidden_states.extraction_worker import work
    from dflash_lib.hidden_states.job import ExtractionJob
    from dflash_lib.hidden_states.plan import ExtractionOptions, make_plan
    from dflash_lib.target.loading import load_target
    from tests.tiny import make_tiny_target

    torch.set_num_threads(1)
    process, capture, kept = psutil.Process(), batches.capture_batch, []
    with tempfile.TemporaryDirectory() as folder:
        target = load_target(make_tiny_target(Path(folder) / "target"), audit="quick")
        lengths = np.random.default_rng(0).integers(TOKENS // 2, TOKENS + 1, num_shards * SAMPLES_PER_SHARD)
        prepared = make_rows(lengths, 384, target.identity["tokenizer"])
        plan = make_plan(target.identity, target.config, prepared, ExtractionOptions(
            target_layer_ids=[1, 3, 4], samples_per_shard=SAMPLES_PER_SHARD, token_budget=4 * TOKENS, threads=1))
        todo = list(range(num_shards))
        for number, leak in enumerate(leaks):
            def leaking(*arguments, leak=leak):
                if leak:
                    kept.append(np.ones(leak, np.uint8))
                return capture(*arguments)

            memory: list[int] = []
            seen: set[int] = set()

            def report(shard: int, memory=memory, seen=seen, **_fields) -> None:
                if shard not in seen and shard >= 0:
                    seen.add(shard)
                    if len(seen) % EVERY == 0:
                        memory.append(process.memory_full_info().uss)

            batches.capture_batch = leaking
            store = Path(folder) / f"store-{number}"
            store.mkdir()
            job = ExtractionJob(store=str(store), model="", prepared="", todo=todo)
            work(job, target, Claims.alone(todo), report, opened=(plan, prepared))
            assert len(list(store.glob("shard-*.h5"))) == num_shards
            print(json.dumps({"uss": memory}), flush=True)


def growth(num_shards: int, *leaks: int) -> list[dict[str, float]]:
    """Memory of a worker over `num_shards` shards, for each leak: USS in bytes in the middle third of the shards and in
    the last (medians), and what it grew by between them."""
    done = subprocess.run([sys.executable, __file__, str(num_shards), *map(str, leaks)], text=True, capture_output=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    found = []
    for line in json_lines(done.stdout):
        memory = np.array(line["uss"], np.float64)
        middle, last = (float(np.median(part)) for part in np.array_split(memory[int(len(memory) * WARM_UP):], 2))
        found.append({"middle": middle, "last": last, "grown": last - middle})
    return found


def report(num_shards: int) -> list[dict[str, float]]:
    """Measures an undisturbed worker, and one with a planted leak; prints the table and returns what `growth` found."""
    rows, measured = [], growth(num_shards, 0, PLANTED)
    names = ("as it is", f"planted: {PLANTED >> 10} KiB of every batch are kept")
    for name, found in zip(names, measured, strict=True):
        rows.append([name, f"{num_shards:,}", f"{found['middle'] / 1e6:.1f} MB", f"{found['last'] / 1e6:.1f} MB",
                     f"{found['grown'] / 1e6:+.2f} MB", "flat" if found["grown"] <= ALLOWANCE else "**grows**"])
    print(f"A worker's own memory (USS) through its own loop; a shard's states are {SHARD_BYTES / 1e6:.1f} MB; up to "
          f"{ALLOWANCE / 1e6:.1f} MB between the middle and the last third of the shards count as flat")
    table(["worker", "shards", "middle third", "last third", "grown by", ""], rows)
    return measured


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("num_shards", type=int)
    parser.add_argument("leaks", type=int, nargs="+")
    args = parser.parse_args()
    worker(args.num_shards, args.leaks)
