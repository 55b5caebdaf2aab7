"""Is there room for the target? Said before loading, since a process that is killed for memory says nothing. And what
an error of a computation means: too little memory, or a device that is gone."""

from collections.abc import Iterator
from pathlib import Path

import torch

from dflash_lib.files import human_bytes
from dflash_lib.target.errors import TargetError


def cgroup_free(root: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """Bytes left under a container's own memory limit, if there is one: psutil reports the whole machine's."""
    limit, used = root / "memory.max", root / "memory.current"
    if limit.is_file() and used.is_file() and limit.read_text().strip() != "max":
        yield int(limit.read_text()) - int(used.read_text())


def free_memory(device: str = "cpu") -> int:
    """Bytes free on a device: of the GPU, or of main memory (within the container's limit). Raises TargetError for a
    device that PyTorch does not know or cannot use."""
    try:
        if torch.device(device).type == "cuda":
            free, _ = torch.cuda.mem_get_info("cuda:0" if device == "cuda" else device)
            return free
    except (RuntimeError, AssertionError) as error:
        raise TargetError(f"device {device!r} cannot be used ({str(error).splitlines()[0]}); PyTorch sees "
                          f"{torch.cuda.device_count()} CUDA devices, and device: cpu always works") from error
    import psutil  # only here: a GPU box that runs the scripts of tests/gpu may have PyTorch and Transformers alone

    return max(0, min([psutil.virtual_memory().available, *cgroup_free()]))


def check_memory(what: str, num_parameters: int, dtype: torch.dtype, device: str, converted: bool) -> tuple[int, int]:
    """Bytes that the weights take and bytes that are free on `device`. Raises TargetError, with the sum, when they do
    not fit.

    converted: the files hold another dtype. Weights of a GPU target pass through main memory, and converted ones lie
    there as a whole (unconverted ones are mapped from the files, page by page).
    """
    needed = num_parameters * dtype.itemsize
    places = [device, "cpu"] if converted and torch.device(device).type == "cuda" else [device]
    for place in places:
        free = free_memory(place)
        if needed > free:
            name = str(dtype).removeprefix("torch.")
            raise TargetError(
                f"{what}: {num_parameters:,} parameters x {dtype.itemsize} bytes ({name}) = {human_bytes(needed)}, but "
                f"{human_bytes(free)} are free on {place}"
                + (" (where weights are converted on their way to the GPU)" if place != device else "")
                + ". Nothing was loaded. "
                + ("Use dtype bfloat16" if dtype.itemsize > 2 else "Free memory")
                + ", another device, or a machine with more.")
    return needed, free_memory(device)


OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")
DEVICE_FAULTS = ("CUDA error", "HIP error", "NVML_SUCCESS")  # beside AcceleratorError: cuBLAS's, and a lost driver's


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a computation failed for want of memory, of the GPU or of the process: a smaller one may succeed."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)


def is_device_lost(error: BaseException) -> bool:
    """Whether an error says that the accelerator cannot be used any longer by this process: fallen off the bus, an
    uncorrectable memory error, a kernel that failed. Nothing that this process does with it can succeed after that."""
    if not isinstance(error, RuntimeError) or is_out_of_memory(error):
        return False
    return isinstance(error, torch.AcceleratorError) or any(text in str(error) for text in DEVICE_FAULTS)
