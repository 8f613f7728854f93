"""Groups of samples whose features point the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dask
import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.spatial import cKDTree

from trakdask.variables import lazy_features, validate

_SAME = 0.9999
"""Samples whose features have a larger cosine are called duplicates."""

_MOST_SAMPLES = 2_000_000
"""Above this, a search in the memory of one machine takes too long."""

_DIRECTIONS = 16


def duplicates(features: xr.Dataset) -> pd.DataFrame:
    """Find training samples whose features point the same way: most often the same content.

    Parameters
    ----------
    features
        Features of the samples, of which the first checkpoint is compared.

    Returns
    -------
    DataFrame with a row for each sample of a group of two or more, whose features have a cosine
    above 0.9999: ``group``, the number of the group, int64, and ``sample``, the position of the
    sample, int64.

    Raises
    ------
    ValueError
        If there are more than two million samples.

    Notes
    -----
    Samples of the same content and label have the same gradient. Samples with the same gradient may
    differ where the model cannot see it, such as texts behind the last token that it reads.

    This computes at once, in two passes over the features. A sample is compared with its nearest
    neighbour in 16 random directions, so that each sample of a large group is found through some
    other sample of it. Memory: 128 bytes for each sample, beside the blocks.

    Examples
    --------
    >>> import trakdask as td
    >>> features = td.testing.simulate_features(n_samples=8, proj_dim=4)
    >>> twice = features.isel(sample=[0, 1, 2, 3, 1])
    >>> found = td.duplicates(twice)
    >>> found.values.tolist()
    [[0, 1], [0, 4]]

    The positions that are left if one sample of each group stays:

    >>> found["sample"][found["group"].duplicated()].tolist()
    [4]
    """
    validate(features, ["feature"], what="features")
    return find_duplicates(lazy_features(features)["feature"].data[:, :, 0])


def find_duplicates(
    feature: da.Array, compute: Callable[..., tuple[Any, ...]] = dask.compute
) -> pd.DataFrame:
    """Return what :func:`duplicates` returns of features (sample, proj_dim)."""
    n, p = feature.shape
    if n > _MOST_SAMPLES:
        raise ValueError(
            f"expected at most {_MOST_SAMPLES:,} samples to search for duplicates, got {n:,}; try "
            "a selection of them"
        )
    # 1. The components of unit vectors in some random directions.
    directions = np.random.default_rng(0).standard_normal((p, _DIRECTIONS))
    chunks = feature.chunks[0], directions.shape[1:]
    lazy = da.map_blocks(_unit_components, feature, directions, chunks=chunks, dtype=np.float64)
    (components,) = compute(lazy)
    # 2. Pairs (n, 2) of each sample and its nearest neighbour there, if that is near at all.
    sketch = np.asarray(components)
    rows = np.flatnonzero(np.isfinite(sketch).all(axis=1))
    # |a - b|² = 2 (1 - cos); in a random direction a distance varies, hence the factor of 3.
    reach = 3 * np.sqrt(2 * (1 - _SAME) * _DIRECTIONS)
    near = cKDTree(sketch[rows])
    index = near.query(sketch[rows], k=2, distance_upper_bound=reach)[1]
    # Where several are at the same place, a sample need not be its own first neighbour.
    other = np.where(index[:, 0] == np.arange(len(rows)), index[:, 1], index[:, 0])
    is_near = other < len(rows)
    pairs = np.stack([rows[is_near], rows[other[is_near]]], axis=1)
    pairs = np.unique(np.sort(pairs, axis=1), axis=0)
    # 3. Those whose features point the same way, in groups of all that are connected.
    left, right = (feature[rows] for rows in pairs.T)
    (cosines,) = compute(da.map_blocks(_cosines, left, right, drop_axis=1, dtype=np.float64))
    pairs = pairs[cosines > _SAME]
    graph = coo_array((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape=(n, n))
    _, label = connected_components(graph, directed=False)
    sample = np.flatnonzero(np.bincount(label)[label] > 1)
    # Labels of components count the single samples, too: groups are numbered anew.
    group = pd.factorize(label[sample])[0]
    table = pd.DataFrame({"group": group.astype(np.int64), "sample": sample})
    return table.sort_values(["group", "sample"], ignore_index=True)


def _unit_components(block: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """Return the components of unit vectors in some directions, (sample, direction)."""
    norms = np.linalg.norm(block, axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(block / norms @ directions)


def _cosines(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    left, right = left.astype(np.float64), right.astype(np.float64)
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    return np.asarray(np.einsum("sp,sp->s", left, right) / norms)
