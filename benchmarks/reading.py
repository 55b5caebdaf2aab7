"""Reading states back: the store's reader against speculators' ArrowDataset, from the same states, in turns.

Both give a sample with all that a training batch needs: token ids, loss mask, aux states and the last state. The two
are measured in one process, which has the real speculators 0.9.0 on its path (tests/speculators_package.py). "cold":
ahead of each turn the files of both are dropped from the page cache with posix_fadvise(DONTNEED), which needs no rights
and leaves other programs' files alone; how much then really came from the disk is counted. A cold read of the store is
told what comes next, as training tells it. Compressed stores are read through HDF5, too, as they were before their
chunks were decoded by the library itself.

Last, how well making training batches hides behind computing: steps that multiply matrices in the main thread, alone,
with each batch made before its step, and made by `drafter.prefetch` meanwhile.
"""

import argparse
import json
import mmap
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median
from unittest import mock

import numpy as np
import torch
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parent.parent
if str(REPOSITORY) not in sys.path:
    sys.path.insert(0, str(REPOSITORY))

from benchmarks.common import in_turns, json_lines, make_random_plan, ratio, table, write_random_store  # noqa: E402
from dflash_lib.conversations.prepare import PreparedRows  # noqa: E402
from dflash_lib.hidden_states.chunk_filters import ChunkFilters  # noqa: E402
from dflash_lib.hidden_states.plan import ExtractionOptions  # noqa: E402
from dflash_lib.hidden_states.schema import get_encoding  # noqa: E402
from dflash_lib.hidden_states.store import HiddenStateStore  # noqa: E402

WANTED = 3.0
FORMS = ({"encoding": "bf16", "last_state": "all"}, {"encoding": "bf16", "last_state": "supervised"},
         {"encoding": "bf16+zstd", "last_state": "supervised"},
         {"encoding": "fp8+zstd", "last_state": "supervised"})  # the first has all that their layout has
AHEAD = 8  # samples that a reader is told of before it asks for them
BATCH = 4  # samples
STEP_S, NUM_STEPS = 0.1, 25  # of the steps that batches hide behind: about as long as the demo's
WANTED_WAIT = 0.02  # of a step


def drop_from_cache(folders: list[Path]) -> None:
    """Drops the files below `folders` from the page cache, once they are on the disk."""
    os.sync()
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)


def bytes_from_disk() -> int:
    """What this process has had read from a disk so far."""
    text = Path("/proc/self/io").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("read_bytes")).split()[1])


