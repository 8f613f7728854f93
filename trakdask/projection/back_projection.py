"""Multiply the matrix of a projector from the other side: from feature columns back to gradients.

The product of a feature with a vector w is that of the gradient with P w. So whoever wants nothing
but products with a few known vectors projects these back once, and never projects a gradient.
"""

from __future__ import annotations

import math
from functools import singledispatch

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from trakdask.projection.integer_products import sign_bits, signs_of
from trakdask.projection.kronecker import Kronecker
from trakdask.projection.mask import Mask, select_rows
from trakdask.projection.philox import (
    STREAM_KRONECKER_LEFT,
    STREAM_KRONECKER_RIGHT,
    STREAM_RADEMACHER,
    STREAM_SJLT,
    fill_words,
)
from trakdask.projection.protocol import Identity, Projector, RowMap
from trakdask.projection.rademacher import Rademacher
from trakdask.projection.sjlt import SJLT

__all__ = ["back_project", "require_back_projection"]

# Tiles of the matrix that fit in a cache; they do not affect results beyond rounding.
_ROW_TILE, _COLUMN_TILE = 2048, 256
_SPARSE_ROWS = 1 << 14
_WORDS_OF_COUNTER = 4


def back_project(projector: Projector, row_map: RowMap, checkpoint: int, vectors: Tensor) -> Tensor:
    """Return P w for some vectors w, with the scale of the features.

    For every gradient g, ``project(g) @ w`` is ``g @ back_project(w)``, up to the rounding of the
    features.

    Parameters
    ----------
    projector
        The map.
    row_map
        Rows of the parameters.
    checkpoint
        Checkpoint id in [0, 2**32).
    vectors
        Shape (m, width), float, on the CPU.

    Returns
    -------
    Shape (m, n_rows), float32; rows of padding have no meaning.

    Raises
    ------
    ValueError
        If the matrix of the projector cannot be multiplied from this side.

    Notes
    -----
    Exactness: the matrix is the one that gradients are multiplied with; products are summed in
    float32. Cost: m multiplications and additions for every nonzero entry of the matrix, and its
    random bits, which are drawn once for all vectors.

    Examples
    --------
    >>> rows = RowMap.from_shapes({"weight": (2, 3)}, alignment=1)
    >>> back_project(Identity(), rows, 0, torch.ones(1, 6)).shape
    torch.Size([1, 6])
    """
    require_back_projection(projector)
    scaled = vectors.double() * projector.scale(row_map.n_rows)
    return _unscaled(projector, row_map, checkpoint, scaled.float())


def require_back_projection(projector: Projector) -> None:
    """Check that the matrix of a projector can be multiplied from both sides.

    Raises
    ------
    ValueError
        If it cannot.
    """
    inner = projector.then if isinstance(projector, Mask) else projector
    if _unscaled.dispatch(type(inner)) is _unscaled.dispatch(object):
        raise ValueError(
            "expected features of a projector whose matrix can be multiplied from both sides, got "
            f"{type(inner).__name__}; try td.SJLT, or another projector that has one"
        )


@singledispatch
def _unscaled(projector: Projector, row_map: RowMap, checkpoint: int, vectors: Tensor) -> Tensor:
    raise NotImplementedError  # require_back_projection has refused it


@_unscaled.register
def _of_identity(projector: Identity, row_map: RowMap, checkpoint: int, vectors: Tensor) -> Tensor:
    return vectors


@_unscaled.register
def _of_mask(projector: Mask, row_map: RowMap, checkpoint: int, vectors: Tensor) -> Tensor:
    rows, ranks = select_rows(row_map.n_rows, projector.keep, projector.seed, checkpoint)
    kept = RowMap.from_shapes({"kept": (projector.keep,)}, alignment=projector.then.row_alignment)
    if isinstance(projector.then, Identity):  # columns are in the order of keys, not of rows
        values = vectors[:, torch.from_numpy(ranks)]
    else:
        values = _unscaled(projector.then, kept, checkpoint, vectors)
    out = vectors.new_zeros(len(vectors), row_map.n_rows)
    out[:, torch.tensor(rows)] = values
    return out


