"""Bounds of memory: the most bytes that a task of each operation holds, known before it runs.

A worker runs as many tasks as it has threads. Blocks that wait for other tasks may be moved to its
disk, but what a running task holds may not: if one task needs more than a worker has, the operation
cannot be computed there, and is refused (:func:`trakdask.execution.require_memory`). The idea is
from cubed, whose operations all have a projected memory. Tests compare bounds with measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import dask.array as da

from trakdask.arrays.blocks import SPLIT_EVERY
from trakdask.arrays.gram import ROWS_PER_DIM, accumulation_dtype
from trakdask.arrays.graphs import reader


@dataclass(frozen=True)
class Sizes:
    """Sizes of features that the memory of tasks depends on.

    Parameters
    ----------
    n_samples, rows
        All samples, and the samples of the largest block.
    proj_dim, n_checkpoints
        p and C.
    itemsize
        Bytes of an element.
    read
        Whether tasks read blocks from a store themselves, one after the other.
    """

    n_samples: int
    rows: int
    proj_dim: int
    n_checkpoints: int
    itemsize: int = 4
    read: bool = False

    @classmethod
    def of(cls, feature: da.Array) -> Self:
        """Return the sizes of lazy features, (sample, proj_dim, checkpoint).

        Examples
        --------
        >>> Sizes.of(da.zeros((10, 2, 3), chunks=(4, 2, 1), dtype="float32")).rows
        4
        """
        n, p, c = feature.shape
        rows = max(feature.chunks[0], default=0)
        return cls(n, rows, p, c, feature.dtype.itemsize, reader(feature) is not None)

    @property
    def block(self) -> int:
        """Bytes of the largest block; twice, if it is read: as bytes, and as an array."""
        return (1 + self.read) * self.rows * self.proj_dim * self.itemsize


def gram(x: Sizes) -> int:
    """Bound a task of :func:`trakdask.arrays.gram.gram`.

    It holds the blocks of a group and the merged group, the sum, a product and its transpose, and
    4 p rows times their weights. A task of the tree adds partial matrices.

    Examples
    --------
    >>> gram(Sizes(1_000_000, 512, 1024, 3)) / 1e6
    171.966464
    """
    p, most = x.proj_dim, 2 * ROWS_PER_DIM * x.proj_dim + x.rows
    group = p * x.itemsize * min(x.n_samples, most)
    slab = p * x.itemsize * min(x.n_samples, max(4 * p, 1024))
    total = p**2 * max(accumulation_dtype(p).itemsize, x.itemsize)
    tree = (SPLIT_EVERY + 1) * total if x.n_samples > most else 0
    return max(2 * group + slab + total + 2 * p**2 * x.itemsize, tree)


def eigenvectors(proj_dim: int, n_component: int) -> int:
    """Bound a task of :func:`trakdask.arrays.spectra.eigenvectors`: K, factors, and LAPACK's work.

    Examples
    --------
    >>> eigenvectors(1024, 1024) / 1e6, eigenvectors(1024, 256) / 1e6
    (41.94304, 22.544384)
    """
    p, k = proj_dim, n_component
    return 8 * (5 * p**2 if k == p else 2 * p**2 + 2 * p * k + 3 * k**2)


def solve(x: Sizes, n_component: int) -> int:
    """Bound a task of :func:`trakdask.arrays.solve.solve`, for a block of targets.

    Examples
    --------
    >>> solve(Sizes(100, 100, 1024, 3), 1024) / 1e6
    10.846208
    """
    return 8 * x.proj_dim * n_component + x.block + 20 * x.rows * x.proj_dim


def leverage(x: Sizes, n_component: int) -> int:
    """Bound a task of :func:`trakdask.arrays.solve.leverage`.

    Examples
    --------
    >>> leverage(Sizes(10_000, 512, 1024, 3), 1024) / 1e6
    20.97152
    """
    return x.block + 12 * (x.proj_dim + x.rows) * n_component


def score(x: Sizes, targets: Sizes, *, ranked: bool = False, errors: bool = False) -> int:
    """Bound a task of :func:`trakdask.arrays.score.score`, which may also rank its tile.

    It holds a block of targets of all checkpoints, and a block of samples: of one checkpoint after
    the other, or of all at once if they are not in a store; then products of few targets come from
    tasks of their own. With errors, it holds sums over checkpoints in float64.

    Examples
    --------
    >>> score(Sizes(10_000, 4096, 1024, 3, read=True), Sizes(100, 100, 1024, 3)) / 1e6
    38.060032
    """
    c, entries, itemsize = x.n_checkpoints, x.rows * targets.rows, max(x.itemsize, targets.itemsize)
    tile = entries * (_ERRORS if errors else max(2 * itemsize, ranked * (itemsize + _KEYS)))
    # As in arrays.score.score: products from tasks of their own, and then the tile of all.
    if not x.read and targets.n_samples < x.proj_dim and c > 1:
        return max(x.block + targets.block + tile, c * entries * itemsize + tile)
    return (1 if x.read else c) * x.block + c * targets.block + tile


#: Bytes for each entry of a tile, while it is ranked, and while errors are computed from sums.
_KEYS, _ERRORS = 16, 84


def top_k(rows: int, n_targets: int, k: int, *, itemsize: int = 4, n_others: int = 0) -> int:
    """Bound a task of :func:`trakdask.arrays.topk.top_k`, which ranks a tile, or merges rankings.

    Examples
    --------
    >>> top_k(4096, 100, 10) / 1e6
    8.192
    """
    others = (itemsize + 4) * n_others + 20 * (n_others > 0)
    kept = n_targets * min(k, rows) * (8 + 4 * n_others)
    return max(rows * n_targets * (itemsize + _KEYS + others), (3 * SPLIT_EVERY + 1) * kept)


def group_sums(x: Sizes, n_groups: int, n_folds: int = 1) -> int:
    """Bound a task of :func:`trakdask.arrays.groups.weighted_sums`.

    Examples
    --------
    >>> group_sums(Sizes(10**6, 4096, 2048, 3), 1000) / 1e6
    189.202432
    """
    # Blocks that a node of a tree adds, and their sum.
    held = min(SPLIT_EVERY, -(-x.n_samples // max(x.rows, 1))) + 1
    return x.block + (8 * max(held, 2) + 4) * n_groups * n_folds * x.proj_dim


def stored(x: Sizes, *, half: bool = False) -> int:
    """Bound storing a block of features, in the task that computed it.

    Examples
    --------
    >>> stored(Sizes(10**6, 4096, 1024, 3)) / 1e6
    50.331648
    """
    return x.rows * x.proj_dim * (16 if half else 3 * x.itemsize)


def exported(chunk_bytes: int) -> int:
    """Bound writing a chunk of results into a store: the array, and its bytes.

    Examples
    --------
    >>> exported(10**6)
    2000000
    """
    return 2 * chunk_bytes


def verified(chunk_bytes: int, n_threads: int) -> int:
    """Bound reading chunks by some threads, in this process: each one as bytes, and as an array.

    Examples
    --------
    >>> verified(16 * 2**20, 8) / 2**20
    256.0
    """
    return 2 * chunk_bytes * n_threads


def tabled(block_bytes: int, n_rows: int, row_bytes: int, n_texts: int) -> int:
    """Bound writing a block of results as rows of a table, some at a time.

    It holds the block, a column of rows as numpy has it, all columns as arrow has them and as they
    are encoded; and text as Python's objects.

    Examples
    --------
    >>> tabled(80_000_000, 2**20, 36, 0) / 1e6
    164.934656
    """
    return block_bytes + n_rows * (2 * row_bytes + 9) + 110 * n_texts


def principal_components(n_samples: int, width: int) -> int:
    """Bound the components of features in this process: they, in float64, and sample × sample.

    Examples
    --------
    >>> principal_components(2000, 8192) / 1e6
    487.68
    """
    return 20 * n_samples * width + 40 * n_samples**2
