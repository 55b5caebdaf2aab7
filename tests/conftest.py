"""Shared by all tests: offline, one thread, tiny random targets."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "agg")

from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402

from dflash_lib.target.loading import Target, load_target  # noqa: E402
from tests.tiny import make_tiny_target  # noqa: E402

torch.set_num_threads(1)  # the models are tiny: a second thread only waits
DATA = Path(__file__).parent / "data"
REPOSITORY = Path(__file__).parent.parent


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist the tests run in one process
def pytest_xdist_make_scheduler(config, log):
    """A file's tests go to one process, so that what its fixtures make is made once; those of tests/notebooks, which
    share an executed run, all go to one."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return "tests/notebooks" if file.startswith("tests/notebooks/") else file

    return Scheduling(config, log)


@pytest.fixture(scope="session")
def tiny_llama_folder(tmp_path_factory) -> Path:
    """Folder of the tiny dense target. Shared: copy it before changing anything."""
    return make_tiny_target(tmp_path_factory.mktemp("targets") / "tiny_llama", "llama")


@pytest.fixture(scope="session")
def tiny_qwen3_5_folder(tmp_path_factory) -> Path:
    """Folder of the tiny Gated DeltaNet hybrid."""
    return make_tiny_target(tmp_path_factory.mktemp("targets") / "tiny_qwen3_5", "qwen3_5")


@pytest.fixture(scope="session")
def tiny_llama(tiny_llama_folder) -> Target:
    return load_target(tiny_llama_folder)


@pytest.fixture(scope="session")
def tiny_qwen3_5(tiny_qwen3_5_folder) -> Target:
    return load_target(tiny_qwen3_5_folder)


@pytest.fixture(scope="session")
def tiny_talker(tiny_llama_folder) -> Target:
    """The tiny dense target with a random head of its own, whose greedy text varies: with tied embeddings, random
    weights only repeat the last token."""
    target = load_target(tiny_llama_folder)
    weight = torch.randn(target.head.weight.shape, generator=torch.Generator().manual_seed(3))
    target.head.weight = torch.nn.Parameter(weight, requires_grad=False)
    return target
