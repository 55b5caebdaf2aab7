"""batches: what does not fit into memory is run in parts and noted, and a row that never fits is left out."""

import json

import h5py
import numpy as np
import pytest
import torch

from dflash_lib.hidden_states.batches import BatchRunner
from dflash_lib.hidden_states.claims import Claims
from dflash_lib.hidden_states.extraction_worker import extract_shard, work
from dflash_lib.hidden_states.job import ExtractionJob
from dflash_lib.hidden_states.plan import make_plan
from dflash_lib.hidden_states.schema import StoreError, get_attribute, shard_name
from dflash_lib.hidden_states.store import HiddenStateStore
from dflash_lib.hidden_states.verify import require_verified, verify_store
from dflash_lib.target.loading import load_target
from tests.hidden_states.faulty_worker import plant
from tests.hidden_states.rows import make_options, make_prepared, make_store


@pytest.fixture(scope="module")
def prepared(tiny_llama):
    return make_prepared(tiny_llama, num_samples=20)


@pytest.fixture
def small(tiny_llama_folder):
    """A target that runs out of memory above so many padded tokens, in one of several ways; `passes` counts."""

    def make(most: int, error: Exception | None = None):
        target = load_target(tiny_llama_folder)
        passes = []

        def check(_module, args):
            passes.append(tuple(args[0].shape))
            if args[0].numel() > most:
                raise error or torch.OutOfMemoryError("CUDA out of memory (planted)")

        target.embedding.register_forward_pre_hook(check)
        return target, passes

    return make


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 1000 bytes")], ids=lambda error: type(error).__name__)
def test_a_split_batch_gives_the_same_samples_in_the_same_order(tmp_path, tiny_llama, prepared, small, error):
    plan = make_store(tmp_path / "whole", tiny_llama, prepared)
    target, passes = small(50, error)
    make_store(tmp_path / "parts", target, prepared)
    with HiddenStateStore.open(tmp_path / "whole") as whole, HiddenStateStore.open(tmp_path / "parts") as parts:
        require_verified(verify_store(parts, prepared))
        for shard in range(len(plan.shards)):
            assert parts.shards[shard].sample_index.tolist() == plan.samples_of(shard)
        for index in range(len(prepared)):
            a, b = whole.read(index), parts.read(index)
            torch.testing.assert_close(a.aux_hidden_states.float(), b.aux_hidden_states.float(), rtol=2e-2, atol=1e-3)
            torch.testing.assert_close(a.last_hidden_state_prenorm.float(), b.last_hidden_state_prenorm.float(),
                                       rtol=2e-2, atol=1e-3)
    assert any(rows * tokens > 50 for rows, tokens in passes)


def test_the_shard_says_what_was_split_and_undisturbed_ones_say_nothing(tmp_path, tiny_llama, prepared, small):
    def padded(batches):
        return [len(batch) * max(prepared.lengths[i] for i in batch) for batch in batches]

    plan = make_plan(tiny_llama.identity, tiny_llama.config, prepared, make_options())
    limit = max(padded(plan.shards[-1]))  # its last shard fits
    target, _ = small(limit)
    make_store(tmp_path / "store", target, prepared)
    splits = {}
    for shard, batches in enumerate(plan.shards):
        with h5py.File(tmp_path / "store" / shard_name(shard)) as file:
            splits[shard] = json.loads(get_attribute(file, "splits")) if "splits" in file.attrs else []
        for split in splits[shard]:
            assert split["batch"] in batches and sum(split["parts"], []) == split["batch"]
            for part in split["parts"]:
                assert len(part) * max(prepared.lengths[i] for i in part) <= limit
        assert len(splits[shard]) == sum(size > limit for size in padded(batches))
    assert any(splits.values()) and not splits[len(plan.shards) - 1]


def test_like_batches_are_split_at_once(tiny_llama, prepared, small):
    plan = make_plan(tiny_llama.identity, tiny_llama.config, prepared, make_options())
    target, passes = small(50)
    runner = BatchRunner(target, prepared, plan)
    for shard in plan.shards:
        for batch in shard:
            runner.run(batch, lambda action: None)
    failed = [rows * tokens for rows, tokens in passes if rows * tokens > 50]
    assert failed == sorted(failed, reverse=True) and len(set(failed)) == len(failed), "no size fails twice"
    assert runner.num_splits > len(failed) >= 1 and runner.too_large == min(failed)


def test_a_row_that_never_fits_is_left_out_with_the_reason(tmp_path, tiny_llama, prepared, small):
    lengths = prepared.lengths.tolist()
    longest = max(lengths)
    limit = max(n for n in lengths if n < longest)  # the longest alone does not fit
    assert lengths.count(longest) == 1
    target, _ = small(limit)
    make_store(tmp_path / "store", target, prepared)
    with HiddenStateStore.open(tmp_path / "store") as store:
        entries = [entry for content in store.shards.values() for entry in json.loads(content.quarantined)]
        require_verified(verify_store(store, prepared))
    assert entries == [{"sample_index": lengths.index(longest),
                        "reason": f"out of memory: {longest} tokens alone do not fit (cpu)"}]


