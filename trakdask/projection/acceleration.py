"""Choose faster implementations with the same results: numba if it is installed, and GPUs.

``TRAKDASK_NUMBA=0`` in the environment turns numba off.
"""

from __future__ import annotations

import importlib
import os
from functools import cache
from typing import Any

from torch import Tensor


def compiled(name: str) -> Any:
    """Return the module ``trakdask.projection.compiled.<name>``, or None without numba.

    Notes
    -----
    The first call in a process imports numba; the first use of a kernel on a machine compiles it,
    which takes seconds, and caches the machine code on disk. Kernels release the GIL and
    start no threads.
    """
    return _load(name) if os.environ.get("TRAKDASK_NUMBA", "1") != "0" else None


def on_gpu(tensor: Tensor) -> bool:
    """Return whether a tensor is on an NVIDIA GPU, where the CUDA kernels can run."""
    return tensor.device.type == "cuda"


@cache
def _load(name: str) -> Any:
    try:
        importlib.import_module("numba")  # optional, and its import takes most of a second
    except ImportError:  # also raised by a numba that does not support this numpy
        return None
    return importlib.import_module(f"trakdask.projection.compiled.{name}")
