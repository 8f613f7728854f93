"""Create masks of training samples lazily, and sum scores over them."""

from __future__ import annotations

import functools

import dask.array as da
import numpy as np
from numpy.typing import NDArray

from trakdask.arrays.blocks import blockwise

_BYTES_PER_BLOCK = 2**24


def random_subsets(
    n: int, n_subsets: int, size: int, seed: int, *, groups: NDArray[np.int64] | None = None
) -> da.Array:
    """Return masks of random subsets of equal size; each depends only on the seed and its index.

    Parameters
    ----------
    n
        Number of samples.
    n_subsets
        Number of masks.
    size
        Number of samples, or of groups, in each subset.
    seed
        Random seed, not negative.
    groups
        Group of each sample, from 0; all samples of a group are in or out of a subset together.

    Returns
    -------
    (subset, sample) bool, lazy, in blocks of rows.

    Examples
    --------
    >>> random_subsets(6, 3, 2, seed=0).compute().sum(axis=1).tolist()
    [2, 2, 2]
    """
    numbers = da.arange(n_subsets, chunks=max(1, _BYTES_PER_BLOCK // max(n, 1)))
    masks = functools.partial(_random_masks, n=n, size=size, seed=seed, groups=groups)
    return blockwise(masks, "sn", numbers, "s", new_axes={"n": n}, name="subsets", dtype=bool)


def _random_masks(
    numbers: NDArray[np.int64], *, n: int, size: int, seed: int, groups: NDArray[np.int64] | None
) -> NDArray[np.bool_]:
    n_drawn = n if groups is None else int(groups.max()) + 1
    drawn = np.zeros((len(numbers), n_drawn), bool)
    for mask, number in zip(drawn, numbers.tolist(), strict=True):
        # The first of a permutation: with another size, subsets contain each other, and each
        # depends on its own number alone.
        mask[np.random.default_rng([seed, number]).permutation(n_drawn)[:size]] = True
    return drawn if groups is None else drawn[:, groups]


def leave_out_each(n: int, positions: NDArray[np.int64]) -> da.Array:
    """Return masks (subset, sample) that each leave out one sample, lazy.

    Examples
    --------
    >>> leave_out_each(3, np.array([2, 0])).compute().tolist()
    [[True, True, False], [False, True, True]]
    """
    left_out = da.from_array(positions[:, None], chunks=(max(1, _BYTES_PER_BLOCK // max(n, 1)), 1))
    return left_out != da.arange(n, chunks=-1)


def subset_sums(masks: da.Array, values: da.Array) -> da.Array:
    """Return the sum of values (sample, ...) over every subset (subset, sample), float64, lazy.

    Computed block by block, so neither array is in memory as a whole. A NaN makes all sums of its
    column NaN.
    """
    return da.tensordot(masks.astype("f8"), values.astype("f8"), axes=((1,), (0,)))
