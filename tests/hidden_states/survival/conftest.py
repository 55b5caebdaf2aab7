"""What the survival tests share: the fork server, rows, and stores that nothing disturbed."""

import pytest

from tests.hidden_states.rows import make_prepared, make_store
from tests.hidden_states.survival.server import ForkServer


@pytest.fixture(scope="session")
def server(tiny_llama_folder, tmp_path_factory):
    with ForkServer(tiny_llama_folder, tmp_path_factory.mktemp("server")) as running:
        yield running


def _rows(tiny_llama, folder, num_samples: int):
    """Rows in memory, their folder, and the store that `extract_shard` makes of them, without the job around it."""
    rows = make_prepared(tiny_llama, num_samples=num_samples)
    rows.save(folder / "prepared")
    make_store(folder / "store", tiny_llama, rows)
    return rows, folder / "prepared", folder / "store"


@pytest.fixture(scope="session")
def small(tiny_llama, tmp_path_factory):
    """12 samples in 3 shards: (rows, their folder, their undisturbed store)."""
    return _rows(tiny_llama, tmp_path_factory.mktemp("small"), 12)


@pytest.fixture(scope="session")
def medium(tiny_llama, tmp_path_factory):
    """60 samples in 12 shards: (rows, their folder, their undisturbed store)."""
    return _rows(tiny_llama, tmp_path_factory.mktemp("medium"), 60)
