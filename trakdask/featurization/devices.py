"""Where a task runs, by which settings of torch, and in how much memory.

It runs on the accelerator of its worker if that has one, else on the CPU.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import psutil
import torch
from dask.system import CPU_COUNT
from distributed import get_worker
from distributed.system import MEMORY_LIMIT
from torch import Tensor

from trakdask.models.checkpoints import States
from trakdask.models.tasks import Batch, Forward, Task
from trakdask.projection.cuda import missing
from trakdask.torch_internals import cudnn_allow_tf32, float32_matmul_precision

_log = logging.getLogger(__name__)

# Weights of checkpoints may take a fifth, beside the half that micro-batches may take.
_SHARE_OF_STATES = 0.2
_LEAST_BUDGET, _BUDGET_OF_WEIGHTS = 96 * 2**20, 8
_CPU = torch.device("cpu")
ACCELERATORS = ("cuda", "xpu", "mps")  # "cuda" is also the name of AMD's


def device_of_task(asked: str) -> torch.device:
    """Return the device of tasks of this process; ``"auto"`` is an accelerator if there is one.

    Raises
    ------
    ValueError
        If a device is requested and this process has none.
    """
    if asked == "auto":
        return _automatic()
    device = torch.device(asked)
    if (n := _number_of(device.type)) <= (device.index or 0):
        raise ValueError(
            f"expected a GPU on every worker for device={asked!r}, got a process with {n} of these "
            f"by torch {torch.__version__}; try device='auto', which takes one where there is one"
        )
    return device


def is_here(device: str) -> bool:
    """Return whether this process has a device, which another one has asked for."""
    try:
        return device != "auto" and _number_of(torch.device(device).type) > 0
    except RuntimeError:
        return False


def _number_of(kind: str) -> int:
    """Return how many devices of a kind this process has."""
    return int(torch.get_device_module(kind).device_count())


@cache
def _automatic() -> torch.device:
    device = torch.device(next(filter(_number_of, ACCELERATORS), "cpu"))
    if device.type == "cpu":
        _log.info("tasks run on the CPU: torch %s sees no GPU", torch.__version__)
    else:
        faster = f"; projections could be faster: {why}" if (why := missing()) else ""
        _log.warning("tasks run on %s%s", device, faster)
    return device


@contextmanager
def applied(settings: Mapping[str, str], device: torch.device) -> Iterator[None]:
    """Apply settings of torch while the ``with`` body runs, except for the dtype."""
    autocast = settings["autocast"]
    dtype = None if autocast == "off" else getattr(torch, autocast)
    # Gradients are taken whatever the caller has switched off: this also leaves ``no_grad``.
    with (
        torch.inference_mode(False),
        float32_matmul_precision[settings["float32_matmul_precision"]](),
        cudnn_allow_tf32[settings["cudnn_allow_tf32"]](),
        torch.autocast(device.type, dtype=dtype, enabled=dtype is not None),
    ):
        yield


def on_device(forward: Forward, device: torch.device) -> Forward:
    """Return the model on a device; for the CPU the same object, since its tensors are there."""
    if device.type == "cpu":
        return forward
    return forward.mapped(lambda tensor: tensor.to(device))


@cache
def states_there(device: torch.device) -> States:
    """Return the cache of weights that this process has moved to a device, or cast, for all tasks.

    Threads, and one block after the other, thus share one copy.
    """
    return States()


def activation_bytes(forward: Forward, task: Task, batch: Batch) -> int:
    """Return the bytes that autograd saves in the forward pass of a sample, without parameters."""
    leaves = {
        name: tensor.detach().requires_grad_(tensor.is_floating_point())
        for name, tensor in forward.parameters.items()
    }
    if forward.reading.copied is None:
        with torch.no_grad():  # the first call copies buffers, which are no activations
            task.output(forward, batch)
    tensors = forward.with_parameters(leaves).tensors()
    # By place in memory, because autograd saves views, too, such as the transpose of a weight.
    not_saved = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in not_saved:
            # A tensor that several operations save counts once.
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with torch.enable_grad(), hooks:
        task.output(forward.with_parameters(leaves), batch)
    return math.ceil(sum(saved.values()) / len(next(iter(batch.values()))))


def budget_bytes(parameters: Mapping[str, Tensor], device: torch.device = _CPU) -> int:
    """Return the memory that activations and gradients of a micro-batch may take.

    It is at most half of what the task has, which is the share of its thread in the memory of the
    worker or the machine (or in the free memory of a GPU): the rest is for weights, inputs and
    features, and for what activations take beyond the measured ones.
    """
    n_threads, limit = _threads_and_memory()
    if device.type != "cpu":
        return free_bytes(device) // n_threads // 2
    # On a CPU, more samples at a time are hardly faster once they leave the caches. Small models
    # need few bytes per sample; large ones read all weights and draw their random matrices once per
    # micro-batch, which only pays if activations outweigh them.
    weights = sum(tensor.nbytes for tensor in parameters.values())
    return min(limit // n_threads // 2, max(_LEAST_BUDGET, _BUDGET_OF_WEIGHTS * weights))


def free_bytes(device: torch.device) -> int:
    """Return the memory that torch can still take on a device.

    Apple's GPUs, which share the memory of the host, do not tell.
    """
    module: Any = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return min(psutil.virtual_memory().available, MEMORY_LIMIT)
    free, _ = module.mem_get_info(device)
    try:  # torch caches memory that it has freed, and can use it again
        cached = module.memory_reserved(device) - module.memory_allocated(device)
    except RuntimeError:  # memory of RMM, of which torch keeps no books (pytorch#133281)
        cached = 0
    return int(free + cached)


def states_bytes(device: torch.device = _CPU) -> int:
    """Return the memory in which a worker, or this process, keeps the weights of checkpoints."""
    memory = _threads_and_memory()[1] if device.type == "cpu" else free_bytes(device)
    return int(_SHARE_OF_STATES * memory)


def _threads_and_memory() -> tuple[int, int]:
    worker = current_worker()
    if worker is None:
        return CPU_COUNT, min(psutil.virtual_memory().available, MEMORY_LIMIT)
    return worker.state.nthreads, worker.memory_manager.memory_limit or MEMORY_LIMIT


def current_worker() -> Any:
    """Return the distributed worker on which this code runs, or None."""
    try:
        return get_worker()
    except ValueError:
        return None


def is_out_of_memory(err: Exception) -> bool:
    """Return whether an error means out of memory, also where torch has no class for it."""
    words = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED", "out of memory", "out_of_memory")
    return isinstance(err, torch.OutOfMemoryError) or any(word in str(err) for word in words)
