"""Chunks decoded outside HDF5: the same bytes as HDF5 gives, the same chunks refused, and others left to it."""

import os
import threading

import h5py
import numpy as np
import pyarrow
import pytest
import torch

from dflash_lib.hidden_states import chunk_filters
from dflash_lib.hidden_states.chunk_filters import ChunkFilters, Decoded, RecentChunks, fletcher32
from dflash_lib.hidden_states.schema import (
    AUX,
    FP8,
    LAST,
    ZSTD_FILTER,
    StateDataset,
    StoreError,
    create_states,
    read_raw,
    shard_name,
    write_raw,
)
from dflash_lib.hidden_states.store import HiddenStateStore
from tests.hidden_states.rows import make_prepared, make_store

KINDS = {"bfloat16": (torch.bfloat16, np.uint16), "float8": (FP8, np.uint8), "int32": (torch.int32, np.int32),
         "float32": (torch.float32, np.float32)}


def slow_fletcher32(data: bytes) -> int:
    """The definition, a 16-bit word at a time, with the carry carried around at once."""
    def carried(total: int) -> int:
        while total > 0xFFFF:
            total = (total & 0xFFFF) + (total >> 16)
        return total

    sum1 = sum2 = 0
    for first in range(0, len(data), 2):
        sum1 = carried(sum1 + (data[first] << 8 | (data[first + 1] if first + 1 < len(data) else 0)))
        sum2 = carried(sum2 + sum1)
    return sum2 << 16 | sum1


def states(kind: str, num_rows: int = 37, row_shape: tuple[int, ...] = (3, 64)) -> np.ndarray:
    """Raw values that Zstd can make smaller."""
    generator = np.random.default_rng(0)
    return generator.integers(0, 99, (num_rows, *row_shape)).astype(KINDS[kind][1])


@pytest.fixture
def make_file(tmp_path):
    """A file with a dataset "x" as the library writes compressed ones; its path, what was written, and what it is."""
    def make(kind: str, **more):
        raw = states(kind, **more)
        stored = StateDataset("x", KINDS[kind][0], raw.shape[1:], zstd=True)
        with h5py.File(tmp_path / f"{kind}.h5", "w", libver=("v110", "v110")) as file:
            write_raw(create_states(file, stored, len(raw)), 0, raw, stored.dtype)
        return tmp_path / f"{kind}.h5", raw, stored
    return make


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr("dflash_lib.hidden_states.schema.ZSTD_CHUNK_BYTES", 5 * 3 * 64 * 2)


def decode(filters: ChunkFilters, mask: int, chunk: bytes, first: int, rows: np.ndarray) -> None:
    covered = filters.check(np.frombuffer(chunk, np.uint8), mask, "x")
    filters.copy_rows(filters.decode(covered, mask, "x"), first, rows)


class TestFletcher32:
    @pytest.mark.parametrize("num", [*range(9), 719, 720, 721, 2046, 2047, 2048, 2049, 5000, 8191])
    def test_it_is_the_definitions(self, num):
        for seed in range(3):
            data = np.random.default_rng(seed).integers(0, 256, num, np.uint8)
            assert fletcher32(data) == slow_fletcher32(data.tobytes())

    @pytest.mark.parametrize("value", [0, 1, 0xFF, 0xFE])
    @pytest.mark.parametrize("num", [1, 2, 131070, 131072, 262141, 262144])
    def test_sums_that_are_all_carry(self, value, num):
        data = np.full(num, value, np.uint8)
        assert fletcher32(data) == slow_fletcher32(data.tobytes())

    def test_the_largest_sums_fit(self):
        """Of all ones every sum is a multiple of 65535, which is written as 0xFFFF: an overflow would show."""
        assert fletcher32(np.full(chunk_filters.MOST_BYTES, 0xFF, np.uint8)) == 0xFFFFFFFF
        with pytest.raises(ValueError, match="at most"):
            fletcher32(np.zeros(chunk_filters.MOST_BYTES + 2, np.uint8))

    @pytest.mark.parametrize("num", [1, 2, 3, 257, 4096, 100_001])
    def test_it_is_what_hdf5_writes(self, tmp_path, num):
        data = np.random.default_rng(num).integers(0, 256, num, np.uint8)
        with h5py.File(tmp_path / "x.h5", "w") as file:
            written = file.create_dataset("x", data=data, chunks=(num,), fletcher32=True)
            _, chunk = written.id.read_direct_chunk((0,))
        assert chunk[:-4] == data.tobytes()
        assert int.from_bytes(chunk[-4:], "little") == fletcher32(data) == slow_fletcher32(data.tobytes())


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_are_what_hdf5_reads(make_file, kind):
    path, raw, stored = make_file(kind)
    with h5py.File(path) as file:
        filters, chunk_rows = ChunkFilters.of(file["x"], stored), file["x"].chunks[0]
        assert filters.num_bytes == chunk_rows * stored.row_bytes and 1 < chunk_rows < len(raw) // 2
        for start in range(0, len(raw), chunk_rows):
            mask, chunk = file["x"].id.read_direct_chunk((start, *[0] * (raw.ndim - 1)))
            for first in range(min(chunk_rows, len(raw) - start)):
                rows = np.empty((1, *raw.shape[1:]), raw.dtype)
                decode(filters, mask, chunk, first, rows)
                assert np.array_equal(rows[0], raw[start + first])
            rows = np.empty_like(raw[start:start + chunk_rows])
            decode(filters, mask, chunk, 0, rows)
            assert np.array_equal(rows, raw[start:start + chunk_rows])


