"""Compute weights of samples from model outputs and from the norms of features."""

from __future__ import annotations

import functools
from typing import Any

import dask.array as da
import numpy as np
from dask.base import tokenize

from trakdask.arrays.blocks import Block, Blocks, Read, blockwise, coarse_groups, flat, mean_weight
from trakdask.arrays.graphs import map_stored, read_in_task, reader, stored

#: Tolerance for values of 1 - p that rounding puts outside [0, 1].
_ROUNDING = 1e-6

#: Standard deviations of log((1 - q)/q) up to which Q is the best weight of samples, and from which
#: its root is. Chosen by tests/benchmarks/results/2026-11-23-quality_wider.txt.
_EQUALLY_SURE, _UNEQUALLY_SURE = 0.8, 1.4

_ROWS_AT_ONCE = 64

#: q is cut off here for its logarithm: q of float32 may be exactly 0 or 1.
_SMALLEST, _LARGEST = 1e-12, 1 - 1e-6


def logit_variance(out_to_loss: da.Array) -> da.Array:
    """Return how much log((1 - q)/q), the margin of the model, varies between samples.

    Parameters
    ----------
    out_to_loss
        q, (sample, checkpoint), float, any chunks; NaN is left out.

    Returns
    -------
    The variance, (checkpoint) float64, lazy.

    Examples
    --------
    >>> logit_variance(da.from_array(np.array([[0.5], [1 / (1 + np.e**2)]]))).compute().tolist()
    [1.0]
    """
    logit = blockwise(_logit, "sc", out_to_loss, "sc", name="logit", dtype=np.float64)
    # A dtype, because arrays of expressions cannot tell theirs to numpy.
    variance: da.Array = da.nan_to_num(da.nanvar(logit, axis=0, dtype=np.float64))
    return variance  # of failed samples alone, 0


def _logit(q: Block) -> Block:
    q = np.clip(q.astype(np.float64), _SMALLEST, _LARGEST)
    return np.asarray(np.log1p(-q) - np.log(q))


def adaptive_power(out_to_loss: da.Array) -> da.Array:
    """Return the power of q that suits a model, by how much its margins vary, (), lazy.

    Examples
    --------
    >>> adaptive_power(da.from_array(np.array([[0.1], [0.2], [0.3]]))).compute().item()
    1.0
    """
    return blockwise(
        power_of, "", logit_variance(out_to_loss), "c",
        concatenate=True, name="adaptive-power", dtype=np.float64,
    )  # fmt: skip


def power_of(variance: Block) -> np.float64:
    """Return the power for margins that vary so much at each checkpoint: from 1 down to ½.

    Where a model is about equally sure of all samples, Q is what they weigh in its loss. Where it
    is not, retraining without some samples raises the weights of others that had almost none, and
    the root of Q is nearer to their weight in the end.

    Examples
    --------
    >>> [float(round(power_of(np.array([deviation**2])), 3)) for deviation in (0.5, 1.1, 3.0)]
    [1.0, 0.75, 0.5]
    """
    deviation = np.sqrt(variance.mean())
    return np.float64(np.interp(deviation, (_EQUALLY_SURE, _UNEQUALLY_SURE), (1.0, 0.5)))


def soft_loss_weights(out_to_loss: da.Array, power: float | da.Array) -> da.Array:
    """Return the weights g = q^a, where q is ``out_to_loss`` and a is ``power``.

    Parameters
    ----------
    out_to_loss
        q, (sample, checkpoint), float, any chunks. Values that rounding puts just outside [0, 1]
        are clipped. NaN, which marks a sample recorded as failed, stays NaN.
    power
        a, in [0, 1]; may be lazy, ().

    Returns
    -------
    (sample, checkpoint) float64, lazy.

    Raises
    ------
    ValueError
        At compute time, if q is not in [0, 1].

    Examples
    --------
    >>> soft_loss_weights(da.from_array(np.array([[0.25, 1.0]])), 0.5).compute().tolist()
    [[0.5, 1.0]]
    """
    if isinstance(power, da.Array):
        return blockwise(
            _loss_weights, "sc", out_to_loss, "sc", power, "",
            name="soft-loss-weights", dtype=np.float64,
        )  # fmt: skip
    return map_stored(_loss_weights, out_to_loss, name="soft-loss-weights", power=power)


def soft_gram_weights(out_to_loss: da.Array, power: float) -> da.Array:
    """Return h = q^a (1 - q), proportional to the derivative of q^a by f = log((1 - q)/q).

    Parameters and errors are as for :func:`soft_loss_weights`.

    Examples
    --------
    >>> soft_gram_weights(da.from_array(np.array([[0.25, 1.0]])), 0.5).compute().tolist()
    [[0.375, 0.0]]
    """
    return map_stored(gram_weights, out_to_loss, name="soft-gram-weights", power=power)


