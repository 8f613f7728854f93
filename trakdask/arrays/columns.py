"""Chunks that hold all scores of a few targets, for statistics that need whole rankings."""

from __future__ import annotations

import math

import dask.array as da

__all__ = ["whole_columns"]

_BYTES = 2**26


def whole_columns(score: da.Array) -> da.Array:
    """Return scores (sample, target, ...) in chunks of all samples and few targets, lazy.

    A chunk has no more targets than it had before, and at most 64 MB unless one target has more.

    Examples
    --------
    >>> whole_columns(da.zeros((6, 4), chunks=(2, 3))).chunks
    ((6,), (3, 1))
    """
    column = score.shape[0] * score.itemsize * math.prod(score.chunksize[2:])
    most = max(1, _BYTES // max(column, 1))
    targets = tuple(part for size in score.chunks[1] for part in _parts(size, most))
    columns: da.Array = score.rechunk({0: -1, 1: targets})
    return columns


def _parts(size: int, most: int) -> list[int]:
    return [min(most, size - start) for start in range(0, size, most)] or [0]
