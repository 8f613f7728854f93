"""What is reduced from saved features and kept beside them: the gram matrix, the loss gradient."""

from __future__ import annotations

import functools
import socket
import time

import dask.array as da
import numpy as np
from dask.base import tokenize

from trakdask import arrays
from trakdask.arrays.blocks import Blocks, flat
from trakdask.storage.blocks import HOST, about, run, storing
from trakdask.storage.piece import GRAM, LOSS_GRADIENT, Piece, array
from trakdask.storage.place import Recorded
from trakdask.storage.reading import stored
from trakdask.storage.template import Kept

__all__ = ["save_sums"]


def save_sums(piece: Piece, kept: Kept, index: int) -> set[str]:
    """Reduce what is kept from the stored features, not from the graph; return the hosts."""
    if GRAM in piece.done(index):
        return set()
    features = stored(piece)
    feature = features.feature.data[:, :, index : index + 1]
    h = kept.weights.gram_data(features)
    h = None if h is None else h[:, index : index + 1]
    if LOSS_GRADIENT in kept.names:
        g = arrays.gram.pooled(kept.weights.loss_data(features))[:, None]
        matrices: tuple[da.Array, ...] = arrays.gram.gram_and_sum(feature, h, g)
    else:
        matrices = (arrays.gram.gram(feature, h),)
    name = f"save-gram-{tokenize(piece.digest, piece.place.url, matrices)}"
    written = da.blockwise(
        functools.partial(_write_sums, piece, kept.names, index), "c",
        *(item for matrix in matrices for item in (matrix, "pqc" if matrix.ndim == 3 else "pc")),
        dtype=HOST, meta=np.empty(0, HOST), concatenate=False, align_arrays=False, name=name,
    )  # fmt: skip
    return run(written)


def _write_sums(piece: Piece, names: tuple[str, ...], index: int, *matrices: Blocks) -> np.ndarray:
    started = time.time()
    with storing(piece, f"the gram matrix of checkpoint {index}"):
        store = Recorded(piece.place.zarr())
        group = piece.group(store)
        for name, matrix in zip(names, matrices, strict=True):
            (array(group, name)[..., index : index + 1],) = flat(matrix)
        piece.write_record(index, GRAM, store.written, about(started))
    return np.array([socket.gethostname()], HOST)
