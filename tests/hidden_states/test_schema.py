"""schema: the bfloat16 datatype is the real one, raw access equals HDF5's own conversion, bad rows are found."""

import h5py
import numpy as np
import pytest
import torch

from dflash_lib.hidden_states.schema import (
    CHUNK_BYTES,
    ENCODINGS,
    StoreError,
    bfloat16_type,
    bytes_per_token,
    create_states,
    find_bad_rows,
    from_raw,
    get_encoding,
    read_raw,
    to_raw,
    write_raw,
)

SPECIAL = [0.0, -0.0, 1.0, -1.5, 3.3895e38, 1e-38, 1e-40, float("inf"), float("-inf")]


@pytest.mark.parametrize("name", ["fp8", "bf16-zstd", ""])
def test_unknown_encodings_are_refused_by_name(name):
    with pytest.raises(StoreError, match=f"'{name}' is not known"):
        get_encoding(name)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_hdf5s_own_conversion_shows_the_numbers_that_were_stored(tmp_path, encoding):
    states = torch.randn(50, 3, 8, generator=torch.Generator().manual_seed(0))
    states.view(-1)[:len(SPECIAL)] = torch.tensor(SPECIAL)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        dataset = create_states(file, "x", states.shape, ENCODINGS[encoding])
        write_raw(dataset, 0, to_raw(states[:20]))
        write_raw(dataset, 20, to_raw(states[20:]))
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
    values = torch.tensor([1.0 + 2**-8, 1.0 + 3 * 2**-8, float("nan")])
    assert from_raw(to_raw(values))[:2].tolist() == [1.0, 1.0 + 2**-6]
    assert torch.isnan(from_raw(to_raw(values))[2])


def test_chunks_are_whole_rows_of_about_two_mebibytes(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        big = create_states(file, "big", (5000, 5, 576), ENCODINGS["bf16"])
        wide = create_states(file, "wide", (3, 40, 40000), ENCODINGS["bf16"])  # a row alone exceeds a chunk
        rows, *row = big.chunks
        assert row == [5, 576] and 0.9 * CHUNK_BYTES < 2 * rows * 5 * 576 <= CHUNK_BYTES
        assert -(-5000 // rows) * rows - 5000 < 20, "the last chunk is about full"
        assert wide.chunks == (1, 40, 40000)
        assert create_states(file, "small", (7, 5, 576), ENCODINGS["bf16"]).chunks == (7, 5, 576)
    assert bytes_per_token(5, 5120, last=True) == 61440  # Qwen3.6-27B
    assert bytes_per_token(5, 576, last=False) == 5760


def test_bad_rows_are_named():
    states = torch.ones(4, 2, 8)
    assert find_bad_rows(to_raw(states)) == ""
    states[1, 0] = 0
    states[2, 1, 3] = 0  # a zero inside a row is nothing to worry about
    assert find_bad_rows(to_raw(states)) == "1 of 8 rows all zero"
    for bad in (float("nan"), float("inf"), -float("inf"), -float("nan")):
        states[3, 1, 0] = bad
        assert find_bad_rows(to_raw(states)) == "1 of 8 rows not finite"
    states[3, 1, 0] = -3.3e38  # large, negative, finite
    assert find_bad_rows(to_raw(states)) == "1 of 8 rows all zero"
