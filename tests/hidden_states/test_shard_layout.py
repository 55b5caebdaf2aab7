"""A sample's rows read at their places in the file: the same bits as through HDF5, and any that changed are seen."""

import os
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from dflash_lib.hidden_states.schema import AUX, LAST, SAMPLE_HASHES, StoreError, read_raw, shard_name
from dflash_lib.hidden_states.store import HiddenStateStore
from tests.hidden_states.rows import make_prepared, make_store

ROW = 3 * 64 * 2  # bytes of a token's aux states in the tiny target's stores


@pytest.fixture
def prepared(tiny_llama):
    return make_prepared(tiny_llama)


@pytest.fixture(params=[5 * ROW, 64 * ROW, 1 << 21], ids=["chunks of 5 rows", "of 64", "one chunk"])
def chunk_bytes(request, monkeypatch):
    monkeypatch.setattr("dflash_lib.hidden_states.schema.CHUNK_BYTES", request.param)


def through_hdf5(store: HiddenStateStore, index: int) -> dict[str, np.ndarray]:
    """The slow, obvious reading."""
    shard = next(shard for shard, content in store.shards.items() if index in content.sample_index)
    content = store.shards[shard]
    start, stop = content.offsets[content.sample_index.tolist().index(index):][:2].tolist()
    with h5py.File(store.folder / shard_name(shard), locking=False) as file:
        return {stored.name: read_raw(file[stored.name], start, stop, stored.dtype) for stored in store.plan.datasets}


@pytest.mark.parametrize("encoding", ["bf16", "bf16+zstd", "fp8"])
def test_rows_are_those_that_hdf5_reads(tiny_llama, prepared, tmp_path, encoding, chunk_bytes):
    make_store(tmp_path / "store", tiny_llama, prepared, encoding=encoding)
    with HiddenStateStore.open(tmp_path / "store") as store:
        store.read_ahead(store.sample_indices)
        for index in store.sample_indices:
            wanted = through_hdf5(store, index)
            for name, tensor in store.read_encoded(index).tensors.items():
                raw = wanted[name]
                assert np.array_equal(tensor.contiguous().view(torch.uint8).numpy().reshape(-1),
                                      raw.reshape(-1).view(np.uint8)), (index, name)


def test_nothing_but_the_sample_is_read(tiny_llama, prepared, tmp_path, monkeypatch, chunk_bytes):
    make_store(tmp_path / "store", tiny_llama, prepared)
    read = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: read.append(preadv(fd, buffers, offset)) or read[-1])
    with HiddenStateStore.open(tmp_path / "store") as store:
        sample = store.read(3)
        assert sum(read) == len(sample.input_ids) * (store.plan.bytes_per_token + 5), "5 of its id and its mask"


def flip(path: Path, name: str, row: int) -> None:
    """Changes one bit of a row where it lies in the file: HDF5 is not asked, so no checksum follows it."""
    with h5py.File(path, locking=False) as file:
        dataset = file[name]
        number, inside = divmod(row, dataset.chunks[0])
        corner = (number * dataset.chunks[0], *[0] * (dataset.ndim - 1))
        row_bytes = dataset.id.get_type().get_size() * int(np.prod(dataset.shape[1:]))
        where = dataset.id.get_chunk_info_by_coord(corner).byte_offset + inside * row_bytes
    with open(path, "rb+") as file:
        file.seek(where + 1)
        byte = file.read(1)
        file.seek(where + 1)
        file.write(bytes([byte[0] ^ 4]))


@pytest.mark.parametrize("name", [AUX, LAST])
def test_a_flipped_bit_is_seen_by_the_sample_that_has_it(tiny_llama, prepared, tmp_path, name, chunk_bytes):
    make_store(tmp_path / "store", tiny_llama, prepared)
    with HiddenStateStore.open(tmp_path / "store") as store:
        content = store.shards[0]
        flip(tmp_path / "store" / shard_name(0), name, int(content.offsets[2]))
        hit, spared = int(content.sample_index[2]), int(content.sample_index[1])
        with pytest.raises(StoreError, match=f"shard-00000.h5: sample .*{name}: the rows of its sample 2 are "
                                             "not what was written"):
            store.read(hit)
        assert torch.isfinite(store.read(spared).aux_hidden_states).all()


def test_a_store_of_before_is_read_through_hdf5_which_compares_its_chunks(tiny_llama, prepared, tmp_path):
    make_store(tmp_path / "store", tiny_llama, prepared)
    with HiddenStateStore.open(tmp_path / "store") as store:
        before = {index: store.read(index) for index in store.sample_indices}
    for path in (tmp_path / "store").glob("*.h5"):
        with h5py.File(path, "r+") as file:
            for name in (AUX, LAST):
                del file[name].attrs[SAMPLE_HASHES]
    with HiddenStateStore.open(tmp_path / "store") as store:
        for index, wanted in before.items():
            sample = store.read(index)
            assert torch.equal(sample.aux_hidden_states, wanted.aux_hidden_states)
            assert torch.equal(sample.last_hidden_state_prenorm, wanted.last_hidden_state_prenorm)
    flip(tmp_path / "store" / shard_name(0), AUX, 0)
    with HiddenStateStore.open(tmp_path / "store") as store, pytest.raises(StoreError, match="cannot be read"):
        store.read(int(store.shards[0].sample_index[0]))


def test_a_file_that_was_cut_off_while_it_is_open_is_an_error(tiny_llama, prepared, tmp_path):
    make_store(tmp_path / "store", tiny_llama, prepared)
    with HiddenStateStore.open(tmp_path / "store") as store:
        index = int(store.shards[0].sample_index[-1])
        store.read(index)
        os.truncate(tmp_path / "store" / shard_name(0), 2000)
        with pytest.raises(StoreError, match="cannot be read .*the file ends before its rows do"):
            store.read(index)


def test_closed_files_are_closed(tiny_llama, prepared, tmp_path, monkeypatch):
    make_store(tmp_path / "store", tiny_llama, prepared)
    monkeypatch.setattr("dflash_lib.hidden_states.store.NUM_OPEN_FILES", 1)
    with HiddenStateStore.open(tmp_path / "store") as store:
        store.read(0)
        before = len(os.listdir("/proc/self/fd"))
        for index in store.sample_indices * 3:
            store.read(index)
        assert len(os.listdir("/proc/self/fd")) <= before
    assert len(os.listdir("/proc/self/fd")) < before


def test_a_shard_of_many_samples_keeps_its_checksums(tiny_llama, tmp_path):
    """More than the 64 kB that an attribute of HDF5's older formats holds."""
    make_store(tmp_path / "store", tiny_llama, make_prepared(tiny_llama, num_samples=8500, longest=3),
               samples_per_shard=8500, token_budget=4096, target_layer_ids=[0])
    with h5py.File(tmp_path / "store" / shard_name(0), locking=False) as file:
        assert len(file[AUX].attrs[SAMPLE_HASHES]) == 8500
    with HiddenStateStore.open(tmp_path / "store") as store:
        assert len(store.read(8499).input_ids) in (2, 3)
