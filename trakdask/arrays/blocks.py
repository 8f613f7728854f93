"""What the array functions share: checks at the door, and the small moves on plain blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import dask.array as da
import numpy as np
import numpy.typing as npt

Block: TypeAlias = npt.NDArray[Any]
#: A block, or dask's nested lists of blocks along axes that are contracted without concatenation.
Blocks: TypeAlias = "Block | list[Any]"

_FEATURE_DIMS = ("sample", "proj_dim", "checkpoint")


def require_features(
    x: da.Array, *, name: str, caller: str, dims: tuple[str, str, str] = _FEATURE_DIMS
) -> None:
    """Refuse an array that is not (rows, p, checkpoint) in chunks (rows, p, 1)."""
    if not isinstance(x, da.Array):
        raise TypeError(
            f"{name} is a {type(x).__name__}; {caller} needs a dask array {dims}. "
            f"Use dask.array.from_array({name}, chunks=(rows, -1, 1))."
        )
    if x.ndim != 3:
        raise ValueError(
            f"{name} has shape {x.shape}; {caller} needs three axes {dims}. "
            "Use x[:, :, None] for a single checkpoint."
        )
    if x.dtype.kind != "f":
        raise TypeError(
            f"{name} has dtype {x.dtype}; {caller} needs a float. Use {name}.astype('float32')."
        )
    _require_chunks(x, name, caller, dims)


def _require_chunks(x: da.Array, name: str, caller: str, dims: tuple[str, str, str]) -> None:
    rows, proj, checkpoint = x.chunks
    if any(size != size for size in rows):
        raise ValueError(
            f"{name} has unknown chunk sizes along {dims[0]!r}; {caller} needs known ones. "
            f"Use {name}.compute_chunk_sizes()."
        )
    if len(proj) != 1:
        raise ValueError(
            f"{name} has {len(proj)} chunks along {dims[1]!r} {proj}; {caller} needs one. "
            f"Use ds.chunk({dims[1]}=-1)."
        )
    if any(size != 1 for size in checkpoint):
        raise ValueError(
            f"{name} has chunks {checkpoint} along {dims[2]!r}; {caller} needs chunks of 1. "
            f"Use ds.chunk({dims[2]}=1)."
        )


def require_split_every(split_every: int) -> None:
    """Refuse a fan-in that cannot reduce anything."""
    if split_every < 2:
        raise ValueError(
            f"split_every is {split_every}; a reduction tree needs at least 2. Use split_every=8."
        )


def align_weights(weights: da.Array, feature: da.Array, *, name: str) -> da.Array:
    """Return (sample, checkpoint) weights in the sample chunks of ``feature``, chunks of 1."""
    if not isinstance(weights, da.Array):
        raise TypeError(
            f"{name} is a {type(weights).__name__}; a dask array (sample, checkpoint) is needed. "
            f"Use dask.array.from_array({name}, chunks=(rows, 1))."
        )
    n, _, n_checkpoint = feature.shape
    if weights.shape != (n, n_checkpoint):
        raise ValueError(
            f"{name} has shape {weights.shape}; feature needs (sample, checkpoint) = "
            f"{(n, n_checkpoint)}. Select the same samples and checkpoints in both."
        )
    aligned: da.Array = weights.rechunk((feature.chunks[0], 1), method="tasks")
    return aligned


def flat(blocks: Blocks) -> Iterator[Block]:
    """Yield the blocks of nested lists in order.

    >>> [int(x) for x in flat([[1, 2], [3]])]
    [1, 2, 3]
    """
    if isinstance(blocks, list):
        for item in blocks:
            yield from flat(item)
    else:
        yield blocks


def product_dtype(*arrays: da.Array | Block) -> np.dtype[Any]:
    """Return the dtype of products: float64 where a factor is float64, else float32.

    Examples
    --------
    >>> product_dtype(np.ones(1, np.float16)), product_dtype(np.ones(1), np.ones(1, "f4"))
    (dtype('float32'), dtype('float64'))
    """
    return np.result_type(np.float32, *(array.dtype for array in arrays))


def matrix(blocks: Blocks) -> Block:
    """Return the one (rows, p, 1) block as a (rows, p) matrix to multiply, a view if it can be."""
    (block,) = flat(blocks)
    return block[:, :, 0].astype(product_dtype(block), copy=False)


def failed_rows(block: Block) -> npt.NDArray[np.bool_]:
    """Return which rows of (rows, p, 1) are NaN throughout, as samples recorded as failed are.

    A row that is NaN in part is none of them: something else is wrong with it.

    >>> failed_rows(np.array([[[np.nan], [np.nan]], [[np.nan], [1.0]]])).tolist()
    [True, False]
    """
    failed = np.isnan(block[:, 0, 0])  # alone it rules out nearly all rows, at 1/p of the cost
    if failed.any():
        failed[failed] = np.isnan(block[failed]).all(axis=(1, 2))
    return failed


def mean_weight(weights: Blocks) -> Block:
    """Return the mean over checkpoints of (rows, 1) blocks as float64 (rows,)."""
    parts = [part[:, 0].astype(np.float64) for part in flat(weights)]
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total / len(parts)


def tree_sum(
    parts: da.Array,
    *,
    split_every: int,
    name: str,
    finish: Callable[..., Any] | None = None,
    dtype: npt.DTypeLike | None = None,
) -> da.Array:
    """Return the sum of blocks of size 1 along axis 0 by a tree that adds in list order.

    ``finish`` (blocks, axis, keepdims) makes the root from the last sums; it must add like ``add``.
    """
    dtype = np.dtype(parts.dtype if dtype is None else dtype)
    total: da.Array = da.reduction(
        parts,
        chunk=_same,
        combine=add,
        aggregate=finish or add,
        axis=0,
        concatenate=False,
        split_every=split_every,
        name=name,
        dtype=dtype,
        meta=np.empty((0,) * (parts.ndim - 1), dtype),
    )
    return total


def _same(block: Block, axis: Any, keepdims: bool) -> Block:
    return block


def add(blocks: Blocks, axis: Any = None, keepdims: bool = False) -> Block:
    """Return the sum of blocks in list order; their concatenation never exists."""
    parts = flat(blocks)
    # A copy: the blocks belong to the scheduler, which may hand them to another task too.
    total = next(parts).copy()
    for part in parts:
        total += part
    return total if keepdims else total[0]


def block_starts(sizes: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return where each chunk starts, and the end.

    >>> block_starts((3, 2)).tolist()
    [0, 3, 5]
    """
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def blocks_with(selected: npt.NDArray[np.bool_], sizes: tuple[int, ...]) -> list[int]:
    """Return the blocks in which any sample is selected.

    >>> blocks_with(np.array([True, False, False]), (1, 2))
    [0]
    """
    counts = np.concatenate([[0], np.cumsum(selected)])[block_starts(sizes)]
    return [int(i) for i in np.flatnonzero(np.diff(counts))]
