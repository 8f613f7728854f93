"""Shapes, tiles and grids of the kernels, which depend on the data alone.

The size of the cache determines tiles, and memory determines how many row blocks are processed
together; neither affects results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trakdask.projection.protocol import ROW_BLOCK

THREADS = 512
"""Threads of a block that works on one sample of one row block; a power of two."""

TILE_THREADS = 256
"""Threads of a block that fills or combines a tile."""

_RUN_BYTES = 2**26  # most memory for digits, and for sums, at a time
_MOST_BLOCKS = 2**15  # a grid has at most 65535 in y
_DEPTH_STEP = 128
_LINE_STEP, _LEAST_LINES = 8, 24  # torch._int_mm needs a multiple of 8, more than 16
_COLUMN_STEP = 8
_SHARED_BYTES = 64 * 2**10  # per block of threads, on every GPU that torch supports
_MOST_GROUP = 4  # of samples that share the drawn words; the kernel holds as many in registers


@dataclass(frozen=True)
class Run:
    """Row blocks of one length that are processed together.

    Parameters
    ----------
    first
        First row of the first block, relative to the first row given.
    n_blocks
        Number of blocks.
    n_rows
        Rows of each.
    """

    first: int
    n_blocks: int
    n_rows: int

    @property
    def stop(self) -> int:
        """The row after the last one."""
        return self.first + self.n_blocks * self.n_rows

    @property
    def depth(self) -> int:
        """Rows of a block as an operand, padded with zeros to whole counters."""
        return _up(self.n_rows, _DEPTH_STEP)


@dataclass(frozen=True)
class Columns:
    """A tile of columns: ``n`` from ``first`` on are needed, ``padded`` are computed."""

    first: int
    n: int
    padded: int


def runs(n_rows: int, block_bytes: int) -> Iterator[Run]:
    """Cut consecutive rows, the first of which starts a block, into runs.

    Parameters
    ----------
    n_rows
        Number of rows.
    block_bytes
        Memory that a block takes while it is processed.
    """
    n_full, rest = divmod(n_rows, ROW_BLOCK)
    most = max(1, min(_MOST_BLOCKS, _RUN_BYTES // block_bytes))
    for block in range(0, n_full, most):
        yield Run(block * ROW_BLOCK, min(most, n_full - block), ROW_BLOCK)
    if rest:
        yield Run(n_full * ROW_BLOCK, 1, rest)


def lines(n_samples: int, n_digits: int) -> int:
    """Return the number of lines of digits as an operand, padded as the product requires."""
    return max(_LEAST_LINES, _up(n_digits * n_samples, _LINE_STEP))


def quantize_grid(n_samples: int, n_digits: int, n_blocks: int) -> tuple[int, int]:
    """Return the grid of ``quantize``: one block of threads per sample and per line of zeros."""
    return lines(n_samples, n_digits) - (n_digits - 1) * n_samples, n_blocks


def dense_columns(width: int, cache_bytes: int) -> Iterator[Columns]:
    """Cut columns so that a tile of a row block's entries, one byte each, fills half a cache."""
    most = max(_COLUMN_STEP, cache_bytes // 2 // ROW_BLOCK)
    tile = _up(-(-width // -(-width // most)), _COLUMN_STEP)
    for first in range(0, width, tile):
        n = min(tile, width - first)
        yield Columns(first, n, _up(n, _COLUMN_STEP))


def dense_block_bytes(n_samples: int, n_digits: int, columns: Columns) -> int:
    """Return the bytes of the digits and sums of a row block."""
    return lines(n_samples, n_digits) * max(ROW_BLOCK, 4 * columns.padded)


def fill_grid(n_columns: int, n_counters: int) -> tuple[int, int]:
    """Return the grid of a kernel that fills a tile, one thread per counter."""
    return -(-n_columns * n_counters // TILE_THREADS), 1


def combine_grid(n_samples: int, n_columns: int) -> tuple[int, int]:
    """Return the grid of ``combine``: a thread per sum."""
    return n_samples, -(-n_columns // TILE_THREADS)


@dataclass(frozen=True)
class SparseTile:
    """How sums by bucket are split into tiles.

    Parameters
    ----------
    group
        Samples whose sums one block of threads computes.
    n_columns
        Columns of a tile.
    item_bytes
        Bytes of a sum.
    """

    group: int
    n_columns: int
    item_bytes: int

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block of threads."""
        return max(4 * THREADS, self.group * self.n_columns * self.item_bytes)

    def columns(self, proj_dim: int) -> Iterator[Columns]:
        """Cut all columns into tiles."""
        for first in range(0, proj_dim, self.n_columns):
            n = min(self.n_columns, proj_dim - first)
            yield Columns(first, n, n)


def sparse_tile(proj_dim: int, sparsity: int, n_samples: int) -> SparseTile:
    """Return the tile that fits the shared memory of a thread block: all columns if possible."""
    # |sums| <= 2**14 * 16384 * sparsity = 2**28 * sparsity.
    item_bytes = 4 if sparsity < 8 else 8
    n_sums = _SHARED_BYTES // item_bytes
    n_columns = min(proj_dim, n_sums)
    return SparseTile(
        max(1, min(_MOST_GROUP, n_samples, n_sums // n_columns)), n_columns, item_bytes
    )


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
