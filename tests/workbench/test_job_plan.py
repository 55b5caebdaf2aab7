"""`run --plan`: the numbers of the real job, what would stop it, and that nothing is touched."""

import json

import pytest
import torch
import yaml

from dflash_lib import __main__ as command
from dflash_lib.files import write_json
from dflash_lib.target.errors import TargetError
from dflash_lib.workbench import job_plan
from dflash_lib.workbench.job_plan import plan_job
from dflash_lib.workbench.parameters import read_parameters_file
from dflash_lib.workbench.runs import REPOSITORY, notebook_paths, runs_folder, write_params
from dflash_lib.workbench.variants import train_options
from tests.hidden_states.rows import make_prepared, make_store

REAL = REPOSITORY / "notebooks" / "params" / "qwen3_6_27b_8gpu.yaml"


@pytest.fixture
def job(tiny_llama_folder, tmp_path):
    """A small job whose data is not counted, with round rates; changes go in by keyword."""
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}) + "\n")

    def write(**changes):
        values = {"model": str(tiny_llama_folder), "conversations": str(tmp_path / "none.jsonl"), "max_samples": 100,
                  "heldout_prompts": str(tmp_path / "prompts.jsonl"), "max_length": 72, "num_aux_layers": 3,
                  "num_workers": 2, "token_budget": 144, "encoding": "bf16", "last_state": "all",
                  "block_size": 4, "mask_token_id": 3, "draft_vocab_size": None,
                  "steps": 200, "batch_samples": 2, "extract_tokens_s": 1.0, "train_tokens_s": 4.0, "load_s": 360.0,
                  "disk_mb_s": 1e6, "runs_dir": str(tmp_path / "runs"), **changes}
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(values))
        return tmp_path / "job.yaml"

    return write


def stage(plan, name):
    return next(s for s in plan.stages if s.notebook == name)


def test_hours_and_bytes_by_hand(job):
    """100 rows of 72 tokens are 7,200: an hour for two processes of one token/s. 200 steps of 2 rows are 28,800 tokens:
    two hours at 4 a second. Loading takes a tenth of an hour, twice in 04, whose audit
    needs the target, too. A token takes (3 + 1) x 64 x 2 bytes."""
    plan = plan_job(job())
    assert [s.notebook for s in plan.stages] == [path.stem for path in notebook_paths()]
    assert stage(plan, "04_extract").hours == pytest.approx(1.2, abs=1e-4)
    assert stage(plan, "04_extract").writes == 7200 * 512
    assert stage(plan, "06_train").hours == pytest.approx(2.1, abs=1e-4)
    assert stage(plan, "06_train").reads == pytest.approx(28_800 * 512 + 246_592 * 4)
    assert "4 epochs of training" in plan.text() and "none.jsonl: no such file" in plan.text()


def test_less_is_stored_where_less_is_asked_for(job):
    """What is supervised is not known without the data: then it is as much as it can be, all of it."""
    for changes, each in (({"last_state": "none", "kl_weight": 0.0}, 3 * 128),
                          ({"last_state": "supervised"}, 4 * 128 + 8),
                          ({"encoding": "fp8", "last_state": "none", "kl_weight": 0.0}, 3 * 68),
                          ({"last_state": "topk", "topk": 5}, 3 * 128 + 8 + 5 * 8 + 4)):
        assert stage(plan_job(job(**changes)), "04_extract").writes == 7200 * each
    with pytest.raises(ValueError, match="last_state: 'some' is not known"):
        plan_job(job(last_state="some"))


def test_more_validation_samples_than_samples_would_stop_it(job):
    assert "validation_samples: 8 of 8 samples" in plan_job(job(max_samples=8, validation_samples=8)).text()
    assert "leave none to train on" not in plan_job(job(max_samples=9, validation_samples=8)).text()


def test_a_drafter_to_begin_from_that_is_not_there_would_stop_it(job, tmp_path):
    missing = job(init_from=str(tmp_path / "nowhere"))
    assert "init_from: " in plan_job(missing).text() and "no such drafter folder" in plan_job(missing).text()
    assert "init_from: " not in plan_job(job()).text()
    begun = tmp_path / "runs" / "job" / "drafter" / "checkpoints" / "step-00000004"
    begun.mkdir(parents=True)
    assert "init_from: " not in plan_job(missing).text(), "it has weights of its own by now"


