"""The report of a run: an index that can be read in a minute, and each notebook as it was executed. Static HTML.

Everything lies in runs/<run_id>/report/: no network, no server and no script is needed to look at it, and the folder
can be copied away. nbconvert's own page templates load MathJax and require.js from a server, so only its "basic" body
is used, under a sheet of our own.
"""

import datetime
import shutil
from html import escape
from pathlib import Path
from typing import Any

import nbformat
from nbconvert import HTMLExporter
from nbconvert.preprocessors.coalescestreams import CoalesceStreamsPreprocessor
from pygments.formatters import HtmlFormatter

from dflash_lib.workbench.parameters import read_parameters_file
from dflash_lib.workbench.runs import RunError, load_record, show, study_names

CSS = Path(__file__).with_name("page.css")
SIGNS = {"<=": "&le;", ">=": "&ge;", "==": "="}


def build_report(run: Path | str) -> Path:
    """Writes the report of the run folder anew and returns its index.html.

    Raises RunError when the folder is no run, or nothing has been executed in it.
    """
    run = Path(run)
    if not (run / "params.yaml").is_file():
        raise RunError(f"{run}: no params.yaml, so this is not a run folder")
    found = {path.stem for folder in ("notebooks", "results") for path in (run / folder).glob("*.*")}
    names = sorted(name for name in found if name[0].isdigit() or name in study_names())
    if not names:
        raise RunError(f"{run}: nothing has been executed in this run yet")
    report, partial = run / "report", run / ".report.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    entries = [_entry(run, name, partial) for name in names]
    write_page(partial / "index.html", f"DFlash run {run.resolve().name}", _index(run, entries))
    shutil.rmtree(report, ignore_errors=True)
    partial.rename(report)
    return report / "index.html"


def _entry(run: Path, name: str, out: Path) -> dict[str, Any]:
    """What the index says of one notebook; its page and its headline figure are written to `out`."""
    record = load_record(run, name)
    entry: dict[str, Any] = {"name": name, "title": name, "record": record, "page": "", "figure": "", "error": ""}
    executed = run / "notebooks" / f"{name}.ipynb"
    if executed.is_file():
        notebook = nbformat.read(executed, as_version=4)
        entry["title"] = _title(notebook, name)
        entry["page"] = f"{name}.html"
        entry["error"] = "" if record is not None else _last_error(notebook)
        # lines printed one by one come as one block each; joined, a long one scrolls in its box (page.css)
        notebook, _ = CoalesceStreamsPreprocessor(enabled=True)(notebook, {})
        body, _ = HTMLExporter(template_name="basic").from_notebook_node(notebook)
        back = '<p><a href="index.html">&larr; the whole run</a></p>'
        write_page(out / entry["page"], entry["title"],
               f"<style>{HtmlFormatter(style='default').get_style_defs('.highlight pre')}</style>{back}"
               f'<article class="card notebook">{body}</article>')
    if record is not None and record["headline_figure"]:
        figure = run / "figures" / name / f"{record['headline_figure']}.png"
        entry["figure"] = f"{name}.png"
        shutil.copyfile(figure, out / entry["figure"])
    return entry


def _title(notebook: nbformat.NotebookNode, name: str) -> str:
    """The first heading of the notebook, else its name."""
    for cell in notebook.cells:
        for line in cell.source.splitlines() if cell.cell_type == "markdown" else []:
            if line.startswith("# "):
                return line[2:].strip()
    return name


def _last_error(notebook: nbformat.NotebookNode) -> str:
    """The error that ended the notebook, as one line; a kernel that died leaves none."""
    errors = [f"{output.ename}: {output.evalue}" for cell in notebook.cells
              for output in cell.get("outputs", []) if output.output_type == "error"]
    if errors and errors[-1].startswith("KeyboardInterrupt:"):
        return "It was interrupted. Run the job again: it goes on from here."
    return errors[-1] if errors else "It has not ended: it is running, was interrupted, or its kernel died."


