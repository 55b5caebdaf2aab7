"""Every study: its form as committed, refusals, and its execution on the tiny run."""

import ast
import io

import pytest

from dflash_lib import __main__ as command
from dflash_lib.report.pages import build_report
from dflash_lib.workbench.parameters import ParameterError, declared_parameters, read_notebook
from dflash_lib.workbench.runs import STUDIES, RunError, load_record, study_names
from dflash_lib.workbench.studies import run_study

SMALL = {"encodings": {"num_seeds": 1, "study_steps": 2, "study_max_new_tokens": 8, "topk_studied": 4,
                       "trained_forms": ["bf16, last all", "fp8, last none"], "measured_tokens": 200,
                       "min_zstd_gain": 0.1, "default_form": "bf16+zstd, last supervised", "max_loss": 9.0},
         "recipe": {"num_seeds": 2, "study_steps": 2, "study_max_new_tokens": 8, "num_prompts": 3,
                    "factors": ["average"], "max_cost": 9.0, "min_base_acceptance": 1.0}}


def test_every_study_has_small_settings_here():
    assert set(SMALL) == set(study_names())


@pytest.mark.parametrize("name", study_names())
def test_it_passes_on_the_tiny_run_and_is_in_the_report(tiny_run, tiny_job, name):
    prompts = str(tiny_job.params_file.parent / "heldout.jsonl")
    stream = io.StringIO()
    assert run_study(name, tiny_run.folder, {**SMALL[name], "prompt_files": [prompts]}, stream) == ""
    assert f"{name}: passed" in stream.getvalue()
    record = load_record(tiny_run.folder, name)
    assert record["checks"] and record["differences"] == {} and record["question"].endswith("?")
    assert all(figure["caption"] for figure in record["figures"])
    executed = tiny_run.folder / "notebooks" / f"{name}.ipynb"
    assert executed.stat().st_size < 1_000_000
    for cell in read_notebook(executed)["cells"]:
        assert [o for o in cell.get("outputs", []) if o.get("name") == "stderr"] == []
    assert f'href="{name}.html"' in build_report(tiny_run.folder).read_text()


@pytest.mark.parametrize("name", study_names())
def test_its_form(name):
    path = STUDIES / f"{name}.ipynb"
    cells = read_notebook(path)["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    first = "".join(cells[0]["source"])
    assert first.startswith("# Study")
    assert all(f"**{word}" in first for word in ("Question", "Inputs", "Outputs", "Passes when", "Time"))
    assert len(code) - 1 <= 15 and all(p.comment for p in declared_parameters(path).values())
    for cell in code:
        for node in ast.walk(ast.parse("".join(cell["source"]))):
            assert not isinstance(node, ast.FunctionDef | ast.ClassDef), "definitions belong into the library"


def test_what_is_no_study_run_or_parameter_is_refused(tiny_run, tmp_path, capsys):
    with pytest.raises(RunError, match="study 'encoding': no such notebook; there are: encodings, recipe"):
        run_study("encoding", tiny_run.folder, {})
    with pytest.raises(RunError, match="no params.yaml"):
        run_study("encodings", tmp_path, {})
    with pytest.raises(ParameterError, match="seeds: the study encodings has no such parameter; it has: .*num_seeds"):
        run_study("encodings", tiny_run.folder, {"seeds": 1})
    with pytest.raises(ParameterError, match="num_seeds must be int, found 'x'"):
        run_study("encodings", tiny_run.folder, {"num_seeds": "x"})
    assert command.main(["study", "encodings", str(tiny_run.folder), "--set", "num_seeds=x"]) == 2
    assert "num_seeds must be int" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["study", "encodings", str(tiny_run.folder), "--set", "num_seeds"])
