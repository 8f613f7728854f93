"""Compute blocked Cholesky factors and triangular solves in place.

SciPy's LAPACK wrappers hold Python's global interpreter lock for the whole factorization. At large
p that takes minutes, during which a Dask worker cannot answer its scheduler. NumPy's Cholesky
releases the lock but needs memory for three matrices. Here nearly all work is done by NumPy's
matrix products, and LAPACK is called for small blocks only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.linalg import blas, lapack

__all__ = ["cholesky_in_place", "solve_in_place"]

_BLOCK = 128


def cholesky_in_place(a: npt.NDArray[np.float64]) -> bool:
    """Replace a symmetric matrix by its lower Cholesky factor.

    Parameters
    ----------
    a
        (p, p) float64; its lower triangle is read. Overwritten, with zeros above the diagonal.

    Returns
    -------
    Whether ``a`` is positive definite. If not, the contents of ``a`` are undefined.

    Notes
    -----
    Cost: p³/3 flops, p · 128 · 16 bytes beside ``a``.

    Examples
    --------
    >>> a = np.array([[4.0, 2.0], [2.0, 10.0]])
    >>> cholesky_in_place(a), a.tolist()
    (True, [[2.0, 0.0], [1.0, 3.0]])
    """
    for start in range(0, len(a), _BLOCK):
        stop = min(start + _BLOCK, len(a))
        left = a[start:, :start]
        panel = a[start:, start:stop]
        panel -= left @ left[: stop - start].T
        diagonal, info = lapack.dpotrf(panel[: stop - start], lower=1, clean=1)
        if info != 0:
            return False
        below = np.ascontiguousarray(panel[stop - start :])
        panel[: stop - start] = diagonal
        if len(below):
            panel[stop - start :] = blas.dtrsm(1.0, diagonal, below.T, lower=1, overwrite_b=1).T
        a[start:stop, stop:] = 0
    return True


def solve_in_place(lower: npt.NDArray[np.float64], rows: npt.NDArray[np.float64]) -> None:
    """Replace every row r by (L Lᵀ)⁻¹ r.

    Parameters
    ----------
    lower
        L, (p, p) float64, in any memory order; its lower triangle is read.
    rows
        (n, p) float64; overwritten. A row that is not finite does not affect the others.

    Notes
    -----
    Cost: 2 p² flops per row, n · 128 · 16 bytes beside them.

    Examples
    --------
    >>> rows = np.array([[4.0, 9.0]])
    >>> solve_in_place(np.diag([1.0, 3.0]), rows)
    >>> rows.tolist()
    [[4.0, 1.0]]
    """
    starts = range(0, len(lower), _BLOCK)
    for start in starts:
        _solve_panel(lower, rows, start, slice(0, start), transposed=False)
    for start in reversed(starts):
        _solve_panel(lower, rows, start, slice(start + _BLOCK, None), transposed=True)


def _solve_panel(
    lower: npt.NDArray[np.float64],
    rows: npt.NDArray[np.float64],
    start: int,
    solved: slice,
    *,
    transposed: bool,
) -> None:
    """Solve one block of columns of ``rows``, given the columns that are already solved."""
    block = slice(start, start + _BLOCK)
    coupling = lower[solved, block] if transposed else lower[block, solved].T
    panel = rows[:, block] - rows[:, solved] @ coupling
    diagonal = lower[block, block]
    rows[:, block] = blas.dtrsm(
        1.0, diagonal, panel.T, lower=1, trans_a=int(transposed), overwrite_b=1
    ).T
