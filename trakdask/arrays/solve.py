"""Solve with K + λI: by eigenvectors of K, or by Cholesky for a λ that is given without them.

A gram matrix of n samples with n < p has rank n at most. Then only n eigenvectors are computed: all
others have the eigenvalue 0, so that (K + λI)⁻¹ divides vectors orthogonal to the n by λ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
import numpy.typing as npt

from trakdask.arrays.blocks import Block, Blocks, blockwise, coarse_groups, flat, product_dtype
from trakdask.arrays.factorization import Matrix, cholesky_in_place, decompose, solve_in_place
from trakdask.arrays.graphs import Labels, read_in_task

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

    values: Matrix
    vectors: Matrix
    loss_gradient: Matrix
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
        _factors, "c", gram, "pqc", Labels(labels), "c",
        concatenate=False, name="decomposition", dtype=object, n_component=axes["k"],
    )  # fmt: skip
    values = blockwise(
        _values, "kc", factors, "c", new_axes={"k": axes["k"]}, name="eigenvalues", dtype="f8"
    )
    return values, blockwise(
        _vectors, "pkc", factors, "c", new_axes=axes, name="eigenvectors", dtype="f8"
    )


def _factors(gram: Blocks, label: str, *, n_component: int) -> tuple[Matrix, Matrix]:
    (block,) = flat(gram)
    _require_finite(block, label)
    return decompose(block[:, :, 0].astype(np.float64, copy=False), n_component)


def _values(factors: tuple[Matrix, Matrix]) -> Block:
    return factors[0][:, None]


def _vectors(factors: tuple[Matrix, Matrix]) -> Block:
    return factors[1][:, :, None]


def spectrum(
    values: da.Array,
    vectors: da.Array,
    loss_gradient: da.Array | None,
    n_sample: int,
    labels: Sequence[object],
) -> da.Array:
    """Put the eigenvalues, eigenvectors and loss gradient of every checkpoint into one object.

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
        _spectrum, "c", values, "kc", vectors, "pkc", *gradient, Labels(labels), "c",
        concatenate=False, name="spectrum", dtype=object, n_sample=n_sample,
    )  # fmt: skip


def _spectrum(
    values: Blocks, vectors: Blocks, loss_gradient: Blocks | None, label: str, *, n_sample: int
) -> Spectrum:
    (s,), (v,) = flat(values), flat(vectors)
    r = np.full((len(v), 1), np.nan)
    if loss_gradient is not None:
        (r,) = flat(loss_gradient)
    return Spectrum(s[:, 0], v[:, :, 0], r[:, 0], float(s.sum()) / n_sample, label)


