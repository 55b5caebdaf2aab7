"""convert: from every form of a store into every other that it holds enough for."""

from dataclasses import replace

import pytest

from dflash_lib.hidden_states.formats import open_states
from dflash_lib.hidden_states.formats.convert import ConvertOptions, convert
from dflash_lib.hidden_states.schema import StoreError
from dflash_lib.hidden_states.store import HiddenStateStore
from dflash_lib.hidden_states.verify import verify_store
from tests.hidden_states.rows import make_prepared, make_store


def to(source, destination, kind, **options):
    return convert(open_states(source), destination, ConvertOptions(to=kind, **options), show=False)


FORMS = {"all": {}, "supervised": {"last_state": "supervised"}, "topk": {"last_state": "topk", "topk": 5},
         "none": {"last_state": "none"}}


def made(target, folder, **changes):
    """Rows without a predicting row among them: one token, and nothing supervised but the first."""
    prepared = make_prepared(target)
    mask = prepared.loss_mask.copy()
    start, stop = prepared.offsets[3:5]
    mask[start:stop] = 0
    mask[start] = 1
    prepared = replace(prepared, loss_mask=mask)
    return prepared, make_store(folder, target, prepared, **changes)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("encoding, to_encoding", [("bf16", "bf16+zstd"), ("fp8", "fp8+zstd")])
def test_a_store_keeps_its_form_and_is_the_one_extracted_so(tiny_llama, tmp_path, form, encoding,
                                                            to_encoding):
    made(tiny_llama, tmp_path / "a", encoding=encoding, **FORMS[form])
    made(tiny_llama, tmp_path / "b", encoding=to_encoding, **FORMS[form])
    to(tmp_path / "a", tmp_path / "c", "store", encoding=to_encoding)
    for path in (tmp_path / "b").iterdir():
        assert path.read_bytes() == (tmp_path / "c" / path.name).read_bytes(), path.name


@pytest.mark.parametrize("encoding", ["bf16", "fp8"])
def test_less_of_the_last_state_is_what_an_extraction_stores(tiny_llama, tmp_path, encoding):
    made(tiny_llama, tmp_path / "a", encoding=encoding)
    for wanted in ("supervised", "none"):
        prepared, _ = made(tiny_llama, tmp_path / wanted, encoding=encoding, last_state=wanted)
        to(tmp_path / "a", tmp_path / f"to-{wanted}", "store", last_state=wanted)
        for path in (tmp_path / wanted).iterdir():
            assert path.read_bytes() == (tmp_path / f"to-{wanted}" / path.name).read_bytes(), (wanted, path.name)
        with HiddenStateStore.open(tmp_path / f"to-{wanted}") as store:
            assert all(check.ok for check in verify_store(store, prepared))


@pytest.mark.parametrize("form, wanted", [("supervised", "all"), ("topk", "supervised"), ("none", "all")])
def test_more_than_there_is_cannot_be_made(tiny_llama, tmp_path, form, wanted):
    made(tiny_llama, tmp_path / "a", **FORMS[form])
    with pytest.raises(StoreError, match=f"--last-state {wanted} cannot be made of that. Leave the option out"):
        to(tmp_path / "a", tmp_path / "b", "store", last_state=wanted)
    with pytest.raises(StoreError, match="speculators' layout needs every token's, before the norm"):
        to(tmp_path / "a", tmp_path / "c", "speculators")


@pytest.mark.parametrize("encoding, to_encoding", [("fp8", "bf16"), ("bf16", "fp8")])
def test_a_store_of_rounded_states_is_not_taken_for_an_extracted_one(tiny_llama, tmp_path, encoding,
                                                                     to_encoding):
    """Else a resumed extraction would mix the two."""
    prepared, _ = made(tiny_llama, tmp_path / "a", encoding=encoding)
    _, plan = made(tiny_llama, tmp_path / "b", encoding=to_encoding)
    to(tmp_path / "a", tmp_path / "c", "store", encoding=to_encoding)
    with HiddenStateStore.open(tmp_path / "c") as store:
        assert all(check.ok for check in verify_store(store, prepared))
        assert store.plan.data["converted_from"] == f"store {encoding}" and store.plan.hash != plan.hash
        assert store.plan.differences(plan) == {"data.converted_from": (f"store {encoding}", None)}
