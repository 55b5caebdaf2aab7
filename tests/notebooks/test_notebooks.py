"""Every notebook of the pipeline: its form as committed, and its execution in order on a tiny target."""

import ast
import re
import shutil

import pytest
from safetensors.torch import load_file, save_file

from dflash_lib.report.pages import build_report
from dflash_lib.target.loading import load_target
from dflash_lib.workbench.parameters import (
    all_declarations,
    declared_parameters,
    read_notebook,
    read_parameters_file,
    resolve_parameters,
)
from dflash_lib.workbench.pipeline import run_pipeline
from dflash_lib.workbench.runs import REPOSITORY, load_record, notebook_paths
from tests.notebooks.conftest import make_job

NOTEBOOKS = notebook_paths()
PARAMETER_FILES = sorted((REPOSITORY / "notebooks" / "params").glob("*.yaml"))

def test_every_notebook_passes_on_a_tiny_target(tiny_run):
    assert tiny_run.error == ""
    assert [(s.notebook, s.state) for s in tiny_run.stages] == [(path.stem, "passed") for path in NOTEBOOKS]


@pytest.mark.slow
def test_every_notebook_passes_on_a_tiny_hybrid(tiny_qwen3_5_folder, tmp_path):
    folder = shutil.copytree(tiny_qwen3_5_folder, tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    tensors[name][2] = tensors[name][3] * 0.7  # as made, padding's row is zero, and Gated DeltaNet leaves zeros zero
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    run = run_pipeline(make_job(load_target(folder), tmp_path))
    assert run.error == ""
    assert [(s.notebook, s.state) for s in run.stages] == [(path.stem, "passed") for path in NOTEBOOKS]
    evaluated = load_record(run.folder, "07_evaluate")["results"]
    assert evaluated["identical_prompts"] == evaluated["num_prompts"] == 4


@pytest.mark.parametrize("name", [path.stem for path in NOTEBOOKS])
def test_its_results_are_complete(tiny_run, name):
    record = load_record(tiny_run.folder, name)
    assert record is not None, tiny_run.error
    assert record["checks"] and all(check["passed"] for check in record["checks"])
    assert record["results"] and record["question"].endswith("?") and record["outcome"]
    assert record["headline_figure"] in [figure["name"] for figure in record["figures"]]
    assert record["differences"] == {} and set(record["parameters"]) | {"run_dir"} == set(
        declared_parameters(REPOSITORY / "notebooks" / f"{name}.ipynb"))
    assert all(figure["caption"] for figure in record["figures"])


@pytest.mark.parametrize("name", [path.stem for path in NOTEBOOKS])
def test_it_is_a_page_that_can_be_shared(tiny_run, name):
    executed = tiny_run.folder / "notebooks" / f"{name}.ipynb"
    assert executed.stat().st_size < 1_000_000
    images = list((tiny_run.folder / "figures" / name).glob("*.png"))
    assert images and all(image.stat().st_size < 150_000 for image in images)
    for cell in read_notebook(executed)["cells"]:
        text = ["".join(o.get("text", "")) for o in cell.get("outputs", []) if o.get("name") == "stderr"]
        assert text == [], "warnings belong to the reader only when there is something to do"


def test_the_training_page_keeps_one_live_picture(tiny_run):
    cells = read_notebook(tiny_run.folder / "notebooks" / "06_train.ipynb")["cells"]
    training, = [cell for cell in cells if "start_training(run" in "".join(cell["source"])]
    outputs = training["outputs"]
    assert ["image/png" in o["data"] for o in outputs if o["output_type"] == "display_data"] == [True]
    assert {o["output_type"] for o in outputs} == {"display_data", "stream"}


def test_a_store_is_refused_before_the_prepared_rows_are_overwritten():
    """Otherwise prepared/ holds the new rows and states/ the old ones."""
    cells = read_notebook(REPOSITORY / "notebooks" / "04_extract.ipynb")["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert -1 < source.find("= open_plan(") < source.find("prepared.save(") < source.find("start_extraction(store")


def test_the_report_holds_them_all_and_a_second_run_repeats_none(tiny_run, tiny_job):
    html = build_report(tiny_run.folder).read_text()
    assert all(f'href="{path.stem}.html"' in html for path in NOTEBOOKS) and "FAIL" not in html
    assert {stage.state for stage in run_pipeline(tiny_job).stages} == {"current"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_its_form(path):
    notebook = read_notebook(path)
    assert path.read_bytes().endswith(b"}\n") or path.read_bytes().endswith(b"}")
    cells = notebook["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    for cell in code:
        assert cell["outputs"] == [] and cell["execution_count"] is None, "committed without outputs"
    assert cells[0]["cell_type"] == "markdown"
    first = "".join(cells[0]["source"])
    assert re.match(rf"# {path.stem[:2]}\b", first)
    for word in ("Question", "Inputs", "Outputs", "Passes when", "Time"):
        assert f"**{word}" in first, f"the first cell says nothing of {word}"
    assert "parameters" in cells[1]["metadata"].get("tags", [])
    assert len(code) - 1 <= 15, "at most 15 code cells after the parameters"
    for cell in code:
        for node in ast.walk(ast.parse("".join(cell["source"]))):
            assert not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef), \
                f"definitions belong into the library: {ast.unparse(node)[:80]}"
        assert not re.search(r"^\s*[!%]", "".join(cell["source"]), re.M), "no magics: a failing one goes unnoticed"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_its_parameters_are_explained_and_passed_on(path):
    declared = declared_parameters(path)
    assert all(parameter.comment for parameter in declared.values()), "each parameter has a trailing comment"
    calls = [node for cell in read_notebook(path)["cells"] if cell["cell_type"] == "code"
             for node in ast.walk(ast.parse("".join(cell["source"])))
             if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "open_run"]
    assert len(calls) == 1
    passed = {keyword.arg: ast.unparse(keyword.value) for keyword in calls[0].keywords}
    assert passed.pop("__notebook_name__") == repr(path.stem)
    assert passed == {name: name for name in declared}


@pytest.mark.parametrize("path", PARAMETER_FILES, ids=lambda p: p.stem)
def test_shipped_parameter_files_are_valid(path):
    resolve_parameters(read_parameters_file(path), all_declarations(NOTEBOOKS), str(path))


def test_opened_by_hand_a_notebook_is_the_demo():
    """The defaults in the notebooks are the values of demo.yaml, so an empty run_dir differs from it in nothing."""
    declarations = all_declarations(NOTEBOOKS)
    values = read_parameters_file(REPOSITORY / "notebooks" / "params" / "demo.yaml")
    demo = resolve_parameters(values, declarations, "demo.yaml")
    other = {f"{notebook}: {name}": (parameter.default, demo[name]) for notebook, declared in declarations.items()
             for name, parameter in declared.items() if name != "run_dir" and parameter.default != demo[name]}
    assert other == {}, "(the notebook's default, demo.yaml)"
