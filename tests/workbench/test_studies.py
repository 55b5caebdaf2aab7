"""studies: one that ends without results takes nothing from an earlier one."""

import io
import json

import pytest

from dflash_lib.workbench import runs, studies
from dflash_lib.workbench.parameters import read_notebook
from dflash_lib.workbench.studies import run_study
from tests.workbench.fake_notebooks import finishing, opening, write_notebook


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Runs a fake study, whose cell `trouble` is Python; returns its error, its page's text, its results."""
    folder, run = tmp_path / "studies", tmp_path / "run"
    monkeypatch.setattr(runs, "STUDIES", folder)
    monkeypatch.setattr(studies, "STUDIES", folder)
    write_notebook(folder, "toy", 'trouble: str = "None"  # an expression\n', opening("toy", "trouble"),
                   "print(eval(trouble))", finishing('{"said": trouble}'))
    run.mkdir()
    runs.write_params(run, {})

    def execute(trouble: str):
        error = run_study("toy", run, {"trouble": trouble}, io.StringIO())
        results = run / "results" / "toy.json"
        return (error, str(read_notebook(run / "notebooks" / "toy.ipynb")["cells"]),
                json.loads(results.read_text())["results"]["said"] if results.exists() else None)

    execute.unfinished = run / "notebooks" / "unfinished" / "toy.ipynb"
    return execute


def test_a_study_that_fails_leaves_an_earlier_one_as_it_was(study):
    error, page, said = study("1 / 0")
    assert "ZeroDivisionError" in error and "ZeroDivisionError" in page and said is None
    assert not study.unfinished.exists(), "nothing earlier was there to be kept"
    error, page, said = study("6 * 7")
    assert error == "" and "42" in page and said == "6 * 7"

    error, page, said = study("2 / 0")
    assert "ZeroDivisionError" in error and str(study.unfinished) in error
    assert "42" in page and "ZeroDivisionError" not in page and said == "6 * 7"
    assert "ZeroDivisionError" in str(read_notebook(study.unfinished)["cells"])

    error, page, said = study("6 * 9")
    assert error == "" and "54" in page and said == "6 * 9" and not study.unfinished.exists()
