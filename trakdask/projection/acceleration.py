"""Means to fast projections: numba if it is installed, GPUs, and buffers that threads reuse.

Importing numba and reading its machine code takes most of a second, and compiling it after an
installation takes several. A process therefore projects its first ``NUMPY_ELEMENTS`` elements of
gradients (samples times rows) with numpy, which takes about as long as the import, and others with
numba. ``TRAKDASK_NUMBA=1`` in the environment uses numba from the start, ``0`` never.
"""

from __future__ import annotations

import importlib
import math
import os
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

NUMPY_ELEMENTS = 2**28
"""Elements of gradients that a process projects before it imports numba."""

_n_projected = 0
_CPU = torch.device("cpu")


def count_elements(n_elements: int) -> None:
    """Count the projected elements; threads may lose a few, which does no harm."""
    global _n_projected
    _n_projected += n_elements


def numba_kernels() -> Any:
    """Return the module :mod:`trakdask.projection.compiled`; None without numba, or not yet.

    Notes
    -----
    The first call that returns it imports numba; the first use of a kernel on a machine compiles
    it, which takes seconds, and caches the machine code on disk. Kernels release the GIL and start
    no threads.
    """
    setting = os.environ.get("TRAKDASK_NUMBA", "")
    is_used = setting == "1" or (setting != "0" and _n_projected >= NUMPY_ELEMENTS)
    return _load() if is_used else None


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
    """Named buffers that a thread reuses, because new memory costs page faults.

    Each grows to the largest request. There is one for each dtype and device, too: a view of other
    numbers would be an alias that nobody sees.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], list[Tensor]] = {}

    def take(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device = _CPU
    ) -> Tensor:
        """Return a contiguous buffer, with undefined content, until the next call by this name."""
        n = math.prod(shape)
        buffer = self.take_out(name, n, dtype, device)
        self.put_back(name, buffer)
        return buffer[:n].view(*shape)

    def take_out(self, name: str, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer of at least this length, which belongs to the caller."""
        kept = self._buffers.get((name, dtype, device))
        if kept and len(buffer := kept.pop()) >= length:
            return buffer
        # A tensor created in inference mode could not be modified outside of it later.
        with torch.inference_mode(False):
            return torch.empty(length, dtype=dtype, device=device)

    def put_back(self, name: str, buffer: Tensor) -> None:
        """Keep a buffer, one of three, for the next call by this name."""
        kept = self._buffers.setdefault((name, buffer.dtype, buffer.device), [])
        kept.append(buffer)
        del kept[:-3]  # the first and the last block of a parameter wait beside the one in work
