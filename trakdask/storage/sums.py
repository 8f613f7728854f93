"""What is reduced from saved features and kept beside them: the gram matrix, the loss gradient."""

from __future__ import annotations

import functools
import time

import dask.array as da
import numpy as np
import xarray as xr
from dask.base import tokenize

from trakdask import arrays
from trakdask.arrays.blocks import Blocks, flat
from trakdask.attribution.estimators import Weights
from trakdask.execution import scheduling
from trakdask.storage.blocks import about, run, storing
from trakdask.storage.piece import GRAM, LOSS_GRADIENT, Piece, array
from trakdask.storage.reading import stored
from trakdask.storage.zarr_stores import Recorded, zarr_store
from trakdask.variables import SAMPLE

__all__ = ["reduced", "save_sums"]


def save_sums(
    piece: Piece, kept: Weights, index: int, dropped: np.ndarray, retries: int = 0
) -> set[str]:
    """Reduce what is kept from the stored features, not from the graph; return the hosts."""
    missing = functools.partial(_missing, piece, kept, index, dropped)
    return scheduling.run(missing, retries=retries, compute=run) or set()


def _missing(piece: Piece, kept: Weights, index: int, dropped: np.ndarray) -> da.Array | None:
    if GRAM in piece.done(index):
        return None
    features = stored(piece)
    if dropped.any():
        features = features.isel({SAMPLE: np.flatnonzero(~dropped)})
    matrices = reduced(features, kept, index)
    name = f"save-gram-{tokenize(piece.digest, piece.place.url, matrices)}"
    written: da.Array = da.blockwise(
        functools.partial(_write_sums, piece, kept.sums, index), "c",
        *(item for matrix in matrices for item in (matrix, "pqc" if matrix.ndim == 3 else "pc")),
        dtype=bool, meta=np.empty(0, bool), concatenate=False, align_arrays=False, name=name,
    )  # fmt: skip
    return written


def reduced(features: xr.Dataset, weights: Weights, index: int) -> tuple[da.Array, ...]:
    """Return ``weights.sums`` over features at one checkpoint, lazy."""
    feature = features.feature.data[:, :, index : index + 1]
    h = weights.gram_data(features)
    h = None if h is None else h[:, index : index + 1]
    if LOSS_GRADIENT not in weights.sums:
        return (arrays.gram.gram(feature, h),)
    g = arrays.gram.pooled(weights.loss_data(features))[:, None]
    return arrays.gram.gram_and_sum(feature, h, g)


def _write_sums(piece: Piece, names: tuple[str, ...], index: int, *matrices: Blocks) -> np.ndarray:
    started = time.time()
    with storing(piece, f"the gram matrix of checkpoint {index}"):
        store = Recorded(zarr_store(piece.place))
        group = piece.group(store)
        for name, matrix in zip(names, matrices, strict=True):
            (array(group, name)[..., index : index + 1],) = flat(matrix)
        piece.write_record(index, GRAM, store.written, about(started))
    return np.ones(1, bool)
