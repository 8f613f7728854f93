"""Attribution scores as lazy tiles."""

from __future__ import annotations

import dask.array as da
import numpy as np
from dask.base import tokenize

from trakdask.arrays.blocks import (
    Block,
    Blocks,
    align_weights,
    flat,
    matrix,
    mean_weight,
    require_features,
)

__all__ = ["score"]


def score(
    feature: da.Array,
    solved: da.Array,
    loss_weight: da.Array | None,
    *,
    average: bool = True,
) -> da.Array:
    """Return the attribution of every target to every sample.

    τ(z, t) = mean_c[ φ_c(z)·w_c(t) ] · mean_c[ g_c(z) ]: TRAK's ensembled score.

    Parameters
    ----------
    feature
        φ of the samples, (sample, proj_dim, checkpoint), float, chunks (rows, p, 1).
    solved
        w of the targets, (target, proj_dim, checkpoint), float, chunks (rows, p, 1).
    loss_weight
        g, (sample, checkpoint); None for 1.
    average
        Take the mean over checkpoints. If False, each checkpoint's product stays apart, times the
        same mean of g: their mean is the averaged score.

    Returns
    -------
    (sample, target) float32, or (sample, target, checkpoint) with ``average=False``; lazy, in the
    row chunks of ``feature`` and ``solved``.

    Raises
    ------
    ValueError
        If shapes or chunks do not fit.

    Notes
    -----
    Cost: 2 n m p C flops; every tile reads its sample block and its target block of all
    checkpoints, so batch the targets. Peak per task: C p (rows of both) itemsize + 8 bytes
    per entry of the tile; the sum over checkpoints is made in place.

    Exactness: float32 products and sums, checkpoints in order: the same bits on any scheduler
    for given chunks. A NaN feature or weight makes the scores of its own sample NaN.

    References
    ----------
    Park et al. 2023, "TRAK: Attributing Model Behavior at Scale", section 3.

    Examples
    --------
    >>> x = da.ones((3, 2, 1), chunks=(2, 2, 1), dtype="float32")
    >>> score(x, x[:1], None).compute().tolist()
    [[2.0], [2.0], [2.0]]
    """
    require_features(feature, name="feature", caller="score")
    require_features(
        solved, name="solved", caller="score", dims=("target", "proj_dim", "checkpoint")
    )
    if feature.shape[1:] != solved.shape[1:]:
        raise ValueError(
            f"feature has (proj_dim, checkpoint) {feature.shape[1:]}; solved has "
            f"{solved.shape[1:]}. Featurize both with the same projector and checkpoints."
        )
    arrays: list[object] = [feature, "spc", solved, "tpc"]
    if loss_weight is not None:
        arrays += [align_weights(loss_weight, feature, name="loss_weight"), "sd"]
    out = "st" if average else "stc"
    tiles: da.Array = da.blockwise(
        _averaged if average else _apart,
        out,
        *arrays,
        # Lists of blocks, as False gives; but dask fuses this layer into the one that consumes
        # its tiles (top_k) only where both say None.
        concatenate=None,
        align_arrays=False,
        name="score-" + tokenize(feature.name, solved.name, loss_weight, average),
        dtype=np.float32,
        meta=np.empty((0,) * len(out), np.float32),
    )
    return tiles


def _averaged(feature: Blocks, solved: Blocks, weight: Blocks | None = None) -> Block:
    """Return one (rows, targets) tile from lists over checkpoints."""
    total, count = None, 0
    for x, w in zip(flat(feature), flat(solved), strict=True):
        product = matrix(x) @ matrix(w).T
        total = product if total is None else np.add(total, product, out=total)
        count += 1
    assert total is not None
    if weight is None:
        total /= np.float32(count)
    else:
        total *= (mean_weight(weight) / count).astype(np.float32)[:, None]
    return total


def _apart(feature: Blocks, solved: Blocks, weight: Blocks | None = None) -> Block:
    """Return one (rows, targets, 1) tile of one checkpoint."""
    product = matrix(feature) @ matrix(solved).T
    if weight is not None:
        product *= mean_weight(weight).astype(np.float32)[:, None]
    return product.reshape(*product.shape, 1)
