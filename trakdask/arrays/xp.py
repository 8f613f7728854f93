"""Choose the module that multiplies tiles: numpy, or CuPy on the GPU of the worker.

A worker that is started with ``TRAKDASK_XP=cupy`` in its environment computes gram matrices and
tiles of scores on its GPU. A CPU's results differ by rounding, so this is never the default. Blocks
are copied from host memory and back. CuPy does not return memory that it has used to the system, so
torch cannot use it. This has not run on a GPU yet.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from trakdask.arrays.blocks import Block


def array_module() -> Any:
    """Return numpy, or CuPy if ``TRAKDASK_XP=cupy`` in the environment of this process.

    Raises
    ------
    ImportError
        If CuPy is not installed; the message names the extra to install.
    ValueError
        If the variable has any other value.
    """
    asked = os.environ.get("TRAKDASK_XP", "numpy")
    if asked == "numpy":
        return np
    if asked != "cupy":
        raise ValueError(
            "expected 'numpy' or 'cupy' as TRAKDASK_XP in the worker's environment, got "
            f"TRAKDASK_XP={asked!r}; try starting the worker with TRAKDASK_XP=cupy, or without it"
        )
    try:
        import cupy  # optional: only workers with a GPU need it
    except ImportError as err:
        raise ImportError(
            "expected CuPy to be installed, as the worker's environment has TRAKDASK_XP=cupy, got "
            f"an error on import ({err}); try pip install 'trakdask[cuda]' ('trakdask[cuda12]' for "
            "CUDA 12), or starting the worker without TRAKDASK_XP"
        ) from err
    return cupy


def asnumpy(array: Any) -> Block:
    """Return an array in host memory: a numpy array itself, or a copy of a CuPy array."""
    return array if isinstance(array, np.ndarray) else array.get()
