"""Samples with unusable states are left out with id and reason while the run goes on, up to a limit; batches for which
memory does not suffice are split, and samples that do not fit alone are left out likewise."""

import json

import h5py
import numpy as np
import pytest
import torch

from dflash_lib.conversations.prepare import PreparedRows, PrepareOptions
from dflash_lib.hidden_states.plan import ExtractionPlan
from dflash_lib.hidden_states.schema import get_attribute, shard_name
from dflash_lib.hidden_states.store import HiddenStateStore
from dflash_lib.hidden_states.verify import verify_store
from tests.hidden_states.rows import make_store
from tests.hidden_states.survival.folders import content, num_done

SHARD = 6  # where the bad sample is, of 12
MB = 1 << 20


@pytest.fixture
def job(medium, tmp_path):
    return {"store": tmp_path / "store", "prepared": medium[1], "log_dir": tmp_path / "logs"}


def sample_of(store, shard: int) -> str:
    return str(ExtractionPlan.load(store).samples_of(shard)[1])


def quarantined(store, shard: int) -> list[dict]:
    with h5py.File(store / shard_name(shard)) as file:
        return json.loads(get_attribute(file, "quarantined"))


def all_but(store, shard: int) -> dict[str, str]:
    return {name: digest for name, digest in content(store).items() if name != shard_name(shard)}


@pytest.mark.parametrize("kind, reason", [("nan", "not finite"), ("infinite", "not finite"), ("zero", "all zero")])
def test_one_unusable_sample_is_left_out_and_the_run_goes_on(server, medium, job, kind, reason):
    bad = sample_of(medium[2], SHARD)
    report = server.run("extract", spoil={bad: kind}, **job)
    assert report["num_shards"] == 12
    assert all_but(job["store"], SHARD) == all_but(medium[2], SHARD)
    entry, = quarantined(job["store"], SHARD)
    assert entry["sample_index"] == int(bad) and reason in entry["reason"]
    with HiddenStateStore.open(job["store"]) as store, HiddenStateStore.open(medium[2]) as truth:
        assert store.sample_indices == [index for index in truth.sample_indices if index != int(bad)]
        for index in store.plan.samples_of(SHARD):
            if index != int(bad):
                assert torch.equal(store.read(index).aux_hidden_states, truth.read(index).aux_hidden_states)
        checks = {check.name: check for check in verify_store(store, medium[0])}
    assert all(check.ok for check in checks.values())
    assert f"sample {bad}: " in checks["samples quarantined"].first_fault and reason in str(checks)


def test_a_run_with_an_unusable_sample_is_resumed_to_the_same_bytes(server, medium, job, tmp_path):
    """Killed before and behind the shard in question."""
    bad = {sample_of(medium[2], SHARD): "nan"}
    server.run("extract", spoil=bad, **{**job, "store": tmp_path / "undisturbed"})
    for nth in (SHARD, 4):  # finished shards: 5, then 5 + 3
        child = server.start("extract", spoil=bad, stop={"op": "replace", "name": "shard-*", "nth": nth}, **job)
        assert child.wait() is None and child.kill() < 0
    server.run("extract", spoil=bad, **job)
    assert content(job["store"]) == content(tmp_path / "undisturbed") != content(medium[2])


def check_limit(text: str, *bad: str) -> None:
    assert "2 of 60 samples have unusable states; at most 1 may be left out" in text
    assert all(f"sample {sample} (row-{sample}): " in text for sample in bad)
    assert "Finished shards are kept" in text


def test_more_than_the_limit_stops_loudly(server, medium, job):
    first, second = sample_of(medium[2], 2), sample_of(medium[2], SHARD)
    kind, text = server.start("extract", spoil={first: "nan", second: "zero"}, **job).error()
    assert kind == "StoreError"
    check_limit(text, first, second)
    assert num_done(job["store"]) == SHARD and not list(job["store"].glob(".*"))
    (job["store"] / shard_name(2)).unlink()  # the target is mended, and its bad shard is done anew
    assert server.run("extract", **job)["num_shards"] == 12 - SHARD + 1
    assert content(job["store"]) == content(medium[2])


