"""Is this machine ready? One line a question, green, amber (works, but look) or red (will not), with what to do."""

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from dflash_lib.files import human_bytes, nearest_existing
from dflash_lib.locks import Locked, folder_lock
from dflash_lib.target.configuration import read_config, text_tower
from dflash_lib.target.errors import TargetError
from dflash_lib.target.gpus import list_gpus
from dflash_lib.target.hub import find_cached, is_hub_id
from dflash_lib.target.memory import free_memory
from dflash_lib.workbench.capacity import target_size
from dflash_lib.workbench.runs import REPOSITORY

GREEN, AMBER, RED = "green", "amber", "red"
PACKAGE = "dflash_lib"
PROBE_BYTES = 64_000_000
OPEN_FILES, SHARED_MEMORY = 4096, 1_000_000_000  # below these many-worker jobs have failed for users
KERNELS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d"}


@dataclass(frozen=True)
class Line:
    """One finding: level (green, amber, red), what was looked at, what was found, what to do about it."""

    level: str
    what: str
    found: str
    to_do: str = ""

    def __post_init__(self) -> None:
        assert self.level == GREEN or self.to_do, f"{self.what}: what is not green says what to do"

    def __str__(self) -> str:
        return f"{self.level:<6} {self.what:<18} {self.found}" + (f"\n{'':26}-> {self.to_do}" if self.to_do else "")


def examine(data: Path | str, model: str | None = None, dtype: str = "bfloat16", device: str = "cpu") -> list[Line]:
    """Every line. data: the folder that hidden states go to (need not exist); model: folder or hub id of a target, of
    which only config.json is read, and nothing downloaded."""
    gpus = gpu_lines()
    config = _config(model)
    lines = [*version_lines(), *gpus, kernel_line(config, on_gpu=torch.cuda.is_available()), flex_line()]
    folder = nearest_existing(data)
    lines += [disk_line(folder), *lock_lines(folder), files_line(), shared_memory_line(), hub_line()]
    if model is not None:
        lines += model_lines(model, dtype, device)
    return lines


def exit_code(lines: Iterable[Line]) -> int:
    """1 when any line is red."""
    return int(any(line.level == RED for line in lines))


def table(lines: Iterable[Line]):
    """The lines as a pandas DataFrame."""
    import pandas as pd

    return pd.DataFrame([[x.level, x.what, x.found, x.to_do] for x in lines],
                        columns=["", "what", "found", "what to do"]).set_index("")


def requirements() -> tuple[str, list[str]]:
    """The Python version and the packages that the workbench requires: of the installed package's metadata, or of
    pyproject.toml in a checkout that is not installed."""
    try:
        metadata = importlib.metadata.metadata(PACKAGE)
        return metadata["Requires-Python"], metadata.get_all("Requires-Dist") or []
    except importlib.metadata.PackageNotFoundError:
        project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        return project["requires-python"], project["dependencies"]


def version_lines() -> list[Line]:
    """Python and packages against what is required: one line when all is well, else one for each that is not."""
    python, needed = requirements()
    wrong, versions = [], []
    if not SpecifierSet(python).contains(platform.python_version()):
        wrong.append(Line(RED, "Python", f"{platform.python_version()}, needed {python}", "use an environment with it"))
    for text in needed:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wrong.append(Line(RED, "versions", f"{requirement.name} {version or 'absent'}, needed "
                              f"{requirement.specifier}", f"pip install '{requirement}'"))
        versions.append(f"{requirement.name} {version}")
    chosen = [v for v in versions if v.split()[0] in ("torch", "transformers", "h5py")]
    return wrong or [Line(GREEN, "versions", f"Python {platform.python_version()}, {', '.join(chosen)}, and "
                          f"{len(versions) - len(chosen)} more, as required")]


def gpu_lines() -> list[Line]:
    """GPUs with memory, driver and who uses them, as nvidia-smi says, and whether PyTorch sees them, too."""
    if shutil.which("nvidia-smi") is None:
        return [Line(AMBER, "GPUs", "none (no nvidia-smi)", "a CPU is enough for the demo; a target of billions of "
                     "parameters needs a GPU with its driver")]
    try:
        cards = list_gpus()
    except (subprocess.SubprocessError, OSError) as error:
        reason = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        return [Line(RED, "GPUs", f"nvidia-smi fails: {reason[0] if reason else error}",
                     "the driver does not work: reload or reinstall it, or restart the machine")]
    lines = []
    for card in cards:
        found = f"{card.name}, {card.total} MiB, {card.used} MiB used, driver {card.driver}"
        lines.append(Line(AMBER if card.busy else GREEN, f"GPU {card.index}", found + (
            f"; {card.users}" if card.others else ""),
            "in use: 04_extract leaves it out unless gpus names it; for the rest wait for its user, or leave it out "
            "with CUDA_VISIBLE_DEVICES" if card.busy else ""))
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if cards and not torch.cuda.is_available():
        lines.append(Line(RED, "PyTorch and GPUs", f"PyTorch {torch.__version__} sees none of {len(cards)} GPUs",
                          "unset CUDA_VISIBLE_DEVICES" if hidden is not None else
                          "install a CUDA build of PyTorch that this driver can run"))
    return lines or [Line(AMBER, "GPUs", "nvidia-smi lists none", "is the driver's device passed to this container?")]


