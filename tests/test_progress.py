"""The progress line: what it says, how often, and where it redraws itself."""

import io
import sys

import pytest

from dflash_lib.progress import Progress, human_rate, human_seconds, watched


def test_a_log_gets_few_whole_lines():
    stream = io.StringIO()
    with Progress(100, "extract", "tokens", interval=1000, stream=stream) as progress:
        for _ in range(100):
            progress.update(1)
    assert stream.getvalue().startswith("extract: 100/100 tokens (100 %)") and stream.getvalue().count("\n") == 1


def test_a_job_of_hours_gets_a_line_every_half_minute(monkeypatch):
    clock, stream = [0.0], io.StringIO()
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    progress = Progress(10_000, "extract", stream=stream)
    for second in range(10_000):
        clock[0] = second
        progress.set(second)
    lines = stream.getvalue().splitlines()
    assert len(lines) < 600 and "extract: 5/" in lines[0] and "extract: 10/" in lines[1]
    assert int(lines[-1].split("/")[0].split()[1].replace(",", "")) - int(
        lines[-2].split("/")[0].split()[1].replace(",", "")) == 30


@pytest.mark.parametrize(("seconds", "text"), [
    (0.4, "0 s"), (99, "99 s"), (4320, "1 h 12 min"), (600, "10 min"), (3599, "1 h 0 min"), (3 * 86400, "3 d 0 h"),
    (47 * 3600, "47 h 0 min")])
def test_seconds_as_people_say_them(seconds, text):
    assert human_seconds(seconds) == text


@pytest.mark.parametrize(("rate", "text"), [(18480.4, "18,480"), (231.4, "231"), (4.321, "4.32"), (0.0731, "0.0731")])
def test_rates(rate, text):
    assert human_rate(rate) == text


def test_a_live_line_is_rewritten_and_covers_the_longer_one_before():
    stream = io.StringIO()
    progress = Progress(10, "train", "steps", live=True, stream=stream)
    progress.set(1, "a long note that must not stay behind")
    progress.close()
    progress.note = ""
    progress.close()
    first, second = stream.getvalue().replace("\n", "").split("\r")[1:3]
    assert len(second) >= len(first) and "long note" not in second


def test_rate_and_time_left_count_from_where_a_resumed_job_began():
    progress = Progress(200, "train", start=100, stream=io.StringIO())
    progress.began -= 10  # ten seconds ago
    progress.set(150)
    assert "150/200" in progress.line() and "5 it/s" in progress.line() and "10 s left" in progress.line()


@pytest.mark.parametrize(("session", "pipeline", "expected"), [
    ("notebook.ipynb", None, True), (None, None, False), ("notebook.ipynb", "17", False)])
def test_a_kernel_is_watched_only_in_an_open_notebook(monkeypatch, session, pipeline, expected):
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    for name, value in (("JPY_SESSION_NAME", session), ("DFLASH_PIPELINE_PID", pipeline)):
        monkeypatch.delenv(name, raising=False)
        if value:
            monkeypatch.setenv(name, value)
    assert watched(io.StringIO()) is expected
