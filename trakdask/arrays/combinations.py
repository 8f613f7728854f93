"""Linear combinations of the rows of arrays, block by block."""

from __future__ import annotations

import dask.array as da
import numpy as np
from scipy import sparse

from trakdask.arrays.blocks import Block, Bounds, blockwise, tree_sum


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
    index = "sxyz"[: data.ndim]
    parts = blockwise(
        _partial, "sk" + index[1:], data, index, Bounds(data.chunks[0]), "s",
        new_axes={"k": weights.shape[0]}, adjust_chunks={"s": (1,) * data.numblocks[0]},
        name="combine-blocks", dtype=np.float64, weights=weights.tocsc(),
    )  # fmt: skip
    return tree_sum(parts, name="combine", dtype=data.dtype)


def _partial(block: Block, bounds: tuple[int, int], *, weights: sparse.csc_array) -> Block:
    """Return (1, combination, ...): the sums over the rows of one block."""
    of_block = weights[:, slice(*bounds)]
    sums = of_block @ block.reshape(len(block), -1).astype(np.float64)
    return np.asarray(sums).reshape(1, weights.shape[0], *block.shape[1:])