@_unscaled.register
def _of_sjlt(projector: SJLT, row_map: RowMap, checkpoint: int, vectors: Tensor) -> Tensor:
    table = vectors.T.contiguous()
    out = vectors.new_empty(len(vectors), row_map.n_rows)
    n_groups = -(-projector.sparsity // _WORDS_OF_COUNTER)
    address = {"seed": projector.seed, "checkpoint": checkpoint, "stream": STREAM_SJLT}
    for row in range(0, row_map.n_rows, _SPARSE_ROWS):
        n_rows = min(_SPARSE_ROWS, row_map.n_rows - row)
        grid = np.empty((n_groups, n_rows, 2), np.uint64)
        fill_words(grid, row, 0, **address)
        words = grid.view(np.uint32).swapaxes(0, 1).reshape(n_rows, -1)[:, : projector.sparsity]
        buckets = (words.astype(np.uint64) * np.uint64(projector.proj_dim)) >> np.uint64(32)
        signs = 1 - 2 * (words & 1).astype(np.float32)
        sums = embedding_bag(
            torch.from_numpy(buckets.astype(np.int64)),
            table,
            mode="sum",
            per_sample_weights=torch.from_numpy(signs),
        )
        out[:, row : row + n_rows] = sums.T
    return out


@_unscaled.register
def _of_rademacher(
    projector: Rademacher, row_map: RowMap, checkpoint: int, vectors: Tensor
) -> Tensor:
    address = {"seed": projector.seed, "checkpoint": checkpoint, "stream": STREAM_RADEMACHER}
    return _by_signs(vectors, 0, row_map.n_rows, address)


@_unscaled.register
def _of_kronecker(
    projector: Kronecker, row_map: RowMap, checkpoint: int, vectors: Tensor
) -> Tensor:
    address = {"seed": projector.seed, "checkpoint": checkpoint}
    out = vectors.new_zeros(len(vectors), row_map.n_rows)
    core = vectors.unflatten(1, (projector.left, projector.right))
    for offset, shape in zip(row_map.offsets, row_map.shapes, strict=True):
        size = math.prod(shape)
        if len(shape) < 2 or not size:
            dense = address | {"stream": STREAM_RADEMACHER}
            values = _by_signs(vectors, offset, size, dense)
        else:
            sides = (
                (shape[0], projector.left, STREAM_KRONECKER_LEFT),
                (size // shape[0], projector.right, STREAM_KRONECKER_RIGHT),
            )
            left, right = (
                _signs(offset, n_rows, 0, n_columns, address | {"stream": stream})
                for n_rows, n_columns, stream in sides
            )
            values = (left.T @ core @ right).flatten(1)
        out[:, offset : offset + size] = values
    return out


def _by_signs(vectors: Tensor, first: int, n_rows: int, address: dict[str, int]) -> Tensor:
    """Return the product with some rows of a dense matrix of signs, (m, n_rows)."""
    out = vectors.new_zeros(len(vectors), n_rows)
    for row in range(0, n_rows, _ROW_TILE):
        rows = slice(row, min(row + _ROW_TILE, n_rows))
        for column in range(0, vectors.shape[1], _COLUMN_TILE):
            part = vectors[:, column : column + _COLUMN_TILE]
            signs = _signs(first + row, rows.stop - row, column, part.shape[1], address)
            out[:, rows] += part @ signs
    return out


def _signs(row: int, n_rows: int, column: int, n_columns: int, address: dict[str, int]) -> Tensor:
    """Return a window of a matrix of signs, (n_columns, n_rows), float32."""
    return signs_of(sign_bits(row, n_rows, column, n_columns, **address), row, n_rows).float()