def inverse(spectrum: da.Array, damping: da.Array) -> da.Array:
    """Return (K_c + λ_c I)⁻¹, for :func:`solve`, without a factorization.

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
        raise _not_definite(spectrum.label, lam, f"smallest eigenvalue of K = {smallest:.3g}")
    return spectrum.inverse(damping)


class Factor(NamedTuple):
    """(K + λI)⁻¹ of one checkpoint, by the lower Cholesky factor of K + λI."""

    lower: Matrix

    def solve(self, rows: Block) -> Matrix:
        """Return (K + λI)⁻¹ of each row."""
        solved = rows.astype(np.float64, order="C", copy=True)
        solve_in_place(self.lower, solved)
        return solved

    def forms(self, rows: Block) -> Matrix:
        """Return φᵀ (K + λI)⁻¹ φ of each row, (row, 1)."""
        return np.asarray(np.einsum("sp,sp->s", rows, self.solve(rows)))[:, None]


def cholesky(gram: da.Array, damping: da.Array, labels: Sequence[object]) -> da.Array:
    """Factorize K_c + λ_c I, for :func:`solve`.

    Parameters
    ----------
    gram
        (proj_dim, proj_dim, checkpoint), float, chunks (p, p, 1); the lower triangle is read.
    damping
        λ, (checkpoint,), at least 0.
    labels
        The checkpoints' names, for errors.

    Returns
    -------
    (checkpoint,) lazy, one :class:`Factor` per chunk.

    Raises
    ------
    ValueError
        When computed, if ``gram`` or λ is not finite.
    numpy.linalg.LinAlgError
        At compute time, if K_c + λ_c I is not positive definite; the message names the checkpoint.

    Notes
    -----
    Cost: p³/3 flops, one task per checkpoint, of :func:`trakdask.arrays.memory.cholesky` bytes; the
    matrix is factorized in place. It is not scaled first: the error of Cholesky does not depend on
    the scale of rows and columns, and float64 can represent the squares of any float32 gradient.

    Examples
    --------
    >>> k = da.from_array(np.array([[3.0, 0.0], [0.0, 8.0]])[:, :, None], chunks=(2, 2, 1))
    >>> cholesky(k, da.ones(1), ["c0"]).shape
    (1,)
    """
    return blockwise(
        _cholesky, "c", gram, "pqc", damping.rechunk(1, method="tasks"), "c", Labels(labels), "c",
        concatenate=True, name="cholesky", dtype=object,
    )  # fmt: skip


def _cholesky(gram: Block, damping: Block, label: str) -> Factor:
    lam = float(damping[0])
    _require_finite(gram, label)
    if not (np.isfinite(lam) and lam >= 0):
        raise ValueError(
            f"expected damping as a finite number of at least 0, got {lam} for checkpoint "
            f"{label!r}; try damping='auto' or a positive number"
        )
    system = gram[:, :, 0].astype(np.float64, order="C", copy=True)
    system.ravel()[:: len(system) + 1] += lam
    if not cholesky_in_place(system):
        smallest = float(np.diagonal(gram).min())
        raise _not_definite(label, lam, f"smallest diagonal of K = {smallest:.3g}")
    return Factor(system)


def _require_finite(gram: Block, label: str) -> None:
    """Check that a matrix is finite; the error names its checkpoint."""
    if not all(np.isfinite(row).all() for row in gram):
        raise ValueError(
            f"expected a finite Gram matrix, got one that is not finite for checkpoint {label!r}: "
            "its features have rows that are infinite or partly NaN (rows that are entirely NaN "
            "were recorded as failed and are left out anyway); try leaving out the samples where "
            "~np.isfinite(features.feature).all('proj_dim')"
        )


def _not_definite(label: str, damping: float, about: str) -> np.linalg.LinAlgError:
    return np.linalg.LinAlgError(
        f"expected K + λI to be positive definite, got one of checkpoint {label!r} that is not in "
        f"float64 (λ = {damping:.3g}, {about}); try a larger damping, such as damping=0.03, "
        "which is λ = 0.03 tr(K²)/tr(K)"
    )


def solve(inverse: da.Array, target: da.Array) -> da.Array:
    """Return w_c(t) = (K_c + λ_c I)⁻¹ φ_c(t) for the targets.

    Parameters
    ----------
    inverse
        Result of :func:`inverse` or :func:`cholesky`.
    target
        Features of the targets, (target, proj_dim, checkpoint), float, chunks (rows, p, 1).

    Returns
    -------
    (target, proj_dim, checkpoint) float32 (float64 if the targets are), lazy, in the chunks of
    ``target``, so that computing some of the targets reads only their blocks.

    Notes
    -----
    Cost in float64, per target and checkpoint: 2 p² flops with factors, 4 p k with k eigenvectors;
    memory as :func:`trakdask.arrays.memory.solve`. A NaN in a target's feature makes that target
    NaN, and no other.

    Examples
    --------
    >>> k = da.from_array(np.array([[2.0, 0.0], [0.0, 4.0]])[:, :, None], chunks=(2, 2, 1))
    >>> t = da.ones((1, 2, 1), chunks=(1, 2, 1), dtype="float32")
    >>> solve(cholesky(k, da.zeros(1), ["c0"]), t).compute()[:, :, 0].tolist()
    [[0.5, 0.25]]
    """
    return blockwise(
        _solve_block, "tpc", target, "tpc", inverse, "c",
        concatenate=False, name="solve", dtype=product_dtype(target),
    )  # fmt: skip


def _solve_block(target: Block, inverse: Inverse | Factor) -> Block:
    solved = inverse.solve(target[:, :, 0])
    return solved.astype(product_dtype(target), copy=False).reshape(target.shape)


def leverage(inverse: da.Array, feature: da.Array) -> da.Array:
    """Return φ_c(z)ᵀ (K_c + λ_c I)⁻¹ φ_c(z) of every sample.

    Parameters
    ----------
    inverse, feature
        As in :func:`solve`.

    Returns
    -------
    (sample, checkpoint) float64, lazy, in the chunks of ``feature``, or of several of its blocks
    where more than 4096 are read from a store.

    Notes
    -----
    Cost: 2 p² flops per sample and checkpoint, as for the Gram matrix; memory as
    :func:`trakdask.arrays.memory.leverage`. The n × n hat matrix is never formed.

    Examples
    --------
    >>> k = da.from_array(np.array([[2.0, 0.0], [0.0, 4.0]])[:, :, None], chunks=(2, 2, 1))
    >>> x = da.ones((1, 2, 1), chunks=(1, 2, 1))
    >>> leverage(cholesky(k, da.zeros(1), ["c0"]), x).compute().tolist()
    [[0.75]]
    """
    groups = coarse_groups(feature.numblocks[0])
    read = read_in_task(feature, groups=groups, by_checkpoint=True)
    return blockwise(
        _leverage_block, "sc", *(read or (feature, "spc")), inverse, "c",
        concatenate=False, name="leverage", dtype=np.float64,
    )  # fmt: skip


def _leverage_block(feature: Blocks, inverse: Inverse | Factor) -> Block:
    return np.concatenate([inverse.forms(phi[:, :, 0]) for phi in flat(feature)])
