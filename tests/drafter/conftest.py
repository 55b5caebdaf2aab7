"""A small real store of the tiny dense target's states, shared by the tests of training."""

import json
import random
from pathlib import Path

import pytest

from dflash_lib.conversations.prepare import PrepareOptions, prepare
from dflash_lib.hidden_states.extraction import open_plan
from dflash_lib.hidden_states.extraction_worker import extract_shard
from dflash_lib.hidden_states.plan import ExtractionOptions
from dflash_lib.hidden_states.store import HiddenStateStore

WORDS = "rain fox battery energy story kitten lazy brown quick dog device short write what is a the explain".split()


def write_conversations(path: Path, number: int) -> Path:
    rng = random.Random(0)
    rows = []
    for i in range(number):
        say = [" ".join(rng.choices(WORDS, k=rng.randint(4, 14))) for _ in range(2)]
        rows.append({"id": f"c{i}", "messages": [{"role": "user", "content": say[0]},
                                                 {"role": "assistant", "content": say[1]}]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def tiny_store(tiny_llama, tmp_path_factory) -> HiddenStateStore:
    folder = tmp_path_factory.mktemp("store")
    rows = prepare(write_conversations(folder / "c.jsonl", 12), tiny_llama.tokenizer, PrepareOptions(min_supervised=4))
    plan = open_plan(folder / "states", tiny_llama.path, rows,
                     ExtractionOptions(target_layer_ids=[1, 3, 4], last_state="all", samples_per_shard=5))
    for shard in range(len(plan.shards)):
        extract_shard(tiny_llama, rows, plan, folder / "states", shard)
    return HiddenStateStore.open(folder / "states")
