"""Solve with K + λI: by its eigenvectors, or by Cholesky for a λ that is given without them.

SciPy's LAPACK wrappers hold Python's global interpreter lock for the whole factorization. At large
p that takes minutes, during which a Dask worker cannot answer its scheduler. NumPy's Cholesky
releases the lock but needs memory for three matrices. Here nearly all work is done by NumPy's
matrix products, in place, and LAPACK is called for small blocks only.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import dask.array as da
import numpy as np
from scipy.linalg import blas, lapack

from trakdask.arrays.blocks import (
    Block,
    Blocks,
    Labels,
    blockwise,
    coarse_groups,
    flat,
    product_dtype,
    read_in_task,
)
from trakdask.arrays.gram import require_finite
from trakdask.arrays.spectrum import Inverse, Matrix, Spectrum

#: Of the matrix, LAPACK factorizes blocks of this size only: 0.7 million operations, for which it
#: holds the lock. From p of about 1000 on, nearly all others are those of NumPy's products.
_BLOCK = 128


def inverse(spectrum: da.Array, damping: da.Array) -> da.Array:
    """Return (K_c + λ_c I)⁻¹, for :func:`solve`, without a factorization.

    Parameters
    ----------
    spectrum
        Of :func:`trakdask.arrays.spectrum.spectrum`.
    damping
        λ, (checkpoint,).

    Returns
    -------
    (checkpoint,) lazy, one :class:`trakdask.arrays.spectrum.Inverse` per chunk.

    Raises
    ------
    numpy.linalg.LinAlgError
        At compute time, if K_c + λ_c I is singular; names the checkpoint.
    """
    # Were concatenate that of solve, Dask would fuse both, and each task of solve would do this.
    return blockwise(
        _inverse, "c", spectrum, "c", damping.rechunk(1, method="tasks"), "c",
        concatenate=True, name="inverse", dtype=object,
    )  # fmt: skip


def _inverse(spectrum: Spectrum, damping: Block) -> Inverse:
    lam = float(damping[0])
    is_whole = len(spectrum.vectors) == len(spectrum.values)
    smallest = float(spectrum.values.min()) if is_whole else 0.0
    # What rounding left of an eigenvalue 0 is no number to divide by.
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
        """Return φᵀ (K + λI)⁻¹ φ of each row."""
        return np.asarray(np.einsum("sp,sp->s", rows, self.solve(rows)))


def cholesky(gram: da.Array, damping: da.Array, labels: Sequence[Hashable]) -> da.Array:
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
    Cost: p³/3 flops, one task per checkpoint, 8 p² bytes in addition to ``gram``; the matrix is
    factorized in place. It is not scaled first: the error of Cholesky does not depend on the scale
    of rows and columns, and float64 can represent the squares of any float32 gradient.

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
    require_finite(gram, label)
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


def _not_definite(label: str, damping: float, about: str) -> np.linalg.LinAlgError:
    return np.linalg.LinAlgError(
        f"expected K + λI to be positive definite, got one of checkpoint {label!r} that is not in "
        f"float64 (λ = {damping:.3g}, {about}); try a larger damping, such as damping=0.03, the "
        "closed form λ = 0.03 tr(K²)/tr(K)"
    )


def cholesky_in_place(a: Matrix) -> bool:
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


def solve_in_place(lower: Matrix, rows: Matrix) -> None:
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
    for start in starts:
        _solve_panel(lower, rows, start, slice(0, start), transposed=False)
    for start in reversed(starts):
        _solve_panel(lower, rows, start, slice(start + _BLOCK, None), transposed=True)


def _solve_panel(
    lower: Matrix, rows: Matrix, start: int, solved: slice, *, transposed: bool
) -> None:
    """Solve one block of columns of ``rows``, given the columns that are already solved."""
    block = slice(start, start + _BLOCK)
    coupling = lower[solved, block] if transposed else lower[block, solved].T
    panel = rows[:, block] - rows[:, solved] @ coupling
    diagonal = lower[block, block]
    rows[:, block] = blas.dtrsm(
        1.0, diagonal, panel.T, lower=1, trans_a=int(transposed), overwrite_b=1
    ).T


def solve(inverse: da.Array, target: da.Array) -> da.Array:
    """Return w_c(t) = (K_c + λ_c I)⁻¹ φ_c(t) for the targets.

    Parameters
    ----------
    inverse
        Of :func:`inverse` or :func:`cholesky`.
    target
        Features of the targets, (target, proj_dim, checkpoint), float, chunks (rows, p, 1).

    Returns
    -------
    (target, proj_dim, checkpoint) float32 (float64 if the targets are), lazy, in the chunks of
    ``target``, so that computing some of the targets reads only their blocks.

    Notes
    -----
    Cost in float64, per target and checkpoint: 2 p² flops with factors, 4 p k with k eigenvectors;
    and 16 p bytes in addition to the inputs. A NaN in a target's feature makes that target NaN, and
    no other.

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
    Cost: 2 p² flops per sample and checkpoint, as for the Gram matrix, and 16 p bytes per sample of
    a block in addition to the block. The n × n hat matrix is never formed.

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
    return np.concatenate([inverse.forms(phi[:, :, 0]) for phi in flat(feature)])[:, None]
