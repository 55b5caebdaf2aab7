import re

import nbformat
import pytest

from dflash_lib.files import write_json
from dflash_lib.report.pages import build_report
from dflash_lib.report.style import new_figure, styled
from dflash_lib.workbench.runs import CheckFailed, RunError, open_run, write_params


@styled
def figure():
    drawn, axis = new_figure(height=1.5)
    axis.plot([1, 2])
    return drawn


def executed(folder, name, *outputs, title="# One & only"):
    notebook = nbformat.v4.new_notebook()
    cell = nbformat.v4.new_code_cell("show(1)", outputs=list(outputs))
    notebook.cells = [nbformat.v4.new_markdown_cell(f"{title}\n\nText with $x^2$ and `code`."), cell]
    (folder / "notebooks").mkdir(exist_ok=True)
    nbformat.write(notebook, folder / "notebooks" / f"{name}.ipynb")


@pytest.fixture
def run_folder(tmp_path):
    """A run with a notebook that passed, one whose check failed, and one that a kernel error ended."""
    write_params(tmp_path, {"steps": 3, "model": "<b>bold</b>"})
    run = open_run(__notebook_name__="01_a", run_dir=str(tmp_path), steps=4)
    run.figure(figure(), "loss", "A caption")
    run.check("error < limit", 0.001234567, 0.1)
    run.finish(question="Is it <right>?", outcome="Yes & more.", headline_figure="loss")
    executed(tmp_path, "01_a", nbformat.v4.new_output("stream", text="<script>alert(1)</script>"))
    run = open_run(__notebook_name__="02_b", run_dir=str(tmp_path))
    run.check("small enough", 7, 5)
    with pytest.raises(CheckFailed):
        run.finish(question="And this?", outcome="No.")
    error = nbformat.v4.new_output("error", ename="ValueError", evalue="no such <store>")
    executed(tmp_path, "03_c", error, title="##")
    return tmp_path


def test_the_index_says_what_happened(run_folder):
    index = build_report(run_folder)
    assert index == run_folder / "report" / "index.html"
    html = index.read_text()
    for part in ("One &amp; only", "Is it &lt;right&gt;?", "Yes &amp; more.", "A caption", "error &lt; limit",
                 "0.00123457", "&le; 0.1", "1 of 2 checks passed", "small enough", "FAIL", "1 failed",
                 "ValueError: no such &lt;store&gt;", "not finished", "&lt;b&gt;bold&lt;/b&gt;",
                 "<code>steps</code>: 4 in the notebook, 3 in the run"):
        assert part in html, part
    assert 'href="01_a.html"' in html and 'href="03_c.html"' in html and 'href="02_b.html"' not in html


def test_pages_need_no_network_and_every_link_leads_somewhere(run_folder):
    report = build_report(run_folder).parent
    pages = sorted(report.glob("*.html"))
    assert [page.name for page in pages] == ["01_a.html", "03_c.html", "index.html"]
    for page in pages:
        html = page.read_text()
        assert "<script" not in html and "<link" not in html and "@import" not in html and "http" not in html
        for target in re.findall(r'(?:href|src)="([^"]+)"', html):
            if target.startswith("#"):
                assert f'id="{target[1:]}"' in html or "anchor-link" in html
            elif not target.startswith("data:"):
                assert (report / target).is_file(), (page.name, target)


def test_a_green_run_is_called_green_and_a_rebuild_keeps_nothing_old(run_folder):
    (run_folder / "results" / "02_b.json").unlink()
    (run_folder / "notebooks" / "03_c.ipynb").unlink()
    (run_folder / "report").mkdir()
    (run_folder / "report" / "old.html").write_text("old")
    index = build_report(run_folder)
    assert "all 1 checks passed" in index.read_text() and "FAIL" not in index.read_text()
    assert sorted(p.name for p in index.parent.iterdir()) == ["01_a.html", "01_a.png", "index.html"]


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(RunError, match="not a run folder"):
        build_report(tmp_path)
    write_params(tmp_path, {})
    with pytest.raises(RunError, match="nothing has been executed"):
        build_report(tmp_path)
    write_json(tmp_path / "results" / "notes.json", {})
    with pytest.raises(RunError, match="nothing has been executed"):
        build_report(tmp_path)


def test_progress_lines_are_one_block_that_scrolls(run_folder):
    lines = [nbformat.v4.new_output("stream", text=f"train: {step}/90 steps\n") for step in range(90)]
    executed(run_folder, "01_a", *lines)
    page = (build_report(run_folder).parent / "01_a.html").read_text()
    assert page.count("output_stdout output_text") == 1 and "train: 89/90 steps" in page
    assert ".output_stdout pre { max-height" in page
