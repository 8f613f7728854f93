"""The eigendecomposition of gram matrices: computed once, it solves for every damping."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import dask.array as da
import numpy as np
import numpy.typing as npt
from dask.base import tokenize

from trakdask.arrays.blocks import (
    Block,
    Blocks,
    flat,
    product_dtype,
    require_features,
)
from trakdask.arrays.solve import require_finite

__all__ = ["Spectrum", "mean_trace", "solve", "spectrum"]


class Spectrum(NamedTuple):
    """K = V diag(s) Vᵀ of one checkpoint, ``loss`` = Vᵀ r, and ``mean`` = tr(K)/n."""

    values: npt.NDArray[np.float64]
    vectors: npt.NDArray[np.float64]
    loss: npt.NDArray[np.float64]
    mean: float
    label: str


def mean_trace(gram: da.Array, n_sample: int) -> da.Array:
    """Return tr(K_c)/n, (checkpoint,) float64, lazy: the unit of relative damping.

    Examples
    --------
    >>> mean_trace(da.ones((2, 2, 1), chunks=(2, 2, 1)), 4).compute().tolist()
    [0.5]
    """
    result: da.Array = da.map_blocks(
        _mean_trace,
        gram,
        n_sample,
        drop_axis=(0, 1),
        name="mean-trace-" + tokenize(gram.name, n_sample),
        dtype=np.float64,
        meta=np.empty((0,), np.float64),
    )
    return result


def _mean_trace(gram: Block, n_sample: int) -> Block:
    return np.array([np.trace(gram[:, :, 0], dtype=np.float64) / n_sample])


def spectrum(
    gram: da.Array, loss_gradient: da.Array, n_sample: int, labels: Sequence[str]
) -> da.Array:
    """Decompose the Gram matrix of every checkpoint, once for all λ.

    Parameters
    ----------
    gram
        K, (proj_dim, proj_dim, checkpoint), float, chunks (p, p, 1), symmetric.
    loss_gradient
        r_c = Σ_z mean_c[ g_c(z) ] φ_c(z), (proj_dim, checkpoint), chunks (p, 1).
    n_sample
        Samples that both are sums over.
    labels
        The checkpoints' names, for errors.

    Returns
    -------
    (checkpoint,) lazy, one :class:`Spectrum` per chunk, for :func:`solve` and for
    :mod:`trakdask.arrays.completeness`.

    Raises
    ------
    ValueError
        At compute time, if ``gram`` is not finite; names the checkpoint.

    Notes
    -----
    Cost: one eigendecomposition by divide and conquer, about 9 p³ flops and 32 p² bytes in a task,
    whose result has 8 p² bytes. Eigenvalues that rounding made negative count as 0. NumPy's routine
    releases Python's lock; SciPy's drivers hold it and are no faster.
    """
    result: da.Array = da.blockwise(
        functools.partial(_spectrum, n_sample=n_sample),
        "c",
        gram,
        "pqc",
        loss_gradient,
        "pc",
        da.from_array(np.array(labels, dtype=object), chunks=1, name="labels-" + tokenize(labels)),
        "c",
        concatenate=False,
        align_arrays=False,
        name="spectrum-" + tokenize(gram.name, loss_gradient.name, n_sample, labels),
        dtype=object,
        meta=np.empty((0,), object),
    )
    return result


def _spectrum(gram: Blocks, loss_gradient: Blocks, label: Block, *, n_sample: int) -> Spectrum:
    ((block,), (r,)) = flat(gram), flat(loss_gradient)
    name = str(label[0])
    require_finite(block, name)
    matrix = block[:, :, 0].astype(np.float64, copy=False)
    values, vectors = np.linalg.eigh(matrix)
    loss = vectors.T @ r[:, 0].astype(np.float64)
    mean = float(np.trace(matrix)) / n_sample
    return Spectrum(np.maximum(values, 0), vectors, loss, mean, name)


def solve(spectrum: da.Array, damping: da.Array, target: da.Array) -> da.Array:
    """Return (K_c + λ_c I)⁻¹ φ_c(t), without another factorisation.

    Parameters
    ----------
    spectrum
        Of :func:`spectrum`.
    damping
        λ, (checkpoint,), chunks of 1.
    target
        (target, proj_dim, checkpoint), float, chunks (rows, p, 1).

    Returns
    -------
    As :func:`trakdask.arrays.solve.solve`.

    Raises
    ------
    numpy.linalg.LinAlgError
        At compute time, if K_c + λ_c I is singular; names the checkpoint.

    Notes
    -----
    Cost: 4 p² flops per target and checkpoint, in float64.
    """
    require_features(target, name="target", caller="solve")
    dtype = product_dtype(target)
    solved: da.Array = da.blockwise(
        _solve,
        "tpc",
        target,
        "tpc",
        spectrum,
        "c",
        damping.rechunk(1, method="tasks"),
        "c",
        concatenate=True,
        align_arrays=False,
        name="spectral-solve-" + tokenize(target.name, spectrum.name, damping.name),
        dtype=dtype,
        meta=np.empty((0, 0, 0), dtype),
    )
    return solved


def _solve(target: Block, spectrum: Spectrum, damping: Block) -> Block:
    system = spectrum.values + float(damping[0])
    if not system.min() > 0:
        raise np.linalg.LinAlgError(
            f"K + λI of checkpoint {spectrum.label!r} is not positive definite in float64: λ = "
            f"{float(damping[0]):.3g}, smallest eigenvalue of K = {spectrum.values.min():.3g}. Use "
            "a larger damping."
        )
    with np.errstate(invalid="ignore"):  # a NaN target stays NaN, alone
        along = target[:, :, 0] @ spectrum.vectors
        solved = (along / system) @ spectrum.vectors.T
    return np.asarray(solved.astype(product_dtype(target), copy=False)[:, :, None])
