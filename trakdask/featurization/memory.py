"""How many samples of a model fit in the memory that a task has."""

from __future__ import annotations

import math
from typing import Any

import psutil
import torch
from dask.system import CPU_COUNT
from distributed import get_worker
from distributed.system import MEMORY_LIMIT
from torch import Tensor

from trakdask.execution.scheduling import active_client
from trakdask.models.tasks import Batch, Forward, Task

__all__ = [
    "activation_bytes",
    "available_bytes",
    "is_out_of_memory",
    "largest_memory",
    "on_worker",
]

_CPU = torch.device("cpu")


def activation_bytes(forward: Forward, task: Task, batch: Batch) -> int:
    """Return what autograd keeps of the forward pass of one sample, beside the parameters."""
    leaves = {
        name: tensor.detach().requires_grad_(tensor.is_floating_point())
        for name, tensor in forward.parameters.items()
    }
    known = {t.untyped_storage().data_ptr() for t in (*leaves.values(), *forward.buffers.values())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with torch.enable_grad(), hooks:
        task.output(forward.with_parameters(leaves), batch)
    return math.ceil(sum(kept.values()) / len(next(iter(batch.values()))))


def available_bytes(device: torch.device = _CPU) -> int:
    """Return the memory of a task: its thread's share of the worker's, or of the machine's.

    On a GPU, its share of what is free there.
    """
    try:
        worker: Any = get_worker()
    except ValueError:
        n_threads, limit = CPU_COUNT, min(psutil.virtual_memory().available, MEMORY_LIMIT)
    else:
        n_threads = worker.state.nthreads
        limit = worker.memory_manager.memory_limit or MEMORY_LIMIT
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        limit = free + kept  # torch keeps what it has freed
    return int(limit // n_threads)


def largest_memory() -> float:
    """Return the bytes of the largest worker of the active client, or those of this machine.

    Infinite where the active client has no workers yet, or one without a limit.
    """
    client = active_client()
    if client is None:
        return float(MEMORY_LIMIT)
    workers: dict[str, Any] = client.scheduler_info(n_workers=-1)["workers"]
    limits = [worker["memory_limit"] for worker in workers.values()]
    return float(max(limits)) if limits and all(limits) else math.inf


def on_worker() -> bool:
    """Tell whether a distributed worker runs this."""
    try:
        get_worker()
    except ValueError:
        return False
    return True


def is_out_of_memory(err: Exception) -> bool:
    """Tell it of CUDA, and of what has no error of its own for it: torch on a CPU, and cuBLAS."""
    words = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(err, torch.OutOfMemoryError) or any(word in str(err) for word in words)
