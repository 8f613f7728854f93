"""Compute attribution scores as lazy tiles."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt

from trakdask.arrays.blocks import (
    Block,
    Blocks,
    align_weights,
    blockwise,
    flat,
    matrix,
    mean_weight,
    product_dtype,
)
from trakdask.arrays.graphs import read_in_task, reader
from trakdask.arrays.weights import row_norms
from trakdask.arrays.xp import array_module, asnumpy

#: The rows of a block whose norms are compared with their stored norms.
_ROWS_COMPARED = 24
_MULTIPLES = np.arange(_ROWS_COMPARED) * (np.sqrt(5) - 1) / 2 % 1

#: Twice the rounding of float16, 2^-11: the error of the square of a row with one large element.
_HALF_PRECISION = 1e-3


def score(
    feature: da.Array,
    solved: da.Array,
    loss_weights: da.Array | None,
    *,
    folds: da.Array | None = None,
    average: bool = True,
    pooled: bool = True,
    name: str = "score",
) -> da.Array:
    """Return the attribution of every target to every sample.

    τ(z, t) = mean_c[ φ_c(z)·w_c(t) ] · mean_c[ g_c(z) ]: TRAK's ensembled score.

    Parameters
    ----------
    feature
        φ of the samples, (sample, proj_dim, checkpoint), float, chunks (rows, p, 1).
    solved
        w of the targets, (target, proj_dim, checkpoint), float, chunks (rows, p, 1).
    loss_weights
        g, (sample, checkpoint); None for 1.
    folds
        The factor of the mean product of the other checkpoints where checkpoint j is left
        out, (sample, fold). If passed, beside weights, scores come with their standard error over
        checkpoints.
    average
        Average the products over checkpoints. If False, return the product of each checkpoint times
        the mean of g, so that the mean over checkpoints is the averaged score.
    pooled
        Average g over checkpoints. If False, the score is mean_c[ g_c(z) φ_c(z)·w_c(t) ].
    name
        With another name, a scheduler computes tiles anew that it would else keep.

    Returns
    -------
    (sample, target) float32 (float64 if an input is), or (sample, target, checkpoint) with
    ``average=False``; lazy, in the row chunks of ``feature`` and ``solved``. With ``folds``, of
    dtype :func:`estimate`.

    Notes
    -----
    The error is a jackknife, √((C - 1)/C Σ_j (θ_j - mean θ)²) with the scores θ_j = b_j(z) mean_c≠j
    of products, where b are ``folds``. Σ θ_j and Σ θ_j² are polynomials in the sum of all products,
    so that four sums in float64 are enough, at any C.

    Cost: 2 n m p C flops. Every tile reads its sample block and its target block of all
    checkpoints, so score many targets at once; :func:`trakdask.arrays.memory.score` bounds the
    memory of a task. If the targets are in one chunk, stored features are read inside these tasks,
    one checkpoint at a time: there is one task per block of samples. Blocks that tasks share, such
    as persisted ones, are each multiplied by a task of its own if there are fewer targets than p:
    workers then send each other products, and not features.

    Exactness: products and sums are in the dtype of the result, with checkpoints added in order, so
    the bits are the same on any scheduler for given chunks and BLAS (a worker with
    ``TRAKDASK_XP=cupy`` multiplies on its GPU). A NaN feature or weight makes only the scores of
    its own sample NaN.

    References
    ----------
    Park et al. 2023, "TRAK: Attributing Model Behavior at Scale", section 3. Efron & Stein 1981
    (jackknife).

    Examples
    --------
    >>> x = da.ones((3, 2, 1), chunks=(2, 2, 1), dtype="float32")
    >>> score(x, x[:1], None).compute().tolist()
    [[2.0], [2.0], [2.0]]
    """
    # Several tiles in a row of tiles share the block that is read.
    reads = solved.numblocks[0] == 1
    read = read_in_task(feature, by_checkpoint=not average) if reads else None
    arrays: list[object] = [*(read or (feature, "spc")), solved, "tpc"]
    function: Callable[..., Block] = _apart
    dtype = product_dtype(feature, solved)
    if average:
        average_of = _averaged if folds is None else _with_error
        function = functools.partial(average_of, pooled=pooled)
    is_small = solved.shape[0] < feature.shape[1] and feature.numblocks[2] > 1
    if average and is_small and reader(feature) is None:
        # dask would fuse layers with the same value of concatenate.
        products = blockwise(
            _apart, "stc", *arrays, concatenate=False, name=f"products-{name}", dtype=dtype
        )
        arrays, function = [products, "stc"], functools.partial(function, None)
    if loss_weights is not None:
        weight = align_weights(loss_weights, feature)
        read = read_in_task(weight, by_checkpoint=not (average or pooled)) if reads else None
        arrays += read or (weight, "sd" if pooled else "sc")
    if folds is not None:
        arrays += folds.rechunk((feature.chunks[0], -1)), "sf"
        dtype = estimate(dtype)
    # concatenate=None passes lists of blocks, as False would. But dask fuses this layer with the
    # one that consumes its tiles (top_k) only if both are None.
    return blockwise(
        function, "st" if average else "stc", *arrays,
        concatenate=None, name=name, dtype=dtype,
    )  # fmt: skip


def checked(feature: da.Array, norm: da.Array, out_to_loss: da.Array) -> da.Array:
    """Return Q, which raises an error when computed if features do not have their stored norms.

    Features in memory, or computed from those of a store, may have been changed since their gram
    matrix was reduced. Blocks that tasks read from a store are as they were: they have checksums.

    Parameters
    ----------
    feature
        (sample, proj_dim, checkpoint), float, chunks (rows, p, 1).
    norm
        ‖φ_c(z)‖² as it was when the features were made, (sample, checkpoint).
    out_to_loss
        Q, (sample, checkpoint), which every score of a sample is multiplied with.

    Returns
    -------
    ``out_to_loss``. In each block of features, 24 rows that are spread over it are compared, or all
    rows of a smaller block, up to the rounding of float16.

    Raises
    ------
    ValueError
        When computed, with a row that differs.

    Examples
    --------
    >>> x, q = da.ones((3, 2, 1), chunks=(2, 2, 1)), da.ones((3, 1), chunks=(2, 1))
    >>> checked(x, 2 * q, q).compute().sum().item()
    3.0
    """
    if reader(feature) is not None:
        return out_to_loss
    # Q raises the error, and not the features: blocks in the memory of workers stay what they are,
    # since every result of a task would be sent again to where the other checkpoints' blocks are.
    small = [align_weights(out_to_loss, feature), "sc", align_weights(norm, feature), "sc"]
    return blockwise(
        _checked, "sc", *small, feature, "spc",
        concatenate=None, name="checked", dtype=out_to_loss.dtype,
    )  # fmt: skip


def _checked(out_to_loss: Block, norm: Block, feature: Blocks) -> Block:
    n, (block,) = len(norm), flat(feature)
    # Multiples of the golden ratio are spread evenly, and unlike every k-th row, they are not all
    # in the same half of rows that alternate.
    some = np.arange(n) if n <= _ROWS_COMPARED else (_MULTIPLES * n).astype(np.intp)
    actual, expected = row_norms(block[some]), norm[some]
    with np.errstate(invalid="ignore"):  # infinity less infinity
        differs = np.abs(actual - expected) > _HALF_PRECISION * expected
    differs |= np.isnan(actual) != np.isnan(expected)
    if differs.any():
        row, column = np.argwhere(differs)[0]
        raise ValueError(
            "expected 'feature' as it was when 'gram' was reduced from it, got a row with "
            f"‖φ‖² = {actual[row, column]:.6g} where 'feature_norm' is "
            f"{expected[row, column]:.6g}; try features.drop_vars(['gram', 'feature_norm'], "
            "errors='ignore'), which reduces a new gram matrix of the features as they are now"
        )
    return out_to_loss


def _averaged(
    feature: Blocks | None, factor: Blocks, weight: Blocks | None = None, *, pooled: bool
) -> Block:
    """Return one (rows, targets) tile from lists of blocks, one block per checkpoint.

    ``factor`` are the solved targets; or their products with the features, which are then None.
    """
    xp, total, count = array_module(), None, 0
    for product in _products(xp, feature, factor, None if pooled else weight):
        if total is None:
            total = product
        else:
            total += product
        count += 1
        del product  # of a wide tile, it would be held while the next one is computed
    assert total is not None
    if weight is None or not pooled:
        total /= total.dtype.type(count)
    else:
        total *= xp.asarray((mean_weight(weight) / count).astype(total.dtype)[:, None])
    return asnumpy(total)


def estimate(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Return the dtype of a number with its standard error."""
    return np.dtype([("score", dtype), ("error", dtype)])


