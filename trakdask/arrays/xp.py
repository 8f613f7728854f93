"""Where tiles are multiplied: by numpy, or by CuPy on the GPU of the worker.

A worker that is started with ``TRAKDASK_XP=cupy`` in its environment forms gram matrices and tiles
of scores on its GPU. They are those of a CPU within rounding, so nothing takes this road unasked.
Blocks come from host memory and go back there. CuPy keeps memory that it has used once, and torch
cannot have it. Has not run on a GPU yet.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from trakdask.arrays.blocks import Block


def array_module() -> Any:
    """Return numpy, or CuPy if this process is told to use it.

    Raises
    ------
    ImportError
        If CuPy is missing; the message names the extra.
    ValueError
        If it is told of something else.
    """
    asked = os.environ.get("TRAKDASK_XP", "numpy")
    if asked == "numpy":
        return np
    if asked != "cupy":
        raise ValueError(
            f"the worker's environment has TRAKDASK_XP={asked!r}; needed 'numpy' or 'cupy'. "
            "Start it with TRAKDASK_XP=cupy, or without."
        )
    try:
        import cupy  # optional: only what has a GPU needs it
    except ImportError as err:
        raise ImportError(
            "the worker's environment has TRAKDASK_XP=cupy and CuPy cannot be imported; products "
            "on a GPU need it. Type pip install 'trakdask[cuda]' (with CUDA 12, "
            f"'trakdask[cuda12]'), or start the worker without TRAKDASK_XP. ({err})"
        ) from err
    return cupy


def asnumpy(array: Any) -> Block:
    """Return an array in host memory; itself if it is numpy's."""
    host: Block = array if isinstance(array, np.ndarray) else array.get()
    return host
