"""Totals of attributions: what all training samples together say of a row, for every damping."""

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
    align_weights,
    block_starts,
    flat,
    product_dtype,
    require_features,
)
from trakdask.arrays.completeness import GRID, is_followed
from trakdask.arrays.gram import pooled
from trakdask.arrays.solve import require_finite

__all__ = ["Spectrum", "held_out", "left_out", "mean_trace", "solve", "spectrum", "spread_rows"]

_LEFT_OUT_BLOCKS = 8


class Spectrum(NamedTuple):
    """K = V diag(s) Vᵀ of one checkpoint, what of r lies along V, and tr(K)/n."""

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
    (checkpoint,) lazy, one :class:`Spectrum` per chunk: for :func:`held_out` and :func:`left_out`.

    Raises
    ------
    ValueError
        At compute time, if ``gram`` is not finite; names the checkpoint.

    Notes
    -----
    Cost: one eigendecomposition by divide and conquer, about 9 p³ flops and 32 p² bytes in a task,
    8 p² bytes kept. Eigenvalues that rounding made negative count as 0. NumPy's, which lets go of
    Python's lock; SciPy's drivers hold it and are no faster.
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


def _inverse(spectrum: Spectrum) -> npt.NDArray[np.float64]:
    """Return 1/(s + ρ tr(K)/n), (p, ρ); NaN where K is all 0."""
    if not spectrum.mean > 0:
        return np.full((len(spectrum.values), len(GRID)), np.nan)
    return 1 / (spectrum.values[:, None] + GRID * spectrum.mean)


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


def held_out(spectrum: da.Array, feature: da.Array) -> da.Array:
    """Return Σ_z score(z, t) of rows that the Gram matrix does not hold, for every ρ of the grid.

    Parameters
    ----------
    spectrum
        Of :func:`spectrum`.
    feature
        (row, proj_dim, checkpoint), float, chunks (rows, p, 1).

    Returns
    -------
    φ_c(t)ᵀ (K_c + λ_c I)⁻¹ r_c, (row, ρ, checkpoint) float64, lazy.

    Notes
    -----
    Cost: 34 p flops per row, after 34 p² once per checkpoint.
    """
    require_features(feature, name="feature", caller="held_out")
    directions: da.Array = da.blockwise(
        _directions,
        "pgc",
        spectrum,
        "c",
        new_axes={"p": feature.shape[1], "g": len(GRID)},
        align_arrays=False,
        name="newton-directions-" + tokenize(spectrum.name),
        dtype=np.float64,
        meta=np.empty((0, 0, 0), np.float64),
    )
    totals: da.Array = da.blockwise(
        _totals,
        "sgc",
        feature,
        "spc",
        directions,
        "pgc",
        concatenate=False,
        align_arrays=False,
        name="held-out-totals-" + tokenize(feature.name, directions.name),
        dtype=np.float64,
        meta=np.empty((0, 0, 0), np.float64),
    )
    return totals


def _directions(spectrum: Spectrum) -> Block:
    return (spectrum.vectors @ (_inverse(spectrum) * spectrum.loss[:, None]))[:, :, None]


def _totals(feature: Blocks, directions: Blocks) -> Block:
    (phi,), (along,) = flat(feature), flat(directions)
    with np.errstate(invalid="ignore"):  # a NaN target is left out of the correlation
        return (phi[:, :, 0] @ along[:, :, 0])[:, :, None]


def left_out(
    spectrum: da.Array,
    feature: da.Array,
    weights: da.Array | None,
    sum_weights: da.Array,
    unless: Sequence[da.Array] = (),
) -> da.Array:
    """Return what :func:`held_out` would if each row alone were taken out of K and r.

    Parameters
    ----------
    spectrum, feature
        As in :func:`held_out`; the rows are among those that K and r are sums over.
    weights, sum_weights
        h (None for 1) and g of those rows, (row, checkpoint), as K and r were made with.
    unless
        Curves of candidates that come first: where one of them reaches the least peak, nothing is
        computed and the totals are NaN.

    Returns
    -------
    (row, ρ, checkpoint) float64, lazy.

    Notes
    -----
    Exact (Sherman-Morrison): with the leverage l = φᵀ (K + λI)⁻¹ φ it is
    (φᵀ (K + λI)⁻¹ r - g l) / (1 - h l). Cost: 2 p² flops per row and checkpoint.
    """
    require_features(feature, name="feature", caller="left_out")
    h = [None, None] if weights is None else [align_weights(weights, feature, name="weights"), "sc"]
    g = pooled(align_weights(sum_weights, feature, name="sum_weights"))
    curves = [item for i, curve in enumerate(unless) for item in (curve, f"{i}")]
    totals: da.Array = da.blockwise(
        _left_out,
        "sgc",
        feature,
        "spc",
        g,
        "s",
        spectrum,
        "c",
        *h,
        *curves,
        new_axes={"g": len(GRID)},
        concatenate=True,
        align_arrays=False,
        name="left-out-totals-" + tokenize(feature.name, spectrum.name, weights, g.name, unless),
        dtype=np.float64,
        meta=np.empty((0, 0, 0), np.float64),
    )
    return totals


def _left_out(phi: Block, g: Block, spectrum: Spectrum, h: Block | None, *curves: Block) -> Block:
    if any(is_followed(curve) for curve in curves):
        return np.full((len(phi), len(GRID), 1), np.nan)
    along, inverse = phi[:, :, 0] @ spectrum.vectors, _inverse(spectrum)
    total = along @ (inverse * spectrum.loss[:, None])
    leverage = np.square(along, out=along) @ inverse
    weight = 1.0 if h is None else h
    result = (total - g[:, None] * leverage) / (1 - weight * leverage)
    return np.asarray(result)[:, :, None]


def spread_rows(sizes: tuple[int, ...], most: int) -> list[slice]:
    """Return runs of at most ``most`` rows in all, in up to 8 chunks spread over all of them.

    Examples
    --------
    >>> [(rows.start, rows.stop) for rows in spread_rows((4, 4, 4), 6)]
    [(0, 2), (4, 6), (8, 10)]
    """
    n_blocks = min(len(sizes), _LEFT_OUT_BLOCKS, most)
    chosen = np.unique(np.linspace(0, len(sizes) - 1, n_blocks).round().astype(int))
    starts = block_starts(sizes)
    rows = most // len(chosen)
    return [slice(int(starts[i]), int(starts[i]) + min(rows, sizes[i])) for i in chosen]
