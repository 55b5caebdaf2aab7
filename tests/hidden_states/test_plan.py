"""plan: a pure function of rows and options, kept as JSON, differences shown."""

from dataclasses import replace

import pytest

from dflash_lib.hidden_states.plan import ExtractionPlan, make_plan
from dflash_lib.hidden_states.schema import StoreError
from dflash_lib.target.loading import TargetError
from tests.hidden_states.rows import make_options, make_prepared


@pytest.fixture
def plan(tiny_llama) -> ExtractionPlan:
    return make_plan(tiny_llama.identity, tiny_llama.config, make_prepared(tiny_llama), make_options())


@pytest.mark.parametrize("changes, what", [
    ({"encoding": "fp9"}, "encoding: 'fp9'"), ({"last_state": "topk"}, "topk: 0"), ({"topk": 4}, "topk: 4"),
    ({"token_budget": 0}, "token_budget"), ({"threads": 1.5}, "threads"),
    ({"samples_per_shard": 0}, "samples_per_shard")])
def test_bad_options_are_refused(changes, what):
    with pytest.raises(StoreError, match=what):
        make_options(**changes)


def test_layer_ids_and_tokenizer_must_fit_the_target(tiny_llama, tiny_qwen3_5):
    prepared = make_prepared(tiny_llama)
    with pytest.raises(TargetError, match="6 layers"):
        make_plan(tiny_llama.identity, tiny_llama.config, prepared, make_options(target_layer_ids=[1, 6]))
    other = {**tiny_llama.identity, "tokenizer": "f" * 64}
    with pytest.raises(StoreError, match="another tokenizer"):
        make_plan(other, tiny_llama.config, prepared, make_options())


def test_every_sample_is_planned_once_in_batches_within_the_budget(tiny_llama, plan):
    lengths = make_prepared(tiny_llama).lengths
    assert sorted(i for shard in range(3) for i in plan.samples_of(shard)) == list(range(12))
    assert [len(plan.samples_of(shard)) for shard in range(3)] == [5, 5, 2]
    for shard, num_tokens in zip(plan.shards, plan.shard_tokens, strict=True):
        assert num_tokens == sum(lengths[i] for batch in shard for i in batch)
        assert all(max(lengths[i] for i in batch) * len(batch) <= 96 for batch in shard)
    order = [lengths[i] for shard in range(3) for i in plan.samples_of(shard)]
    assert order == sorted(order, reverse=True)
    assert plan.bytes_per_token == 2 * 64 * 4 and plan.num_bytes == sum(lengths) * plan.bytes_per_token
    assert 0 <= plan.padding_share(lengths.tolist()) < 0.2


def test_a_plan_survives_its_file_and_a_damaged_one_is_refused(tmp_path, plan):
    plan.save(tmp_path)
    assert ExtractionPlan.load(tmp_path) == plan and ExtractionPlan.load(tmp_path).hash == plan.hash
    text = (tmp_path / "plan.json").read_text()
    for bad in (text[:100], "[]", text.replace('"schema":1', '"schema":2'), text.replace('"threads"', '"treads"'),
                text.replace('"bf16"', '"fp9"')):
        (tmp_path / "plan.json").write_text(bad)
        with pytest.raises(StoreError):
            ExtractionPlan.load(tmp_path)
    with pytest.raises(StoreError, match="no hidden-state store"):
        ExtractionPlan.load(tmp_path / "nowhere")


def test_an_update_of_transformers_and_appended_lines_are_recorded_and_refuse_nothing(tiny_llama, plan):
    prepared = replace(make_prepared(tiny_llama), source_sha256="1" * 64)
    later = make_plan({**tiny_llama.identity, "transformers": "99.0"}, tiny_llama.config, prepared, make_options())
    assert (later.target["transformers"], later.data["source_sha256"]) == ("99.0", "1" * 64)
    assert plan.differences(later) == {}


def test_differences_name_what_differs_and_not_the_folders_name(tiny_llama, plan):
    prepared = make_prepared(tiny_llama)
    renamed = make_plan({**tiny_llama.identity, "name": "moved"}, tiny_llama.config, prepared, make_options())
    assert plan.differences(renamed) == {}
    other = make_plan({**tiny_llama.identity, "weights": "x"}, tiny_llama.config, make_prepared(tiny_llama, seed=1),
                      make_options(target_layer_ids=[1, 2], threads=2))
    assert set(plan.differences(other)) == {"target.weights", "target_layer_ids", "threads", "data.fingerprint",
                                            "data.num_tokens", "data.num_supervised"}
    assert plan.differences(other)["target_layer_ids"] == ([1, 3, 4], [1, 2])
