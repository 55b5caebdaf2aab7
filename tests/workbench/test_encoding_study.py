"""encoding_study: every form from one pass is the store that an extraction would have written; costs are its own."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_lib.hidden_states.schema import LAST_STATES, StoreError, shard_name
from dflash_lib.hidden_states.store import HiddenStateStore
from dflash_lib.hidden_states.verify import verify_store
from dflash_lib.report.figures_forms import forms_figure
from dflash_lib.workbench.encoding_study import (
    Form,
    all_forms,
    forms_table,
    forms_to_train,
    measure_forms,
    same_values,
    write_forms,
)
from dflash_lib.workbench.variants import Outcome
from tests.hidden_states.rows import make_options, make_prepared, make_store

FORMS = all_forms(4)


@pytest.fixture(scope="module")
def prepared(tiny_llama):
    return make_prepared(tiny_llama, num_samples=14)


@pytest.fixture(scope="module")
def stores(tiny_llama, prepared, tmp_path_factory) -> list[Path]:
    return write_forms(tiny_llama, prepared, FORMS, make_options(), tmp_path_factory.mktemp("forms"))


@pytest.fixture(scope="module")
def costs(tiny_llama, prepared, stores):
    return measure_forms(tiny_llama, prepared, FORMS, make_options(), stores, num_tokens=100)


def test_every_encoding_with_every_form_of_the_last_state():
    assert len(FORMS) == 16 and len({form.name for form in FORMS}) == 16
    trained = forms_to_train(FORMS)
    assert [form.name for form in trained] == [
        "bf16, last all", "bf16, last top 4", "bf16, last none", "fp8, last all", "fp8, last top 4", "fp8, last none"]


def test_each_is_the_store_that_an_extraction_would_have_written(tiny_llama, prepared, stores, tmp_path):
    for form, store in zip(FORMS, stores, strict=True):
        make_store(tmp_path / store.name, tiny_llama, prepared, encoding=form.encoding, last_state=form.last_state,
                   topk=form.topk)
        for path in sorted((tmp_path / store.name).iterdir()):
            assert path.read_bytes() == (store / path.name).read_bytes(), (form.name, path.name)
        with HiddenStateStore.open(store) as opened:
            assert all(check.ok for check in verify_store(opened, prepared))


def test_what_is_missing_is_written_and_other_settings_are_refused(tiny_llama, prepared, tmp_path):
    forms = [Form("bf16", "all"), Form("fp8", "none")]
    first = write_forms(tiny_llama, prepared, forms, make_options(), tmp_path)
    whole = {path: path.read_bytes() for store in first for path in store.iterdir()}
    (first[1] / shard_name(1)).unlink()
    write_forms(tiny_llama, prepared, forms, make_options(), tmp_path)
    assert {path: path.read_bytes() for path in whole} == whole
    with pytest.raises(StoreError, match="target_layer_ids"):
        write_forms(tiny_llama, prepared, forms, make_options(target_layer_ids=[0, 3, 4]), tmp_path)


def test_costs_are_those_of_the_files(costs, stores, prepared):
    for cost, store in zip(costs, stores, strict=True):
        size = sum(path.stat().st_size for path in store.glob("shard-*.h5"))
        assert cost.bytes_per_token == pytest.approx(size / prepared.num_tokens)
        assert 100 <= cost.measured_tokens <= prepared.num_tokens and cost.write_s > 0 and cost.read_s > 0
    by_name = {cost.form.name: cost for cost in costs}
    for last in LAST_STATES:
        name = f"last {'top 4' if last == 'topk' else last}"
        bf16, fp8 = by_name[f"bf16, {name}"], by_name[f"fp8, {name}"]
        assert 0.001 < bf16.aux_error < 0.003 < 0.015 < fp8.aux_error < 0.04
        assert bf16.aux_error == by_name[f"bf16+zstd, {name}"].aux_error
        assert np.isfinite(bf16.last_error) == (last in ("all", "supervised"))
        assert np.isfinite(bf16.covered) == (last == "topk")
    assert 0 < by_name["bf16, last top 4"].covered < 1


def test_zstd_holds_the_same_values_and_fp8_others(stores):
    place = {form.name: store for form, store in zip(FORMS, stores, strict=True)}
    indices = [0, 5, 13]
    for name in ("bf16+zstd, last all", "bf16, last supervised", "bf16+zstd, last supervised"):
        assert same_values([place["bf16, last all"], place[name]], indices)
    assert same_values([place["bf16, last top 4"], place["bf16+zstd, last top 4"]], indices)
    for name in ("fp8, last all", "bf16, last none", "bf16, last top 4"):
        assert not same_values([place["bf16, last all"], place[name]], indices)


def test_the_table_shows_outcomes_at_all_forms_of_the_same_values(costs):
    rng = np.random.default_rng(0)
    outcomes = [Outcome(name, np.stack([rng.integers(4, 9, (2, 5)), np.full((2, 5), 4)], axis=-1).astype(float),
                        [1.0, 2.0]) for name in ("bf16, last all", "fp8, last none")]
    table = forms_table(costs, outcomes)
    assert len(table) == 16 and "same values" in table.loc[("bf16+zstd", "supervised"), "acceptance length (95 %)"]
    assert table.loc[("bf16", "all"), "difference (prompts)"] == ""
    assert table.loc[("fp8+zstd", "none"), "difference (seeds)"].startswith(("+", "-"))
    assert table.loc[("bf16", "top 4"), "acceptance length (95 %)"] == "not trained"
    assert table.loc[("bf16", "all"), "times smaller"] == "1.00"


def test_the_figure_has_a_bar_for_every_form(costs):
    left, right = forms_figure(costs).axes
    assert [text.get_text() for text in left.get_yticklabels()] == [form.name for form in FORMS]
    assert [bar.get_width() for bar in left.patches] == pytest.approx([cost.bytes_per_token for cost in costs])
    assert "bytes" in left.get_xlabel() and "tokens" in right.get_xlabel()
    assert torch.is_grad_enabled()
