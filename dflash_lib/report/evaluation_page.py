"""What `evaluate` leaves behind: results.json, the figures as PNG, and one static page that shows them."""

import base64
import datetime
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from dflash_lib.conversations.rendering import TemplateOptions
from dflash_lib.decoding.acceptance import Interval, acceptance_length, by_slot
from dflash_lib.decoding.comparison import Comparison, Evaluation, NamedDrafter
from dflash_lib.decoding.side_by_side import SideBySide, fastest, record, showpiece
from dflash_lib.files import write_json
from dflash_lib.report import figures_decoding as decoding_figures
from dflash_lib.report import figures_evaluation as figures
from dflash_lib.report.pages import checks_html, pill, write_page
from dflash_lib.workbench.runs import OPERATORS, to_json

COLUMNS = ("drafter", "block size", "acceptance length", "paired difference", "tokens a second", "speed-up",
           "ms an output token", "drafter\u2019s share", "best block size", "speed-up there", "identical", "near-ties",
           "different")


class OutputError(ValueError):
    """A folder that results cannot be written to; the message says what to do."""


def claim_folder(out: Path | str) -> Path:
    """Makes `out` unless it is there, and tries to write into it: better now than when everything is measured.

    Raises OutputError for a folder that holds something (an earlier evaluation is never overwritten), OSError for one
    that cannot be written.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    if (out / "results.json").exists():
        raise OutputError(f"{out}: holds an evaluation already; give another folder, or remove this one")
    if any(out.iterdir()):
        raise OutputError(f"{out}: is not empty; give a new folder")
    probe = out / ".writable"
    probe.write_text("")
    probe.unlink()
    return out


def evaluation_checks(comparison: Comparison, dtype: str) -> list[dict[str, Any]]:
    """Named checks, as notebooks record them. Rounding is told from a fault by its size in float32 only, so in other
    dtypes answers that differ are listed and not judged."""
    checks = []

    def check(name: str, value: float, op: str, limit: float, note: str = "") -> None:
        checks.append({"name": name, "value": value, "op": op, "limit": limit, "note": note,
                       "passed": bool(OPERATORS[op](value, limit))})

    for e in comparison.evaluations:
        for size, speed in e.speeds.items():
            note = f"{speed.num_identical} of {speed.num_prompts} identical, {speed.num_near_ties} near-ties"
            if dtype == "float32":
                check(f"{e.name}, block size {size}: answers unlike plain decoding's, near-ties apart",
                      speed.num_different, "==", 0, note)
        if e.walk is not None:
            check(f"{e.name}: training\u2019s walk against decoding, relative", e.walk.difference, "<=", e.walk.limit,
                  f"{e.walk.num_prompts} prompts compared, {e.walk.num_other} decoded to another text")
    return checks


def rendering_notes(drafters: Sequence[NamedDrafter], rendering: TemplateOptions) -> list[str]:
    """What about the drafters a reader must know to believe the figures: an unknown target, another rendering, a
    convention that engines do not serve."""
    notes = []
    for drafter in drafters:
        if not drafter.drafter.target:
            notes.append(f"{drafter.name}: the export does not say which target it was trained for; only shapes were "
                         "compared with this one's.")
        if drafter.drafter.config.sample_from_anchor:
            notes.append(f"{drafter.name}: sample_from_anchor: the anchor's slot drafts, too, so a verify step has "
                         f"{drafter.block_size} tokens. vLLM 0.32 refuses such a drafter by name, and an engine that "
                         "ignored the key would draft every token one place late.")
        trained = None if drafter.rows is None else drafter.rows.options.template
        if trained is not None and (trained.thinking, trained.template_kwargs) != (
                rendering.thinking, rendering.template_kwargs):
            notes.append(f"{drafter.name}: trained on text rendered with thinking {trained.thinking!r} and "
                         f"{trained.template_kwargs}, evaluated with {rendering.thinking!r} and "
                         f"{rendering.template_kwargs}.")
    return notes


def rows(comparison: Comparison) -> list[list[str]]:
    """One row a drafter, as text, in the order of COLUMNS."""
    table = []
    for e in comparison.evaluations:
        speed, best = e.speeds[e.block_size], fastest(e.speeds)
        difference = comparison.differences.get(e.name)
        table.append([
            e.name, str(e.block_size), str(e.acceptance), "" if difference is None else _signed(difference),
            f"{speed.tokens_per_second:.1f} (plain {speed.plain_tokens_per_second:.1f})", str(speed.speedup),
            f"{1000 * speed.output_token_s:.1f} (plain {1000 * speed.plain_step_s:.1f})",
            f"{100 * speed.draft_share:.0f} %", str(best.block_size), str(best.speedup),
            f"{speed.num_identical} of {speed.num_prompts}", str(speed.num_near_ties), str(speed.num_different)])
    return table


def _signed(interval: Interval) -> str:
    return f"{interval.value:+.2f} ({interval.low:+.2f} to {interval.high:+.2f})"


def summary(comparison: Comparison) -> str:
    """The table for a terminal: one block a drafter, and acceptance by set below it."""
    lines = []
    for e, row in zip(comparison.evaluations, rows(comparison), strict=True):
        lines.append(row[0])
        lines += [f"  {column:<20} {value}" for column, value in zip(COLUMNS[1:], row[1:], strict=True) if value]
        lines += [f"  {'set ' + name:<20} {interval}" for name, interval in e.by_set.items()]
    return "\n".join(lines)


def write_evaluation(out: Path, comparison: Comparison, tokenizer, about: dict[str, Any],
                     notes: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Writes figures, index.html and, last, results.json below `out`; returns the checks.

    about: what was evaluated and how, shown as it is and kept in results.json (needs the key "dtype"). notes: sentences
    that the reader should see first.
    """
    checks = evaluation_checks(comparison, about["dtype"])
    drawn = _figures(comparison)
    (out / "figures").mkdir()
    for name, (figure, _) in drawn.items():
        figure.savefig(out / "figures" / f"{name}.png")
    page = _page(out, comparison, tokenizer, about, checks, {name: text for name, (_, text) in drawn.items()}, notes)
    write_page(out / "index.html", "Evaluation", page)
    write_json(out / "results.json", to_json(_results(comparison, about, checks, notes)))
    return checks


