"""Asking a server for greedy answers, one prompt at a time, with what its drafter did for each of them.

One at a time, because a server's counters are read before and behind every answer: so steps and accepted drafts belong
to one prompt, prompts can be resampled, a killed call loses nothing that was answered, and other clients' traffic shows
(`inconsistency`). Every answer is written to a file as it comes; the same call goes on with the missing ones.

A server counts the drafts that its target accepted behind an answer's end; the workbench counts those that stand in the
answer (speculative.py). `in_answer` takes them out again.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dflash_lib.decoding.server import (
    Counters,
    CutConnection,
    DraftCounts,
    NoMetrics,
    Server,
    ServerError,
)
from dflash_lib.files import hash_value, publish
from dflash_lib.target.resume import PartialFile

SETTLING_PAUSE_S = 0.05


@dataclass(frozen=True)
class ServedAnswer:
    """One prompt's answer. token_ids: None where the server gave text only. num_tokens: end-of-turn token included.
    counts: what drafting did for this answer, None where that is not known; fault: why not, "" when it is."""

    id: str
    token_ids: list[int] | None
    text: str
    num_tokens: int
    finish_reason: str
    counts: DraftCounts | None
    fault: str = ""


@dataclass(frozen=True)
class Served:
    """Answers in the order of the prompts; engine: "vllm", "sglang" or "" when unknown; accept_length: the server's own
    average, where it has no counts; warnings: what a reader of the figures must know."""

    model: str
    engine: str
    answers: list[ServedAnswer]
    accept_length: float | None
    warnings: list[str]


def inconsistency(counts: DraftCounts, num_tokens: int) -> str:
    """Why these counts cannot be of an answer of `num_tokens` tokens alone; "" when they can.

    The first token comes from the prompt's forward, every verify step adds its accepted drafts and one more token, and
    only the last step's may lie behind the answer's end; one of them at least does not. Another client's steps are seen
    when they add more tokens than that.
    """
    tokens, steps = num_tokens - 1, counts.num_steps
    if not counts.accepted:
        return f"{steps} verify steps for {tokens} tokens" if not (tokens > 0) <= steps <= tokens else ""
    if list(counts.accepted) != sorted(counts.accepted, reverse=True) or counts.accepted[0] > steps:
        return f"accepted by slot {list(counts.accepted)} in {steps} steps: a later slot cannot have more"
    beyond = steps + sum(counts.accepted) - tokens
    if not 0 <= beyond <= max(_last_accepted(counts), default=0):
        return f"{tokens + beyond} tokens counted in verify steps, {tokens} came in the answer; did another client ask?"
    return ""


def _last_accepted(counts: DraftCounts) -> list[int]:
    """Numbers of drafts that some step accepted: the last one's is among them."""
    at_least = [counts.num_steps, *counts.accepted, 0]
    return [n for n in range(len(at_least) - 1) if at_least[n] > at_least[n + 1]]