def disk_rate(folder: Path, num_reads: int = 300, size: int = 1 << 20) -> float | None:
    """Bytes a second of random reads of 1 MiB past the page cache, four at a time: the most that a cold reader can get.
    None where the file system cannot read past its cache, or the files are smaller."""
    files = [path for path in folder.glob("*.h5") if path.stat().st_size > 2 * size]
    generator = np.random.default_rng(0)
    places = [(files[i % len(files)], int(generator.integers(0, files[i % len(files)].stat().st_size - size)) // 4096)
              for i in range(num_reads)] if files else []

    def read(place) -> int:
        fd = os.open(place[0], os.O_RDONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, size) as buffer:  # aligned to a page, as such reads need
                return os.preadv(fd, [buffer], place[1] * 4096)
        finally:
            os.close(fd)

    try:
        with ThreadPoolExecutor(4) as pool:
            start = time.perf_counter()
            num_bytes = sum(pool.map(read, places))
            return num_bytes / (time.perf_counter() - start) or None
    except OSError:
        return None


def worker(folder: Path, num_reads: int, repeats: int, compare: bool) -> None:
    """Measures each store of `folder`, in this process, and prints a line of JSON a measurement."""
    for number, store in enumerate(sorted(path for path in folder.iterdir() if path.name.startswith("store"))):
        measure(store, folder / "exported", num_reads, repeats, compare, every_case=number == 0)


def measure(store_folder: Path, exported: Path, num_reads: int, repeats: int, compare: bool, every_case: bool) -> None:
    """One store. every_case: False leaves reading one after another and the batches out."""
    from dflash_lib.drafter.dataset import TrainingData

    torch.set_num_threads(1)
    store = HiddenStateStore.open(store_folder)
    indices = store.sample_indices
    shuffled = np.random.default_rng(0).permutation(indices)[:num_reads].tolist()
    stored = [i for shard in store.shards for i in store.plan.samples_of(shard)]
    folders = [store_folder, exported]
    form = f"{store.plan.encoding}, last state {store.plan.last_state}"

    def ours(order, store=store):
        def read() -> None:
            for number, index in enumerate(order):
                if number % AHEAD == 0:
                    store.read_ahead(order[number + AHEAD:number + 2 * AHEAD])
                store.read(index)
        return read

    def theirs(data, order):
        def read() -> None:
            for index in order:
                data[index]
        return read

    def batches(data):
        def read() -> None:
            for number in range(num_reads // data.batch_samples):
                data.batch(number)
        return read

    def packed(data, collate, order):
        def read() -> None:
            for start in range(0, len(order), 4):
                collate([data[index] for index in order[start:start + 4]])
        return read

    def batches_of(store) -> TrainingData:
        return TrainingData(store, indices, batch_samples=BATCH, anchors_per_sample=32, slots_per_anchor=2,
                            block_size=8, mask_token_id=0, gamma=1.5, need_last=True, seed=0)

    training, through_hdf5 = batches_of(store), None
    if get_encoding(store.plan.encoding).zstd:
        with mock.patch.object(ChunkFilters, "of", classmethod(lambda *_: None)):
            through_hdf5 = HiddenStateStore.open(store_folder)
            through_hdf5.read_ahead(indices)  # knows all layouts from here on
    trained = [index for number in range(num_reads // 4) for _, index in training.chosen(number)]
    # the reads of both sides are the same samples; one after another is each side's own order on the disk
    cases = [("random", shuffled, shuffled, ours(shuffled)), ("one after another", stored, indices, ours(stored)),
             ("random, made into batches of 4", trained, trained, batches(training))]
    if compare:
        from speculators.train.data import ArrowDataset, CollateFn

        data = ArrowDataset(max_len=1 << 20, datapath=exported, on_missing="raise")
        assert len(data) == len(indices)
        for index in shuffled[:20]:
            a, b = store.read(index), data[index]
            assert get_encoding(store.plan.encoding).fp8 or torch.equal(
                b["hidden_states"], a.aux_hidden_states.flatten(1)), "the same states"
            rows = slice(None) if a.last_rows is None else a.last_rows
            assert torch.equal(b["verifier_last_hidden_states"][rows], a.last_hidden_state_prenorm)
            assert b["loss_mask"].tolist() == a.loss_mask.tolist() and b["input_ids"].tolist() == a.input_ids.tolist()
    before = disk_rate(store_folder)
    for name, order, their_order, read in cases[:None if every_case else 1]:
        num_bytes = sum(store.length(index) for index in order) * store.plan.bytes_per_token
        ways = {"store": read}
        if through_hdf5 is not None:
            ways["hdf5"] = ours(order, through_hdf5)
        if compare and "batches" in name:
            longest = 4 * max(store.length(index) for index in order)
            ways["arrow"] = packed(data, CollateFn(longest, store.hidden_size, len(store.target_layer_ids),
                                                   torch.float32), their_order)
        elif compare:
            ways["arrow"] = theirs(data, their_order)
        for cache in ("warm", "cold"):
            if cache == "warm":
                for way in ways.values():
                    way()
            fetched: dict[str, int] = {}

            def counted(label, way, fetched=fetched):
                def run() -> float:
                    before, start = bytes_from_disk(), time.perf_counter()
                    way()
                    seconds = time.perf_counter() - start
                    fetched[label] = bytes_from_disk() - before
                    return seconds
                return run

            seconds = in_turns({label: counted(label, way) for label, way in ways.items()}, repeats,
                               (lambda: drop_from_cache(folders)) if cache == "cold" else (lambda: None))
            print(json.dumps({"form": form, "order": name, "cache": cache, "num": len(order), "bytes": num_bytes,
                              "seconds": seconds, "from_disk": fetched}), flush=True)
    print(json.dumps({"disk": [before, disk_rate(store_folder)]}))
    data = {"store": training} | ({} if through_hdf5 is None else {"hdf5": batches_of(through_hdf5)})
    num_steps = min(NUM_STEPS, max(2, num_reads // BATCH))
    print(json.dumps({"form": form, "num_steps": num_steps, "hidden": {
        reader: behind_compute(each, num_steps, repeats) for reader, each in data.items()}}))


def behind_compute(data, num_steps: int, repeats: int) -> dict[str, list[float]]:
    """Seconds a step, one for each turn: computing `alone`, with batches made `before` each step, and `meanwhile`; and
    `waited`, what of the last was waiting for a batch. data: a TrainingData."""
    from dflash_lib.drafter.prefetch import Prefetched

    a = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    start = time.perf_counter()
    for _ in range(100):
        a @ a
    num_products = max(1, round(STEP_S / ((time.perf_counter() - start) / 100)))

    def steps(get=None) -> float:
        start = time.perf_counter()
        for number in range(num_steps):
            if get is not None:
                get(number)
            for _ in range(num_products):
                a @ a
        return (time.perf_counter() - start) / num_steps

    waited: list[float] = []

    def meanwhile() -> float:
        waits = []
        with Prefetched(data.batch, 0, num_steps - 1) as items:

            def get(_number: int) -> None:
                items.next()
                waits.append(items.wait_s)

            found = steps(get)
            waited.append(sum(waits[1:]) / (num_steps - 1))  # nothing can hide the first
            return found

    found = in_turns({"alone": steps, "before": lambda: steps(data.batch), "meanwhile": meanwhile}, repeats)
    return {**found, "waited": waited}


def compare_readers(prepared: PreparedRows, hidden_size: int, options: ExtractionOptions, num_hidden_layers: int,
                    work_dir: Path, num_reads: int, repeats: int, compare: bool = True,
                    pool: Tensor | None = None) -> list[dict]:
    """Writes stores of the same states for the rows in FORMS, exports them in speculators' layout, and measures.

    compare: False leaves speculators out, for a machine that lacks it; pool: states to take, random ones without.
    Prints the table and returns what was measured.
    """
    from dflash_lib.hidden_states.formats import open_states
    from dflash_lib.hidden_states.formats.convert import ConvertOptions, convert

    stores, exported = [work_dir / f"store-{number}" for number in range(len(FORMS))], work_dir / "exported"
    for folder, form in zip(stores, FORMS, strict=True):
        plan = make_random_plan(prepared, hidden_size, replace(options, **form), num_hidden_layers)
        write_random_store(folder, plan, prepared, pool)
    if compare:
        convert(open_states(stores[0]), exported, ConvertOptions(to="speculators"), show=False)
        from tests import speculators_package

        environment = speculators_package.environment()
    else:
        exported.mkdir()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", __file__, str(work_dir), str(num_reads), str(repeats), str(int(compare))]
    done = subprocess.run(command, env=environment, text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(f"reading failed:\n{done.stderr[-3000:]}")
    found = json_lines(done.stdout)
    disk = " and ".join(f"{rate / 1e9:.2f}" for line in found for rate in line.get("disk", []) if rate)
    hidden, found = [line for line in found if "hidden" in line], [line for line in found if "order" in line]
    rows = []
    for case in found:
        ours, theirs = case["seconds"]["store"], case["seconds"].get("arrow")
        shown = ["", "not measured"] if theirs is None else [f"{case['num'] / median(theirs):,.0f}",
                                                             ratio(theirs, ours)]
        share = " and ".join(f"{case['from_disk'][name] / case['bytes']:.2f}" for name in case["from_disk"])
        old = case["seconds"].get("hdf5")
        rows.append([case["form"], case["order"], case["cache"], f"{case['num'] / median(ours):,.0f}",
                     f"{case['bytes'] / median(ours) / 1e9:.2f}", "" if old is None else
                     f"{case['num'] / median(old):,.0f}; {ratio(old, ours)}", *shown, share])
    whole, length = 2 * hidden_size * (len(options.target_layer_ids) + 1), prepared.num_tokens / len(prepared)
    print(f"Reading {len(prepared):,} samples of {length:.0f} tokens on average, {whole:,} bytes a token with every "
          f"last state; {num_reads} reads a turn, {repeats} turns, one thread; at least {WANTED:.0f} times the "
          "samples/s are wanted. GB/s that the disk gives, before and after each store, for random reads of 1 MiB past "
          f"the cache, four at a time: {disk or 'not measured'}")
    table(["store", "order", "cache", "store, samples/s", "GB/s", "through HDF5, samples/s; times faster",
           "ArrowDataset, samples/s", "times faster", "read from disk, of the states' bytes"], rows)
    print(f"Batches of {BATCH} samples behind steps that compute for about {STEP_S:.1f} s in the main thread, "
          f"{hidden[0]['num_steps']} steps a turn, warm: milliseconds a step, medians; waiting for a batch is wanted "
          f"under {WANTED_WAIT:.0%} of a step")
    table(["store", "read by", "computing alone", "batch made before the step", "made meanwhile", "waited",
           "waited, of a step"],
          [[f"batches of {line['form']}", {"store": "the library", "hdf5": "HDF5"}[reader],
            *(f"{1e3 * median(of[name]):.1f}" for name in ("alone", "before", "meanwhile")),
            f"{1e3 * median(of['waited']):.2f}",
            f"**{median(a / b for a, b in zip(of['waited'], of['meanwhile'], strict=True)):.2%}**"]
           for line in hidden for reader, of in line["hidden"].items()])
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for name in ("reads", "repeats", "compare"):
        parser.add_argument(name, type=int)
    args = parser.parse_args()
    worker(args.folder, args.reads, args.repeats, bool(args.compare))
