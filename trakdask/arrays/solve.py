"""Solve with K + λI: with what :mod:`trakdask.arrays.spectra` made, or by Cholesky without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import dask.array as da
import numpy as np

from trakdask.arrays.blocks import (
    Block,
    Blocks,
    Floats,
    blockwise,
    coarse_groups,
    flat,
    product_dtype,
)
from trakdask.arrays.factorization import cholesky_in_place, solve_in_place
from trakdask.arrays.graphs import read_in_task, texts
from trakdask.arrays.spectra import Inverse, not_definite, require_finite


class Factor(NamedTuple):
    """(K + λI)⁻¹ of one checkpoint, by the lower Cholesky factor of K + λI."""

    lower: Floats

    def solve(self, rows: Block) -> Floats:
        """Return (K + λI)⁻¹ of each row."""
        # solve_in_place overwrites rows, and blocks belong to the scheduler.
        solved = rows.astype(np.float64, order="C", copy=True)
        solve_in_place(self.lower, solved)
        return solved

    def forms(self, rows: Block) -> Floats:
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
    Cost: p³/3 flops, one task per checkpoint, which holds 24 p² bytes: K, its copy, and the factor,
    for which the copy is overwritten. The matrix is not scaled first: the error of Cholesky does
    not depend on the scale of rows and columns, and float64 can represent the squares of any
    float32 gradient.

    Examples
    --------
    >>> k = da.from_array(np.array([[3.0, 0.0], [0.0, 8.0]])[:, :, None], chunks=(2, 2, 1))
    >>> cholesky(k, da.ones(1), ["c0"]).shape
    (1,)
    """
    return blockwise(
        _cholesky, "c", gram, "pqc", damping.rechunk(1, method="tasks"), "c", texts(labels), "c",
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
        # The smallest eigenvalue is at most this, which takes no factorization.
        smallest = float(np.diagonal(gram).min())
        raise not_definite(label, lam, f"smallest diagonal of K = {smallest:.3g}")
    return Factor(system)


def solve(inverse: da.Array | None, target: da.Array) -> da.Array:
    """Return w_c(t) = (K_c + λ_c I)⁻¹ φ_c(t) for the targets.

    Parameters
    ----------
    inverse
        Result of :func:`trakdask.arrays.spectra.inverse` or :func:`cholesky`. With None, for
        estimators without a gram matrix, the features are returned as they are.
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
    if inverse is None:
        return target
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
