"""What makes projections fast: numba if it is installed, GPUs, and buffers that threads reuse.

Importing numba and reading its machine code takes most of a second, and compiling it after an
installation takes several. A process therefore projects with numpy until its threads have spent
``PATIENCE_S`` of processor time on projections, as much as that costs, so that it never takes more
than twice the time of the better choice. Other programs on the machine do not prolong it.
``TRAKDASK_NUMBA=1`` in the environment uses numba from the start, ``0`` never.
"""

from __future__ import annotations

import importlib
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

PATIENCE_S = 0.7
"""CPU seconds of projections in a process after which numba is worth its import."""

_spent_s = 0.0


@contextmanager
def timed() -> Iterator[None]:
    """Add the time of the block to that which the process has spent on projections."""
    global _spent_s
    start = time.thread_time()
    try:
        yield
    finally:
        _spent_s += time.thread_time() - start


def stop_waiting() -> None:
    """Use numba from now on in this process."""
    global _spent_s
    _spent_s = PATIENCE_S


def numba_kernels() -> Any:
    """Return the module :mod:`trakdask.projection.compiled`; None without numba, or not yet.

    Notes
    -----
    The first call that returns it imports numba; the first use of a kernel on a machine compiles
    it, which takes seconds, and caches the machine code on disk. Kernels release the GIL and start
    no threads.
    """
    setting = os.environ.get("TRAKDASK_NUMBA", "")
    waits = _spent_s < PATIENCE_S and setting != "1"
    return None if waits or setting == "0" else _load()


def on_gpu(tensor: Tensor) -> bool:
    """Return whether a tensor is on an NVIDIA GPU, where the CUDA kernels can run."""
    return tensor.device.type == "cuda"


@cache
def _load() -> Any:
    try:
        importlib.import_module("numba")  # optional, and its import takes most of a second
    except ImportError:  # also raised by a numba that does not support this numpy
        return None
    return importlib.import_module("trakdask.projection.compiled")


class Scratch(threading.local):
    """Named buffers that a thread reuses between blocks, because new memory costs page faults.

    Each grows to the largest request.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a contiguous buffer of this shape; its content is undefined."""
        # By dtype, too: a view of other numbers would be an alias that nobody sees.
        n = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < n:
            # A tensor created in inference mode could not be modified outside of it later.
            with torch.inference_mode(False):
                buffer = self._buffers[name, dtype] = torch.empty(n, dtype=dtype)
        return buffer[:n].view(*shape)
