"""Create masks of training samples lazily, and sum scores over them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import dask.array as da
import numpy as np
from dask.base import tokenize
from numpy.typing import NDArray

_BYTES_PER_BLOCK = 2**24
Mask = NDArray[np.bool_]


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
    row = functools.partial(_random_row, n, size, seed, groups)
    return _rows(row, n_subsets, n, name="subsets-" + tokenize(n, n_subsets, size, seed, groups))


def _random_row(n: int, size: int, seed: int, groups: NDArray[np.int64] | None, index: int) -> Mask:
    n_drawn = n if groups is None else int(groups.max()) + 1
    drawn = np.zeros(n_drawn, bool)
    drawn[np.random.default_rng([seed, index]).permutation(n_drawn)[:size]] = True
    return drawn if groups is None else drawn[groups]


def leave_out_each(n: int, positions: NDArray[np.int64]) -> da.Array:
    """Return masks (subset, sample) that each leave out one sample, lazy.

    Examples
    --------
    >>> leave_out_each(3, np.array([2, 0])).compute().tolist()
    [[True, True, False], [False, True, True]]
    """
    row = functools.partial(_all_but, n, positions)
    return _rows(row, len(positions), n, name="leave-out-" + tokenize(n, positions))


def _all_but(n: int, positions: NDArray[np.int64], index: int) -> Mask:
    mask = np.ones(n, bool)
    mask[positions[index]] = False
    return mask


def _rows(row: Callable[[int], Mask], n_rows: int, n: int, *, name: str) -> da.Array:
    size = max(1, _BYTES_PER_BLOCK // max(n, 1))
    masks: da.Array = da.map_blocks(
        functools.partial(_row_block, row, n_rows, size),
        chunks=da.core.normalize_chunks((size, -1), shape=(n_rows, n)),
        name=name, dtype=bool, meta=np.empty((0, 0), bool),
    )  # fmt: skip
    return masks


def _row_block(
    row: Callable[[int], Mask], n_rows: int, size: int, block_id: tuple[int, ...]
) -> Mask:
    first = block_id[0] * size
    return np.stack([row(index) for index in range(first, min(first + size, n_rows))])


def without_first(ranked: da.Array, counts: Sequence[int], n: int) -> da.Array:
    """Return masks that leave out the first k ranked samples, for every ranking and every k.

    Parameters
    ----------
    ranked
        Positions (ranking, rank), in the order in which they are left out; -1 for no sample.
    counts
        The values of k.
    n
        Number of samples.

    Returns
    -------
    (ranking × k, sample) bool, k varying fastest, lazy, in the row chunks of ``ranked``.

    Examples
    --------
    >>> ranked = da.from_array(np.array([[2, 0]]), chunks=-1)
    >>> without_first(ranked, [1, 2], 3).compute().tolist()
    [[True, True, False], [False, True, False]]
    """
    ranked = ranked.rechunk({1: -1})
    masks: da.Array = da.map_blocks(
        _without_first, ranked, tuple(counts), n,
        chunks=(tuple(len(counts) * size for size in ranked.chunks[0]), (n,)),
        name="without-first-" + tokenize(ranked.name, counts, n),
        dtype=bool, meta=np.empty((0, 0), bool),
    )  # fmt: skip
    return masks


def _without_first(ranked: NDArray[np.int64], counts: tuple[int, ...], n: int) -> Mask:
    masks = np.ones((len(ranked), len(counts), n), bool)
    for of_ranking, positions in zip(masks, ranked, strict=True):
        for mask, k in zip(of_ranking, counts, strict=True):
            first = positions[:k]
            mask[first[first >= 0]] = False
    return masks.reshape(-1, n)


def subset_sums(masks: da.Array, values: da.Array) -> da.Array:
    """Return the sum of values (sample, ...) over every subset (subset, sample), float64, lazy.

    Computed block by block, so neither array is in memory as a whole. A NaN makes all sums of its
    column NaN.
    """
    sums: da.Array = da.tensordot(_double(masks), _double(values), axes=((1,), (0,)))
    return sums


def _double(x: da.Array) -> da.Array:
    double: da.Array = x.astype(np.float64)
    return double
