"""Linear combinations of the rows of arrays, block by block."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt
from dask.base import tokenize
from scipy import sparse

from trakdask.arrays.block_arguments import Bounds
from trakdask.arrays.blocks import Block, Blocks, add, tree_sum

__all__ = ["combine_rows"]

_SPLIT_EVERY = 8


def combine_rows(data: da.Array, weights: sparse.csr_array) -> da.Array:
    """Return Σ_i w_ki x_i for each row k of some weights.

    Parameters
    ----------
    data
        (sample, ...), float, in any chunks.
    weights
        (combination, sample), sparse. Where a weight is 0, the sample is not read into the sum,
        whatever it holds.

    Returns
    -------
    (combination, ...) in the dtype of ``data``, lazy, in one chunk along combinations.

    Notes
    -----
    Exactness: products and sums in float64, blocks added in order, rounded once at the end.

    Examples
    --------
    >>> x = da.from_array(np.array([[1.0, 2.0], [3.0, 5.0], [np.nan, 0.0]]), chunks=(2, 2))
    >>> combine_rows(x, sparse.csr_array([[-1.0, 1.0, 0.0]])).compute().tolist()
    [[2.0, 3.0]]
    """
    columns = weights.tocsc()
    index = "sxyz"[: data.ndim]
    parts = da.blockwise(
        _partial,
        "k" + index,
        data,
        index,
        Bounds(data.chunks[0]),
        "s",
        new_axes={"k": weights.shape[0]},
        adjust_chunks={"s": (1,) * data.numblocks[0]},
        align_arrays=False,
        name="combine-blocks-" + tokenize(data.name, *_parts_of(columns)),
        dtype=np.float64,
        meta=np.empty((0,) * (data.ndim + 1), np.float64),
        weights=columns,
    )
    first = da.moveaxis(parts, 1, 0)
    return tree_sum(
        first,
        split_every=_SPLIT_EVERY,
        name="combine",
        finish=_rounded(data.dtype),
        dtype=data.dtype,
    )


def _parts_of(weights: sparse.csc_array) -> tuple[npt.NDArray[Any], ...]:
    return weights.data, weights.indices, weights.indptr


def _partial(block: Block, bounds: tuple[int, int], *, weights: sparse.csc_array) -> Block:
    """Return (combination, 1, ...): the sums over the rows of one block."""
    of_block = weights[:, slice(*bounds)]
    sums = of_block @ block.reshape(len(block), -1).astype(np.float64)
    return np.asarray(sums).reshape(weights.shape[0], 1, *block.shape[1:])


def _rounded(dtype: np.dtype[Any]) -> Any:
    def finish(blocks: Blocks, axis: object = None, keepdims: bool = False) -> Block:
        return add(blocks, keepdims=keepdims).astype(dtype)

    return finish