@pytest.mark.parametrize("kind", ["bfloat16", "int32"])
@pytest.mark.parametrize("mask", range(8))
def test_filters_that_a_chunk_was_spared_are_not_undone(make_file, kind, mask):
    """Of shuffle, Zstd and checksum each may be left out of a chunk, as its mask says; HDF5 is the judge."""
    path, raw, stored = make_file(kind)
    with h5py.File(path, "r+") as file:
        dataset, chunk_rows = file["x"], file["x"].chunks[0]
        values = raw[:chunk_rows][::-1].copy()
        chunk = values.tobytes()
        if not mask & 1:
            chunk = np.frombuffer(chunk, np.uint8).reshape(-1, stored.dtype.itemsize).T.tobytes()
        if not mask & 2:
            chunk = pyarrow.Codec("zstd").compress(chunk, asbytes=True)
        if not mask & 4:
            chunk += slow_fletcher32(chunk).to_bytes(4, "little")
        dataset.id.write_direct_chunk((0, *[0] * (raw.ndim - 1)), chunk, filter_mask=mask)
    with h5py.File(path) as file:
        assert np.array_equal(read_raw(file["x"], 0, chunk_rows, stored.dtype), values), "HDF5 reads it so"
        info, rows = file["x"].id.get_chunk_info(0), np.empty_like(values)
        assert info.filter_mask == mask
        decode(ChunkFilters.of(file["x"], stored), info.filter_mask, chunk, 0, rows)
        assert np.array_equal(rows, values)


def test_every_flipped_bit_is_refused_by_both(make_file):
    path, _, stored = make_file("bfloat16")
    sound = path.read_bytes()
    with h5py.File(path) as file:
        info, filters = file["x"].id.get_chunk_info(2), ChunkFilters.of(file["x"], stored)
        rows = np.empty((file["x"].chunks[0], *stored.row_shape), np.uint16)
    chunk_rows = len(rows)
    dice = np.random.default_rng(0)
    places = [info.byte_offset, *range(info.byte_offset + info.size - 5, info.byte_offset + info.size),
              *(info.byte_offset + dice.integers(0, info.size, 30)).tolist()]
    for place in places:
        hurt = bytearray(sound)
        hurt[place] ^= 1 << int(dice.integers(8))
        with pytest.raises(OSError, match="^x: its bytes do not fit their checksum"):
            decode(filters, 0, hurt[info.byte_offset:info.byte_offset + info.size], 0, rows)
        path.write_bytes(hurt)
        with h5py.File(path) as file, pytest.raises(OSError):
            read_raw(file["x"], 2 * chunk_rows, 3 * chunk_rows)


def test_a_checksum_of_very_old_hdf5_is_taken_as_hdf5_takes_it(make_file):
    path, raw, stored = make_file("bfloat16")
    content = bytearray(path.read_bytes())
    with h5py.File(path) as file:
        info, filters = file["x"].id.get_chunk_info(0), ChunkFilters.of(file["x"], stored)
    end = info.byte_offset + info.size
    a, b, c, d = content[end - 4:end]
    content[end - 4:end] = bytes((b, a, d, c))
    path.write_bytes(content)
    rows = np.empty((5, *stored.row_shape), np.uint16)
    with h5py.File(path) as file:
        assert np.array_equal(read_raw(file["x"], 0, 5), raw[:5])
    decode(filters, 0, content[info.byte_offset:end], 0, rows)
    assert np.array_equal(rows, raw[:5])