def test_rates_of_an_earlier_run_take_the_stated_ones_place(job, tmp_path):
    folder = tmp_path / "runs" / "job"
    write_params(folder, {})
    write_json(folder / "results" / "04_extract.json", {"results": {"tokens_per_second": 4.0, "num_workers": 2}})
    plan = plan_job(job())
    assert stage(plan, "04_extract").hours == pytest.approx(0.7, abs=1e-4)
    assert "measured in job (04_extract)" in plan.text()
    other = tmp_path / "runs" / "other"
    write_params(other, {})
    write_json(other / "results" / "06_train.json", {"results": {"tokens_per_second": 8.0, "num_workers": 1}})
    plan = plan_job(job(rates_from=str(other)))
    assert stage(plan, "06_train").hours == pytest.approx(1.1, abs=1e-4)


def test_nothing_is_touched(job, tmp_path, capsys):
    path = job()
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    assert command.main(["run", str(path), "--plan"]) == 1, "the conversations are missing"
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before
    printed = capsys.readouterr().out
    assert "nothing was executed or written" in printed and "What would stop it" in printed


def test_a_job_that_nothing_stops(job, tmp_path, capsys):
    (tmp_path / "c.jsonl").write_text("".join(
        f'{{"id": "{i}", "messages": [{{"role": "user", "content": "What is rain?"}}, '
        '{"role": "assistant", "content": "A battery is a device that stores electrical energy."}]}\n'
        for i in range(9)))
    path = job(conversations=str(tmp_path / "c.jsonl"), validation_samples=8)
    assert command.main(["run", "--plan", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "data: 9 samples" in printed and "Nothing that can be seen from here would stop it" in printed


def obstacles(path):
    return "\n".join(plan_job(path).obstacles)


def test_what_would_stop_it(job, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="mask_token_id 999 is no row"):
        plan_job(job(mask_token_id=999))
    monkeypatch.setattr(job_plan, "free_memory", lambda *_: 2_000_000)
    found = obstacles(job(batch_samples=8))
    assert "06_train: takes" in found and "02_layout" not in found
    monkeypatch.setattr(job_plan.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 3_000_000}))
    assert "the hidden states take 3.69 MB, 3.00 MB are free" in obstacles(job())
    monkeypatch.setattr(job_plan.os, "access", lambda *_: False)
    assert "runs_dir: " in obstacles(job()) and "cannot be written" in obstacles(job())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "PyTorch sees no CUDA device" in obstacles(job(device="cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "num_processes: 3 train, each on a GPU of its own; PyTorch sees 2" in obstacles(
        job(device="cuda", num_processes=3, batch_samples=3))
    assert "num_processes" not in obstacles(job(device="cuda", num_processes=2))


def test_training_processes_share_the_work(job, monkeypatch):
    """Four read the target's files each and take a quarter of the time; a step's two rows are one in each of two."""
    one, two, four = (stage(plan_job(job(num_processes=n, batch_samples=8)), "06_train") for n in (1, 2, 4))
    assert four.hours - 0.1 == pytest.approx((one.hours - 0.1) / 4) and four.resources == "4 on cpu"
    assert four.reads - one.reads == pytest.approx(3 * 246_592 * 4)
    assert two.memory < one.memory and stage(plan_job(job(accumulate=2)), "06_train").memory < one.memory
    monkeypatch.setattr(job_plan, "free_memory", lambda *_: 2 * one.memory)
    assert "06_train" not in obstacles(job())
    assert "06_train: takes" in obstacles(job(num_processes=8, batch_samples=8)), "main memory"



def test_a_device_and_a_folder_that_are_none(job, tmp_path):
    assert "device 'gpu' cannot be used" in obstacles(job(device="gpu"))
    (tmp_path / "runs").write_text("")
    assert "runs_dir: " in obstacles(job()) and "is a file" in obstacles(job())


@pytest.mark.parametrize(("changes", "words"), [
    ({"max_length": 0}, "max_length must be >= 2"), ({"num_workers": 0}, "num_workers must be"),
    ({"token_budget": -1}, "token_budget must be"),
    ({"decode_tokens_s": 0.0}, "decode_tokens_s must be > 0"), ({"extract_tokens_s": 0.0}, "extract_tokens_s"),
    ({"disk_mb_s": -1.0}, "disk_mb_s must be > 0"), ({"steps": 0}, "steps"), ({"batch_samples": 0}, "batch_samples"),
    ({"slots_per_anchor": 0}, "slots_per_anchor"), ({"num_gpus": 0}, "num_gpus"), ({"gpus": []}, "gpus must"),
    ({"gpus": [0, 0]}, "gpus must name different devices"), ({"gpus": [-1]}, "gpus must"),
    ({"gpus": 8}, "gpus must be"), ({"gpus": ["a"]}, "gpus must be list[int] | None"),
    ({"max_samples": 0}, "max_samples"),
    ({"num_aux_layers": 99}, "num_aux_layers"), ({"target_layer_ids": [9, 1]}, "target_layer_ids"),
    ({"encoding": "int4"}, "encoding"), ({"dtype": "float31"}, "dtype"), ({"too_long": "shorten"}, "too_long"),
    ({"thinking": "yes"}, "thinking"), ({"draft_vocab_size": 385}, "draft_vocab_size 385"), ({"modle": "x"}, "modle")])
def test_values_that_cannot_be(changes, words, job, capsys):
    """One line, no traceback, and the exit code of what the user can put right."""
    assert command.main(["run", "--plan", str(job(**changes))]) == 2
    assert words in capsys.readouterr().err


def test_files_that_are_no_parameters(tmp_path, capsys):
    for text in ("a: [", "- 1\n", "\x00"):
        (tmp_path / "bad.yaml").write_text(text)
        assert command.main(["run", "--plan", str(tmp_path / "bad.yaml")]) == 2
        assert "bad.yaml" in capsys.readouterr().err


def test_broken_conversations_stop_the_job_not_the_plan(job, tmp_path):
    (tmp_path / "c.jsonl").write_text("{")
    assert "conversations: " in obstacles(job(conversations=str(tmp_path / "c.jsonl")))


def test_some_of_the_notebooks(job, capsys):
    plan = plan_job(job(), start="04_extract", stop="06_train")
    assert [s.notebook for s in plan.stages] == ["04_extract", "05_statistics", "06_train"]
    assert [s.notebook for s in plan_job(job(), only="02_layout").stages] == ["02_layout"]
    assert command.main(["run", "--plan", str(job()), "--to", "08"]) == 2
    assert "--to 08: no such notebook" in capsys.readouterr().err


def test_drawn_slots_and_the_average_are_counted(job):
    """Half the drafter's bytes for less: 7 slots against 1 of a head of 384 rows, a copy of the drafter."""
    wide = {"block_size": 8, "anchors_per_sample": 60, "kl_weight": 1.0, "average": 0.0}
    one, all_slots = (stage(plan_job(job(slots_per_anchor=n, **wide)), "06_train").memory for n in (1, 7))
    assert all_slots - one > 2 * 2 * 60 * 6 * 384 * 4  # logits and their gradient at least, of two conversations
    averaged = stage(plan_job(job(slots_per_anchor=7, **wide | {"average": 0.9})), "06_train").memory
    assert averaged > all_slots


def test_finished_shards_are_room_for_the_store(job, tmp_path, monkeypatch):
    monkeypatch.setattr(job_plan.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1_000_000}))
    (tmp_path / "states").mkdir()
    (tmp_path / "states" / "shard-00000.h5").write_bytes(bytes(3_000_000))
    assert "the hidden states take" not in obstacles(job(store_dir=str(tmp_path / "states")))


