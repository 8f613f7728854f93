"""Read memory-mapped files in tasks, which would otherwise get their content."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["MappedFile", "mapped"]


@dataclass(frozen=True)
class MappedFile:
    """Where a read-only memory map, or a contiguous slice of one, has its bytes."""

    path: str
    dtype: np.dtype[Any]
    offset: int
    shape: tuple[int, ...]
    version: tuple[int, int]
    """Size in bytes, and time of the last change in microseconds: some disks keep no more."""

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def token(self) -> str:
        """Identifies the content by the file."""
        return repr((self.path, self.dtype.str, self.offset, self.shape, self.version))

    def __getitem__(self, rows: Any) -> np.ndarray[Any, Any]:
        if (version := _version(self.path)) != self.version:
            raise OSError(
                f"{self.path!r} has changed since it was mapped: its size and time are {version}, "
                f"not {self.version}; try opening it again"
            )
        whole = np.memmap(self.path, self.dtype, "r", self.offset, self.shape)
        return np.array(whole[rows])


def mapped(array: np.ndarray[Any, Any]) -> MappedFile | None:
    """Return the file of a read-only memory map, or of a slice of one; None for any other array."""
    root: Any = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    # A writable map can differ from its file, now or later.
    is_of_file = isinstance(root, np.memmap) and isinstance(root.base, mmap.mmap)
    if not is_of_file or root.mode != "r" or root.filename is None:
        return None
    if not array.flags.c_contiguous or array.size == 0:
        return None
    path, offset = (
        os.path.abspath(root.filename),
        root.offset + array.ctypes.data - root.ctypes.data,
    )
    return MappedFile(path, array.dtype, offset, array.shape, _version(path))


def _version(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns // 1000
