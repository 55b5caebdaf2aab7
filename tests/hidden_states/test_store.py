"""shards and store: what is written is what was captured; damaged, missing and foreign shards are refused."""

import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
from dataclasses import replace

import h5py
import numpy as np
import pytest
import torch

from dflash_lib.hidden_states.encode import EncodedSample, dequantize_fp8, quantize_fp8
from dflash_lib.hidden_states.plan import ExtractionPlan
from dflash_lib.hidden_states.schema import AUX, ENCODINGS, LAST, StoreError, shard_name
from dflash_lib.hidden_states.shards import ShardWriter, remove_dead_partials
from dflash_lib.hidden_states.store import HiddenStateStore, missing_shards, read_shard_index
from dflash_lib.target.capture import capture_batch
from tests.hidden_states.rows import make_prepared, make_store


@pytest.fixture(scope="module")
def prepared(tiny_llama):
    return make_prepared(tiny_llama)


@pytest.fixture(scope="module")
def made(tiny_llama, prepared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("states") / "store"
    make_store(folder, tiny_llama, prepared)
    return folder


@pytest.fixture
def copied(made, tmp_path):
    shutil.copytree(made, tmp_path / "store")
    return tmp_path / "store"


def test_a_store_that_is_no_store_is_refused(tmp_path):
    with pytest.raises(StoreError, match="no hidden-state store"):
        HiddenStateStore.open(tmp_path)


def test_a_missing_shard_is_refused_unless_a_look_is_asked_for(copied):
    (copied / shard_name(1)).unlink()
    with pytest.raises(StoreError, match="1 of 3 shards are missing .shard-00001.h5."):
        HiddenStateStore.open(copied)
    store = HiddenStateStore.open(copied, allow_incomplete=True)
    assert store.num_samples == 7 and "2 of 3" in store.describe()
    absent = store.plan.samples_of(1)[0]
    with pytest.raises(StoreError, match=f"no sample {absent}"):
        store.read(absent)


@pytest.mark.parametrize("size", [0, 100, 4096, -1])
def test_a_truncated_or_empty_shard_is_refused_and_counts_as_missing(copied, size):
    path = copied / shard_name(1)
    os.truncate(path, size if size >= 0 else path.stat().st_size - 1)
    with pytest.raises(StoreError, match="shard-00001.h5: damaged or cut off"):
        HiddenStateStore.open(copied)
    missing, damaged = missing_shards(copied, ExtractionPlan.load(copied))
    assert missing == [1] and list(damaged) == [1]


def test_a_partial_file_is_not_a_shard(copied):
    (copied / shard_name(2)).rename(copied / ".shard-00002.h5.partial")
    assert missing_shards(copied, ExtractionPlan.load(copied)) == ([2], {})


def test_a_shard_of_another_store_or_number_is_refused(tiny_llama, prepared, copied, tmp_path):
    make_store(tmp_path / "other", tiny_llama, prepared, target_layer_ids=[0, 3, 4])
    shutil.copy(tmp_path / "other" / shard_name(1), copied / shard_name(1))
    with pytest.raises(StoreError, match="belongs to another plan"):
        HiddenStateStore.open(copied)
    shutil.copy(copied / shard_name(0), copied / shard_name(1))
    with pytest.raises(StoreError, match="belongs to another plan"):
        HiddenStateStore.open(copied)


def test_a_store_of_another_target_or_layers_is_refused_with_the_difference(made, tiny_llama, tiny_qwen3_5, prepared):
    store = HiddenStateStore.open(made)
    store.require(tiny_llama.identity, [1, 3, 4], prepared.fingerprint)
    with pytest.raises(StoreError, match=r"target_layer_ids: the store has \[1, 3, 4\], asked for \[1, 3\]"):
        store.require(target_layer_ids=[1, 3])
    with pytest.raises(StoreError, match="target.weights: the store has .*asked for"):
        store.require(tiny_qwen3_5.identity)
    with pytest.raises(StoreError, match="data.fingerprint"):
        store.require(data_fingerprint="x")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_sample_reads_back_as_captured(tiny_llama, prepared, tmp_path, encoding):
    plan = make_store(tmp_path / "store", tiny_llama, prepared, encoding=encoding)
    with HiddenStateStore.open(tmp_path / "store") as store:
        assert store.sample_indices == list(range(12)) and store.num_samples == 12
        assert store.lengths().tolist() == prepared.lengths.tolist()
        assert (store.target_layer_ids, store.hidden_size) == ([1, 3, 4], 64)
        for shard in plan.shards:
            for batch in shard:
                truth = capture_batch(tiny_llama, [prepared.row(i)[0] for i in batch], [1, 3, 4])
                for index, wanted in zip(batch, truth, strict=True):
                    sample = store.read(index)
                    ids, mask = prepared.row(index)
                    assert sample.input_ids.dtype == np.int32 and np.array_equal(sample.input_ids, ids)
                    assert sample.loss_mask.dtype == np.uint8 and np.array_equal(sample.loss_mask, mask)
                    aux = wanted.aux_hidden_states
                    if encoding.startswith("fp8"):
                        aux = dequantize_fp8(*quantize_fp8(aux))
                    assert torch.equal(sample.aux_hidden_states, aux.bfloat16())
                    assert torch.equal(sample.last_hidden_state_prenorm, wanted.last_hidden_state_prenorm.bfloat16())


def test_rows_keep_their_place_over_many_chunks(tiny_llama, tmp_path):
    prepared = make_prepared(tiny_llama, num_samples=3)
    plan = make_store(tmp_path / "store", tiny_llama, prepared)
    lengths = [6000, 1, 5461]  # 2 MiB are 5461 rows of 3 x 64: chunks are crossed
    stretched = replace(plan, shards=[[[0], [1], [2]]], shard_tokens=[sum(lengths)])
    generator = torch.Generator().manual_seed(0)
    samples = [EncodedSample({AUX: torch.randn(n, 3, 64, generator=generator).bfloat16(),
                              LAST: torch.randn(n, 64, generator=generator).bfloat16()}) for n in lengths]
    with ShardWriter(tmp_path, stretched, 0) as writer:
        for i, (n, sample) in enumerate(zip(lengths, samples, strict=True)):
            writer.add(i, np.full(n, i, np.int32), np.ones(n, np.uint8), sample)
    store = HiddenStateStore(tmp_path, stretched, {0: read_shard_index(tmp_path, stretched, 0)})
    assert store.file(0)[AUX].chunks == (3821, 3, 64)
    for i, sample in enumerate(samples):
        assert torch.equal(store.read(i).aux_hidden_states, sample.tensors[AUX])
        assert torch.equal(store.read(i).last_hidden_state_prenorm, sample.tensors[LAST])


def test_a_store_without_the_last_state(tiny_llama, prepared, tmp_path):
    make_store(tmp_path / "store", tiny_llama, prepared, last_state="none")
    store = HiddenStateStore.open(tmp_path / "store")
    assert store.read(3).last_hidden_state_prenorm is None and LAST not in store.file(0)
    assert "not stored" in store.describe()


def test_files_are_the_same_bytes_every_time(tiny_llama, prepared, made, tmp_path):
    make_store(tmp_path / "again", tiny_llama, prepared)
    for path in sorted(made.iterdir()):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_describe_prints_what_a_store_holds(made):
    text = HiddenStateStore.open(made).describe()
    for part in ("[1, 3, 4]", "before the final norm", "bf16", "12 of 12", "tokens", "3 of 3", "uncompressed 512)",
                 "HDF5's own are off"):
        assert part in text


def test_a_store_can_be_carried_into_other_processes(made):
    store = HiddenStateStore.open(made)
    before = store.read(0)
    again = pickle.loads(pickle.dumps(store))  # what a spawned data loader does
    assert torch.equal(again.read(0).aux_hidden_states, before.aux_hidden_states)
    shard = store._locate(0)[0]
    opened, plain = store.file(shard), store._fds[shard]
    child = os.fork()
    if child == 0:  # a forked one must not use the parent's handles
        ok = torch.equal(store.read(0).aux_hidden_states, before.aux_hidden_states)
        os._exit(0 if ok and store.file(shard) is not opened and store._fds[shard] is not plain else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_few_files_stay_open(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setattr("dflash_lib.hidden_states.store.NUM_OPEN_FILES", 2)
    make_store(tmp_path / "store", tiny_llama, make_prepared(tiny_llama), samples_per_shard=2)
    store = HiddenStateStore.open(tmp_path / "store")
    for index in [*range(12), *range(12)]:
        assert len(store.read(index).input_ids) == store.length(index)
        assert len(store._files) <= 2 and len(store._fds) <= 2


class TestShardWriter:
    def start(self, tmp_path, tiny_llama, prepared):
        plan = make_store(tmp_path / "store", tiny_llama, prepared)
        (tmp_path / "store" / shard_name(0)).unlink()
        return plan, ShardWriter(tmp_path / "store", plan, 0)

    def sample(self, prepared, index, value=1.0):
        ids, mask = prepared.row(index)
        states = {AUX: torch.full((len(ids), 3, 64), value), LAST: torch.full((len(ids), 64), 1.0)}
        return ids, mask, EncodedSample({name: values.bfloat16() for name, values in states.items()})

    def files(self, tmp_path):
        return sorted(path.name for path in (tmp_path / "store").iterdir() if "shard-00000" in path.name)

    def test_an_exception_leaves_nothing(self, tmp_path, tiny_llama, prepared):
        plan, writer = self.start(tmp_path, tiny_llama, prepared)
        with pytest.raises(KeyboardInterrupt), writer:
            writer.add(plan.samples_of(0)[0], *self.sample(prepared, plan.samples_of(0)[0]))
            assert self.files(tmp_path) == [f".shard-00000.h5.{socket.gethostname()}.{os.getpid()}.partial"]
            raise KeyboardInterrupt
        assert self.files(tmp_path) == []

    def test_two_writers_of_one_shard_do_not_disturb_each_other(self, tmp_path, tiny_llama, prepared, monkeypatch):
        plan, writer = self.start(tmp_path, tiny_llama, prepared)
        with writer:
            for index in plan.samples_of(0):
                writer.add(index, *self.sample(prepared, index))
        alone = (tmp_path / "store" / shard_name(0)).read_bytes()
        first = ShardWriter(tmp_path / "store", plan, 0)
        monkeypatch.setattr("dflash_lib.hidden_states.shards.os.getpid", lambda: 1)  # the second in another process
        second = ShardWriter(tmp_path / "store", plan, 0)
        with second:
            with first:
                for index in plan.samples_of(0):
                    first.add(index, *self.sample(prepared, index))
                    second.add(index, *self.sample(prepared, index))
            assert (tmp_path / "store" / shard_name(0)).read_bytes() == alone
        assert (tmp_path / "store" / shard_name(0)).read_bytes() == alone
        assert self.files(tmp_path) == [shard_name(0)]

    def test_only_what_dead_writers_of_this_host_left_is_removed(self, tmp_path):
        gone = subprocess.Popen([sys.executable, "-c", ""])
        zombie = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)  # ended, and not asked for its status
        host = socket.gethostname()
        dead = sorted(f".shard-00000.h5.{host}.{pid}.partial" for pid in (gone.pid, zombie.pid))
        kept = [f".shard-00001.h5.{host}.{os.getpid()}.partial", f".shard-00002.h5.else{host}.{gone.pid}.partial",
                "shard-00003.h5", f".plan.json.{host}.{gone.pid}.partial"]
        for name in (*dead, *kept):
            (tmp_path / name).touch()
        assert remove_dead_partials(tmp_path) == dead
        zombie.wait()
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)

    def test_a_sample_that_is_missing_or_added_twice_is_refused(self, tmp_path, tiny_llama, prepared):
        plan, writer = self.start(tmp_path, tiny_llama, prepared)
        with pytest.raises(StoreError, match="4 different samples were added, the plan has 5"), writer:
            for index in [*plan.samples_of(0)[:4]]:
                writer.add(index, *self.sample(prepared, index))
        assert self.files(tmp_path) == []

    def test_unusable_samples_are_left_out_and_noted(self, tmp_path, tiny_llama, prepared):
        plan, writer = self.start(tmp_path, tiny_llama, prepared)
        bad, zero, *good = plan.samples_of(0)
        with writer:
            writer.add(bad, *self.sample(prepared, bad, float("nan")))
            writer.add(zero, *self.sample(prepared, zero, 0.0))
            for index in good:
                writer.add(index, *self.sample(prepared, index))
        index = read_shard_index(tmp_path / "store", plan, 0)
        assert index.sample_index.tolist() == good
        noted = json.loads(index.quarantined)
        assert [entry["sample_index"] for entry in noted] == [bad, zero]
        assert "not finite" in noted[0]["reason"] and "all zero" in noted[1]["reason"]
        with h5py.File(tmp_path / "store" / shard_name(0)) as file:
            assert file[AUX].shape[0] == index.offsets[-1] == len(file["input_ids"])
        assert HiddenStateStore.open(tmp_path / "store").num_samples == 10

    def test_a_target_that_yields_only_zeros_stops_the_extraction(self, tmp_path, tiny_llama, prepared):
        plan, writer = self.start(tmp_path, tiny_llama, prepared)
        with pytest.raises(StoreError, match="every sample was unusable.*all zero"), writer:
            for index in plan.samples_of(0):
                writer.add(index, *self.sample(prepared, index, 0.0))
        assert self.files(tmp_path) == []

    @pytest.mark.parametrize("at", ["write", "fsync"])
    def test_a_full_disk_is_reported_and_leaves_no_file(self, tmp_path, tiny_llama, prepared, monkeypatch, at):
        plan, writer = self.start(tmp_path, tiny_llama, prepared)

        def full(*_):
            raise OSError(28, "No space left on device")

        if at == "fsync":
            monkeypatch.setattr("os.fsync", full)
        with pytest.raises(StoreError, match="No space left on device.*Free on that disk"), writer:
            for index in plan.samples_of(0):
                writer.add(index, *self.sample(prepared, index))
            if at == "write":
                writer.guard.file = FullFile(writer.guard.file)
        assert self.files(tmp_path) == []


class FullFile:
    """A file that takes nothing any more."""

    def __init__(self, file):
        self.file = file

    def write(self, _data):
        raise OSError(28, "No space left on device")

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.parametrize("dataset", [AUX, LAST, "input_ids", "loss_mask"])
def test_bits_that_rot_are_an_error_when_they_are_read(made, copied, dataset):
    """Long after verification: the size and the time of the file may be as they were."""
    path = copied / shard_name(1)
    with h5py.File(path) as file:
        data = file[dataset].id
        place = data.get_chunk_info(0).byte_offset if file[dataset].chunks else data.get_offset()
    raw = bytearray(path.read_bytes())
    raw[place + 3] ^= 1
    path.write_bytes(raw)
    with HiddenStateStore.open(copied) as store, HiddenStateStore.open(made) as sound:
        for index in store.plan.samples_of(0):
            assert torch.equal(store.read(index).aux_hidden_states, sound.read(index).aux_hidden_states)
        with pytest.raises(StoreError, match="shard-00001.h5.*Delete shard-00001.h5 from the store and run 04_extract"):
            for index in store.plan.samples_of(1):
                store.read(index)