def in_answer(counts: DraftCounts, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The fewest and the most accepted drafts by slot that stand in the answer: the server's counts without those
    behind its end.

    The last step added one token more than it accepted drafts, `beyond` of them behind the end. With one, that is the
    bonus token; with more, its last `beyond - 1` accepted drafts are to be taken off. Which slots these had is known
    when one number of accepted drafts only is possible for the last step, and is bounded otherwise.
    """
    beyond = counts.num_steps + sum(counts.accepted) - (num_tokens - 1)
    if beyond <= 1:
        return counts.accepted, counts.accepted
    possible = [n for n in _last_accepted(counts) if n >= beyond]
    off = [[int(n - (beyond - 1) < slot <= n) for n in possible] for slot in range(1, len(counts.accepted) + 1)]
    return (tuple(count - max(each) for count, each in zip(counts.accepted, off, strict=True)),
            tuple(count - min(each) for count, each in zip(counts.accepted, off, strict=True)))


def ask(server: Server, prompts: Sequence[tuple[str, list[int]]], max_new_tokens: int, out: Path | str,
        on_answer: Callable[[int], None] | None = None) -> Served:
    """Greedy answers to (id, token ids) prompts, in `out` (JSON lines) when all are there.

    Until then they are in OUT.partial, and a call with the same prompts, server and model goes on with the missing
    ones; one with others is refused with a ValueError. An `out` that is there already is kept as OUT.1, OUT.2, ...
    Raises ServerError; what was answered before is kept. `on_answer` is called with the number of answers so far.
    """
    out, model = Path(out), server.model()
    settings = {"server": server.url, "model": model, "max_new_tokens": max_new_tokens,
                "prompts": hash_value([[name, list(ids)] for name, ids in prompts])}
    if len({name for name, _ in prompts}) != len(prompts):
        raise ValueError("two prompts have the same id; answers are kept by id")
    _set_aside(out)
    warnings: list[str] = []
    with PartialFile(out, settings) as partial:
        answers, started = _read_back(partial)
        if answers:
            warnings.append(f"going-on: {len(answers)} of {len(prompts)} answers are of an earlier call")
        reading = _first_reading(server, warnings)
        if reading is not None and started - {reading.started}:
            warnings.append("restarted: the server was started again between two calls; if its settings or the drafter "
                            f"changed as well, remove {partial.path} and ask anew")
        try:
            for name, ids in prompts:
                if name not in answers:
                    answers[name] = _ask_one(server, model, name, list(ids), max_new_tokens, reading)
                    partial.append(json.dumps({**asdict(answers[name]),
                                               "server_started": reading.started if reading else None}))
                    partial.keep()
                    if on_answer is not None:
                        on_answer(len(answers))
            reading = server.counters() if reading is not None else None
        except ServerError as error:
            raise ServerError(f"{error} {len(answers)} of {len(prompts)} answers are kept in {partial.path}; the same "
                              "call goes on behind them.") from error
        publish(partial.path, out)
        partial.settings_path.unlink()
    ordered = [answers[name] for name, _ in prompts]
    faults = [answer for answer in ordered if answer.fault]
    if faults and reading is not None and reading.counts is not None:
        warnings.append(f"not-counted: {len(faults)} of {len(prompts)} answers have no usable counts and are left out "
                        f"of acceptance, first {faults[0].id}: {faults[0].fault}. Ask while no other client does, or "
                        "start vLLM with --per-request-spec-decode-metrics summary.")
    engine, accept_length = (reading.engine, reading.accept_length) if reading else ("", None)
    return Served(model, engine, ordered, accept_length, warnings)


def _first_reading(server: Server, warnings: list[str]) -> Counters | None:
    """The counters before the first question; None, with a warning, where there are none."""
    try:
        reading = server.counters()
    except NoMetrics as error:
        warnings.append(f"no-metrics: {error} Texts are compared, acceptance is not.")
        return None
    if reading.counts is None:
        warnings.append("average-only: the server gives its own average accept length, of all its steps so far or of "
                        "the newest ones, whoever asked for them: no figure by slot, none by prompt, no noise")
    elif not reading.counts.accepted:
        warnings.append("no-slots: the server counts verify steps and does not say which slots were accepted: "
                        "acceptance length only")
    return reading


def _ask_one(server: Server, model: str, name: str, prompt_ids: list[int], max_new_tokens: int,
             reading: Counters | None) -> ServedAnswer:
    """One answer with its counts. A cut connection is tried again, with counters read anew: the server may have drafted
    for the answer that was lost."""
    has_counts = reading is not None and reading.counts is not None
    for attempt in range(server.options.max_retries + 1):
        before = server.counters() if has_counts else None
        try:
            answer = server.complete(model, prompt_ids, max_new_tokens)
            break
        except CutConnection:
            if attempt == server.options.max_retries:
                raise
            time.sleep(min(2.0 ** attempt, server.options.max_wait_s))
    counts, fault = answer.counts, ""
    if counts is not None:
        fault = inconsistency(counts, answer.num_tokens)
    elif before is not None:
        counts, fault = _settled(server, before, answer.num_tokens)
    else:
        fault = "the server does not count"
    return ServedAnswer(name, answer.token_ids, answer.text, answer.num_tokens, answer.finish_reason,
                        None if fault else counts, fault)


def _settled(server: Server, before: Counters, num_tokens: int) -> tuple[DraftCounts | None, str]:
    """What was counted since `before`, once it fits the answer: counters may come a moment behind it."""
    deadline = time.monotonic() + server.options.settle_s
    while True:
        try:
            counts = server.counters().since(before)
        except ServerError as error:
            return None, str(error)
        fault = inconsistency(counts, num_tokens)
        if not fault or time.monotonic() > deadline:
            return counts, fault
        time.sleep(SETTLING_PAUSE_S)


def _read_back(partial: PartialFile) -> tuple[dict[str, ServedAnswer], set[float]]:
    """The answers of an earlier call by id, and when their servers were started, where that is known."""
    answers, started = {}, set()
    for _, row in partial.rows(dict):
        started.add(row.pop("server_started"))
        counts = row.pop("counts")
        if counts is not None:
            counts = DraftCounts(counts["num_steps"], tuple(counts["accepted"]), counts["num_drafted"])
        answers[row["id"]] = ServedAnswer(counts=counts, **row)
    return answers, started - {None}


def _set_aside(out: Path) -> None:
    """An earlier call's answers are kept under another name: they may have cost hours."""
    if out.exists():
        number = next(n for n in range(1, 10_000) if not Path(f"{out}.{n}").exists())
        out.rename(f"{out}.{number}")