@pytest.mark.parametrize("frame", ["short", "long", "of no stated size", "no frame", "nothing"])
def test_what_fits_its_checksum_and_is_no_chunk_is_refused(make_file, frame):
    path, _, stored = make_file("bfloat16")
    with h5py.File(path) as file:
        filters = ChunkFilters.of(file["x"], stored)
    compress, size = pyarrow.Codec("zstd").compress, filters.num_bytes
    if frame == "of no stated size":
        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, "zstd") as out:  # as a stream, whose length it cannot know ahead
            out.write(bytes(size))
        data = sink.getvalue().to_pybytes()
    else:
        data = {"short": compress(bytes(size - 1), asbytes=True), "long": compress(bytes(size + 1), asbytes=True),
                "no frame": bytes(300), "nothing": b""}[frame]
    chunk = data + slow_fletcher32(data).to_bytes(4, "little")
    with pytest.raises(OSError, match=f"^x: no Zstd frame of {size} bytes"):
        decode(filters, 0, chunk, 0, np.empty((1, *stored.row_shape), np.uint16))


@pytest.mark.parametrize("size", [1, 100, 255, 256, 257, 65_791, 65_792, 100_000, 1 << 24])
def test_sizes_of_zstd_frames_are_read(size):
    frame = pyarrow.Codec("zstd").compress(bytes(size), asbytes=True)
    padded = frame + bytes(18)  # of tiny frames as well
    assert chunk_filters._content_size(memoryview(padded)) == size


@pytest.mark.parametrize("change", ["gzip", "no checksum", "checksum first", "no shuffle", "another type", "chunks"])
def test_other_layouts_are_left_to_hdf5(tmp_path, change):
    stored = StateDataset("x", torch.bfloat16, (3, 64), zstd=True)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        settings.set_chunk((5, 3, 32) if change == "chunks" else (5, 3, 64))
        steps = [settings.set_shuffle, settings.set_fletcher32,
                 lambda: settings.set_filter(ZSTD_FILTER, h5py.h5z.FLAG_MANDATORY, (1,))]
        shuffle, checksum, zstd = steps
        for step in {"gzip": [shuffle, lambda: settings.set_deflate(1), checksum], "no checksum": [shuffle, zstd],
                     "checksum first": [checksum, shuffle, zstd], "no shuffle": [zstd, checksum]}.get(
                         change, [shuffle, zstd, checksum]):
            step()
        kind = (h5py.h5t.STD_I16LE if change == "another type" else
                create_states(file, StateDataset("y", torch.bfloat16, (3, 64)), 1).id.get_type())
        dataset = h5py.Dataset(h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple((20, 3, 64)), settings))
        assert ChunkFilters.of(dataset, stored) is None
        assert ChunkFilters.of(create_states(file, StateDataset("z", torch.bfloat16, (3, 64), zstd=True), 20), stored)


def test_only_few_recent_chunks_are_kept():
    recent = RecentChunks(100)

    def chunk(size: int) -> Decoded:
        return Decoded(memoryview(bytes(size)), True)

    a, b = chunk(40), chunk(50)
    recent.put(("a",), b"1", a)
    recent.put(("b",), b"1", b)
    assert recent.get(("a",), b"1") is a and recent.get(("b",), b"1") is b and recent.used == 90
    assert recent.get(("a",), b"2") is None, "of other bytes in the file"
    recent.get(("a",), b"1")
    recent.put(("c",), b"1", chunk(60))
    assert recent.get(("b",), b"1") is None and recent.get(("a",), b"1") is a, "the one used longest ago goes"
    recent.put(("a",), b"3", chunk(10))
    assert recent.used == 70
    recent.put(("d",), b"1", chunk(101))
    assert recent.get(("d",), b"1") is None and recent.used == 0, "one that is too large is not kept"


@pytest.fixture
def prepared(tiny_llama):
    return make_prepared(tiny_llama)


FORMS = [{"encoding": "bf16+zstd", "last_state": "supervised"}, {"encoding": "fp8+zstd"},
         {"encoding": "fp8+zstd", "last_state": "topk", "topk": 4}]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_compressed_store_is_read_without_hdf5(tiny_llama, prepared, tmp_path, form, threads, monkeypatch):
    make_store(tmp_path / "store", tiny_llama, prepared, **form)
    with monkeypatch.context() as patch, HiddenStateStore.open(tmp_path / "store") as store:
        patch.setattr(ChunkFilters, "of", classmethod(lambda *_: None))
        wanted = {index: store.read_encoded(index).tensors for index in store.sample_indices}
    with HiddenStateStore.open(tmp_path / "store", decode_threads=threads) as store:
        store.read_ahead(store.sample_indices)  # knows the layouts now
        store.close()
        monkeypatch.setattr(h5py, "File", None)
        for index in [*store.sample_indices, *store.sample_indices[::-1]]:
            found = store.read_encoded(index).tensors
            assert list(found) == list(wanted[index])
            for name, tensor in found.items():
                assert tensor.dtype == wanted[index][name].dtype and tensor.shape == wanted[index][name].shape
                assert np.array_equal(*(part.contiguous().view(torch.uint8).numpy() for part in (
                    tensor, wanted[index][name]))), (index, name)