def _figures(comparison: Comparison) -> dict[str, tuple[Any, str]]:
    """Figure and caption by file name; those of one drafter begin with its number."""
    evaluations, results = comparison.evaluations, comparison.results
    drawn: dict[str, tuple[Any, str]] = {}
    if len(evaluations) > 1:
        drawn["drafters"] = (figures.drafters_figure({e.name: e.acceptance for e in evaluations},
                                                     comparison.differences),
                             "Acceptance length of each drafter on the same prompts, decoded for real, with 95 % "
                             "bootstrap intervals over prompts; differences are paired.")
        drawn["slots"] = (decoding_figures.slots_figure({e.name: e.slots for e in evaluations}), "Acceptance by slot.")
    drawn["sets"] = (figures.sets_figure({e.name: e.by_set for e in evaluations}),
                     "Acceptance length by prompt set, with 95 % intervals.")
    drawn["histogram"] = (figures.histogram_figure({e.name: e.histogram for e in evaluations}),
                          "How many drafts a verify step accepts.")
    for number, e in enumerate(evaluations, 1):
        steps = e.steps(results)
        lengths = [acceptance_length(of_prompt) if of_prompt else None for of_prompt in steps]
        walked = {name: by_slot([step for of_prompt in walk for step in of_prompt])
                  for name, walk in e.walked.items()}
        drawn |= {f"{number}-{name}": entry for name, entry in {
            "proposers": (decoding_figures.proposers_figure(*e.proposers()),
                          "Beside toys, walked along the target\u2019s greedy answers: what a table, the prompt, or "
                          "the drafter without the right states would score."),
            "slots": (decoding_figures.slots_figure(walked), "Acceptance by slot, toys beside it."),
            "text": (figures.text_figure(e.positions, e.repetition, comparison.repetitiveness, lengths),
                     "Where in the answer, and in what kind of text, drafts are accepted."),
            "block_sizes": (decoding_figures.block_size_figure(e.promised, list(e.speeds.values())),
                            "Acceptance and cost of every block size up to the trained one."),
            "speed": (decoding_figures.speed_figure(results, fastest(e.speeds),
                                                    (e.name, fastest(e.speeds).block_size)),
                      "Speed with and without drafter, at the faster block size, in turns on this machine.")}.items()}
        if e.walk is not None:
            drawn[f"{number}-walk"] = (figures.walk_figure(e.walk),
                                       "Acceptance as training counts it, on the answers that were decoded.")
    return drawn


