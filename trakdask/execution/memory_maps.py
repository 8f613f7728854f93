"""What the spool must know of numpy arrays: which are plain bytes, and which lie in a file."""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np

__all__ = ["is_plain_array", "memmap_place", "open_memmap"]

MemmapPlace = tuple[str, str, int, tuple[int, ...]]
"""Arguments of :func:`open_memmap`: path, dtype, offset in bytes, shape."""


def is_plain_array(obj: Any) -> bool:
    """Tell whether the object is a numpy array whose content is its bytes."""
    return type(obj) in (np.ndarray, np.memmap) and obj.dtype.kind in "biufcmMSU"


def memmap_place(obj: Any) -> MemmapPlace | None:
    """Find where on disk a read-only memory map, or a contiguous slice of one, lies."""
    if not is_plain_array(obj) or not obj.flags.c_contiguous or obj.size == 0:
        return None
    root: Any = obj
    while isinstance(root.base, np.ndarray):
        root = root.base
    mapped: Any = root.base
    # A writable map may hold, or get, what its file does not.
    if type(root) is not np.memmap or not isinstance(mapped, mmap.mmap) or root.mode != "r":
        return None
    if root.filename is None:
        return None
    offset = root.offset + obj.ctypes.data - root.ctypes.data
    return os.path.abspath(root.filename), obj.dtype.str, offset, obj.shape


def open_memmap(path: str, dtype: str, offset: int, shape: tuple[int, ...]) -> np.memmap[Any, Any]:
    """Map the bytes that :func:`memmap_place` found."""
    return np.memmap(path, dtype=np.dtype(dtype), mode="r", offset=offset, shape=shape)