def test_a_store_that_was_begun_with_other_settings_would_stop_it(job, tmp_path, tiny_llama):
    store = tmp_path / "states"
    make_store(store, tiny_llama, make_prepared(tiny_llama), target_layer_ids=[1, 2, 4], token_budget=144,
               samples_per_shard=8)
    same = {"store_dir": str(store), "samples_per_shard": 8, "target_layer_ids": [1, 2, 4]}
    assert "store_dir" not in obstacles(job(**same))
    found = obstacles(job(**{**same, "encoding": "fp8", "samples_per_shard": 9}))
    assert 'encoding: the store has "bf16", asked for "fp8"' in found and "samples_per_shard: the store has 8" in found
    (store / "plan.json").write_text("{")
    assert "plan.json: damaged" in obstacles(job(**same))
    assert "plan.json" not in "".join(plan_job(job(**same), start="06_train").obstacles)


def test_a_target_that_is_not_here(job, tmp_path):
    with pytest.raises(TargetError, match="--plan downloads nothing. Give a folder .* model_config"):
        plan_job(job(model="Org/model"))
    config = str(REPOSITORY / "data" / "configs" / "qwen3.6-27b")
    assert "HF_HUB_OFFLINE=1" in obstacles(job(model="Org/model", model_config=config, mask_token_id=248070))
    with pytest.raises(FileNotFoundError, match="to plan without it all the same, set max_samples"):
        plan_job(job(max_samples=None))


