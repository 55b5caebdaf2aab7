"""A worker's memory does not grow with the number of shards that it has written (benchmarks/memory.py).

Through the worker's own loop, in a process of its own. The allowance is half of what keeping the states of one batch of
each shard would add between the shards that are compared, and twenty times what was measured.
"""

from benchmarks.memory import ALLOWANCE, report

NUM_SHARDS = 60


def test_memory_is_flat_and_a_planted_leak_shows(capsys):
    """Undisturbed; then with 64 KiB kept of every batch, a third of a batch's states."""
    flat, leaking = report(NUM_SHARDS)
    assert flat["grown"] <= ALLOWANCE < leaking["grown"], (flat, leaking)
    shown = capsys.readouterr().out
    assert shown.count("| flat |") == shown.count("| **grows** |") == 1