def _loss_weights(q: Block, power: float) -> Block:
    return np.power(_probability(q), power)


def gram_weights(q: Block, power: float) -> Block:
    """Return h = q^a (1 - q) of a block, float64; see :func:`soft_gram_weights`."""
    q = _probability(q)
    return np.power(q, power) * (1 - q)


def _probability(q: Block) -> Block:
    if ((q < -_ROUNDING) | (q > 1 + _ROUNDING)).any():  # never true of NaN
        raise ValueError(
            "expected out_to_loss = 1 - p in [0, 1] for soft weights, got values in "
            f"[{np.nanmin(q):.4g}, {np.nanmax(q):.4g}]; try td.Trak()"
        )
    return np.clip(q.astype(np.float64), 0, 1)


def pooled(weights: da.Array) -> da.Array:
    """Return the mean over checkpoints of (sample, checkpoint) weights, (sample,) float64, lazy.

    Examples
    --------
    >>> pooled(da.from_array(np.array([[0.5, 1.0]]), chunks=(1, 1))).compute().tolist()
    [0.75]
    """
    if read := reader(weights):
        read = functools.partial(_read_pooled, read, weights.shape[1])
        return stored(read, weights.chunks[:1], np.float64, "pooled-" + tokenize(weights))
    return blockwise(
        mean_weight, "s", weights, "sc", concatenate=False, name="pooled", dtype=np.float64
    )


def _read_pooled(read: Read, n_checkpoints: int, key: tuple[slice, ...]) -> Block:
    return mean_weight([read((*key, slice(i, i + 1))) for i in range(n_checkpoints)])


def squared_norm(feature: da.Array) -> da.Array:
    """Return ‖φ_c(z)‖², (sample, checkpoint) float64, lazy, in the chunks of ``feature``.

    Examples
    --------
    >>> squared_norm(da.full((1, 2, 1), 3.0, chunks=(1, 2, 1))).compute().tolist()
    [[18.0]]
    """
    groups = coarse_groups(feature.numblocks[0])
    read = read_in_task(feature, groups=groups, by_checkpoint=True)
    return blockwise(
        _squared_norm, "sc", *(read or (feature, "spc")),
        concatenate=False, name="squared-norm", dtype=np.float64,
    )  # fmt: skip


def _squared_norm(feature: Blocks) -> Block:
    return np.concatenate([row_norms(phi) for phi in flat(feature)])


def row_norms(feature: Block) -> Block:
    """Return ‖φ‖² of a block (sample, proj_dim, checkpoint), (sample, checkpoint) float64.

    The bits of a row do not depend on the other rows.

    Examples
    --------
    >>> row_norms(np.full((1, 2, 1), 3.0)).tolist()
    [[18.0]]
    """
    norms = np.empty((len(feature), feature.shape[2]))
    for start in range(0, len(feature), _ROWS_AT_ONCE):  # so that their squares stay in the cache
        rows = slice(start, start + _ROWS_AT_ONCE)
        # Squares first, then a sum of each row: einsum would add several rows at once, in an order
        # that depends on where a row begins.
        norms[rows] = np.square(np.moveaxis(feature[rows], 1, 2), dtype=np.float64).sum(axis=-1)
    return norms


def self_influence(forms: da.Array, loss_weights: da.Array, *, average: bool) -> da.Array:
    """Return form_c(z) · mean_c[g_c(z)]², lazy, in the chunks of ``forms``.

    Parameters
    ----------
    forms
        (sample, checkpoint), of :func:`trakdask.arrays.solve.leverage`, or :func:`squared_norm`.
    loss_weights
        g, (sample, checkpoint), chunks (rows, 1).
    average
        Whether the result is the mean over checkpoints, (sample), or (sample, checkpoint).

    Examples
    --------
    >>> forms = da.from_array(np.array([[1.0, 3.0]]), chunks=(1, 1))
    >>> weight = da.from_array(np.array([[0.5, 1.5]]), chunks=(1, 1))
    >>> self_influence(3 * forms, weight, average=True).compute().tolist()
    [6.0]
    >>> self_influence(3 * forms, weight, average=False).compute().tolist()
    [[3.0, 9.0]]
    """
    mean = pooled(loss_weights)
    read = read_in_task(mean, groups=coarse_groups(mean.numblocks[0]))
    if read is None or read[0].chunks != forms.chunks[:1]:  # forms are not of stored features
        read = mean.rechunk({0: forms.chunks[0]}, method="tasks"), "s"
    return blockwise(
        _influence, "s" if average else "sc", forms, "sc", *read,
        concatenate=False, name="self-influence", dtype=np.float64, average=average,
    )  # fmt: skip


def _influence(forms: Any, mean: Blocks, *, average: bool) -> Block:
    squared = np.concatenate(list(flat(mean))) ** 2
    return np.asarray(mean_weight(forms) * squared if average else forms * squared[:, None])
