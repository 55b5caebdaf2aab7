"""The cost of every stage over 1x, 4x and 16x the samples, and what that makes of 800,000 samples of 3,072 tokens.

Stores are synthetic: random states of a small hidden size through the library's own writer, so that what is timed is
the bookkeeping, which a tiny target does not hide. Each stage is timed at three sizes in one process; the exponent is
that of the power law through the two larger ones (1 = linear, less = a fixed cost still shows). The large job is then
the largest measured size times the ratio of that stage's units (samples, tokens or shards); stages that go through
the stored bytes are measured a second time on one large shard, whose rate is taken, because at the small hidden size
they measure files, not bytes. All of it is an estimate for one core that does as this one, files in the page cache.
"""

import gc
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from benchmarks.common import make_random_plan, make_rows, table, write_random_store
from benchmarks.prepare import write_rows
from dflash_lib.conversations.prepare import PrepareOptions, prepare
from dflash_lib.drafter.dataset import TrainingData, draft_vocabulary, split_samples
from dflash_lib.drafter.training import check_mask_token
from dflash_lib.files import human_bytes
from dflash_lib.hidden_states.plan import ExtractionOptions, ExtractionPlan
from dflash_lib.hidden_states.store import HiddenStateStore, missing_shards
from dflash_lib.hidden_states.verify import verify_store
from dflash_lib.target.loading import load_tokenizer

FACTORS = (1, 4, 16)
HIDDEN, LAYERS, VOCABULARY, PER_SHARD = 8, [1, 3], 32_768, 16
BIG_SAMPLES, BIG_TOKENS, BIG_PER_SHARD = 800_000, 3072, 64
BIG_BYTES = 61_440  # a token of Qwen3.6-27B: 5 aux layers and the last, 5,120 wide, bf16
BIG_VOCABULARY = 248_320
NUM_READS, NUM_BATCHES = 200, 50
LARGE_HIDDEN, LARGE_TOKENS = 1024, (512, 64)  # of the one large shard: 6 KB a token; tokens of a sample, samples
GPUS, GPU_TOKENS_S, DISK_BYTES_S = 8, 2500.0, 2e9  # what notebooks/params/qwen3_6_27b_8gpu.yaml states
WRITE, VERIFY = f"write shards (checksums, HDF5); the large job: {GPUS} workers", "verify, one process"
READ = "read a sample, random, one thread"
PATIENCE_S = {"once": 3600.0, "step": 0.1}  # beyond this a stage is in the way


class Sizes(SimpleNamespace):
    """How much of each unit a job has: samples, tokens, shards, bytes (stored), and one, for what is done once."""


def big() -> Sizes:
    """The published recipe's data on Qwen3.6-27B."""
    tokens = BIG_SAMPLES * BIG_TOKENS
    return Sizes(samples=BIG_SAMPLES, tokens=tokens, shards=BIG_SAMPLES // BIG_PER_SHARD, bytes=tokens * BIG_BYTES,
                 one=1, prepared_tokens=tokens)


def seconds_of(work: Callable[[], object], at_least: float = 0.05, at_least_calls: int = 3) -> float:
    """Seconds of this process's CPU time that a call takes, the least of a few: what else runs then matters little, and
    what is done once, such as looking into a shard, is no part of it."""
    gc.collect()
    found: list[float] = []
    while len(found) < at_least_calls or sum(found) < at_least and len(found) < 1000:
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found)


def byte_rates(folder: Path) -> dict[str, float]:
    """Seconds a stored byte of the stages that go through all of them, on one large shard."""
    tokens, num = LARGE_TOKENS
    prepared = make_rows(np.full(num, tokens), VOCABULARY)
    plan = make_random_plan(prepared, LARGE_HIDDEN, ExtractionOptions(
        target_layer_ids=LAYERS, samples_per_shard=num, token_budget=tokens), 8)
    found = {WRITE: seconds_of(lambda: write_random_store(folder, plan, prepared), 0, 1) / plan.num_bytes}
    with HiddenStateStore.open(folder) as store:
        found[VERIFY] = seconds_of(lambda: verify_store(store, prepared)) / plan.num_bytes
        found[READ] = seconds_of(lambda: [store.read(i) for i in range(num)]) / plan.num_bytes
    return found


