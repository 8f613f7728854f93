"""Factorize symmetric matrices in memory, with Python's lock released nearly all the time.

SciPy's LAPACK wrappers hold Python's global interpreter lock for the whole factorization. At large
p that takes minutes, during which a Dask worker cannot answer its scheduler. NumPy's Cholesky
releases the lock but needs memory for three matrices. Here nearly all work is done by NumPy's
matrix products, in place, and LAPACK is called for small blocks only.
"""

from __future__ import annotations

import numpy as np
from scipy.linalg import blas, lapack

from trakdask.arrays.blocks import Floats

#: Smaller eigenvalues, as a share of the largest, are rounding of the float32 products in K; and
#: eigenvectors that are computed from a factor of K are orthogonal to this precision at least.
_LEAST = float(np.sqrt(np.finfo(np.float64).eps))
#: LAPACK factorizes blocks of this size only: 0.7 million operations, while it holds the lock. From
#: p of about 1000 on, NumPy's products do nearly all of the work.
_BLOCK = 128


def decompose(matrix: Floats, n_component: int) -> tuple[Floats, Floats]:
    """Return eigenvalues, ascending, at least 0, and eigenvectors of a gram matrix.

    Parameters
    ----------
    matrix
        K, (p, p) float64, symmetric.
    n_component
        p, or a number that the rank of K does not exceed.

    Returns
    -------
    (component,) and (p, component). If there are less than p, eigenvectors of eigenvalue 0 are 0.

    Notes
    -----
    Cost: 9 p³ flops for all components. For n of them, with K = L Lᵀ by a pivoted Cholesky
    factorization and Lᵀ L = U diag(s) Uᵀ, V = L U diag(s)^-½: about 4 p n² + 9 n³. NumPy's routine
    releases Python's lock; SciPy's drivers hold it and are no faster.

    Examples
    --------
    >>> values, vectors = decompose(np.full((3, 3), 2.0), 1)
    >>> values.round(12).tolist(), (vectors * values @ vectors.T).round(12)[0].tolist()
    ([6.0], [2.0, 2.0, 2.0])
    """
    if n_component >= len(matrix):
        values, vectors = np.linalg.eigh(matrix)
        return np.maximum(values, 0), vectors
    # L (p, component) with K[pivots][:, pivots] = L Lᵀ; columns beyond K's own rank are 0.
    # For an eigenvector u of Lᵀ L, K (L u) = L (Lᵀ L u) = s L u, and |L u|² = uᵀ Lᵀ L u = s: so L u
    # divided by √s is one of K, of the same eigenvalue. The rest of K has the eigenvalue 0.
    whole, pivots, rank, _ = lapack.dpstrf(matrix.T, lower=1)
    lower, pivots = whole[:, :n_component], pivots - 1
    lower[:n_component] = np.tril(lower[:n_component])  # above the diagonal are numbers of K
    lower[:, rank:] = 0
    values, factors = np.linalg.eigh(lower.T @ lower)
    is_kept = values > _LEAST * values.max(initial=0)
    values = np.where(is_kept, values, 0)
    scale = np.where(is_kept, 1 / np.sqrt(np.where(is_kept, values, 1)), 0)
    factors *= scale
    vectors = np.empty(lower.shape)
    # The first rows of L are a triangle, which takes half of the operations.
    vectors[pivots[:n_component]] = blas.dtrmm(1.0, lower[:n_component], factors, lower=1)
    vectors[pivots[n_component:]] = lower[n_component:] @ factors
    return values, vectors


def cholesky_in_place(a: Floats) -> bool:
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
        # All that the finished columns subtract from this panel is one product, by NumPy; LAPACK
        # gets the 128 x 128 block on the diagonal, and BLAS the panel below it.
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


def solve_in_place(lower: Floats, rows: Floats) -> None:
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
    # First L y = r from the first block on, then Lᵀ x = y from the last one back.
    for start, transposed in [*((s, 0) for s in starts), *((s, 1) for s in reversed(starts))]:
        # One block of columns of ``rows``, given the columns that are already solved.
        block = slice(start, start + _BLOCK)
        solved = slice(start + _BLOCK, None) if transposed else slice(0, start)
        coupling = lower[solved, block] if transposed else lower[block, solved].T
        panel = (rows[:, block] - rows[:, solved] @ coupling).T
        diagonal = lower[block, block]
        rows[:, block] = blas.dtrsm(
            1.0, diagonal, panel, lower=1, trans_a=transposed, overwrite_b=1
        ).T
