"""Means to fast projections: numba if it is installed, and accelerators.

Importing numba and reading its machine code takes most of a second, and compiling it after an
installation takes several. A process therefore projects its first ``NUMPY_ELEMENTS`` elements of
gradients (samples times rows) with numpy, which takes about as long as the import, and others with
numba. ``TRAKDASK_NUMBA=1`` in the environment uses numba from the start, ``0`` never.
"""

from __future__ import annotations

import importlib
import os
from functools import cache
from typing import Any

from torch import Tensor

NUMPY_ELEMENTS = 2**28
"""Elements of gradients that a process projects before it imports numba."""

_n_projected = 0


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
    """Return whether a tensor is on an accelerator, whatever its kind, and not on the CPU."""
    return tensor.device.type != "cpu"


@cache
def _load() -> Any:
    try:
        importlib.import_module("numba")  # optional, and its import takes most of a second
    except ImportError:  # also raised by a numba that does not support this numpy
        return None
    return importlib.import_module("trakdask.projection.compiled")