def _with_error(
    feature: Blocks | None, factor: Blocks, weight: Blocks, folds: Blocks, *, pooled: bool
) -> Block:
    """Return one tile of scores with their errors; see :func:`_averaged`."""
    xp = array_module()
    (others,) = flat(folds)
    b = xp.asarray(others.T[:, :, None])
    # 1. Sums of products x_j: Σ x_j, Σ b_j x_j, Σ b_j² x_j and Σ b_j² x_j².
    products = _products(xp, feature, factor, None if pooled else weight)
    sums: list[Any] = []
    for b_j in b:
        product = next(products)  # zip would hold it while the next one is computed
        dtype, x = product.dtype, product.astype(np.float64)
        y = b_j * x
        terms = [x, y, b_j * y, y * y]
        sums = list(map(operator.iadd, sums, terms)) if sums else terms
        del product, x, y, terms
    n, (total, y, by, yy) = len(b), sums
    # 2. With θ_j = b_j (total - x_j)/(n - 1), of each entry:
    first = total * b.sum(axis=0) - y
    second = total * total * (b * b).sum(axis=0) - 2 * total * by + yy
    variance = (second - first * first / n) / (n * (n - 1))
    if pooled:
        total *= xp.asarray(mean_weight(weight)[:, None])
    tile = np.empty(total.shape, estimate(dtype))
    tile["score"] = asnumpy(total / n)
    tile["error"] = asnumpy(np.sqrt(np.maximum(variance, 0)))  # rounding may make it negative
    return tile


