"""encode: fp8, the last state at supervised rows, top-k logits: stored, read back, verified."""

import json
from dataclasses import asdict, replace

import h5py
import numpy as np
import pytest
import torch

from dflash_lib.files import canonical_json, hash_value
from dflash_lib.hidden_states.encode import (
    dequantize_fp8,
    encode_sample,
    find_bad,
    num_last_rows,
    predicting_rows,
    quantize_fp8,
    target_topk,
)
from dflash_lib.hidden_states.plan import ExtractionPlan, make_plan
from dflash_lib.hidden_states.schema import (
    AUX,
    AUX_SCALES,
    FP8,
    FP8_LARGEST_CODE,
    LAST,
    LAST_ROWS,
    TOPK_IDS,
    TOPK_LOGITS,
    TOPK_LOGSUMEXP,
    StoreError,
    shard_name,
    to_raw,
    write_raw,
)
from dflash_lib.hidden_states.store import HiddenStateStore
from dflash_lib.hidden_states.verify import verify_store
from dflash_lib.target.capture import capture_batch
from tests.hidden_states.rows import make_options, make_prepared, make_store

FORMS = {"all": {}, "supervised": {"last_state": "supervised"}, "topk": {"last_state": "topk", "topk": 5},
         "none": {"last_state": "none"}}


@pytest.fixture(scope="module")
def prepared(tiny_llama):
    return make_prepared(tiny_llama)


