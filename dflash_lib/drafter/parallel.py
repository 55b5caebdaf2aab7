"""Several processes that train one drafter: the process group, DDP or FSDP2, and tensors that are divided among them.

Every function is one that all processes call together, and with one process does nothing that costs.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

PATIENCE = timedelta(hours=2)  # with a process that writes or checks a checkpoint: 28 GB on a slow disk; NCCL's 10 min
# would end the job. One that died is torchrun's to notice, in seconds.


def rank() -> int:
    """This process's number."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def process_group(device: torch.device) -> Iterator[torch.device]:
    """The process group that torchrun's environment describes, none for one process. Yields this process's device:
    the GPU of its local rank, where `device` is CUDA without a number."""
    if device.type == "cuda" and device.index is None:
        number, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if number >= num_gpus:
            raise ValueError(f"process {number} of num_processes has no GPU of its own: PyTorch sees {num_gpus} here")
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield device
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    yield device
    # not after an error: NCCL's end waits for the other processes, which wait for this one; torchrun ends them all
    dist.destroy_process_group()


def wrap(network: nn.Module, device: torch.device, shard: bool, precision: str) -> nn.Module:
    """`network` as what is called in training: itself, in DistributedDataParallel, or, with `shard`, its own layers
    changed in place to FSDP2's (weights are gathered a layer at a time and kept in pieces)."""
    if shard:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(device.type, (num_ranks(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32,
                                      cast_forward_inputs=False) if precision == "bfloat16" else MixedPrecisionPolicy()
        for module in (*network.layers, network):
            fully_shard(module, mesh=mesh, mp_policy=policy)
            if device.type == "cpu":  # gloo has no average
                module.set_force_sum_reduction_for_comms(True)
        return network
    if num_ranks() == 1:
        return network
    return nn.parallel.DistributedDataParallel(network, device_ids=[device] if device.type == "cuda" else None,
                                               gradient_as_bucket_view=True)


@contextmanager
def gradients_shared(module: nn.Module, now: bool) -> Iterator[None]:
    """Whether the backward passes inside bring gradients together: in the last pass of a step only."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        with nullcontext() if now else module.no_sync():
            yield
        return
    if hasattr(module, "set_requires_gradient_sync"):
        module.set_requires_gradient_sync(now)
    yield


def local(tensor: Tensor) -> Tensor:
    """This process's piece of a divided tensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a divided tensor, on every process; any other tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def divided_like(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor`, whole on every process, divided as `like` is."""
    tensor = tensor.to(like.device)
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def wholes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`whole` of each."""
    return {name: whole(tensor) for name, tensor in tensors.items()}


def collected(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`whole` of each in the first process, one after another in main memory where they are divided; {} elsewhere."""
    found = {}
    for name, tensor in tensors.items():
        complete = whole(tensor)
        if rank() == 0:
            found[name] = complete.cpu() if isinstance(tensor, DTensor) else complete
    return found


def summed(values: Tensor) -> Tensor:
    """The sum over all processes, on each."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def any_of(value: bool, device: torch.device) -> bool:
    """Whether it is true in any process."""
    return bool(summed(torch.tensor(float(value), device=device))) if dist.is_initialized() else value


def gathered(value: Any) -> list[Any]:
    """Each process's JSON-able value, in the order of ranks."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * num_ranks()
    dist.all_gather_object(values, value)
    return values


def barrier() -> None:
    """Waits for all processes."""
    if dist.is_initialized():
        dist.barrier()
