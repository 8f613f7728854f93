"""(K + λI)⁻¹ by the eigenvectors of K, which are made once for all λ.

A gram matrix of n samples with n < p has rank n at most. Then only n eigenvectors are computed: all
others have the eigenvalue 0, so that (K + λI)⁻¹ divides vectors orthogonal to the n by λ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
import numpy.typing as npt

from trakdask.arrays.blocks import Block, Blocks, Floats, blockwise, flat, take
from trakdask.arrays.factorization import decompose
from trakdask.arrays.graphs import texts

#: SciPy holds Python's lock while it factorizes; a worker can do without it for a second or two.
_MOST_FLOPS = 5e10
#: Fewer eigenvectors than this share of p are made faster than all of them.
_SMALL_SHARE = 0.75


class Inverse(NamedTuple):
    """(K + λI)⁻¹ = V diag(along) Vᵀ + rest · I for some λ: ``along`` (component, λ), ``rest`` (λ).

    Vectors in the span of V are divided by s + λ. All orthogonal to it have the eigenvalue 0, so λ
    divides them; with V Vᵀ as the projection on it, x/λ - V (Vᵀ x)/λ + V diag(1/(s + λ)) Vᵀ x. So
    ``along`` is 1/(s + λ) - 1/λ = -s/(λ (s + λ)), and ``rest`` is 1/λ. If V has all columns,
    nothing is orthogonal to it, and λ may be 0: ``along`` is 1/(s + λ), and ``rest`` is 0.
    """

    along: Floats
    rest: Floats
    vectors: Floats

    def solve(self, rows: npt.NDArray[Any]) -> Floats:
        """Return (K + λI)⁻¹ of each row, for the first λ. A row that is NaN stays so, alone."""
        with np.errstate(invalid="ignore"):
            solved = ((rows @ self.vectors) * self.along[:, 0]) @ self.vectors.T
            solved += rows * self.rest[0]
        return np.asarray(solved)

    def forms(self, rows: npt.NDArray[Any]) -> Floats:
        """Return φᵀ (K + λI)⁻¹ φ of each row, (row, λ)."""
        vectors = self.vectors
        if not self.rest.any():  # a sum of squares: products as exact as the features are enough
            vectors = vectors.astype(rows.dtype, copy=False)
        with np.errstate(invalid="ignore"):  # the form of a failed sample is NaN
            forms = np.square(rows @ vectors, dtype=np.float64) @ self.along
            forms += np.outer(np.einsum("sp,sp->s", rows, rows, dtype=np.float64), self.rest)
        return np.asarray(forms)


class Spectrum(NamedTuple):
    """K = V diag(s) Vᵀ of one checkpoint, with r = Σ_z mean_c[g] φ, NaN if unknown, and tr(K)/n.

    V is (p, component); if it has fewer columns than rows, the missing ones have the eigenvalue 0.
    """

    values: Floats
    vectors: Floats
    loss_gradient: Floats
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


def eigenvectors(
    gram: da.Array, labels: Sequence[object], n_component: int | None = None
) -> tuple[da.Array, da.Array]:
    """Decompose the Gram matrix of every checkpoint, once for all λ.

    Parameters
    ----------
    gram
        K, (proj_dim, proj_dim, checkpoint), float, chunks (p, p, 1), symmetric.
    labels
        The checkpoints' names, for errors.
    n_component
        Result of :func:`component_count`; None for p.

    Returns
    -------
    Eigenvalues (component, checkpoint), ascending, and eigenvectors (proj_dim, component,
    checkpoint), float64, lazy, one chunk per checkpoint.

    Raises
    ------
    ValueError
        When computed, if ``gram`` is not finite; names the checkpoint.

    Notes
    -----
    Cost: as :func:`decompose`; the memory of a task is
    :func:`trakdask.arrays.memory.eigenvectors`, 40 p² bytes for all vectors.
    Eigenvalues that rounding made negative count as 0.

    Examples
    --------
    >>> values, vectors = eigenvectors(da.eye(2, chunks=2)[:, :, None], ["c0"])
    >>> values.compute()[:, 0].tolist(), vectors.shape
    ([1.0, 1.0], (2, 2, 1))
    """
    p = gram.shape[0]
    axes = {"p": p, "k": n_component or p}
    factors = blockwise(
        _factors, "c", gram, "pqc", texts(labels), "c",
        concatenate=False, name="decomposition", dtype=object, n_component=axes["k"],
    )  # fmt: skip
    values = blockwise(
        take, "kc", factors, "c", key=0, new_axes={"k": axes["k"]}, name="eigenvalues", dtype="f8"
    )
    return values, blockwise(
        take, "pkc", factors, "c", key=1, new_axes=axes, name="eigenvectors", dtype="f8"
    )


def _factors(gram: Blocks, label: str, *, n_component: int) -> tuple[Floats, Floats]:
    (block,) = flat(gram)
    require_finite(block, label)
    values, vectors = decompose(block[:, :, 0].astype(np.float64, copy=False), n_component)
    return values[:, None], vectors[:, :, None]


def spectrum(
    values: da.Array,
    vectors: da.Array,
    loss_gradient: da.Array | None,
    n_sample: int,
    labels: Sequence[object],
) -> da.Array:
    """Put the eigenvectors, λ or sums of every checkpoint's gram matrix into one object.

    Parameters
    ----------
    values, vectors
        Results of :func:`eigenvectors`.
    loss_gradient
        r_c = Σ_z mean_c[ g_c(z) ] φ_c(z), (proj_dim, checkpoint), chunks (p, 1). Without it the
        result is for :func:`inverse` only.
    n_sample
        Samples that the matrix is a sum over.
    labels
        The checkpoints' names, for errors.

    Returns
    -------
    (checkpoint,) lazy, one :class:`Spectrum` per chunk, for :func:`inverse` and
    :mod:`trakdask.arrays.damping`.
    """
    gradient = (None, None) if loss_gradient is None else (loss_gradient, "pc")
    return blockwise(
        _spectrum, "c", values, "kc", vectors, "pkc", *gradient, texts(labels), "c",
        concatenate=False, name="spectrum", dtype=object, n_sample=n_sample,
    )  # fmt: skip


def _spectrum(
    values: Blocks, vectors: Blocks, loss_gradient: Blocks | None, label: str, *, n_sample: int
) -> Spectrum:
    (s,), (v,) = flat(values), flat(vectors)
    r = np.full((len(v), 1), np.nan)
    if loss_gradient is not None:
        (r,) = flat(loss_gradient)
    # A store has them in the precision of its features.
    wide = v[:, :, 0].astype(np.float64, copy=False)
    return Spectrum(s[:, 0], wide, r[:, 0], float(s.sum()) / n_sample, label)


def inverse(spectrum: da.Array, damping: da.Array) -> da.Array:
    """Return (K_c + λ_c I)⁻¹, for :func:`trakdask.arrays.solve.solve`, without a factorization.

    Parameters
    ----------
    spectrum
        Result of :func:`spectrum`.
    damping
        λ, (checkpoint,).

    Returns
    -------
    (checkpoint,) lazy, one :class:`Inverse` per chunk.

    Raises
    ------
    numpy.linalg.LinAlgError
        At compute time, if K_c + λ_c I is singular; names the checkpoint.
    """
    # With the concatenate of solve, Dask would fuse both, and each task of solve would do this.
    return blockwise(
        _inverse, "c", spectrum, "c", damping.rechunk(1, method="tasks"), "c",
        concatenate=True, name="inverse", dtype=object,
    )  # fmt: skip


def _inverse(spectrum: Spectrum, damping: Block) -> Inverse:
    lam = float(damping[0])
    is_whole = len(spectrum.vectors) == len(spectrum.values)
    smallest = float(spectrum.values.min()) if is_whole else 0.0
    # The eigenvalue 0 is a rounding error here, and no number to divide by.
    least = np.finfo(np.float64).eps * spectrum.values.max(initial=0)
    if not smallest + lam > least:
        raise not_definite(spectrum.label, lam, f"smallest eigenvalue of K = {smallest:.3g}")
    return spectrum.inverse(damping)


def require_finite(gram: Block, label: str) -> None:
    """Check that a matrix is finite; the error names its checkpoint."""
    if not all(np.isfinite(row).all() for row in gram):
        raise ValueError(
            f"expected a finite Gram matrix, got one that is not finite for checkpoint {label!r}: "
            "its features have rows that are infinite or partly NaN (rows that are entirely NaN "
            "were recorded as failed and are left out anyway); try leaving out the samples where "
            "~np.isfinite(features.feature).all('proj_dim')"
        )


def not_definite(label: str, damping: float, about: str) -> np.linalg.LinAlgError:
    """Return the error of a matrix that has no factor; it names the checkpoint."""
    return np.linalg.LinAlgError(
        f"expected K + λI to be positive definite, got one of checkpoint {label!r} that is not in "
        f"float64 (λ = {damping:.3g}, {about}); try a larger damping, such as damping=0.03, "
        "which is λ = 0.03 tr(K²)/tr(K)"
    )