def test_the_real_job(capsys):
    """51,200 bytes a token before compression, and every stage fits a GPU of 96 GB; the published recipe's anchors and
    the public drafter's shape: 1.730 B parameters, four float32 each, beside an embedding and a head in bfloat16."""
    plan = plan_job(REAL)
    extract, train = stage(plan, "04_extract"), stage(plan, "06_train")
    assert extract.writes == pytest.approx(50_000 * 3072 * 51_200 / 1.4)
    assert 53.79e9 < extract.memory < 96e9
    attention, mlp = 5120 * 128 * (32 + 8 + 8 + 32), 3 * 5120 * 17_408
    static = 4 * 4 * (5 * (attention + mlp) + 5 * 5120 * 5120) + 2 * 2 * 248_320 * 5120
    assert static < train.memory < 0.6 * 96e9, "the whole target would take 49 GB more"
    assert train.resources == "8 on cuda" and train.reads > 8 * 53.79e9
    assert extract.hours > 50_000 * 3072 / (8 * 2500) / 3600
    assert 6 * 50_000 * 3072 / 10_000 / 3600 / 8 < train.hours < 6 * 50_000 * 3072 / 10_000 / 3600 / 4
    params = read_parameters_file(REAL)
    assert params["anchors_per_sample"] == 512 and params["slots_per_anchor"] == params["block_size"] == 16
    assert params["steps"] * params["batch_samples"] == 6 * params["max_samples"], "six epochs"
    options = train_options(params)
    assert options.layer_types == ("sliding_attention",) * 4 + ("full_attention",) and options.sliding_window == 2048
    assert (options.num_heads, options.num_kv_heads, options.head_dim) == (32, 8, 128)
    assert plan.folder == runs_folder({"runs_dir": "/scratch/dflash/runs"}) / REAL.stem
    text = plan.text()
    assert "MLP 17.11 B" in text and "multi-token prediction 0.425 B" in text
    assert "6 epochs on 8 GPUs with 10 TB of disk" in text
    assert ": E: 6 extract while 2 train" in text
    assert "The workbench does as C: extract with all, then train, in 8 processes." in text
    assert "tapped layers [1, 16, 31, 46, 61]" in text and "26.9 B parameters, 53.79 GB in bfloat16" in text
    assert "conversations: /scratch/dflash/conversations.jsonl: no such file" in text
    assert command.main(["run", "--plan", str(REAL)]) == 1
    assert "07_evaluate: " not in capsys.readouterr().out, "decoding takes the 27B's layers"


def test_the_shipped_configuration_is_the_tested_one():
    ours = REPOSITORY / "data" / "configs" / "qwen3.6-27b" / "config.json"
    assert ours.read_bytes() == (REPOSITORY / "tests" / "data" / "qwen3.6-27b" / "config.json").read_bytes()


def test_a_device_that_holds_no_values(job):
    assert any("device 'meta'" in text for text in plan_job(job(device="meta")).obstacles)


def test_held_out_prompts_are_read_before_hours_are_spent(job, tmp_path):
    """None takes all; a row that 07_evaluate would refuse stops the job now."""
    rows = [{"id": str(i), "messages": [{"role": "user", "content": "hello"}]} for i in range(3)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"eval_max_new_tokens": 3600, "decode_tokens_s": 1.0}
    loading = 0.1
    for asked, taken in ((None, 3), (2, 2), (24, 3)):
        plan = plan_job(job(eval_prompts=asked, **changes))
        assert stage(plan, "07_evaluate").hours == pytest.approx(loading + 2 * taken, abs=1e-4)
        assert "heldout_prompts" not in "".join(plan.obstacles)
    with open(tmp_path / "prompts.jsonl", "a") as file:
        file.write('{"id": "3", "messages": "hello"}\n')
    assert any("heldout_prompts" in text and "line 4" in text for text in plan_job(job(eval_prompts=None)).obstacles)
    assert not any("heldout_prompts" in text for text in plan_job(job(eval_prompts=None), stop="06_train").obstacles)
