"""Starting again: other parameters are refused with the difference shown, a complete store is left alone, a second job
is kept out while the first one works."""

import json
import os
import shutil
import signal
from dataclasses import asdict, fields

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_lib.hidden_states import extraction
from dflash_lib.hidden_states.plan import ONLY_RECORDED, ExtractionOptions, ExtractionPlan
from dflash_lib.hidden_states.schema import StoreError, shard_name
from dflash_lib.locks import lock_holder
from tests.hidden_states.rows import make_options, make_prepared
from tests.hidden_states.survival.folders import content, num_done, state

OPTIONS = {  # parameter: what is asked for on resume, and how the message shows it
    "target_layer_ids": ({"target_layer_ids": [1, 3, 5]},
                         "target_layer_ids: the store has [1, 3, 4], asked for [1, 3, 5]"),
    "encoding": ({"encoding": "bf16+zstd"}, 'encoding: the store has "bf16", asked for "bf16+zstd"'),
    "last_state": ({"last_state": "none"}, 'last_state: the store has "all", asked for "none"'),
    "topk": ({"last_state": "topk", "topk": 8}, "topk: the store has 0, asked for 8"),
    "token_budget": ({"token_budget": 100}, "token_budget: the store has 96, asked for 100"),
    "samples_per_shard": ({"samples_per_shard": 6}, "samples_per_shard: the store has 5, asked for 6"),
    "threads": ({"threads": 2}, "threads: the store has 1, asked for 2"),
}


def other_weights(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[0]
    tensors[name] = tensors[name] + torch.eye(*tensors[name].shape[-2:])[:1] * 1e-3
    save_file(tensors, path, {"format": "pt"})


def other_config(folder):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 1e-5}))


def other_tokenizer(folder):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": "{{ messages }}"}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")


TARGETS = {"target.weights": other_weights, "target.config": other_config, "target.tokenizer": other_tokenizer}
DERIVED = {"num_hidden_layers", "hidden_size", "schema",  # of the configuration, of the version
           "data.num_samples", "data.num_tokens", "data.num_supervised",  # of the rows
           "target.revision"}  # of a download


@pytest.fixture
def begun(small, tmp_path):
    """A store with one shard missing; it must be as it was in the end."""
    store = tmp_path / "store"
    shutil.copytree(small[2], store)
    (store / shard_name(1)).unlink()
    before = state(store)
    yield store
    assert state(store) == before


def refused(store, model, prepared, logs, dtype="float32", **options) -> str:
    with pytest.raises(StoreError) as caught:
        extraction.start_extraction(store, model, prepared, make_options(**options), logs, dtype=dtype, show=False)
    return str(caught.value)


def test_each_parameter_is_tried():
    assert set(OPTIONS) == {field.name for field in fields(ExtractionOptions)}


def test_each_part_of_the_plan_is_tried(small):
    plan = asdict(ExtractionPlan.load(small[2]))
    flat = {name for name in plan if name not in ("target", "data", "shards", "shard_tokens")}
    flat |= {f"{group}.{name}" for group in ("target", "data") for name in plan[group]}
    assert flat - DERIVED - ONLY_RECORDED == {*OPTIONS, *TARGETS, "target.dtype", "data.fingerprint"}


@pytest.mark.parametrize("changes, shown", OPTIONS.values(), ids=OPTIONS)
def test_another_option_is_refused(begun, small, tiny_llama_folder, tmp_path, changes, shown):
    text = refused(begun, tiny_llama_folder, small[1], tmp_path / "logs", **changes)
    assert shown in text and str(begun) in text and "Choose another store_dir" in text


@pytest.mark.parametrize("name, change", TARGETS.items(), ids=TARGETS)
def test_another_target_is_refused(begun, small, tiny_llama, tiny_llama_folder, tmp_path, name, change):
    model, prepared = tmp_path / "model", small[1]
    shutil.copytree(tiny_llama_folder, model)
    change(model)
    if name == "target.tokenizer":  # rows of the old tokenizer would be refused for themselves
        from dflash_lib.target.loading import load_tokenizer, target_identity

        assert len(load_tokenizer(model))
        rows = small[0].in_memory()
        object.__setattr__(rows, "tokenizer_hash", target_identity(model)["tokenizer"])
        prepared = tmp_path / "prepared"
        rows.save(prepared)
    text = refused(begun, model, prepared, tmp_path / "logs")
    assert f"{name}: the store has " in text and "asked for" in text


def test_another_dtype_is_refused(begun, small, tiny_llama_folder, tmp_path):
    text = refused(begun, tiny_llama_folder, small[1], tmp_path / "logs", dtype="bfloat16")
    assert 'target.dtype: the store has "float32", asked for "bfloat16"' in text


def test_other_rows_are_refused(begun, tiny_llama, tiny_llama_folder, tmp_path):
    make_prepared(tiny_llama, seed=1).save(tmp_path / "prepared")
    text = refused(begun, tiny_llama_folder, tmp_path / "prepared", tmp_path / "logs")
    assert "data.fingerprint: the store has " in text


def test_a_plan_that_was_cut_is_refused_in_words(begun, small, tiny_llama_folder, tmp_path):
    whole = (begun / "plan.json").read_bytes()
    times = (begun / "plan.json").stat()
    (begun / "plan.json").write_bytes(whole[:200])
    text = refused(begun, tiny_llama_folder, small[1], tmp_path / "logs")
    assert "plan.json: " in text and "damaged" in text
    (begun / "plan.json").write_bytes(whole)
    os.utime(begun / "plan.json", ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_complete_store_is_left_alone(server, small, tmp_path):
    store = tmp_path / "store"
    shutil.copytree(small[2], store)
    before = state(store)
    report = server.run("extract", store=store, prepared=small[1], log_dir=tmp_path / "logs", mutate=["no_launch"])
    assert (report["num_shards"], report["num_tokens"]) == (0, 0)
    assert state(store) == before


def test_a_second_job_is_refused_while_the_first_works(server, medium, tmp_path):
    """The first one is stopped in the middle, so it neither works nor ends while the second one asks."""
    store, job = tmp_path / "store", {"prepared": medium[1], "log_dir": tmp_path / "logs"}
    first = server.start("extract", store=store, **job, stop={"op": "replace", "name": "shard-*", "nth": 4})
    assert first.wait() is None
    before = state(store)
    kind, text = server.start("extract", store=store, prepared=medium[1], log_dir=tmp_path / "other").error()
    assert kind == "Locked" and f"process {first.pid} on " in text and "extraction" in text and str(store) in text
    assert state(store) == before and num_done(store) == 3
    assert lock_holder(store)["pid"] == first.pid
    os.kill(first.pid, signal.SIGCONT)
    assert first.result()["num_shards"] == 12
    assert content(store) == content(medium[2])


def test_the_lock_of_a_killed_job_does_not_keep_the_next_one_out(server, medium, tmp_path):
    store, job = tmp_path / "store", {"prepared": medium[1], "log_dir": tmp_path / "logs"}
    first = server.start("extract", store=store, **job, stop={"op": "replace", "name": "shard-*", "nth": 4})
    assert first.wait() is None and first.kill() < 0
    assert (store / ".lock").exists() and lock_holder(store) is None
    server.run("extract", store=store, **job)
    assert content(store) == content(medium[2])
