"""Small features and the decomposition of their gram matrices, for several test modules."""

from __future__ import annotations

import dask.array as da
import numpy as np

from trakdask.arrays.gram import gram_and_sum
from trakdask.arrays.spectra import eigenvectors, spectrum

LABELS = ["a", "b"]


def data(n: int = 40, p: int = 6) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, p, 2)) * 0.5 ** np.arange(p)[:, None]
    return x, rng.random((n, 2)), rng.random((n, 2)), rng.standard_normal((9, p, 2))


def lazy(x: np.ndarray, rows: int | tuple[int, ...] = 7) -> da.Array:
    """Chunks (rows, p, 1) or (rows, 1)."""
    return da.from_array(x, chunks=(rows, *(-1, 1)[: x.ndim - 2], 1))


def decomposed(x: np.ndarray, h: np.ndarray | None, g: np.ndarray) -> da.Array:
    k, r = gram_and_sum(lazy(x), None if h is None else lazy(h), lazy(g))
    return spectrum(*eigenvectors(k, LABELS), r, len(x), LABELS)
