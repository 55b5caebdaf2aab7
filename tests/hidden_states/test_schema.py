"""schema: the bfloat16 datatype is the real one, raw access equals HDF5's own conversion, bad rows are found."""

import h5py
import numpy as np
import pytest
import torch

from dflash_lib.hidden_states.encode import find_bad
from dflash_lib.hidden_states.schema import (
    AUX,
    AUX_SCALES,
    CHUNK_BYTES,
    FP8,
    FP8_LARGEST,
    LAST,
    LAST_ROWS,
    TOPK_IDS,
    TOPK_LOGITS,
    TOPK_LOGSUMEXP,
    StateDataset,
    StoreError,
    bfloat16_type,
    create_states,
    from_raw,
    get_encoding,
    read_raw,
    state_datasets,
    to_raw,
    write_raw,
)

SPECIAL = [0.0, -0.0, 1.0, -1.5, 3.3895e38, 1e-38, 1e-40, float("inf"), float("-inf")]


@pytest.mark.parametrize("name", ["fp16", "bf16-zstd", ""])
def test_unknown_encodings_are_refused_by_name(name):
    with pytest.raises(StoreError, match=f"'{name}' is not known"):
        get_encoding(name)


@pytest.mark.parametrize("zstd", [False, True])
def test_hdf5s_own_conversion_shows_the_numbers_that_were_stored(tmp_path, zstd):
    states = torch.randn(50, 3, 8, generator=torch.Generator().manual_seed(0))
    states.view(-1)[:len(SPECIAL)] = torch.tensor(SPECIAL)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        dataset = create_states(file, StateDataset("x", torch.bfloat16, (3, 8), zstd=zstd), 50)
        write_raw(dataset, 0, to_raw(states[:20].bfloat16()))
        write_raw(dataset, 20, to_raw(states[20:].bfloat16()))
    with h5py.File(tmp_path / "x.h5") as file:
        dataset = file["x"]
        assert dataset.id.get_type().equal(bfloat16_type()) and dataset.dtype == np.float32
        assert dataset.id.get_type().get_size() == 2
        wanted = states.to(torch.bfloat16)
        assert np.array_equal(dataset[:], wanted.float().numpy())
        assert torch.equal(from_raw(read_raw(dataset, 0, 50)), wanted)
        assert torch.equal(from_raw(read_raw(dataset, 19, 22)), wanted[19:22])
        assert read_raw(dataset, 7, 7).shape == (0, 3, 8)


def test_raw_keeps_nan_and_rounds_to_nearest_even():
    values = torch.tensor([1.0 + 2**-8, 1.0 + 3 * 2**-8, float("nan")]).bfloat16()
    assert from_raw(to_raw(values))[:2].tolist() == [1.0, 1.0 + 2**-6]
    assert torch.isnan(from_raw(to_raw(values))[2])


def test_chunks_are_whole_rows_of_about_two_mebibytes(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        big = create_states(file, StateDataset("big", torch.bfloat16, (5, 576)), 5000)
        wide = create_states(file, StateDataset("wide", torch.bfloat16, (40, 40000)), 3)  # a row exceeds a chunk
        rows, *row = big.chunks
        assert row == [5, 576] and 0.9 * CHUNK_BYTES < 2 * rows * 5 * 576 <= CHUNK_BYTES
        assert -(-5000 // rows) * rows - 5000 < 20, "the last chunk is about full"
        assert wide.chunks == (1, 40, 40000)
        assert create_states(file, StateDataset("small", torch.bfloat16, (5, 576)), 7).chunks == (7, 5, 576)


@pytest.mark.parametrize("settings, names, row_bytes", [
    (("bf16", "all", 0), [AUX, LAST], 61_440),  # Qwen3.6-27B: DESIGN.md's figure
    (("bf16+zstd", "none", 0), [AUX], 51_200),
    (("fp8", "supervised", 0), [AUX, AUX_SCALES, LAST, LAST_ROWS], 25_600 + 20 + 10_240 + 8),
    (("fp8+zstd", "topk", 32), [AUX, AUX_SCALES, LAST_ROWS, TOPK_IDS, TOPK_LOGITS, TOPK_LOGSUMEXP],
     25_600 + 20 + 8 + 8 * 32 + 4)])
def test_datasets_of_each_form_and_the_bytes_of_their_rows(settings, names, row_bytes):
    found = state_datasets(5, 5120, *settings)
    assert [stored.name for stored in found] == names and sum(stored.row_bytes for stored in found) == row_bytes
    assert {stored.name for stored in found if not stored.per_token} == {*names} - {AUX, AUX_SCALES, LAST} | (
        {LAST} & {*names} if settings[1] == "supervised" else set())


@pytest.mark.parametrize("last_state, topk", [("some", 0), ("topk", 0), ("topk", True), ("all", 8), ("none", -1)])
def test_a_form_of_the_last_state_that_cannot_be_is_refused(last_state, topk):
    with pytest.raises(StoreError, match="last_state|topk"):
        state_datasets(5, 64, "bf16", last_state, topk)


def test_hdf5s_own_conversion_shows_every_fp8_code(tmp_path):
    """Up to 240: from 256 on HDF5 would show infinity or NaN, and no code of ours goes there."""
    codes = torch.tensor([c for c in range(256) if c & 0x7F <= 0x77], dtype=torch.uint8).view(FP8)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        dataset = create_states(file, StateDataset("x", FP8, ()), len(codes))
        write_raw(dataset, 0, to_raw(codes), FP8)
    with h5py.File(tmp_path / "x.h5") as file:
        shown = file["x"][:]
        assert file["x"].id.get_type().get_size() == 1 and np.isfinite(shown).all() and shown.max() == FP8_LARGEST
        assert np.array_equal(shown, codes.float().numpy())
        assert torch.equal(from_raw(read_raw(file["x"], 0, len(codes), FP8)).view(torch.uint8), codes.view(torch.uint8))


def test_bad_rows_are_named():
    def bad(values):
        return find_bad({AUX: to_raw(values.bfloat16())})

    states = torch.ones(4, 2, 8)
    assert bad(states) == ""
    states[1, 0] = 0
    states[2, 1, 3] = 0  # a zero inside a row is nothing to worry about
    assert bad(states) == "1 of 8 rows all zero"
    for value in (float("nan"), float("inf"), -float("inf"), -float("nan")):
        states[3, 1, 0] = value
        assert bad(states) == "1 of 8 rows not finite"
    states[3, 1, 0] = -3.3e38  # large, negative, finite
    assert bad(states) == "1 of 8 rows all zero"
