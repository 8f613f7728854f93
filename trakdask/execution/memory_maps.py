"""Recognize numpy arrays that are plain bytes, and those that are memory maps of a file."""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np

__all__ = [
    "FileVersion",
    "MemmapLocation",
    "file_version",
    "is_plain_array",
    "memmap_location",
    "open_memmap",
]

MemmapLocation = tuple[str, str, int, tuple[int, ...]]
"""Arguments of :func:`open_memmap`: path, dtype, offset in bytes, shape."""

FileVersion = tuple[int, int]
"""Size in bytes, and time of the last change in microseconds: some network disks keep no more."""


def is_plain_array(obj: Any) -> bool:
    """Return whether the object is a numpy array whose bytes are its whole content."""
    return type(obj) in (np.ndarray, np.memmap) and obj.dtype.kind in "biufcmMSU"


def memmap_location(obj: Any) -> MemmapLocation | None:
    """Return the file and offset of a read-only memory map, or of a contiguous slice of one.

    None for any other object.
    """
    if not is_plain_array(obj) or not obj.flags.c_contiguous or obj.size == 0:
        return None
    root: Any = obj
    while isinstance(root.base, np.ndarray):
        root = root.base
    mapped: Any = root.base
    # A writable map can differ from its file, now or later.
    if type(root) is not np.memmap or not isinstance(mapped, mmap.mmap) or root.mode != "r":
        return None
    if root.filename is None:
        return None
    offset = root.offset + obj.ctypes.data - root.ctypes.data
    return os.path.abspath(root.filename), obj.dtype.str, offset, obj.shape


def open_memmap(path: str, dtype: str, offset: int, shape: tuple[int, ...]) -> np.memmap[Any, Any]:
    """Map the bytes at a location that :func:`memmap_location` returned."""
    return np.memmap(path, dtype=np.dtype(dtype), mode="r", offset=offset, shape=shape)


def file_version(path: str) -> FileVersion | None:
    """Return what tells a file from others that were at its path; None if there is no file."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns // 1000
