"""Compute the closed form of λ, and Cholesky factors for a λ that is given without eigenvectors."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import dask.array as da
import numpy as np
import numpy.typing as npt
from dask.base import tokenize

from trakdask.arrays.blocks import Block
from trakdask.arrays.triangular import cholesky_in_place

__all__ = [
    "CLOSED_FORM",
    "cholesky",
    "closed_form_damping",
    "require_finite",
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