def states(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_fp8_rounds_each_row_to_three_mantissa_bits_and_its_largest_value_to_the_largest_code():
    values = states(50, 4, 96) * torch.tensor([1e-3, 1.0, 30.0, 1e4])[:, None]
    codes, scales = quantize_fp8(values)
    raw = to_raw(codes)
    assert codes.shape == values.shape and scales.shape == (50, 4) and scales.dtype == torch.float32
    assert ((raw & 0x7F).max(axis=-1) == FP8_LARGEST_CODE).all()
    back = dequantize_fp8(codes, scales)
    error = (back - values).abs()
    small = scales[..., None] * 2**-10  # half the distance of the smallest codes
    assert (error <= torch.maximum(values.abs() / 16 * (1 + 1e-6), small)).all()
    assert 0.01 < float(error.norm() / values.norm()) < 0.04
    assert torch.equal(*(t.abs().amax(dim=-1) > 0 for t in (back, values)))


def test_every_code_means_what_pytorch_says_in_any_memory_layout():
    codes = torch.arange(256, dtype=torch.uint8).reshape(16, 4, 4).view(FP8)
    scales = torch.rand(16, 4, generator=torch.Generator().manual_seed(0))
    for change in (lambda t: t, lambda t: t[::3], lambda t: t.transpose(0, 1)):
        found, wanted = dequantize_fp8(change(codes), change(scales)), change(codes).float() * change(scales)[..., None]
        assert found.dtype == torch.float32 and torch.equal(found.view(torch.int32), wanted.view(torch.int32))


def test_fp8_of_rows_that_cannot_be():
    values = states(4, 8)
    values[1] = 0
    values[2, 3], values[3, 0] = float("nan"), float("-inf")
    codes, scales = quantize_fp8(values)
    assert scales[1] == 0 and not scales[2:].isfinite().any() and scales[0] > 0
    for row, wanted in ((0, ""), (1, "1 of 1 rows all zero"), (2, "1 of 1 rows not finite"),
                        (3, "1 of 1 rows not finite")):
        found = find_bad({AUX: to_raw(codes[None, row:row + 1]), AUX_SCALES: to_raw(scales[None, row:row + 1])})
        assert found == wanted, row


def test_rows_that_predict_a_supervised_token_stand_one_before_it():
    assert predicting_rows(np.array([1, 0, 0, 1, 1, 0, 1])).tolist() == [2, 3, 5]  # the first token has no row before
    assert predicting_rows(np.array([1])).tolist() == [] and predicting_rows(np.zeros(3)).tolist() == []


def test_top_k_logits_are_the_targets_own(tiny_llama, prepared):
    ids = prepared.row(3)[0].tolist()
    logits = tiny_llama.model(torch.tensor([ids])).logits[0].detach()
    last = capture_batch(tiny_llama, [ids], [1])[0].last_hidden_state_prenorm
    found, values, logsumexp = target_topk(tiny_llama, last, 7)
    order = logits.argsort(dim=-1, descending=True)[:, :7]
    assert torch.equal(found.long(), order) and found.dtype == torch.int32
    assert torch.allclose(values, logits.gather(1, order), atol=1e-5)
    assert torch.allclose(logsumexp, logits.logsumexp(dim=-1), atol=1e-5)
    empty = target_topk(tiny_llama, last[:0], 7)
    assert [tuple(part.shape) for part in empty] == [(0, 7), (0, 7), (0,)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("encoding", ["bf16", "fp8+zstd"])
def test_every_form_reads_back_as_captured_and_verifies(tiny_llama, prepared, tmp_path, form, encoding):
    plan = make_store(tmp_path / "store", tiny_llama, prepared, encoding=encoding, **FORMS[form])
    with HiddenStateStore.open(tmp_path / "store") as store:
        assert all(check.ok for check in verify_store(store, prepared))
        for shard in plan.shards:
            for batch in shard:
                truth = capture_batch(tiny_llama, [prepared.row(i)[0] for i in batch], [1, 3, 4])
                for index, wanted in zip(batch, truth, strict=True):
                    sample, rows = store.read(index), torch.from_numpy(predicting_rows(prepared.row(index)[1]))
                    aux = wanted.aux_hidden_states
                    if encoding != "bf16":
                        aux = dequantize_fp8(*quantize_fp8(aux))
                    assert torch.equal(sample.aux_hidden_states, aux.bfloat16())
                    last = wanted.last_hidden_state_prenorm
                    if form == "none":
                        assert sample.last_hidden_state_prenorm is sample.last_rows is sample.top_logits is None
                    elif form == "all":
                        assert torch.equal(sample.last_hidden_state_prenorm, last.bfloat16())
                        assert sample.last_rows is None
                    elif form == "supervised":
                        assert torch.equal(sample.last_rows, rows) and sample.top_logits is None
                        assert torch.equal(sample.last_hidden_state_prenorm, last[rows].bfloat16())
                    else:
                        assert torch.equal(sample.last_rows, rows) and sample.last_hidden_state_prenorm is None
                        top = sample.top_logits
                        for stored, own in zip((top.ids, top.logits, top.logsumexp),
                                               target_topk(tiny_llama, last[rows], 5), strict=True):
                            assert torch.equal(stored, own)
        text = store.describe()
    assert {"all": "of every token", "supervised": "rows that predict", "topk": "5 largest logits",
            "none": "not stored"}[form] in text and encoding in text


def test_less_is_stored(tiny_llama, prepared, tmp_path):
    sizes = {}
    for name, changes in {**FORMS, "fp8": {"encoding": "fp8"}}.items():
        plan = make_store(tmp_path / name, tiny_llama, prepared, **changes)
        sizes[name] = plan.num_bytes
        with HiddenStateStore.open(tmp_path / name) as store:
            rows = sum(file[stored.name].shape[0] * stored.row_bytes for shard in store.shards
                       for file in [store.file(shard)] for stored in plan.datasets)
        first = sum(int(prepared.row(i)[1][0]) for i in range(12))  # answers that begin their row have one row less
        assert rows == plan.num_bytes - first * sum(d.row_bytes for d in plan.datasets if not d.per_token)
    assert sizes["none"] < sizes["topk"] < sizes["supervised"] < sizes["all"] and sizes["fp8"] < 0.7 * sizes["all"]


def test_rows_of_the_last_state_are_counted_before_they_come(tiny_llama, prepared, tmp_path):
    masks = [prepared.row(i)[1] for i in range(3)]
    plan = make_plan(tiny_llama.identity, tiny_llama.config, prepared, make_options(last_state="supervised"))
    assert num_last_rows(plan, masks) == sum(len(predicting_rows(mask)) for mask in masks)
    assert num_last_rows(replace(plan, last_state="all"), masks) == sum(map(len, masks))
    assert num_last_rows(replace(plan, last_state="none"), masks) == 0


def test_a_last_state_that_was_not_captured_is_refused(tiny_llama, prepared):
    plan = make_plan(tiny_llama.identity, tiny_llama.config, prepared, make_options(last_state="supervised"))
    ids, mask = prepared.row(0)
    sample, = capture_batch(tiny_llama, [ids], [1, 3, 4], last=False)
    with pytest.raises(StoreError, match="'supervised' needs the last state"):
        encode_sample(tiny_llama, plan, mask, sample)


def test_more_logits_than_the_vocabulary_has_are_refused(tiny_llama, prepared):
    with pytest.raises(StoreError, match="topk: 385 of a vocabulary of 384"):
        make_plan(tiny_llama.identity, tiny_llama.config, prepared, make_options(last_state="topk", topk=385))


@pytest.mark.parametrize("plant, name", [
    (lambda file: file[LAST_ROWS].__setitem__(2, file[LAST_ROWS][2] + 1), "last-state rows missing"),
    (lambda file: file[AUX_SCALES].__setitem__((3, 1), np.nan), "rows not finite"),
    (lambda file: file[AUX_SCALES].__setitem__((3, 1), 0), "rows all zero"),
    (lambda file: write_raw(file[AUX], 3, np.full((1, 3, 64), 0x7F, np.uint8), torch.float8_e4m3fn), "rows not finite"),
    (lambda file: write_raw(file[AUX], 3, np.full((1, 3, 64), 0x80, np.uint8), torch.float8_e4m3fn), "rows all zero"),
    (lambda file: file[TOPK_LOGITS].__setitem__((1, 1), np.inf), "rows not finite"),
    (lambda file: file[TOPK_LOGSUMEXP].__setitem__(1, 3.0), "checksums"),
    (lambda file: file[TOPK_IDS].__setitem__((1, 0), 3), "checksums")])
def test_faults_in_these_datasets_are_found(tiny_llama, prepared, tmp_path, plant, name):
    make_store(tmp_path / "store", tiny_llama, prepared, encoding="fp8", **FORMS["topk"])
    with h5py.File(tmp_path / "store" / shard_name(0), "r+") as file:
        plant(file)
    with HiddenStateStore.open(tmp_path / "store") as store:
        found = {check.name: check.first_fault for check in verify_store(store, prepared) if not check.ok}
    assert {name, "checksums"} == set(found) and "shard-00000.h5" in found[name]


def test_a_quarantined_sample_leaves_no_rows_behind(tiny_llama, prepared, tmp_path, monkeypatch):
    """The shard's last rows are numbered over the samples that are in it."""
    from dflash_lib.hidden_states import batches

    plan = make_plan(tiny_llama.identity, tiny_llama.config, prepared, make_options())
    bad = plan.samples_of(0)[1]

    def encode(target, plan, mask, sample):
        encoded = encode_sample(target, plan, mask, sample)
        if len(mask) == len(prepared.row(bad)[0]) and np.array_equal(mask, prepared.row(bad)[1]):
            encoded.tensors[LAST][0, 0] = float("nan")
        return encoded

    monkeypatch.setattr(batches, "encode_sample", encode)
    make_store(tmp_path / "store", tiny_llama, prepared, **FORMS["supervised"])
    with HiddenStateStore.open(tmp_path / "store") as store:
        assert store.num_quarantined >= 1 and bad not in store.sample_indices
        failed = {check.name for check in verify_store(store, prepared) if not check.ok}
        assert failed <= {"samples quarantined"}
        for index in store.sample_indices:
            assert store.read(index).last_rows.tolist() == predicting_rows(prepared.row(index)[1]).tolist()


def test_a_store_of_before_is_read_and_keeps_its_hash(tiny_llama, prepared, tmp_path):
    """Plans said `last`: true or false."""
    plan = make_store(tmp_path / "store", tiny_llama, prepared)
    value = {name: part for name, part in asdict(plan).items() if name not in ("last_state", "topk")}
    (tmp_path / "store" / "plan.json").write_text(canonical_json({**value, "last": True}))
    before = ExtractionPlan.load(tmp_path / "store")
    assert before.hash == hash_value({**value, "last": True}) != plan.hash and before == plan
    assert not before.differences(plan) and before.last_state == "all"
    for path in (tmp_path / "store").glob("shard-*.h5"):
        with h5py.File(path, "r+") as file:
            file.attrs["plan"] = np.bytes_(before.hash)
    with HiddenStateStore.open(tmp_path / "store") as store:
        assert all(check.ok for check in verify_store(store, prepared))
    assert ExtractionPlan.from_dict({**value, "last": False}).last_state == "none"


def test_splits_are_noted_where_there_were_any(tiny_llama, prepared, tmp_path):
    from dflash_lib.hidden_states.shards import ShardWriter

    plan = make_store(tmp_path / "store", tiny_llama, prepared)
    with h5py.File(tmp_path / "store" / shard_name(0)) as file:
        assert "splits" not in file.attrs
    with HiddenStateStore.open(tmp_path / "store") as store:
        samples = [(i, *store.read_tokens(i), store.read_encoded(i)) for i in plan.samples_of(0)]
    with ShardWriter(tmp_path / "store", plan, 0, [mask for _, _, mask, _ in samples]) as writer:
        writer.note_split([4, 5, 6], [[4], [5, 6]])
        for sample in samples:
            assert writer.add(*sample)
    with h5py.File(tmp_path / "store" / shard_name(0)) as file:
        assert json.loads(file.attrs["splits"]) == [{"batch": [4, 5, 6], "parts": [[4], [5, 6]]}]
