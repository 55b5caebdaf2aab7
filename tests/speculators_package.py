"""The real speculators package, in a folder of its own, for the tests that read our files and compare numbers with it.

It is never part of the environment: it asks for torchvision and torchaudio, and for older transformers. `install` puts
it and what the environment lacks of its small dependencies into a git-ignored folder of the repository; tests put that
folder on the path of a subprocess (`environment`), never of their own.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDER = REPOSITORY / ".venv-speculators" / "packages"  # git-ignored by its prefix; `make clean` leaves it
PACKAGES = ["speculators==0.9.0", "hs-connectors==0.9.0"]
DEPENDENCIES = [  # theirs, and these's own, closed: nothing is resolved
    "aiohappyeyeballs==2.7.1", "aiohttp==3.14.5", "aiosignal==1.4.0", "distro==1.9.0", "frozenlist==1.8.0",
    "jiter==0.19.0", "loguru==0.7.3", "multidict==7.2.1", "openai==3.57.0", "propcache==0.5.4", "protobuf==7.36.2",
    "pydantic-settings==2.16.3", "python-dotenv==1.2.4", "sniffio==1.3.1", "yarl==1.25.1"]


def _present(requirement: str) -> bool:
    try:
        return bool(metadata.version(re.split("==", requirement)[0]))
    except metadata.PackageNotFoundError:
        return False


def install() -> Path:
    """The folder that holds the package: installed by the first call (seconds, needs pip's index), found by later ones.

    Several processes may call it at once. Raises subprocess.CalledProcessError, pip's words shown, when pip fails.
    """
    wanted = [*PACKAGES, *(line for line in DEPENDENCIES if not _present(line))]
    stamp, text = FOLDER / "installed.txt", "\n".join([sys.version, *wanted])
    FOLDER.parent.mkdir(exist_ok=True)
    with open(FOLDER.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.is_file() or stamp.read_text() != text:
            shutil.rmtree(FOLDER, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
                            "--no-deps", "--target", str(FOLDER), *wanted], check=True)
            stamp.write_text(text)
    return FOLDER


def environment() -> dict[str, str]:
    """The environment of a subprocess that imports the package, and dflash_lib and tests of this repository."""
    paths = [str(REPOSITORY), str(install()), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false"}
