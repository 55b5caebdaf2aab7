import json

import numpy as np
import pytest
import torch

from dflash_lib.report.style import label, new_figure, styled
from dflash_lib.workbench import runs
from dflash_lib.workbench.runs import CheckFailed, RunError, load_record, open_run, write_params


@pytest.fixture
def folder(tmp_path):
    write_params(tmp_path, {"steps": 3, "ids": None})
    return tmp_path


def opened(folder, **parameters):
    return open_run(__notebook_name__="02_b", run_dir=str(folder), **parameters)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(RunError, match="not a run folder"):
        opened(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_tables_show_their_texts_whole(folder):
    run, note = opened(folder), "a note of more than fifty characters, the end of which says what to do"
    run.check("a check", 1, 2, "<=", note)
    assert note in run.checks_table()._repr_html_() and note in repr(run.checks_table())


def test_the_cell_wins_and_differences_are_printed_and_recorded(folder, capsys):
    run = opened(folder, steps=4, ids=None, other="x")
    assert run.params == {"steps": 4, "ids": None, "other": "x"}
    printed = capsys.readouterr().out
    assert "steps = 4 here, 3 in the run's params.yaml" in printed and "ids" not in printed
    run.finish(question="q", outcome="o")
    record = load_record(folder, "02_b")
    assert record["differences"] == {"steps": [3, 4], "other": ["(not set)", "x"]}
    assert record["parameters"] == {"steps": 4, "ids": None, "other": "x"}


def test_a_relative_path_is_the_repositorys_and_a_model_may_be_a_hub_id(folder, tmp_path, monkeypatch):
    from dflash_lib.target import hub

    asked = []
    monkeypatch.setattr(hub, "find_target", lambda name, revision: asked.append((name, revision)) or tmp_path / "found")
    run = opened(folder, model="org/name@abc", conversations="data/none.jsonl")
    assert run.resolve("org/name@abc") == tmp_path / "found" and asked == [("org/name", "abc")]
    assert run.resolve("data/none.jsonl") == runs.REPOSITORY / "data" / "none.jsonl"
    assert run.resolve("other/name") == runs.REPOSITORY / "other" / "name"  # only the model is looked up on the hub
    assert runs.input_path("model", "org/name") == tmp_path / "found" and asked[1:] == [("org/name", None)]
    assert runs.input_path("model", "a/b/c") == runs.REPOSITORY / "a" / "b" / "c"  # no hub id
    assert runs.input_path("model", "data/demo_prompts.jsonl") == runs.REPOSITORY / "data" / "demo_prompts.jsonl"
    assert runs.input_path("model", str(tmp_path)) == tmp_path and len(asked) == 2


def test_checks_hold_or_not_and_nan_never_passes(folder):
    run = opened(folder)
    assert run.check("at most", 1.0, 1.0)
    assert run.check("at least", np.float32(2), 1, op=">=")
    assert run.check("equal", torch.tensor(0.0), 0.0, op="==")
    assert not run.check("too much", 2, 1, note="why")
    for op in runs.OPERATORS:
        assert not run.check(f"nan {op}", float("nan"), 1.0, op=op)
    with pytest.raises(ValueError, match="op must be one of"):
        run.check("other", 1, 2, op="<")
    with pytest.raises(ValueError, match="recorded already"):
        run.check("equal", 1, 2)
    assert list(run.checks_table()["result"]) == ["pass"] * 3 + ["FAIL"] * 4


def test_results_are_written_before_a_failed_check_raises(folder):
    run = opened(folder)
    run.check("passes", 1, 1)
    run.check("error of the states", 0.5, 0.1, note="per token")
    with pytest.raises(CheckFailed, match=r"02_b: 1 of 2 checks failed: error of the states: 0.5 <= 0.1 does NOT hold "
                                          r"\(per token\)"):
        run.finish(question="q", outcome="o", results={"x": 1})
    record = load_record(folder, "02_b")
    assert not record["passed"] and record["results"] == {"x": 1}
    assert record["checks"][1] == {"name": "error of the states", "value": 0.5, "op": "<=", "limit": 0.1,
                                   "passed": False, "note": "per token"}


def test_results_become_plain_json_or_are_refused(folder):
    run = opened(folder)
    table = run.finish(question="q", outcome="o", results={
        "a": np.int64(3), "b": np.ones((1, 2)), "c": torch.tensor(2.5), "d": float("inf"), "e": {"f": (1, None)}})
    text = (folder / "results" / "02_b.json").read_text()
    assert json.loads(text)["results"] == {"a": 3, "b": [[1.0, 1.0]], "c": 2.5, "d": "inf", "e": {"f": [1, None]}}
    assert dict(table["value"]) == {"a": "3", "c": "2.5", "d": "inf"}
    with pytest.raises(TypeError, match="results.x: set"):
        run.finish(question="q", outcome="o", results={"x": {1}})


def test_missing_results_name_what_to_run(folder, capsys):
    run = opened(folder)
    with pytest.raises(RunError, match="no results of 01_a yet. Run that notebook first: .*--only 01_a"):
        run.results("01_a")
    earlier = open_run(__notebook_name__="01_a", run_dir=str(folder))
    earlier.check("c", 2, 1)
    with pytest.raises(CheckFailed):
        earlier.finish(question="q", outcome="o", results={"x": 7})
    assert run.results("01_a") == {"x": 7}
    assert "a check of 01_a failed" in capsys.readouterr().out


@styled
def small_figure():
    figure, (left, right) = new_figure(1, 2)
    left.plot([1, 2], [3, 5])
    right.imshow(np.random.default_rng(0).random((40, 40)))
    label(left, "step", "loss (nats)", "Loss")
    return figure


def test_a_figure_is_a_small_png_that_shows_itself(folder):
    run = opened(folder)
    shown = run.figure(small_figure(), "loss", "falls")
    assert shown.path == folder / "figures" / "02_b" / "loss.png"
    data, metadata = shown._repr_png_()
    assert metadata == {"alt": "falls"} and data.startswith(b"\x89PNG") and len(data) < 150_000
    run.figure(small_figure(), "loss", "falls again")
    with pytest.raises(ValueError, match="'other' was not saved; saved: .'loss'"):
        run.finish(question="q", outcome="o", headline_figure="other")
    run.finish(question="q", outcome="o", headline_figure="loss")
    assert load_record(folder, "02_b")["figures"] == [{"name": "loss", "caption": "falls again"}]


def test_paths_do_not_depend_on_the_working_directory(folder, monkeypatch, tmp_path_factory):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    run = opened(folder)
    assert run.resolve("data/x.jsonl") == runs.REPOSITORY / "data" / "x.jsonl"
    assert run.resolve("/abs/x") == runs.REPOSITORY.__class__("/abs/x")
    assert run.path("states", "plan.json") == folder / "states" / "plan.json"


def test_opened_by_hand_without_run_dir_starts_a_new_demo_run(tmp_path, monkeypatch):
    from tests.workbench.fake_notebooks import write_notebook

    notebooks = tmp_path / "notebooks"
    write_notebook(notebooks, "01_a", "steps: int = 3\n")
    write_notebook(notebooks, "02_b", "block_size: int = 8\n")
    (notebooks / "params").mkdir()
    (notebooks / "params" / "demo.yaml").write_text("steps: 5\n")
    monkeypatch.setattr(runs, "REPOSITORY", tmp_path)
    monkeypatch.setattr(runs.notebook_paths, "__defaults__", (notebooks,))
    run = open_run(__notebook_name__="01_a", run_dir="", steps=5)
    assert run.folder.parent == tmp_path / "runs" and run.folder.name.startswith("demo-by-hand-")
    assert (run.folder / "params.yaml").read_text() == "steps: 5\nblock_size: 8\n"
    assert run.differences == {}