def kernel_line(config, on_gpu: bool) -> Line:
    """The fast Gated DeltaNet kernels, and what their absence costs the target of `config` (None = any)."""
    absent = [name for module, name in KERNELS.items() if importlib.util.find_spec(module) is None]
    linear = None if config is None else "linear_attention" in (getattr(config, "layer_types", None) or [])
    if linear is False:
        return Line(GREEN, "GDN kernels", "this target has no linear attention, so none are needed")
    if not absent:
        return Line(GREEN, "GDN kernels", "flash-linear-attention and causal-conv1d are installed")
    found = f"{' and '.join(absent)} not installed"
    if not on_gpu:
        return Line(GREEN, "GDN kernels", f"{found}; they run on GPUs only", "")
    cost = ("linear attention runs in PyTorch, in float32, chunk by chunk: right, but several times slower, and a "
            "batch takes about twice the working memory") if "flash-linear-attention" in absent else (
            "only the short convolution runs in PyTorch: right, and a little slower")
    return Line(AMBER, "GDN kernels", f"{found}: {cost}", f"pip install {' '.join(absent)}")


def flex_line() -> Line:
    """Whether FlexAttention has a backward pass here, tried."""
    from torch.nn.attention.flex_attention import flex_attention

    device = "cuda" if torch.cuda.is_available() else "cpu"
    function = torch.compile(flex_attention) if device == "cuda" else flex_attention
    query = torch.ones(1, 1, 128, 16, device=device, requires_grad=True)
    try:
        function(query, query, query).sum().backward()
    except Exception as error:  # noqa: BLE001  whatever it is, training with it would meet it, too
        reason = (str(error).splitlines() or [type(error).__name__])[0].split(". ")[0]  # the rest is advice to coders
        return Line(GREEN if device == "cpu" else AMBER, "FlexAttention", f"does not train on {device} "
                    f"({shorten(reason, 100, placeholder=' ...')})",
                    "nothing to do on a CPU: SDPA computes the blocks; a GPU trains more slowly with it")
    return Line(GREEN, "FlexAttention", f"trains on {device}")


@dataclass(frozen=True)
class DiskSpeed:
    """MB/s of one writer (fsync included) and one reader, and bytes free."""

    write_mb_s: float
    read_mb_s: float
    free: int


