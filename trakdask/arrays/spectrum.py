"""Eigenvalues and eigenvectors of gram matrices, which solve for every damping λ.

A gram matrix of n samples with n < p has rank n at most. Then only n eigenvectors are made: all
others have the eigenvalue 0, so that (K + λI)⁻¹ divides what is orthogonal to the n by λ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
import numpy.typing as npt
from scipy.linalg import lapack

from trakdask.arrays.blocks import Block, Blocks, Labels, blockwise, flat
from trakdask.arrays.gram import require_finite

Matrix = npt.NDArray[np.float64]

#: SciPy holds Python's lock while it factorizes; a worker can do without it for a second or two.
_MOST_FLOPS = 5e10
#: Fewer eigenvectors than this share of p are made faster than all of them.
_SMALL_SHARE = 0.75
#: Smaller eigenvalues, as a share of the largest, are rounding of the float32 products in K; and
#: eigenvectors that are computed from a factor of K are orthogonal to this precision at least.
_LEAST = float(np.sqrt(np.finfo(np.float64).eps))


class Inverse(NamedTuple):
    """(K + λI)⁻¹ = V diag(along) Vᵀ + rest · I for some λ: ``along`` (component, λ), ``rest`` (λ).

    What V spans is divided by s + λ. What is orthogonal to it has the eigenvalue 0 and is divided
    by λ; with V Vᵀ as the projection on the span, x/λ - V (Vᵀ x)/λ + V diag(1/(s + λ)) Vᵀ x. So
    ``along`` is 1/(s + λ) - 1/λ = -s/(λ (s + λ)), and ``rest`` is 1/λ. If V has all columns,
    nothing is orthogonal to it, and λ may be 0: ``along`` is 1/(s + λ), and ``rest`` is 0.
    """

    along: Matrix
    rest: Matrix
    vectors: Matrix

    def solve(self, rows: npt.NDArray[Any]) -> Matrix:
        """Return (K + λI)⁻¹ of each row, for the first λ. A row that is NaN stays so, alone."""
        with np.errstate(invalid="ignore"):
            solved = ((rows @ self.vectors) * self.along[:, 0]) @ self.vectors.T
            solved += rows * self.rest[0]
        return np.asarray(solved)

    def forms(self, rows: npt.NDArray[Any]) -> Matrix:
        """Return φᵀ (K + λI)⁻¹ φ of each row, for the first λ."""
        vectors = self.vectors
        if not self.rest.any():  # a sum of squares: products as exact as the features are enough
            vectors = vectors.astype(rows.dtype, copy=False)
        with np.errstate(invalid="ignore"):  # that of a failed sample is NaN
            forms = np.square(rows @ vectors, dtype=np.float64) @ self.along[:, 0]
            forms += self.rest[0] * np.einsum("sp,sp->s", rows, rows, dtype=np.float64)
        return np.asarray(forms)


class Spectrum(NamedTuple):
    """K = V diag(s) Vᵀ of one checkpoint, ``loss`` = Vᵀ r, ``total`` = r, and ``mean`` = tr(K)/n.

    V is (p, component); where it has fewer columns than rows, what it lacks has the eigenvalue 0.
    """

    values: Matrix
    vectors: Matrix
    loss: Matrix
    total: Matrix
    mean: float
    label: str

    def inverse(self, damping: npt.ArrayLike) -> Inverse:
        """Return (K + λI)⁻¹ for one or several λ."""
        lam = np.atleast_1d(np.asarray(damping, np.float64))
        s = self.values[:, None]
        if len(self.vectors) == len(s):
            return Inverse(1 / (s + lam), np.zeros_like(lam), self.vectors)
        return Inverse(-s / (lam * (s + lam)), 1 / lam, self.vectors)


def component_count(n_sample: int, proj_dim: int, dtype: np.dtype[np.floating]) -> int:
    """Return how many eigenvectors to make of the gram matrix of some features: n, or all p.

    All p if the features are float64, because the n are less precise.

    Examples
    --------
    >>> [component_count(n, 2048, np.dtype("float32")) for n in (1200, 10_000)]
    [1200, 2048]
    """
    is_small = n_sample <= _SMALL_SHARE * proj_dim and proj_dim * n_sample**2 <= _MOST_FLOPS
    return n_sample if is_small and dtype.itemsize < 8 else proj_dim


def decompose(matrix: Matrix, n_component: int) -> tuple[Matrix, Matrix]:
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

    Raises
    ------
    ValueError
        If the rank of K is larger.

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
    # For an eigenvector u of Lᵀ L, K (L u) = L (Lᵀ L u) = s L u, and |L u|² = uᵀ Lᵀ L u = s: so L u
    # divided by √s is one of K, of the same eigenvalue. What is left of K has the eigenvalue 0.
    lower, pivots = _pivoted_factor(matrix, n_component)
    values, factors = np.linalg.eigh(lower.T @ lower)
    is_kept = values > _LEAST * values.max(initial=0)
    values = np.where(is_kept, values, 0)
    scale = np.where(is_kept, 1 / np.sqrt(np.where(is_kept, values, 1)), 0)
    vectors = np.empty(lower.shape)
    vectors[pivots] = lower @ (factors * scale)
    return values, vectors


def _pivoted_factor(matrix: Matrix, rank: int) -> tuple[Matrix, npt.NDArray[np.intp]]:
    """Return L (p, rank) and pivots with K[pivots][:, pivots] = L Lᵀ.

    Columns beyond K's own rank are 0.
    """
    whole, pivots, found, _ = lapack.dpstrf(matrix.T, lower=1)
    lower = whole[:, :rank]
    lower[:rank] = np.tril(lower[:rank])  # above the diagonal are numbers of K
    lower[:, found:] = 0
    left = np.trace(matrix) - float(np.vdot(lower.T, lower.T))
    if left > 1e-3 * np.trace(matrix):
        raise ValueError(
            f"expected a gram matrix of {rank} samples, whose rank is at most {rank}, got one with "
            f"{left / np.trace(matrix):.2g} of its trace beyond that; try reducing it anew, with "
            "features.drop_vars(['gram', 'loss_gradient'], errors='ignore')"
        )
    return lower, pivots - 1


def spectrum(
    gram: da.Array,
    loss_gradient: da.Array | None,
    n_sample: int,
    labels: Sequence[str],
    *,
    n_component: int | None = None,
) -> da.Array:
    """Decompose the Gram matrix of every checkpoint, once for all λ.

    Parameters
    ----------
    gram
        K, (proj_dim, proj_dim, checkpoint), float, chunks (p, p, 1), symmetric.
    loss_gradient
        r_c = Σ_z mean_c[ g_c(z) ] φ_c(z), (proj_dim, checkpoint), chunks (p, 1). Without it the
        result is for :func:`trakdask.arrays.solve.inverse` only.
    n_sample
        Samples that both are sums over.
    labels
        The checkpoints' names, for errors.
    n_component
        Of :func:`component_count`; None for p.

    Returns
    -------
    (checkpoint,) lazy, one :class:`Spectrum` per chunk, for :mod:`trakdask.arrays.solve` and
    :mod:`trakdask.arrays.damping`.

    Raises
    ------
    ValueError
        At compute time, if ``gram`` is not finite; names the checkpoint.

    Notes
    -----
    Cost: that of :func:`decompose`, and 32 p² bytes in a task whose result has 8 p² bytes.
    Eigenvalues that rounding made negative count as 0.
    """
    loss = (None, None) if loss_gradient is None else (loss_gradient, "pc")
    return blockwise(
        _spectrum, "c", gram, "pqc", *loss, Labels(labels), "c",
        concatenate=False, name="spectrum", dtype=object,
        n_sample=n_sample, n_component=n_component or gram.shape[0],
    )  # fmt: skip


def _spectrum(
    gram: Blocks, loss_gradient: Blocks | None, label: str, *, n_sample: int, n_component: int
) -> Spectrum:
    (block,) = flat(gram)
    require_finite(block, label)
    matrix = block[:, :, 0].astype(np.float64, copy=False)
    values, vectors = decompose(matrix, n_component)
    total, mean = _total(len(matrix), loss_gradient), float(np.trace(matrix)) / n_sample
    return Spectrum(values, vectors, vectors.T @ total, total, mean, label)


def _total(proj_dim: int, loss_gradient: Blocks | None) -> Matrix:
    """Return r, NaN if it is not given."""
    if loss_gradient is None:
        return np.full(proj_dim, np.nan)
    (r,) = flat(loss_gradient)
    total: Matrix = r[:, 0].astype(np.float64)
    return total


def eigenvectors(
    spectrum: da.Array, proj_dim: int, n_component: int | None = None
) -> tuple[da.Array, da.Array]:
    """Return the eigenvalues and eigenvectors of a spectrum, as :func:`from_eigenvectors` takes.

    Examples
    --------
    >>> k = spectrum(da.eye(2, chunks=2)[:, :, None], None, 1, ["c0"])
    >>> values, vectors = eigenvectors(k, 2)
    >>> values.compute()[:, 0].tolist(), vectors.shape
    ([1.0, 1.0], (2, 2, 1))
    """
    axes = {"p": proj_dim, "k": n_component or proj_dim}
    values = blockwise(
        _values, "kc", spectrum, "c", new_axes={"k": axes["k"]}, name="eigenvalues", dtype="f8"
    )
    return values, blockwise(
        _vectors, "pkc", spectrum, "c", new_axes=axes, name="eigenvectors", dtype="f8"
    )


def _values(spectrum: Spectrum) -> Block:
    return spectrum.values[:, None]


def _vectors(spectrum: Spectrum) -> Block:
    return spectrum.vectors[:, :, None]


def from_eigenvectors(
    values: da.Array,
    vectors: da.Array,
    loss_gradient: da.Array | None,
    n_sample: int,
    labels: Sequence[str],
) -> da.Array:
    """Return what :func:`spectrum` returns, from eigenvalues and eigenvectors that are known.

    Parameters
    ----------
    values
        (component, checkpoint) float64, chunks (k, 1).
    vectors
        (proj_dim, component, checkpoint) float, chunks (p, k, 1).
    loss_gradient, n_sample, labels
        As in :func:`spectrum`.

    Notes
    -----
    Cost: 2 p² flops per checkpoint, for ``loss_gradient``.
    """
    loss = (None, None) if loss_gradient is None else (loss_gradient, "pc")
    return blockwise(
        _from_eigenvectors, "c", values, "kc", vectors, "pkc", *loss, Labels(labels), "c",
        concatenate=False, name="known-spectrum", dtype=object, n_sample=n_sample,
    )  # fmt: skip


def _from_eigenvectors(
    values: Blocks, vectors: Blocks, loss_gradient: Blocks | None, label: str, *, n_sample: int
) -> Spectrum:
    (s,), (v,) = flat(values), flat(vectors)
    s, v = s[:, 0], v[:, :, 0]
    total = _total(len(v), loss_gradient)
    return Spectrum(s, v, v.T @ total, total, float(s.sum()) / n_sample, label)