def _products(
    xp: Any, feature: Blocks | None, factor: Blocks, weight: Blocks | None
) -> Iterator[Any]:
    """Yield the (rows, targets) product of each checkpoint, as arrays that may be changed."""
    samples = itertools.repeat(None) if feature is None else flat(feature)
    apart = itertools.repeat(None) if weight is None else flat(weight)
    for x, w, g in zip(samples, flat(factor), apart, strict=False):
        # Copies of products that are known, as the scheduler owns these blocks.
        product = xp.array(w[:, :, 0]) if x is None else _product(xp, x, w)
        if g is not None:
            product *= xp.asarray(g.astype(product.dtype))
        yield product
        del product


def _apart(feature: Blocks, solved: Blocks, weight: Blocks | None = None) -> Block:
    """Return one (rows, targets, 1) tile of one checkpoint."""
    product = asnumpy(_product(array_module(), feature, solved))
    if weight is not None:
        product *= mean_weight(weight).astype(product.dtype)[:, None]
    return product.reshape(*product.shape, 1)


def _product(xp: Any, feature: Blocks, solved: Blocks) -> Any:
    """Return the (rows, targets) product of one checkpoint, as an array of ``xp``."""
    return xp.asarray(matrix(feature)) @ xp.asarray(matrix(solved)).T
