"""The last state where it is no slot: right ones raise no alarm, planted faults are named, in every form."""

from dataclasses import replace

import pytest
import torch

from dflash_lib.hidden_states.audit import audit_states, faults
from dflash_lib.hidden_states.formats import open_states
from dflash_lib.hidden_states.store import TopLogits
from dflash_lib.target.capture import capture_batch
from dflash_lib.target.loading import load_target
from tests.hidden_states.rows import make_prepared, make_store

FORMS = {"fp8": {"encoding": "fp8"}, "supervised": {"last_state": "supervised"},
         "topk": {"last_state": "topk", "topk": 5},
         "fp8 topk": {"encoding": "fp8+zstd", "last_state": "topk", "topk": 3}}


@pytest.fixture(params=["tiny_llama", "tiny_qwen3_5"])
def target(request):
    return request.getfixturevalue(request.param)


def audited(target, source):
    found = audit_states(source, target, 6, scan="all")
    return found.verdict, {finding.fault for finding in found.about_states}


@pytest.mark.parametrize("form", FORMS)
def test_what_was_extracted_is_right(target, tmp_path, form):
    make_store(tmp_path / "store", target, make_prepared(target), **FORMS[form])
    verdict, found = audited(target, open_states(tmp_path / "store"))
    assert not found and verdict.startswith("RIGHT: every slot is as stated, and so is the last state")


@pytest.mark.parametrize("form", ["supervised", "topk"])
def test_states_that_the_target_computed_in_bfloat16_are_right(target, tmp_path, form):
    make_store(tmp_path / "store", load_target(target.path, "bfloat16"), make_prepared(target), **FORMS[form])
    assert not audited(target, open_states(tmp_path / "store"))[1]


def planted(target, tmp_path, form, change):
    make_store(tmp_path / "store", target, make_prepared(target), **FORMS[form])
    source = open_states(tmp_path / "store")
    read = source.store.read
    source.store.read = lambda index: change(read(index))
    return audited(target, source)[1]


def recomputed(target, sample, layer_id):
    return capture_batch(target, [sample.input_ids.tolist()], [layer_id])[0].aux_hidden_states[:, 0].bfloat16()


@pytest.mark.parametrize("form", ["fp8", "supervised"])
def test_another_layer_the_norm_and_other_rows_are_named(target, tmp_path, form):
    def rows(sample):
        return slice(None) if sample.last_rows is None else sample.last_rows

    changes = {
        faults.WRONG_LAYER: lambda s: recomputed(target, s, target.num_layers - 2)[rows(s)],
        faults.POST_NORM: lambda s: target.final_norm(s.last_hidden_state_prenorm.float()).detach().bfloat16(),
        faults.UNRECOGNISED: lambda s: s.last_hidden_state_prenorm.flip(0)}
    for number, (code, change) in enumerate(changes.items()):
        found = planted(target, tmp_path / str(number), form,
                        lambda s, change=change: replace(s, last_hidden_state_prenorm=change(s)))
        assert found == {code}


@pytest.mark.parametrize("change", [
    lambda top: TopLogits(top.ids.roll(1, 0), top.logits.roll(1, 0), top.logsumexp.roll(1, 0)),
    lambda top: TopLogits(top.ids.flip(1), top.logits, top.logsumexp),
    lambda top: TopLogits(top.ids, top.logits * 1.3, top.logsumexp),
    lambda top: TopLogits(top.ids, top.logits, top.logsumexp + 1),
    lambda top: TopLogits(top.ids, top.logits - top.logsumexp[:, None], torch.zeros_like(top.logsumexp))])
def test_logits_of_other_rows_ids_or_scales_are_seen(target, tmp_path, change):
    found = planted(target, tmp_path, "topk", lambda s: replace(s, top_logits=change(s.top_logits)))
    assert found == {faults.TOP_LOGITS}
