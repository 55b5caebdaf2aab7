"""Promises about the repository itself: direction of imports, size of files, one environment in three places."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from dflash_lib.workbench.runs import REPOSITORY

PACKAGE = REPOSITORY / "dflash_lib"
ROOMS = ["conversations", "target", "hidden_states", "drafter", "decoding", "workbench", "report"]
LEAVES = ["files", "progress", "launch", "locks", "job_status"]
MODULES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Dotted names that a module imports anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def wrong_imports(path: Path) -> list[str]:
    """What the module at `path` imports against the order of the rooms, and of the leaves, which import no room."""
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    allowed = ({*LEAVES, *ROOMS[:ROOMS.index(room) + 1]} if room in ROOMS
               else set(LEAVES[:LEAVES.index(room)]) if room in LEAVES else set())
    wrong = []
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "IPython" or parts[0] == "dflash_lib" and len(parts) > 1 and parts[1] not in allowed:
            wrong.append(name)
    return wrong


def test_every_file_of_the_package_has_its_room():
    tops = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in MODULES}
    assert tops == {*ROOMS, *LEAVES, "__init__", "__main__", "commands"}


@pytest.mark.parametrize("path", [p for p in MODULES if p.name not in ("__main__.py", "commands.py")],
                         ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down_only(path):
    assert wrong_imports(path) == []


def test_a_planted_upward_import_is_found(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    (tmp_path / "target").mkdir()
    planted = tmp_path / "target" / "x.py"
    planted.write_text("def f():\n    from dflash_lib.report import style\n    import IPython\n"
                       "from dflash_lib.conversations import formats\nfrom dflash_lib import files\n")
    assert sorted(wrong_imports(planted)) == ["IPython", "dflash_lib.report", "dflash_lib.report.style"]


def test_no_file_is_longer_than_450_lines():
    files = [*MODULES, *(REPOSITORY / "tests").rglob("*.py"), *(REPOSITORY / "data").glob("*.py")]
    long = {str(p.relative_to(REPOSITORY)): n for p in files if (n := len(p.read_text().splitlines())) > 450}
    assert long == {}


def test_the_test_folders_mirror_the_package():
    folders = {p.name for p in (REPOSITORY / "tests").iterdir() if p.is_dir() and (p / "__init__.py").is_file()}
    assert set(ROOMS) <= folders


def project() -> dict:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def names(requirements) -> dict[str, str]:
    """Normalised package name -> version part of requirement lines."""
    split = [re.fullmatch(r"([A-Za-z0-9._-]+)(.*)", line.strip()) for line in requirements]
    return {re.sub(r"[-_.]+", "-", match[1]).lower(): match[2] for match in split}


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def test_conda_and_pip_describe_one_environment():
    environment = yaml.safe_load((REPOSITORY / "environment.yml").read_text())
    assert environment["name"] == "dflash"
    assert f"python{project()['requires-python']}" in environment["dependencies"]
    pip = next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    editable = [line for line in pip if line.startswith("-e ")]
    assert editable == [f"-e .[{','.join(sorted(project()['optional-dependencies'], reverse=True))}]"]
    assert names(line for line in pip if line not in editable) == names(project()["dependencies"])


def test_the_lock_pins_every_requirement_at_or_above_its_minimum():
    lines = [line for line in (REPOSITORY / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", line) for line in lines), "names and versions only"
    locked = names(lines)
    assert locked["torch"] == "==2.13.0" and locked["transformers"] == "==5.24.0"
    extras = [line for extra in project()["optional-dependencies"].values() for line in extra]
    for name, minimum in names([*project()["dependencies"], *extras]).items():
        assert version(locked[name]) >= version(minimum), name
    assert not {"torchvision", "torchaudio"} & set(locked)


def test_what_the_package_imports_is_declared():
    """Each third-party module that the library names is a direct requirement (or the standard library's)."""
    import sys

    provided_by = {"yaml": "pyyaml", "PIL": "pillow", "dateutil": "python-dateutil"}
    with_another = {"tokenizers": "transformers", "pyarrow": "datasets", "jupyter_client": "ipykernel",
                    "nbclient": "nbconvert", "pygments": "nbconvert", "cycler": "matplotlib", "xxhash": "datasets",
                    "packaging": "transformers",
                    "huggingface_hub": "transformers"}  # hard requirements of a declared one
    extras = [line for extra in project()["optional-dependencies"].values() for line in extra]
    declared = names([*project()["dependencies"], *extras])
    used = {name.split(".")[0] for path in MODULES for name in imports(path)} - set(sys.stdlib_module_names)
    brought_by_users = {"hs_connectors", "speculators"}  # their requirements clash with ours; tests/speculators_package
    missing = {module for module in used - {"dflash_lib"} - brought_by_users
               if provided_by.get(module, with_another.get(module, module)).lower().replace("_", "-") not in declared}
    assert missing == set()
