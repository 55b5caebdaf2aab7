"""verify: a sound store passes, and each planted fault is found under its name."""

import hashlib
import json
import shutil

import h5py
import numpy as np
import pytest
import torch

from dflash_lib.hidden_states.schema import (
    AUX,
    AUX_SCALES,
    ENCODINGS,
    FP8,
    LAST,
    StoreError,
    read_raw,
    shard_name,
    write_raw,
)
from dflash_lib.hidden_states.store import HiddenStateStore
from dflash_lib.hidden_states.verify import NAMES, max_quarantined, require_verified, verify_store
from tests.hidden_states.rows import make_prepared, make_store


@pytest.fixture(scope="module")
def prepared(tiny_llama):
    return make_prepared(tiny_llama)


@pytest.fixture(scope="module", params=ENCODINGS)
def made(request, tiny_llama, prepared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("states") / "store"
    make_store(folder, tiny_llama, prepared, encoding=request.param)
    return folder


@pytest.fixture
def copied(made, tmp_path):
    shutil.copytree(made, tmp_path / "store")
    return tmp_path / "store"


def failed(folder, prepared) -> dict[str, tuple[int, str]]:
    with HiddenStateStore.open(folder) as store:
        checks = verify_store(store, prepared)
    assert [check.name for check in checks] == NAMES
    return {check.name: (check.num_faults, check.first_fault) for check in checks if not check.ok}


def test_a_sound_store_passes(made, prepared):
    seen = []
    with HiddenStateStore.open(made) as store:
        checks = verify_store(store, prepared, seen.append)
        require_verified(checks)
    assert all(check.ok for check in checks) and seen[-1] == prepared.num_tokens


def test_other_rows_are_refused(made, tiny_llama):
    with HiddenStateStore.open(made) as store, pytest.raises(StoreError, match="data.fingerprint"):
        verify_store(store, make_prepared(tiny_llama, seed=1))


def test_a_flipped_byte_in_the_data_is_found(copied, prepared):
    path = copied / shard_name(1)
    with h5py.File(path) as file:
        chunk = file[AUX].id.get_chunk_info(0)
    raw = bytearray(path.read_bytes())
    raw[chunk.byte_offset + chunk.size // 2] ^= 4
    path.write_bytes(raw)
    num, text = failed(copied, prepared)["checksums"]
    assert num >= 1 and "Delete shard-00001.h5 from the store and run 04_extract (or convert) again" in text
    with HiddenStateStore.open(copied) as store, pytest.raises(StoreError, match="checksums"):
        require_verified(verify_store(store, prepared))


@pytest.mark.parametrize("dataset", [AUX, LAST])
@pytest.mark.parametrize("made", ["bf16", "bf16+zstd"], indirect=True)
@pytest.mark.parametrize("value, name", [(0x7FC0, "rows not finite"), (0xFF80, "rows not finite"),
                                         (0x0000, "rows all zero"), (0x8000, "rows all zero")])
def test_nan_infinity_and_zero_rows_are_found_with_their_place(copied, prepared, dataset, value, name):
    with HiddenStateStore.open(copied) as store:
        content = store.shards[0]
    with h5py.File(copied / shard_name(0), "r+") as file:
        row = int(content.offsets[2]) + 1
        raw = read_raw(file[dataset], row, row + 1)
        raw[..., :] = value
        write_raw(file[dataset], row, raw)
    found = failed(copied, prepared)
    assert set(found) == {name, "checksums"}
    assert f"{dataset}, sample {content.sample_index[2]}, token 1" in found[name][1]
    assert found[name][0] == raw[..., 0].size


def test_a_changed_token_and_mask_are_found(copied, prepared):
    with h5py.File(copied / shard_name(0), "r+") as file:
        file["input_ids"][3] += 1
        file["loss_mask"][5] ^= 1
    found = failed(copied, prepared)
    assert set(found) == {"token ids", "loss mask", "checksums"} and found["checksums"][0] == 2
    assert found["token ids"][0] == found["loss mask"][0] == 1


def quarantine(file, num):
    """Moves the last `num` samples of a shard to its list of quarantined ones."""
    start = int(file["offsets"][-1 - num])
    gone = file["sample_index"][-num:].tolist()
    file.attrs["quarantined"] = np.bytes_(json.dumps([{"sample_index": i, "reason": "3 rows all zero"} for i in gone]))
    values = {"offsets": file["offsets"][:-num], "sample_index": file["sample_index"][:-num],
              **{name: file[name][:start] for name in ("input_ids", "loss_mask")}}
    for name, value in values.items():
        del file[name]
        file.create_dataset(name, data=value).attrs["sha256"] = np.bytes_(hashlib.sha256(value).hexdigest())
    for name in (AUX, AUX_SCALES, LAST):
        if name not in file:
            continue
        fp8 = {AUX: FP8, AUX_SCALES: torch.float32} if AUX_SCALES in file else {}
        raw = read_raw(file[name], 0, start, fp8.get(name, torch.bfloat16))
        file[name].id.set_extent(raw.shape)
        file[name].attrs["sha256"] = np.bytes_(hashlib.sha256(raw).hexdigest())
    return gone


def test_a_rare_quarantined_sample_does_not_block_but_many_do(copied, prepared):
    with h5py.File(copied / shard_name(0), "r+") as file:
        quarantine(file, 1)
    with HiddenStateStore.open(copied) as store:
        require_verified(verify_store(store, prepared))
        assert (store.num_samples, store.num_quarantined) == (len(prepared) - 1, 1)
    with h5py.File(copied / shard_name(1), "r+") as file:
        quarantine(file, 1)
    assert failed(copied, prepared)["samples quarantined"][0] == 2


def test_how_many_may_be_quarantined():
    assert [max_quarantined(n) for n in (1, 450, 1999, 2000, 800_000)] == [1, 1, 1, 2, 800]


def test_samples_that_are_missing_or_quarantined_are_counted(copied, prepared):
    with h5py.File(copied / shard_name(2), "r+") as file:
        gone = file["sample_index"][:]
        file.attrs["quarantined"] = np.bytes_(json.dumps(
            [{"sample_index": int(i), "reason": "3 rows all zero"} for i in gone[:2]]))
    assert failed(copied, prepared) == {"samples quarantined": (2, f"sample {gone[0]}: 3 rows all zero")}
    (copied / shard_name(2)).unlink()
    with HiddenStateStore.open(copied, allow_incomplete=True) as store:
        checks = {check.name: check.num_faults for check in verify_store(store, prepared)}
    assert checks["samples missing"] == len(gone) and sum(checks.values()) == len(gone)


def test_last_states_that_are_missing_are_found(copied, prepared):
    with h5py.File(copied / shard_name(0), "r+") as file:
        num_tokens = file[LAST].shape[0]
        del file[LAST]
    assert failed(copied, prepared) == {"last-state rows missing": (num_tokens, f"shard-00000.h5: no dataset {LAST}")}