def test_a_store_of_other_filters_is_read_through_hdf5(tiny_llama, prepared, tmp_path, monkeypatch):
    make_store(tmp_path / "store", tiny_llama, prepared, encoding="bf16+zstd")
    with HiddenStateStore.open(tmp_path / "store") as store:
        wanted = {index: store.read(index) for index in store.sample_indices}
    monkeypatch.setattr(ChunkFilters, "of", classmethod(lambda *_: None))
    asked = []
    monkeypatch.setattr("dflash_lib.hidden_states.store.read_raw", lambda *a: asked.append(a) or read_raw(*a))
    with HiddenStateStore.open(tmp_path / "store") as store:
        for index, sample in wanted.items():
            assert torch.equal(store.read(index).aux_hidden_states, sample.aux_hidden_states)
    assert len(asked) == 2 * len(wanted)


@pytest.mark.parametrize("name", [AUX, LAST])
@pytest.mark.parametrize("hurt", ["bit", "cut"])
def test_damage_is_seen_though_the_sample_was_read_before(tiny_llama, prepared, tmp_path, name, hurt):
    """By the same open store, which still has the decoded chunk."""
    make_store(tmp_path / "store", tiny_llama, prepared, encoding="bf16+zstd")
    path = tmp_path / "store" / shard_name(0)
    with HiddenStateStore.open(tmp_path / "store") as store:
        index = int(store.shards[0].sample_index[0])
        store.read(index)
        with h5py.File(path, locking=False) as file:
            info = file[name].id.get_chunk_info(0)
        with open(path, "rb+") as file:
            if hurt == "cut":
                file.truncate(info.byte_offset + info.size // 2)
            else:
                file.seek(info.byte_offset + info.size // 2)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 16]))
        said = "the file ends" if hurt == "cut" else f"{name}, chunk 0: its bytes do not fit their checksum"
        with pytest.raises(StoreError, match=f"shard-00000.h5: sample {index} cannot be read .*{said}.*Delete shard-0"):
            store.read(index)


@pytest.mark.parametrize("form", [{"encoding": "bf16"}, *FORMS[:2], {"encoding": "bf16+zstd", "through": "HDF5"}],
                         ids=str)
def test_threads_share_a_store(tiny_llama, prepared, tmp_path, form, monkeypatch):
    """While files are opened and closed under them all the time, by a third thread too."""
    if form.get("through"):
        monkeypatch.setattr(ChunkFilters, "of", classmethod(lambda *_: None))
    monkeypatch.setattr("dflash_lib.hidden_states.store.NUM_OPEN_FILES", 1)
    make_store(tmp_path / "store", tiny_llama, prepared, **{k: v for k, v in form.items() if k != "through"})
    with HiddenStateStore.open(tmp_path / "store") as store:
        wanted = {index: store.read(index).aux_hidden_states for index in store.sample_indices}
        store.decode_threads = 2
        faults, done = [], threading.Event()

        def read(seed: int) -> None:
            try:
                for index in np.random.default_rng(seed).permutation(store.sample_indices * 10).tolist():
                    if not torch.equal(store.read(index).aux_hidden_states, wanted[index]):
                        faults.append(f"sample {index}: other values")
            except Exception as error:
                faults.append(repr(error))

        def close() -> None:
            while not done.wait(0.001):
                store.close()

        closer, readers = threading.Thread(target=close), [threading.Thread(target=read, args=(n,)) for n in range(3)]
        for thread in (closer, *readers):
            thread.start()
        for thread in readers:
            thread.join()
        done.set()
        closer.join()
        assert faults == []


def test_a_fork_while_another_thread_has_the_lock(tiny_llama, prepared, tmp_path):
    make_store(tmp_path / "store", tiny_llama, prepared, encoding="bf16+zstd")
    store = HiddenStateStore.open(tmp_path / "store", decode_threads=2)
    wanted, has_it, done = store.read(0).aux_hidden_states, threading.Event(), threading.Event()

    def hold() -> None:
        with store._locked():
            has_it.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    has_it.wait()
    child = os.fork()
    if child == 0:
        import signal

        signal.alarm(20)  # rather than for ever
        os._exit(0 if torch.equal(store.read(0).aux_hidden_states, wanted) else 1)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
