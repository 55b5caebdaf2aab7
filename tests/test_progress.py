"""The progress line: what it says, how often, and where it redraws itself."""

import io
import sys

import pytest

from dflash_lib.progress import Progress, watched


def test_a_log_gets_few_whole_lines():
    stream = io.StringIO()
    with Progress(100, "extract", "tokens", interval=1000, stream=stream) as progress:
        for _ in range(100):
            progress.update(1)
    assert stream.getvalue().startswith("extract: 100/100 tokens (100 %)") and stream.getvalue().count("\n") == 1


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