def test_another_error_is_not_taken_for_too_little_memory(tmp_path, tiny_llama, prepared, small):
    target, passes = small(50, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    plan = make_plan(tiny_llama.identity, tiny_llama.config, prepared, make_options())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        extract_shard(target, prepared, plan, tmp_path, 0)
    assert len(passes) == 1 and not list(tmp_path.iterdir())


def nan_job(folder, target, prepared, rows: list[int], spared: list[int] = ()):
    """A job, and a target of which these rows' states are NaN; `spared` shards are extracted without the fault."""
    plan = make_store(folder / "store", target, prepared)
    for shard in set(range(len(plan.shards))) - set(spared):
        (folder / "store" / shard_name(shard)).unlink()
    prepared.save(folder / "prepared")
    faulty = load_target(target.path)
    plant(faulty, {"kind": "nan", "rows": [prepared.row(index)[0].tolist() for index in rows]})
    todo = sorted(set(range(len(plan.shards))) - set(spared))
    return plan, faulty, ExtractionJob(store=str(folder / "store"), model=str(target.path),
                                       prepared=str(folder / "prepared"), todo=todo)


def test_a_sample_with_nan_is_left_out_and_the_job_goes_on(tmp_path, tiny_llama, prepared):
    _, faulty, job = nan_job(tmp_path, tiny_llama, prepared, [7])
    seen = []
    work(job, faulty, Claims.alone(job.todo), lambda **fields: seen.append(fields))
    with HiddenStateStore.open(tmp_path / "store") as store:
        require_verified(verify_store(store, prepared))
        assert store.num_samples == 19 and 7 not in store.sample_indices
        (reason,) = [entry["reason"] for c in store.shards.values() for entry in json.loads(c.quarantined)]
    assert "rows not finite" in reason
    assert seen[0]["tokens"] == 0 and seen[-1]["tokens"] == prepared.num_tokens and seen[-1]["state"] == "done"
    assert seen[-1]["bytes_written"] == sum(f.stat().st_size for f in (tmp_path / "store").glob("shard-*.h5"))
    assert np.diff([fields["seconds"] for fields in seen]).min() >= 0


def test_more_than_the_limit_stop_the_job_and_are_named(tmp_path, tiny_llama, prepared):
    plan, faulty, job = nan_job(tmp_path, tiny_llama, prepared, [7, 11])
    assert len({shard for shard in range(len(plan.shards)) if {7, 11} & set(plan.samples_of(shard))}) == 2
    with pytest.raises(StoreError, match="2 of 20 samples have unusable states; at most 1") as caught:
        work(job, faulty, Claims.alone(job.todo))
    assert "sample 7 (row-7): " in str(caught.value) and "sample 11 (row-11): " in str(caught.value)
    assert "check its weights and dtype" in str(caught.value)
    with HiddenStateStore.open(tmp_path / "store", allow_incomplete=True) as store:
        assert store.num_quarantined == 1, "what went beyond the limit was not written: the job can go on"


def test_samples_left_out_by_finished_shards_count(tmp_path, tiny_llama, prepared):
    _, faulty, job = nan_job(tmp_path, tiny_llama, prepared, [7])
    claims = Claims.alone(job.todo)
    claims.publish(job.todo, num_quarantined=1)
    with pytest.raises(StoreError, match="2 of 20 samples"):
        work(job, faulty, claims)


def test_a_shard_without_any_usable_sample_stops_at_once(tmp_path, tiny_llama, prepared):
    _, faulty, job = nan_job(tmp_path, tiny_llama, prepared, list(range(20)))
    with pytest.raises(StoreError, match="every sample was unusable"):
        work(job, faulty, Claims.alone(job.todo))
    assert not list((tmp_path / "store").glob("*shard*"))


def test_a_lost_device_leaves_its_shards_to_another_worker(tmp_path, tiny_llama, prepared):
    plan, _, job = nan_job(tmp_path, tiny_llama, prepared, [])
    faulty, store = load_target(tiny_llama.path), torch.distributed.HashStore()
    first, second = Claims(store, 0, 2), Claims(store, 1, 2)
    first.publish(job.todo)
    first.receive(), second.receive()
    seen, passes = [], []

    def lose(_module, _args):
        passes.append(True)
        if len(passes) == sum(map(len, plan.shards[:2])):  # the last batch of its second shard
            raise torch.AcceleratorError("CUDA error: the GPU has fallen off the bus")

    faulty.embedding.register_forward_pre_hook(lose)
    with pytest.raises(torch.AcceleratorError, match="fallen off") as caught:
        work(job, faulty, first, lambda **fields: seen.append(fields))
    assert seen[-1]["state"] == "lost" and "fallen off" in seen[-1]["error"] and 1 in first.held
    done = {0, 1} - set(first.held)
    assert seen[-1]["tokens"] == sum(plan.shard_tokens[shard] for shard in done)
    assert first.give_back("cuda:0", caught.value)
    work(job, tiny_llama, second)
    with HiddenStateStore.open(tmp_path / "store") as opened:
        require_verified(verify_store(opened, prepared))
