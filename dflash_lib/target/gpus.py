"""GPUs as nvidia-smi sees them, who uses them, and which of them a job may have."""

import csv
import io
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_lib.target.errors import TargetError

IDLE_SHARE = 0.05  # of its memory that a GPU has in use though nobody works on it


@dataclass(frozen=True)
class Gpu:
    """A card: nvidia-smi's index, uuid, name, memory in MiB as written there ("[N/A]" for unknown), driver; the other
    processes on it as (pid, program, MiB), and what this process itself has there."""

    index: str
    uuid: str
    name: str
    total: str
    used: str
    driver: str
    others: tuple[tuple[str, str, str], ...] = ()
    own_mib: float = 0.0

    @property
    def busy(self) -> bool:
        """Whether someone else uses it. In a container nvidia-smi often names no process: then its memory tells."""
        return bool(self.others) or mib(self.used) - self.own_mib > IDLE_SHARE * mib(self.total)

    @property
    def users(self) -> str:
        """The other processes in words."""
        return ", ".join(f"process {pid} ({Path(program).name}, {memory} MiB)" for pid, program, memory in self.others)


def mib(text: str) -> float:
    """A count of nvidia-smi; 0 for "[N/A]"."""
    return float(text) if text.replace(".", "", 1).isdigit() else 0.0


def nvidia_smi(*query: str) -> list[list[str]]:
    """Rows of a query. Raises OSError or SubprocessError when there is no nvidia-smi or it fails."""
    done = subprocess.run(["nvidia-smi", *query, "--format=csv,noheader,nounits"], capture_output=True, text=True,
                          timeout=30, check=True)
    rows = [[field.strip() for field in row] for row in csv.reader(io.StringIO(done.stdout))]
    return [row for row in rows if len(row) == query[0].count(",") + 1]  # others are remarks ("No devices were found")


def list_gpus() -> list[Gpu]:
    """Every card of the machine. Raises what `nvidia_smi` does."""
    cards = nvidia_smi("--query-gpu=index,uuid,name,memory.total,memory.used,driver_version")
    users = nvidia_smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory")
    found = []
    for card in cards:
        on_it = [(pid, program, memory) for owner, pid, program, memory in users if owner == card[1]]
        own = sum(mib(memory) for pid, _, memory in on_it if pid == str(os.getpid()))
        found.append(Gpu(*card, tuple(user for user in on_it if user[0] != str(os.getpid())), own))
    return found


@dataclass(frozen=True)
class GpuChoice:
    """numbers: CUDA devices to use, ascending or as asked for; notes: which were left out, or are used though someone
    else is on them, and why."""

    numbers: list[int]
    notes: list[str]


def choose_gpus(wanted: Sequence[int] | None) -> GpuChoice:
    """The CUDA devices of a job: those `wanted`, or, for None, all that nobody else is using.

    Numbers are PyTorch's: positions in CUDA_VISIBLE_DEVICES where it is set, else nvidia-smi's. A wanted one that is in
    use is noted, not refused. Raises TargetError for a number that does not exist or stands there twice, and when none
    is left. Where nvidia-smi does not answer, all devices count as free.
    """
    num = torch.cuda.device_count()
    if num == 0:
        raise TargetError("gpus: PyTorch sees no CUDA device (python -m dflash_lib doctor says why); device: cpu "
                          "always works")
    if wanted is not None:
        for number in wanted:
            if type(number) is not int or not 0 <= number < num:
                raise TargetError(f"gpus: there is no device {number!r}; PyTorch sees {num}, from 0 to {num - 1}")
            if list(wanted).count(number) > 1:
                raise TargetError(f"gpus: device {number} stands there twice; one process works on a device")
        if not wanted:
            raise TargetError("gpus: an empty list; name devices, or leave it out (null) for all that are free")
    busy, notes = _busy(num)
    if wanted is not None:
        return GpuChoice(list(wanted), notes + [f"GPU {k} is used though it is in use already: {busy[k]}"
                                                for k in wanted if k in busy])
    free = [k for k in range(num) if k not in busy]
    notes += [f"GPU {k} was left out: {busy[k]}" for k in sorted(busy)]
    if not free:
        raise TargetError("gpus: every device is in use: " + "; ".join(f"GPU {k}: {busy[k]}" for k in sorted(busy))
                          + ". Wait for their users, or name devices in gpus to use them all the same.")
    return GpuChoice(free, notes)


def _busy(num: int) -> tuple[dict[int, str], list[str]]:
    """By PyTorch's number, who is on a device that is in use; and what could not be found out."""
    try:
        cards = list_gpus()
    except (subprocess.SubprocessError, OSError) as error:
        return {}, [f"nvidia-smi does not answer ({error}), so whether others use the GPUs is not known"]
    busy = {}
    for number, card in enumerate(visible(cards)[:num]):
        if card is not None and card.busy and not _only_ours(card, number):
            busy[number] = card.users or f"{card.used} of {card.total} MiB in use"
    return busy, []


def _only_ours(card: Gpu, number: int) -> bool:
    """Whether this process's own tensors explain a card's memory, where nvidia-smi could not tell whose it is."""
    if card.others or not torch.cuda.is_initialized():
        return False
    return mib(card.used) - torch.cuda.memory_reserved(number) / 2**20 <= IDLE_SHARE * mib(card.total)


def visible(cards: list[Gpu]) -> list[Gpu | None]:
    """Cards in PyTorch's order: all, or those that CUDA_VISIBLE_DEVICES names, by index or (the beginning of) uuid;
    None for what it cannot be matched with (a part of a card)."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return list(cards)
    by_name = [next((card for card in cards if name == card.index or name[:4] == "GPU-"
                     and card.uuid.startswith(name)), None) for name in map(str.strip, named.split(",")) if name]
    return by_name
