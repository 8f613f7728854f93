"""Compute dampings and Cholesky factors, and solve for the targets by these or by eigenvectors."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
import numpy.typing as npt
from dask.base import tokenize

from trakdask.arrays.block_arguments import coarse_groups, read_in_task
from trakdask.arrays.blocks import Block, Blocks, flat, product_dtype
from trakdask.arrays.decomposition import Inverse, Matrix
from trakdask.arrays.triangular import cholesky_in_place, solve_in_place

__all__ = [
    "CLOSED_FORM",
    "cholesky",
    "closed_form_damping",
    "leverage",
    "require_finite",
    "solve",
    "without_trace",
]

#: The default factor of the closed form of λ, which was fitted by tests/benchmarks/quality.py:
#: tr(K²)/tr(K) is of the size of the largest eigenvalues, and λ has to be well below these.
CLOSED_FORM = 0.03


def closed_form_damping(
    gram: da.Array, factor: float = CLOSED_FORM, labels: Sequence[Hashable] | None = None
) -> da.Array:
    """Return the damping λ_c = factor · tr(K_c²) / tr(K_c).

    tr(K²)/tr(K) is the mean of the eigenvalues of K, weighted by the eigenvalues themselves, so λ
    scales with the gradients and the same factor is suitable for all checkpoints.

    Parameters
    ----------
    gram
        (proj_dim, proj_dim, checkpoint), float, chunks (p, p, 1), symmetric.
    factor
        At least 0.
    labels
        The checkpoints' names, for errors.

    Returns
    -------
    (checkpoint,) float64, lazy, chunks of 1, in the units of ``gram``; not finite for a checkpoint
    whose ``gram`` is not finite.

    Raises
    ------
    ValueError
        When computed, if ``gram`` is all 0, so that K + λI would be singular; the message names the
        checkpoint.

    Notes
    -----
    Cost: one pass over ``gram`` in float64, with 8 p bytes of additional memory.

    Examples
    --------
    >>> k = da.ones((2, 2, 1), chunks=(2, 2, 1))
    >>> closed_form_damping(k, factor=0.5).compute().tolist()
    [1.0]
    """
    texts = tuple(map(str, range(gram.shape[2]) if labels is None else labels))
    damping: da.Array = da.map_blocks(
        _closed_form,
        gram,
        float(factor),
        texts,
        drop_axis=(0, 1),
        name="closed-form-damping-" + tokenize(gram.name, float(factor), texts),
        dtype=np.float64,
        meta=np.empty((0,), np.float64),
    )
    return damping


def _closed_form(
    gram: Block, factor: float, labels: tuple[str, ...], *, block_id: tuple[int, ...]
) -> Block:
    if not np.trace(gram[:, :, 0]):  # K is a sum of squares, so all of K is 0, too
        raise ValueError(without_trace(labels[block_id[-1]]))
    return np.array([_closed_form_value(gram[:, :, 0], factor)])


def without_trace(label: str) -> str:
    """Return the error of a gram matrix that is all 0."""
    return (
        f"expected a gram matrix with a positive trace, got 0 at checkpoint {label!r}, where all "
        "features are 0 or failed, or all weights are 0 (estimator='soft' gives weight 0 where "
        "out_to_loss is 0 or 1); try estimator='trak', and inspect features.feature and "
        "features.out_to_loss"
    )


def _closed_form_value(gram: Block, factor: float) -> float:
    trace = float(np.trace(gram, dtype=np.float64))
    # Row by row, because a float64 copy of the whole matrix would double the task's memory.
    square = sum(float(np.vdot(row, row)) for row in (r.astype(np.float64) for r in gram))
    return factor * square / trace if trace else 0.0


def cholesky(
    gram: da.Array,
    damping: da.Array | npt.ArrayLike,
    labels: Sequence[Hashable],
) -> da.Array:
    """Return the lower Cholesky factors of K_c + λ_c I.

    Parameters
    ----------
    gram
        (proj_dim, proj_dim, checkpoint), float, chunks (p, p, 1); the lower triangle is read.
    damping
        λ, (checkpoint,) or one number for all, at least 0.
    labels
        The checkpoints' names, for errors.

    Returns
    -------
    (proj_dim, proj_dim, checkpoint) float64, lazy, chunks (p, p, 1), zeros above the diagonal.

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
    >>> cholesky(k, 1.0, ["c0"]).compute()[:, :, 0].tolist()
    [[2.0, 0.0], [0.0, 3.0]]
    """
    values = (
        damping
        if isinstance(damping, da.Array)
        else da.from_array(
            np.broadcast_to(np.asarray(damping, np.float64), gram.shape[2:]), chunks=1
        )
    )
    lam = values.rechunk(1, method="tasks")
    texts = tuple(str(label) for label in labels)
    factor: da.Array = da.map_blocks(
        _factor,
        gram,
        lam[None, None, :],
        labels=texts,
        chunks=gram.chunks,
        name="cholesky-" + tokenize(gram.name, lam.name, texts),
        dtype=np.float64,
        meta=np.empty((0, 0, 0), np.float64),
    )
    return factor


def _factor(
    gram: Block, damping: Block, *, labels: tuple[str, ...], block_id: tuple[int, ...]
) -> Block:
    """Return the (p, p, 1) factor of one checkpoint."""
    label, lam = labels[block_id[2]], float(damping[0, 0, 0])
    require_finite(gram, label)
    _require_damping(lam, label)
    system = gram[:, :, 0].astype(np.float64, order="C", copy=True)
    system.ravel()[:: len(system) + 1] += lam
    if not cholesky_in_place(system):
        raise np.linalg.LinAlgError(_not_definite(gram[:, :, 0], lam, label))
    return system.reshape(gram.shape)


def require_finite(gram: Block, label: str) -> None:
    """Check that a matrix is finite; the error names its checkpoint."""
    if not all(np.isfinite(row).all() for row in gram):
        raise ValueError(
            f"expected a finite Gram matrix, got one that is not finite for checkpoint {label!r}: "
            "its features have rows that are infinite or partly NaN (rows that are entirely NaN "
            "were recorded as failed and are left out anyway); try leaving out the samples where "
            "~np.isfinite(features.feature).all('proj_dim')"
        )


def _require_damping(damping: float, label: str) -> None:
    if not (np.isfinite(damping) and damping >= 0):
        raise ValueError(
            f"expected damping as a finite number of at least 0, got {damping} for checkpoint "
            f"{label!r}; try damping='auto' or a positive number"
        )


def _not_definite(gram: Block, damping: float, label: str) -> str:
    # K is a sum of squares, so its eigenvalues are >= 0 and ‖K + λI‖₁ / λ bounds the condition.
    norm = max(float(np.abs(row).sum(dtype=np.float64)) for row in gram) + damping
    condition = norm / damping if damping else np.inf
    return (
        f"expected K + λI to be positive definite, got one of checkpoint {label!r} that is "
        f"not in float64 (λ = {damping:.3g}, smallest diagonal of K = "
        f"{float(np.diagonal(gram).min()):.3g}, condition up to {condition:.3g}; for K from "
        "float32 products it should be at most about 1e+07); try a larger damping, such as "
        f"damping={CLOSED_FORM}, the closed form λ = {CLOSED_FORM} * tr(K²) / tr(K) = "
        f"{_closed_form_value(gram, CLOSED_FORM):.3g}"
    )


class _Factor(NamedTuple):
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


def solve(inverse: da.Array, target: da.Array) -> da.Array:
    """Return w_c(t) = (K_c + λ_c I)⁻¹ φ_c(t) for the targets.

    Parameters
    ----------
    inverse
        Of :func:`trakdask.arrays.spectrum.inverse`, or the factors of :func:`cholesky`.
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
    >>> f = da.from_array(np.array([[2.0, 0.0], [0.0, 4.0]])[:, :, None], chunks=(2, 2, 1))
    >>> t = da.ones((1, 2, 1), chunks=(1, 2, 1), dtype="float32")
    >>> solve(f, t).compute()[:, :, 0].tolist()
    [[0.25, 0.0625]]
    """
    dtype = product_dtype(target)
    # concatenate=False passes a factor itself; concatenating its one block would copy p² numbers.
    solved: da.Array = da.blockwise(
        _solve_block, "tpc", target, "tpc", inverse, "pqc" if inverse.ndim == 3 else "c",
        concatenate=False, align_arrays=False, dtype=dtype, meta=np.empty((0, 0, 0), dtype),
        name="solve-" + tokenize(inverse.name, target.name),
    )  # fmt: skip
    return solved


def _solve_block(target: Blocks, inverse: Any) -> Block:
    (phi,) = flat(target)
    solved = _inverse_of(inverse).solve(phi[:, :, 0])
    return solved.astype(product_dtype(phi), copy=False).reshape(phi.shape)


def _inverse_of(block: Any) -> Inverse | _Factor:
    if isinstance(block, Inverse):
        return block
    (lower,) = flat(block)
    return _Factor(lower[:, :, 0])


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
    >>> f = da.from_array(np.array([[2.0, 0.0], [0.0, 4.0]])[:, :, None], chunks=(2, 2, 1))
    >>> leverage(f, da.ones((1, 2, 1), chunks=(1, 2, 1))).compute().tolist()
    [[0.3125]]
    """
    groups = coarse_groups(feature.numblocks[0])
    result: da.Array = da.blockwise(
        _leverage_block, "sc",
        *(read_in_task(feature, groups=groups, by_checkpoint=True) or (feature, "spc")),
        inverse, "pqc" if inverse.ndim == 3 else "c",
        concatenate=False, align_arrays=False, dtype=np.float64, meta=np.empty((0, 0), np.float64),
        name="leverage-" + tokenize(inverse.name, feature.name),
    )  # fmt: skip
    return result


def _leverage_block(feature: Blocks, inverse: Any) -> Block:
    forms = _inverse_of(inverse).forms
    return np.concatenate([forms(phi[:, :, 0]) for phi in flat(feature)])[:, None]