def _results(comparison: Comparison, about: dict[str, Any], checks: list[dict[str, Any]],
             notes: Sequence[str]) -> dict[str, Any]:
    return {"about": about, "passed": all(check["passed"] for check in checks), "checks": checks, "notes": list(notes),
            "drafters": [_drafter(comparison, e) for e in comparison.evaluations], "unlike_plain": comparison.leaves,
            "prompts": [{"set": r.prompt.prompt_set, "id": r.prompt.id, "kind": r.prompt.kind,
                         "prompt_ids": r.prompt.token_ids, "token_ids": r.plain.token_ids,
                         "finish_reason": r.plain.finish_reason, "seconds": r.plain.seconds, "repetitiveness": share}
                        for r, share in zip(comparison.results, comparison.repetitiveness, strict=True)]}


def _drafter(comparison: Comparison, e: Evaluation) -> dict[str, Any]:
    proposers, leads = e.proposers()
    difference = comparison.differences.get(e.name)
    return {
        "name": e.name, "path": str(e.path), "block_size": e.block_size,
        "sample_from_anchor": e.sample_from_anchor, "target_layer_ids": list(e.layer_ids),
        "knows_target": e.knows_target, "acceptance_length": vars(e.acceptance),
        "difference_to_first": None if difference is None else vars(difference), "slots": asdict(e.slots),
        "accepted_histogram": e.histogram, "by_set": {name: vars(i) for name, i in e.by_set.items()},
        "by_kind": {name: vars(i) for name, i in e.by_kind.items()}, "by_position": [asdict(b) for b in e.positions],
        "by_repetition": [asdict(b) for b in e.repetition],
        "walked": {name: vars(i) for name, i in proposers.items()},
        "leads": {name: vars(i) for name, i in leads.items()},
        "block_sizes": [{**vars(b), "speedup": b.speedup} for b in e.promised],
        "best_block_size": fastest(e.speeds).block_size,
        "speeds": [{**asdict(s), "break_even": s.break_even, "draft_share": s.draft_share}
                   for s in e.speeds.values()],
        "walk_against_decoding": None if e.walk is None else {
            **asdict(e.walk), "difference": e.walk.difference},
        "rejected": e.rejected, "rejected_examples": e.rejected_examples,
        "decoded": [{"set": r.prompt.prompt_set, **record(r, e.way)} for r in comparison.results]}


