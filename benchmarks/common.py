"""Shared by the parts of benchmarks/extraction.py: ways measured in turns, tables, the machine, rows, stores."""

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import numpy as np
import psutil
import torch
from torch import Tensor

from dflash_lib.conversations.prepare import PreparedRows, PrepareOptions
from dflash_lib.hidden_states.encode import encode_sample
from dflash_lib.hidden_states.plan import ExtractionOptions, ExtractionPlan, make_plan
from dflash_lib.hidden_states.shards import ShardWriter
from dflash_lib.target.capture import CapturedSample

REPOSITORY = Path(__file__).resolve().parent.parent


def in_turns(ways: dict[str, Callable[[], float | None]], repeats: int,
             before: Callable[[], None] = lambda: None) -> dict[str, list[float]]:
    """Seconds of each way, A B C A B C ...: what else the machine does then disturbs all of them alike. A way that
    returns a number is believed (it leaves its own tidying out), one that returns None is timed around. before: called
    ahead of each, untimed."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            before()
            start = time.perf_counter()
            said = way()
            found[name].append(time.perf_counter() - start if said is None else said)
    return found


def ratio(slow: Sequence[float], fast: Sequence[float]) -> str:
    """How many times faster: the median over the turns, with the least and the largest."""
    each = [a / b for a, b in zip(slow, fast, strict=True)]
    return f"**{median(each):.2f}** ({min(each):.2f} to {max(each):.2f})"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints a Markdown table."""
    print(f"\n| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")
    print(flush=True)


def note_machine(when: str) -> None:
    """Prints what else runs: a figure without it says little."""
    busy = psutil.cpu_percent(interval=0.5)
    free = psutil.virtual_memory().available
    print(f"{when}: load {os.getloadavg()[0]:.1f}, CPUs {busy:.0f} % busy, {os.cpu_count()} "
          f"CPUs, {free / 1e9:.1f} GB of memory free, Python {platform.python_version()}, PyTorch {torch.__version__}",
          flush=True)


def make_rows(lengths: np.ndarray, vocab_size: int, tokenizer_hash: str = "0" * 64, seed: int = 0) -> PreparedRows:
    """Random token rows; the last 60 % of each is supervised, as in the demo. Token id 3 occurs nowhere."""
    generator = np.random.default_rng(seed)
    position = np.concatenate([np.arange(n) / n for n in lengths])
    return PreparedRows(
        input_ids=generator.integers(4, vocab_size, int(lengths.sum())).astype(np.int32),
        loss_mask=(position >= 0.4).astype(np.uint8), offsets=np.cumsum([0, *lengths]).astype(np.int64),
        sample_ids=[f"row-{i}" for i in range(len(lengths))], kinds=[""] * len(lengths), options=PrepareOptions(),
        tokenizer_hash=tokenizer_hash, source_sha256="0" * 64)


def make_random_plan(prepared: PreparedRows, hidden_size: int, options: ExtractionOptions,
                     num_hidden_layers: int) -> ExtractionPlan:
    """A plan for a target that exists by name only."""
    identity = {"name": "random", "weights": "0" * 64, "config": "0" * 64, "tokenizer": prepared.tokenizer_hash,
                "dtype": "float32", "transformers": ""}
    config = SimpleNamespace(num_hidden_layers=num_hidden_layers, hidden_size=hidden_size, vocab_size=1 << 20)
    return make_plan(identity, config, prepared, options)


def write_random_store(folder: Path, plan: ExtractionPlan, prepared: PreparedRows, pool: Tensor | None = None) -> None:
    """A store of random states, written as an extraction writes: stored as they are, they cost the same whatever they
    say. pool: bfloat16 [rows, L + 1, H] to take them from, real ones where they shall be compressed."""
    folder.mkdir(parents=True)
    plan.save(folder)
    num_layers, longest = len(plan.target_layer_ids), int(prepared.lengths.max())
    if pool is None:
        pool = torch.randn(longest + 4096, num_layers + 1, plan.hidden_size,
                           generator=torch.Generator().manual_seed(0)).bfloat16()
    aux, last = pool[:, :-1].contiguous(), pool[:, -1].contiguous()
    for shard in range(len(plan.shards)):
        masks = [prepared.row(index)[1] for index in plan.samples_of(shard)]
        with ShardWriter(folder, plan, shard, masks) as writer:
            for index in plan.samples_of(shard):
                ids, mask = prepared.row(index)
                first = index % (len(pool) - longest)
                rows = slice(first, first + len(ids))
                writer.add(index, ids, mask, encode_sample(None, plan, mask, CapturedSample(aux[rows], last[rows])))


def demo_parameters() -> dict:
    """What `make demo` runs 04_extract with: the notebook's own values, and over them those of its parameter file."""
    from dflash_lib.workbench.parameters import declared_parameters, read_parameters_file

    declared = declared_parameters(REPOSITORY / "notebooks" / "04_extract.ipynb")
    asked = read_parameters_file(REPOSITORY / "notebooks" / "params" / "demo.yaml")
    return {name: asked.get(name, parameter.default) for name, parameter in declared.items()}


def json_lines(text: str) -> list[dict]:
    """The JSON objects among the lines of a subprocess's output."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]
