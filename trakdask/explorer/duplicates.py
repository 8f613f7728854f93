"""Training samples that are there more than once, found by their features."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.spatial import cKDTree

from trakdask.explorer.computing import compute

__all__ = ["MOST_SAMPLES", "SAME", "duplicates"]

SAME = 0.9999
"""Samples whose features have a larger cosine are called duplicates."""

MOST_SAMPLES = 2_000_000
"""Above this, a search in the memory of one machine takes too long for a page."""

_DIRECTIONS = 16


def duplicates(features: xr.Dataset) -> pd.DataFrame:
    """Return groups of samples whose features, of the first checkpoint, have a cosine above 0.9999.

    A sample is compared with its nearest neighbour in 16 random directions, so of a large group
    each is found through some other one of it. Two samples of the same content have the same
    gradient, unless the model is random; samples with the same gradient may differ where the model
    cannot see it.

    Returns
    -------
    DataFrame with ``group``, numbered from 0 by the first sample of each, and ``sample``.

    Raises
    ------
    ValueError
        If there are more than two million samples.
    """
    feature = features["feature"].data[:, :, 0]
    n, p = feature.shape
    if n > MOST_SAMPLES:
        raise ValueError(
            f"expected at most {MOST_SAMPLES:,} samples to search for duplicates, got {n:,}; try "
            "td.explore of a selection of them"
        )
    if n < 2:
        return pd.DataFrame({"group": [], "sample": []}, dtype=np.int64)
    directions = np.random.default_rng(0).standard_normal((p, _DIRECTIONS))
    (sketch,) = compute(
        feature.map_blocks(_sketch, directions, chunks=(feature.chunks[0], (_DIRECTIONS,)))
    )
    pairs = _nearest(sketch)
    left, right = (feature[rows] for rows in pairs.T)
    (cosines,) = compute(da.map_blocks(_cosines, left, right, drop_axis=1, dtype=np.float64))
    return _groups(pairs[cosines > SAME], n)


def _sketch(block: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """Return unit vectors by their components in some random directions."""
    norms = np.linalg.norm(block, axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        unit = block / norms
    return np.asarray(unit @ directions)


def _nearest(sketch: np.ndarray) -> np.ndarray:
    """Return pairs (n, 2) of each sample and its nearest neighbour, if that is near at all."""
    rows = np.flatnonzero(np.isfinite(sketch).all(axis=1))
    if len(rows) < 2:
        return np.zeros((0, 2), np.int64)
    # |a - b|² = 2 (1 - cos); in a random direction a distance varies, hence the factor of 3.
    reach = 3 * np.sqrt(2 * (1 - SAME) * _DIRECTIONS)
    tree = cKDTree(sketch[rows])
    index = tree.query(sketch[rows], k=2, distance_upper_bound=reach)[1]
    # Where several are at the same place, a sample need not be its own first neighbour.
    other = np.where(index[:, 0] == np.arange(len(rows)), index[:, 1], index[:, 0])
    is_near = other < len(rows)
    pairs = np.stack([rows[is_near], rows[other[is_near]]], axis=1)
    return np.unique(np.sort(pairs, axis=1), axis=0)


def _cosines(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    left, right = left.astype(np.float64), right.astype(np.float64)
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    return np.asarray(np.einsum("sp,sp->s", left, right) / norms)


def _groups(pairs: np.ndarray, n: int) -> pd.DataFrame:
    """Return the connected samples of two or more."""
    graph = coo_array((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape=(n, n))
    _, label = connected_components(graph, directed=False)
    sample = np.flatnonzero(np.bincount(label)[label] > 1)
    group = pd.factorize(label[sample])[0]
    table = pd.DataFrame({"group": group.astype(np.int64), "sample": sample})
    return table.sort_values(["group", "sample"], ignore_index=True)