def _page(out: Path, comparison: Comparison, tokenizer, about: dict[str, Any], checks: list[dict[str, Any]],
          captions: dict[str, str], notes: Sequence[str]) -> str:
    passed = sum(check["passed"] for check in checks)
    state = pill(f"{passed} of {len(checks)} checks passed", passed == len(checks))
    first = comparison.evaluations[0]
    best = fastest(first.speeds)
    outcome = (f"{first.name}: {first.acceptance} tokens a verify step at block size {first.block_size}; at its best, "
               f"block size {best.block_size}, {best.speedup} times plain decoding{best.caveat}.")
    settings = "".join(f"<tr><td>{escape(key)}</td><td>{escape(str(value))}</td></tr>" for key, value in about.items())
    shared = [name for name in captions if not name[0].isdigit()]
    leaves = _table(["prompt", "drafter", "block size", "", "token", "gap (logits)"], [
        [f"{leaf['set']}/{leaf['prompt']}", leaf["drafter"], leaf["block_size"], leaf["outcome"],
         "" if leaf["position"] is None else leaf["position"], "" if leaf["gap"] is None else f"{leaf['gap']:.1e}"]
        for leaf in comparison.leaves])
    # drafters side by side: as rows, thirteen columns would not fit a page
    head, *body = (list(line) for line in zip(COLUMNS, *rows(comparison), strict=True))
    body = [line for line in body if any(line[1:])]  # nothing is paired with the only drafter
    parts = [f"""<header class="top"><h1>Evaluation</h1>{state}</header>
<p class="muted">{datetime.datetime.now():%d %B %Y, %H:%M} &middot; {len(comparison.prompts)} prompts &middot;
95 % bootstrap intervals over prompts</p>
{"".join(f'<div class="error">{escape(note)}</div>' for note in notes)}
<section class="card"><p class="outcome">{escape(outcome)}</p>{_table(head, body)}
{"".join(_image(out, name, captions[name]) for name in shared)}{checks_html(checks)}
{f"<h3>Answers unlike plain decoding&rsquo;s</h3>{leaves}" if comparison.leaves else ""}</section>"""]
    for number, e in enumerate(comparison.evaluations, 1):
        parts.append(_section(out, number, e, comparison.results, tokenizer, captions))
    parts.append(f"""<section class="card"><h2>What was evaluated</h2><table>{settings}</table></section>
<footer>Made by <code>python -m dflash_lib evaluate</code>. Every figure is in <code>figures/</code>, every number in
<code>results.json</code>.</footer>""")
    return "\n".join(parts)


def _section(out: Path, number: int, e: Evaluation, results: Sequence[SideBySide], tokenizer,
             captions: dict[str, str]) -> str:
    own = [name for name in captions if name.startswith(f"{number}-")]
    kinds = _table(["kind of prompt", "acceptance length"], [[k, i] for k, i in e.by_kind.items() if k])
    frequent = _table(["times", "%", "behind", "drafted", "the target wanted"], [
        [row["times"], f"{100 * row['share']:.1f}", row["context"], row["drafted"], row["wanted"]]
        for row in e.rejected])
    examples = _table(["prompt", "slot", "behind", "drafted", "the target wanted"], [
        [row["prompt"], row["slot"], row["context"], row["drafted"], row["wanted"]] for row in e.rejected_examples])
    example = showpiece(results, e.way)
    convention = " (sample_from_anchor)" if e.sample_from_anchor else ""
    return f"""<section class="card"><h2>{escape(e.name)}</h2>
<p class="muted">block size {e.block_size}{convention}, layers {", ".join(map(str, e.layer_ids))}</p>
{"".join(_image(out, name, captions[name]) for name in own)}
<h3>Refused drafts that occur most often</h3>{frequent}
<details><summary>Examples, evenly spread over all refused drafts</summary>{examples}</details>
<details><summary>By kind of prompt</summary>{kinds}</details>
<details><summary>The answer with the longest accepted drafts (coloured: drafted and accepted)</summary>
{decoding_figures.answer_html(tokenizer, example.prompt.text, example.speculative[e.way])}</details></section>"""


def _image(out: Path, name: str, caption: str) -> str:
    """The figure within the page, so that the one file can be sent around."""
    data = base64.b64encode((out / "figures" / f"{name}.png").read_bytes()).decode()
    return f'<img src="data:image/png;base64,{data}" alt="{escape(caption)}"><p class="caption">{escape(caption)}</p>'


def _table(columns: Sequence[str], body: Sequence[Sequence[Any]]) -> str:
    """Cells are escaped; columns of numbers are not told apart from text."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in body)
    return (f'<div class="scroll"><table class="wide"><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>'
            "</div>")