def disk_speed(folder: Path | str, num_bytes: int = PROBE_BYTES) -> DiskSpeed:
    """Writes, reads and removes a file in `folder`, or where it would be made. Raises OSError when that is not
    possible."""
    folder = nearest_existing(folder)
    block = os.urandom(1_000_000)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".dflash-probe-") as file:
        began = time.perf_counter()
        for _ in range(max(1, num_bytes // len(block))):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter() - began
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # read it from the disk, not from memory
        size = file.tell()
        file.seek(0)
        began = time.perf_counter()
        while file.read(len(block)):
            pass
        read = time.perf_counter() - began
    return DiskSpeed(size / 1e6 / written, size / 1e6 / read, shutil.disk_usage(folder).free)


def disk_line(folder: Path) -> Line:
    """Speed of the data folder and what is free there."""
    try:
        speed = disk_speed(folder)
    except OSError as error:
        return Line(RED, "data folder", f"{folder}: cannot be written ({error.strerror})", "choose another store_dir")
    found = (f"{folder}: writes {speed.write_mb_s:,.0f} MB/s, reads {speed.read_mb_s:,.0f}, "
             f"{human_bytes(speed.free)} free")
    if speed.free < 5e9:
        return Line(AMBER, "data folder", found, "free space: the demo's states take half a gigabyte, a real "
                    "job's terabytes")
    if min(speed.write_mb_s, speed.read_mb_s) < 100:
        return Line(AMBER, "data folder", found, "slow: look at 01_capacity's GPU plan before extracting much; "
                    "prefer a local NVMe disk")
    return Line(GREEN, "data folder", found)


def lock_lines(folder: Path) -> list[Line]:
    """Whether a lock there keeps a second job out, and whether HDF5 can lock and reopen its own files."""
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".dflash-locks-") as inside:
            return [_lock_line(folder, Path(inside)), *_hdf5_lines(Path(inside))]
    except OSError as error:
        return [Line(RED, "file locks", f"{folder}: cannot be tried ({error.strerror})", "choose another folder")]


def _lock_line(folder: Path, inside: Path) -> Line:
    kept_out = False
    try:
        with folder_lock(inside, "trial"):
            try:
                with folder_lock(inside, "second trial"):
                    pass
            except Locked:
                kept_out = True
    except Locked:  # the second one took the first one's away
        kept_out = False
    except OSError as error:
        return Line(RED, "file locks", f"{folder}: {error.strerror}", "put runs_dir on another file system")
    if kept_out:
        return Line(GREEN, "file locks", "keep a second job out of a folder")
    return Line(RED, "file locks", f"{folder}: a lock keeps nobody out", "put runs_dir on another file system")


def _hdf5_lines(inside: Path) -> list[Line]:
    import h5py

    try:
        with h5py.File(inside / "probe.h5", "w") as file:
            file["x"] = [1]
        with h5py.File(inside / "probe.h5") as file:
            assert file["x"][0] == 1
    except OSError as error:
        return [Line(AMBER, "HDF5 locks", str(error).splitlines()[0],
                     "export HDF5_USE_FILE_LOCKING=FALSE (NFS, ZFS): safe, since a shard has one writer")]
    return []


def files_line() -> Line:
    """How many files a process may open: every reader holds every shard's file open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= OPEN_FILES or soft == resource.RLIM_INFINITY:
        return Line(GREEN, "open files", f"{soft:,} a process")
    return Line(AMBER, "open files", f"{soft:,} a process; a store of many shards needs {OPEN_FILES:,}",
                f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}" if hard == -1 or hard >= OPEN_FILES else
                "ask for a higher hard limit (limits.conf, or docker's --ulimit nofile)")


def shared_memory_line(folder: str = "/dev/shm") -> Line:
    """Shared memory, through which processes of one machine exchange tensors; containers get 64 MB."""
    if not os.path.isdir(folder):
        return Line(AMBER, "shared memory", f"no {folder}", "mount it: NCCL and data loaders use it")
    total = shutil.disk_usage(folder).total
    if total >= SHARED_MEMORY:
        return Line(GREEN, "shared memory", human_bytes(total))
    return Line(AMBER, "shared memory", f"{human_bytes(total)}: several GPUs need more", "docker run --shm-size=16g "
                "(or --ipc=host)")


def hub_line() -> Line:
    """The hub's cache, what is free there, and whether there is a token."""
    from huggingface_hub import constants, get_token

    cache = Path(constants.HF_HUB_CACHE)
    there = nearest_existing(cache)
    free = shutil.disk_usage(there).free
    found = (f"cache {cache} ({human_bytes(free)} free), token {'set' if get_token() else 'not set'}"
             + (", offline" if constants.HF_HUB_OFFLINE else ""))
    if not os.access(there, os.W_OK):
        return Line(AMBER, "hub", found + "; not writable", "point HF_HOME at a folder that is, or give local folders")
    return Line(GREEN, "hub", found, "" if get_token() else "gated targets need one: `hf auth login`, or HF_TOKEN")


def _config(model: str | None):
    """The text tower's configuration of a folder or of a hub id that is here; None when it cannot be had."""
    folder = None if model is None else _folder(model)
    try:
        return None if folder is None else text_tower(read_config(folder), folder)
    except TargetError:
        return None  # `model_lines` says why


def _folder(model: str) -> Path | None:
    """The folder of a target; None for a hub id that is not in the cache."""
    return find_cached(model) if is_hub_id(model.partition("@")[0]) else Path(model)


def model_lines(model: str, dtype: str, device: str) -> list[Line]:
    """Whether the target is here, and whether its weights fit; nothing is downloaded."""
    from huggingface_hub import constants

    folder = _folder(model)
    if folder is None:
        return [Line(RED, "target", f"{model}: not a folder; a hub id that is not in the cache, and HF_HUB_OFFLINE=1",
                     "unset HF_HUB_OFFLINE, or give a folder") if constants.HF_HUB_OFFLINE else
                Line(AMBER, "target", f"{model}: not a folder; a hub id that was not downloaded yet, so not looked at",
                     f"hf download {model.partition('@')[0]}, or check the name")]
    try:
        size = target_size(folder)
    except TargetError as error:
        return [Line(RED, "target", " ".join(str(error).split()), "give a model's folder in Hugging Face layout")]
    try:
        needed, free = size.weight_bytes(dtype), free_memory(device)
    except ValueError as error:
        return [Line(RED, "target", str(error), "change dtype or device")]
    found = f"{size.model_type}, {size.num_parameters / 1e9:.4g} B parameters, {human_bytes(needed)} in {dtype}"
    if needed > free:
        return [Line(RED, "target", f"{found}; {human_bytes(free)} free on {device}",
                     "another device, a smaller dtype, or a machine with more memory")]
    return [Line(GREEN, "target", f"{found}; {human_bytes(free)} free on {device}")]
