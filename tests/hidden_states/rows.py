"""Prepared rows and small stores for the tests of hidden states."""

from pathlib import Path

import numpy as np

from dflash_lib.conversations.prepare import PreparedRows, PrepareOptions
from dflash_lib.hidden_states.extraction_worker import extract_shard
from dflash_lib.hidden_states.plan import ExtractionOptions, ExtractionPlan, make_plan
from dflash_lib.hidden_states.store import HiddenStateStore
from dflash_lib.target.loading import Target


def make_prepared(target: Target, num_samples: int = 12, seed: int = 0, longest: int = 40) -> PreparedRows:
    """Random token rows of 2 to `longest` tokens; the last half of each is supervised."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(2, longest + 1, num_samples)
    masks = [np.arange(n) >= n // 2 for n in lengths]
    return PreparedRows(
        input_ids=generator.integers(4, 384, lengths.sum()).astype(np.int32),
        loss_mask=np.concatenate(masks).astype(np.uint8), offsets=np.cumsum([0, *lengths]).astype(np.int64),
        sample_ids=[f"row-{i}" for i in range(num_samples)], kinds=["facts"] * num_samples, options=PrepareOptions(),
        tokenizer_hash=target.identity["tokenizer"], source_sha256="0" * 64)


def make_options(**changes) -> ExtractionOptions:
    return ExtractionOptions(**{"target_layer_ids": [1, 3, 4], "encoding": "bf16", "last_state": "all",
                                "token_budget": 96, "samples_per_shard": 5, "threads": 1,
                                **changes})


def open_random_store(target: Target, folder: Path) -> HiddenStateStore:
    """A store of random rows below `folder`, open."""
    make_store(folder / "store", target, make_prepared(target))
    return HiddenStateStore.open(folder / "store")


def make_store(folder: Path, target: Target, prepared: PreparedRows, **changes) -> ExtractionPlan:
    """Extracts a store in this process, as a worker does: with the plan read from the folder."""
    folder.mkdir(parents=True)
    make_plan(target.identity, target.config, prepared, make_options(**changes)).save(folder)
    plan = ExtractionPlan.load(folder)
    for shard in range(len(plan.shards)):
        extract_shard(target, prepared, plan, folder, shard)
    return plan