def _index(run: Path, entries: list[dict[str, Any]]) -> str:
    records = [entry["record"] for entry in entries if entry["record"] is not None]
    checks = [check for record in records for check in record["checks"]]
    good = len(records) == len(entries) and all(check["passed"] for check in checks)
    passed = sum(check["passed"] for check in checks)
    state = f"all {len(checks)} checks passed" if good else f"{passed} of {len(checks)} checks passed"
    finished = max((record["finished"] for record in records), default="")
    when = f"{datetime.datetime.fromisoformat(finished):%d %B %Y, %H:%M}" if finished else "not finished"
    minutes = sum(record["seconds"] for record in records) / 60
    rows = "".join(_row(entry) for entry in entries)
    params = "".join(f"<tr><td><code>{escape(key)}</code></td><td>{escape(show(value))}</td></tr>"
                     for key, value in read_parameters_file(run / "params.yaml").items())
    return f"""<header class="top"><h1>DFlash run <em>{escape(run.resolve().name)}</em></h1>
{pill(state, good)}</header>
<p class="muted">{when} &middot; {minutes:.1f} minutes in the notebooks</p>
<section class="card scroll"><table class="wide"><thead><tr><th>notebook</th><th>outcome</th><th>checks</th>
<th class="number">time</th></tr></thead><tbody>{rows}</tbody></table></section>
{"".join(_card(entry) for entry in entries)}
<section class="card"><h2>Parameters</h2><details><summary>every parameter of the run</summary>
<div class="scroll"><table>{params}</table></div></details></section>
<footer>Made by <code>python -m dflash_lib report</code>. The notebooks as executed lie in the run folder, in
<code>notebooks/</code>; their results in <code>results/</code>.</footer>"""


def _row(entry: dict[str, Any]) -> str:
    record = entry["record"]
    if record is None:
        return (f'<tr><td class="nowrap"><a href="#{entry["name"]}">{escape(entry["title"])}</a></td>'
                f"<td>{escape(entry['error'])}</td><td>{pill('not finished', False)}</td><td></td></tr>")
    passed = sum(check["passed"] for check in record["checks"])
    state = pill(f"{passed}/{len(record['checks'])}", record["passed"])
    return (f'<tr><td class="nowrap"><a href="#{entry["name"]}">{escape(entry["title"])}</a></td>'
            f'<td>{escape(record["outcome"])}</td><td>{state}</td><td class="number">{_seconds(record["seconds"])}</td>'
            "</tr>")


def _card(entry: dict[str, Any]) -> str:
    record = entry["record"]
    link = f'<p><a href="{entry["page"]}">The notebook as executed &rarr;</a></p>' if entry["page"] else ""
    head = f'<section class="card" id="{entry["name"]}"><h2>{escape(entry["title"])}'
    if record is None:
        return (f'{head} {pill("not finished", False)}</h2><div class="error">{escape(entry["error"])}</div>'
                f"{link}</section>")
    failed = [check for check in record["checks"] if not check["passed"]]
    state = pill("passed" if record["passed"] else f"{len(failed)} failed", record["passed"])
    figure = ""
    if entry["figure"]:
        caption = next(f["caption"] for f in record["figures"] if f["name"] == record["headline_figure"])
        figure = (f'<img src="{entry["figure"]}" alt="{escape(caption or record["headline_figure"])}">'
                  f'<p class="caption">{escape(caption)}</p>')
    differences = "".join(
        f"<li><code>{escape(name)}</code>: {escape(show(ours))} in the notebook, {escape(show(theirs))} in the run</li>"
        for name, (theirs, ours) in record["differences"].items())
    return f"""{head} {state}</h2>
<p class="muted">{escape(record["question"])}</p><p class="outcome">{escape(record["outcome"])}</p>
{figure}{checks_html(record["checks"])}{f"<ul>{differences}</ul>" if differences else ""}{link}</section>"""


def checks_html(checks: list[dict[str, Any]]) -> str:
    """Named checks as a table that is folded up when it is long and all is well; "" without any."""
    if not checks:
        return ""
    rows = "".join(
        f'<tr><td>{pill("pass" if c["passed"] else "FAIL", c["passed"])}</td><td>{escape(c["name"])}</td>'
        f'<td class="number">{escape(show(c["value"]))}</td>'
        f'<td class="nowrap">{SIGNS[c["op"]]} {escape(show(c["limit"]))}</td>'
        f'<td class="muted">{escape(c["note"])}</td></tr>' for c in checks)
    opened = " open" if len(checks) <= 10 or not all(c["passed"] for c in checks) else ""
    return (f'<details{opened}><summary>{len(checks)} checks</summary>'
            '<div class="scroll"><table class="wide"><thead><tr><th></th><th>check</th>'
            '<th class="number">measured</th>'
            f"<th>limit</th><th></th></tr></thead><tbody>{rows}</tbody></table></div></details>")


def pill(text: str, good: bool) -> str:
    """A word on green ground, or on red."""
    return f'<span class="pill {"good" if good else "bad"}">{escape(text)}</span>'


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def write_page(path: Path, title: str, body: str) -> None:
    """A whole static page around `body` (HTML), with the one sheet of all pages in it."""
    path.write_text(f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>
{CSS.read_text(encoding="utf-8")}</style></head>
<body><main>
{body}
</main></body></html>
""", encoding="utf-8")
