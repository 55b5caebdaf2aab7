"""Our drafter, losses, weights and gradients against the real speculators package (`pytest -m slow ... -s` prints the
differences)."""

import subprocess
import sys

import pytest

from tests.speculators_package import REPOSITORY, environment


@pytest.mark.slow
def test_parity_with_speculators():
    """speculators_parity.py in a process of its own; it fails, and does not skip, where the package is missing."""
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-W", "ignore",
               "tests/drafter/speculators_parity.py"]
    run = subprocess.run(command, cwd=REPOSITORY, env=environment(), text=True, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT)
    print(*[line for line in run.stdout.splitlines() if "PARITY" in line], sep="\n")
    assert run.returncode == 0, run.stdout[-20_000:]
    last = run.stdout.rstrip().splitlines()[-1]
    assert "passed" in last and not {"skipped", "deselected", "error"} & set(last.split()), last