def stages(folder: Path, num_samples: int) -> tuple[dict[str, tuple[str, str, float]], Sizes]:
    """Unit, kind ("once" or "step") and seconds of each stage for a store of that many samples; and its sizes."""
    lengths = np.random.default_rng(1).integers(BIG_TOKENS * 3 // 4, BIG_TOKENS + 1, num_samples)
    prepared = make_rows(lengths, VOCABULARY)
    options = ExtractionOptions(target_layer_ids=LAYERS, samples_per_shard=PER_SHARD, token_budget=4 * BIG_TOKENS)
    found: dict[str, tuple[str, str, float]] = {}

    def stage(name: str, unit: str, work: Callable[[], object], kind: str = "once", per: int = 1) -> None:
        found[name] = unit, kind, seconds_of(work) / per

    stage("make the plan", "samples", lambda: make_random_plan(prepared, HIDDEN, options, 8))
    plan = make_random_plan(prepared, HIDDEN, options, 8)
    found[WRITE] = "bytes", "once", seconds_of(lambda: write_random_store(folder, plan, prepared), 0, 1)
    stage("plan.json: read, hashed", "samples", lambda: ExtractionPlan.load(folder).hash)
    stage("scan for missing shards", "shards", lambda: missing_shards(folder, plan))
    stage("open the store", "shards", lambda: HiddenStateStore.open(folder))
    with HiddenStateStore.open(folder) as store:
        stage(VERIFY, "bytes", lambda: verify_store(store, prepared))
    with HiddenStateStore.open(folder) as store:
        stage("first look into each shard (checksums of ids and masks)", "tokens", lambda: [
            HiddenStateStore(folder, plan, store.shards).read_tokens(plan.samples_of(shard)[0])
            for shard in store.shards])
        stage("look for the mask token (reads all token ids)", "samples", lambda: check_mask_token(store, 3))
        stage("split the samples (reads all loss masks)", "samples", lambda: split_samples(store, 1, 0))
        stage("draft vocabulary (reads all token ids)", "samples",
              lambda: draft_vocabulary(store, store.sample_indices, 8192, [2], VOCABULARY))
        data = TrainingData(store, store.sample_indices, batch_samples=4, anchors_per_sample=8, slots_per_anchor=2,
                            block_size=8, mask_token_id=0, gamma=1.5, need_last=True, seed=0)
        stage("order of an epoch", "samples", lambda: TrainingData.epoch_order(data, next(epochs)))
        order = [store.sample_indices[i] for i in np.random.default_rng(2).integers(0, num_samples, NUM_READS)]
        stage("choose the samples of a batch", "one", lambda: [data.chosen(i) for i in range(NUM_BATCHES)], "step",
              NUM_BATCHES)
        stage(READ, "one", lambda: [store.read(i) for i in order], "step",
              NUM_READS)
        stage("make a batch of 4, narrow states", "one", lambda: [data.batch(i) for i in range(NUM_BATCHES)],
              "step", NUM_BATCHES)
    return found, Sizes(samples=num_samples, tokens=plan.num_tokens, shards=len(plan.shards), bytes=plan.num_bytes,
                        one=1, plan_bytes=(folder / "plan.json").stat().st_size,
                        overhead=sum(p.stat().st_size for p in folder.glob("*.h5")) - plan.num_bytes)


epochs = iter(range(1 << 30))  # never the same twice: an order that is kept costs nothing


def duration(seconds: float) -> str:
    """1.2 ms, 3.4 s, 5.6 min, 7.8 h or 9.1 days."""
    for limit, factor, unit in ((1, 1e-3, "ms"), (120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / factor:.2g} {unit}" if seconds / factor < 10 else f"{seconds / factor:.0f} {unit}"
    return f"{seconds / 86_400:.1f} days"


def prepare_stage(conversations: Path, model: Path, work_dir: Path, num_rows: int) -> tuple[float, int]:
    """CPU seconds of preparing so many conversations in one process, without the ids that the target generated, and the
    tokens that came out."""
    tokenizer, source = load_tokenizer(model), work_dir / f"{num_rows}.jsonl"
    write_rows(conversations, source, num_rows, None)
    made = []
    seconds = seconds_of(lambda: made.append(prepare(source, tokenizer, PrepareOptions(max_length=2048))), 0, 1)
    return seconds, made[0].num_tokens


def report(work_dir: Path, num_samples: int, conversations: Path, model: Path) -> None:
    """Measures at `num_samples` times FACTORS and prints the tables. conversations and model: for the first stage,
    which tokenises."""
    torch.set_num_threads(1)
    measured, sizes = [], []
    for factor in FACTORS:
        found, size = stages(work_dir / f"store-{factor}", factor * num_samples)
        seconds, size.prepared_tokens = prepare_stage(conversations, model, work_dir, factor * num_samples)
        found = {"prepare the conversations, one process": ("prepared_tokens", "once", seconds), **found}
        measured.append(found)
        sizes.append(size)
    wanted, largest, rates = big(), sizes[-1], byte_rates(work_dir / "large")
    rows, estimates = [], {}
    for name, (unit, kind, seconds) in measured[-1].items():
        before = measured[-2][name][2]
        growth = vars(sizes[-1])[unit] / vars(sizes[-2])[unit]
        growth = growth if growth > 1 else FACTORS[-1] / FACTORS[-2]  # of what should not grow: against the samples
        exponent = math.log(max(seconds, 1e-9) / max(before, 1e-9)) / math.log(growth)
        estimates[name] = kind, seconds * vars(wanted)[unit] / vars(largest)[unit]
        if name in rates:
            estimates[name] = kind, rates[name] * (BIG_TOKENS * BIG_BYTES if name == READ else wanted.bytes)
        if name == WRITE:
            estimates[name] = kind, estimates[name][1] / GPUS
        rows.append([name, *(duration(each[name][2]) for each in measured),
                     {"one": "(each)", "prepared_tokens": "tokens"}.get(unit, unit), f"{exponent:.2f}",
                     duration(estimates[name][1])])
    print(f"{', '.join(f'{size.samples:,}' for size in sizes)} samples of 2,304 to 3,072 tokens, "
          f"{largest.shards:,} shards at most, {HIDDEN} wide; CPU seconds of one thread; exponent: of the power law "
          "from 4x to 16x, 1 = linear, 0 = does not grow. On one large shard: " + ", ".join(
              f"{re.split('[,(]', name)[0].strip()} {1e-6 / rate:,.0f} MB/s" for name, rate in rates.items()) + "\n")
    table(["stage", *(f"{factor}x" for factor in FACTORS), "grows with", "exponent",
           f"{wanted.samples:,} samples of {BIG_TOKENS:,} tokens"], rows)
    _print_limits(largest, wanted, estimates)


def _print_limits(largest: Sizes, wanted: Sizes, estimates: dict[str, tuple[str, float]]) -> None:
    """The other limits of the large job, and the stages in the order in which they are in the way."""
    plan_bytes = largest.plan_bytes / largest.samples * wanted.samples
    extraction = wanted.tokens / (GPUS * GPU_TOKENS_S)
    rows = [
        ["disk for the states", human_bytes(wanted.bytes), f"bf16, {BIG_BYTES:,} bytes a token; fp8 and the last state "
         "of supervised rows only about halve it"],
        ["writing them to it", duration(wanted.bytes / DISK_BYTES_S), f"at {human_bytes(DISK_BYTES_S)}/s, as stated in "
         "qwen3_6_27b_8gpu.yaml"],
        ["the target's passes", duration(extraction), f"{GPUS} GPUs at {GPU_TOKENS_S:,.0f} tokens/s, as stated there"],
        ["bytes a second for the target not to wait", human_bytes(wanted.bytes / extraction) + "/s", "all GPUs"],
        ["files", f"{wanted.shards:,} of {human_bytes(wanted.bytes / wanted.shards)}", f"{BIG_PER_SHARD} samples a "
         "shard"],
        ["plan.json", human_bytes(plan_bytes), "as measured for each sample"],
        ["memory of an open store", human_bytes(wanted.samples * 250), "about 250 bytes a sample: its place, its "
         "offsets"],
        ["memory of the rows' token ids and masks", human_bytes(wanted.tokens * 5), "mapped from files, 5 bytes a "
         "token"],
        ["memory of one sample, float32, in training", human_bytes(BIG_TOKENS * BIG_BYTES * 2), "a batch has several"],
    ]
    print("The large job in other respects:")
    table(["", "", "assumption"], rows)
    slow = sorted(((seconds / PATIENCE_S[kind], name, kind, seconds) for name, (kind, seconds) in estimates.items()),
                  reverse=True)
    print(f"What breaks first: the disk ({human_bytes(wanted.bytes)}); then " + ("; ".join(
        f"{name} ({duration(seconds)}{' a step' if kind == 'step' else ''})" for over, name, kind, seconds in slow
        if over > 1) or "no stage") + f". In the way is what takes more than "
        f"{duration(PATIENCE_S['once'])} once, or {duration(PATIENCE_S['step'])} a step.\n")