def test_the_limit_counts_what_earlier_starts_left_out(server, medium, job):
    first, second = sample_of(medium[2], 2), sample_of(medium[2], SHARD)
    child = server.start("extract", spoil={first: "nan"}, stop={"op": "replace", "name": "shard-*", "nth": 5}, **job)
    assert child.wait() is None and child.kill() < 0
    check_limit(server.start("extract", spoil={second: "infinite"}, **job).error()[1], first, second)


def test_a_target_that_yields_nothing_but_zeros_stops_at_the_first_shard(server, medium, job):
    samples = ExtractionPlan.load(medium[2]).samples_of(0)
    kind, text = server.start("extract", spoil={str(index): "zero" for index in samples}, **job).error()
    assert kind == "StoreError" and "all zero" in text
    assert num_done(job["store"]) == 0 and not list(job["store"].glob(".*"))


def rows_of(target, lengths: list[int]) -> PreparedRows:
    generator = np.random.default_rng(1)
    num = sum(lengths)
    return PreparedRows(
        input_ids=generator.integers(4, 384, num).astype(np.int32), loss_mask=np.ones(num, np.uint8),
        offsets=np.cumsum([0, *lengths]).astype(np.int64), sample_ids=[f"row-{i}" for i in range(len(lengths))],
        kinds=["facts"] * len(lengths), options=PrepareOptions(), tokenizer_hash=target.identity["tokenizer"],
        source_sha256="0" * 64)


def close(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Equal but for roundings: the company in a batch moves float32 states by 1e-6 (DESIGN.md)."""
    one, two = one.float(), two.float()
    return bool(((one - two).abs() <= one.abs() / 128 + 1e-5).all()) and float((one != two).float().mean()) < 0.01


def test_what_does_not_fit_into_memory_is_split_or_left_out(server, tiny_llama, tmp_path):
    """The child may have 64 MB more than it has, and each padded token takes one for a moment: batches of up to 96
    tokens are split, and the sample of 200 tokens fits in no way."""
    rows = rows_of(tiny_llama, [200, *[40] * 7, *[20] * 12, *[8] * 10])
    rows.save(tmp_path / "prepared")
    make_store(tmp_path / "truth", tiny_llama, rows)
    report = server.run("extract", store=tmp_path / "store", prepared=tmp_path / "prepared",
                        log_dir=tmp_path / "logs", hunger=[MB, 64 * MB])
    assert report["num_shards"] == 6 and report["num_splits"] > 2
    plan = ExtractionPlan.load(tmp_path / "store")
    where = next(shard for shard in range(6) if 0 in plan.samples_of(shard))
    entry, = quarantined(tmp_path / "store", where)
    assert entry["sample_index"] == 0 and "out of memory: 200 tokens alone do not fit" in entry["reason"]
    splits = []
    for shard in range(6):
        with h5py.File(tmp_path / "store" / shard_name(shard)) as file:
            splits += json.loads(get_attribute(file, "splits")) if "splits" in file.attrs else []
    assert len(splits) == report["num_splits"]
    with HiddenStateStore.open(tmp_path / "store") as store, HiddenStateStore.open(tmp_path / "truth") as truth:
        assert store.sample_indices == list(range(1, 30))
        assert all(close(store.read(i).aux_hidden_states, truth.read(i).aux_hidden_states) for i in range(1, 30))
        assert all(check.ok for check in verify_store(store, rows))


def test_too_many_samples_that_do_not_fit_stop_loudly(server, tiny_llama, tmp_path):
    rows_of(tiny_llama, [200, 190, *[20] * 12]).save(tmp_path / "prepared")
    kind, text = server.start("extract", store=tmp_path / "store", prepared=tmp_path / "prepared",
                              log_dir=tmp_path / "logs", hunger=[MB, 64 * MB]).error()
    assert kind == "StoreError" and "2 of 14 samples have unusable states" in text
    assert "sample 0 (row-0): out of memory" in text and "max_length" in text
