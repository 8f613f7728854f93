"""Products on a GPU: dense ones tile by tile through the cache, sparse ones in shared memory.

The bits are those of a CPU, because gradients are rounded in the same way and added up as integers,
and only the sums of blocks are added in float64, in order. The size of the cache determines tiles,
and memory determines how many row blocks are processed together; neither affects results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trakdask.projection.cuda.launch import Kernels, Launch
from trakdask.projection.philox import ROWS_PER_COUNTER
from trakdask.projection.protocol import ROW_BLOCK
from trakdask.projection.quantize import FRACTION_BITS
from trakdask.torch_internals import int8_matmul

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
class _Quantized:
    """The row blocks of one run as integers; see ``kernels/quantize.cu``."""

    digits: Tensor
    totals: Tensor
    steps: Tensor
    n_digits: int


def add_rademacher(
    kernels: Kernels,
    rows: Tensor,
    row_offset: int,
    *,
    seed: int,
    checkpoint: int,
    n_digits: int,
    out: Tensor,
) -> None:
    """Add the product of consecutive row blocks with the Rademacher matrix to ``out``.

    Parameters
    ----------
    kernels
        The kernels of the device that the tensors are on.
    rows
        Shape (B, rows): float32, float16 or bfloat16, with adjacent columns. Only the last block
        may be short.
    row_offset, seed, checkpoint, n_digits, out
        First row; address of the matrix; 8-bit digits per element; and sums (B, width), float64,
        with adjacent columns, which the product is added to.

    Notes
    -----
    Exactness: the same bits as on a CPU. Cost: 2 * n_digits * B * rows * width integer operations
    and one byte written and read in the cache per entry of the matrix, once for all samples. Memory
    in addition to ``rows`` and ``out``: about 64 MB of digits and sums, at least those of one
    block, and a tile. No call waits for the device.
    """
    tiles = list(dense_columns(out.shape[1], kernels.cache_bytes))
    for run in runs(rows.shape[1], dense_block_bytes(len(rows), n_digits, tiles[0])):
        quantized = quantize(kernels, rows[:, run.first : run.stop], run, n_digits)
        digits = quantized.digits
        for columns in tiles:
            sums = digits.new_empty((*digits.shape[:2], columns.padded), dtype=torch.int32)
            bits = digits.new_empty(columns.padded, run.depth)
            # One product per block, since only sums within a block are integers of one scale.
            for block in range(run.n_blocks):
                row = row_offset + run.first + block * run.n_rows
                fill_bits(kernels, bits, row, columns, seed=seed, checkpoint=checkpoint)
                int8_matmul(digits[block], bits, sums[block])
            target = out[:, columns.first : columns.first + columns.n]
            combine(kernels, sums, quantized.totals, quantized.steps, n_digits, target)


def fill_bits(
    kernels: Kernels, into: Tensor, row: int, columns: Columns, *, seed: int, checkpoint: int
) -> None:
    """Write a window of the bits of the Rademacher matrix, (columns, rows), from ``row`` on."""
    n_counters = into.shape[1] // ROWS_PER_COUNTER
    counters = np.uint64(row // ROWS_PER_COUNTER), np.int32(n_counters)
    window = np.uint32(columns.first), np.int32(columns.padded)
    arguments = (*counters, *window, np.uint64(seed), np.uint32(checkpoint), into)
    grid = fill_grid(columns.padded, n_counters)
    kernels.launch(
        Launch("rademacher_bits", grid, TILE_THREADS, arguments, shared_bytes=16 * TILE_THREADS)
    )


def quantize(kernels: Kernels, rows: Tensor, run: Run, n_digits: int) -> _Quantized:
    """Round the row blocks of a run to digits."""
    n_samples = len(rows)
    n_lines = lines(n_samples, n_digits)
    digits = rows.new_empty((run.n_blocks, n_lines, run.depth), dtype=torch.int8)
    totals = rows.new_empty((run.n_blocks, n_samples), dtype=torch.int64)
    steps = rows.new_empty((run.n_blocks, n_samples), dtype=torch.float64)
    numbers = (run.n_rows, n_samples, FRACTION_BITS[n_digits], n_lines, run.depth)
    kernels.launch(
        Launch(
            f"quantize_{dtype_name(rows)}_{n_digits}",
            quantize_grid(n_samples, n_digits, run.n_blocks),
            THREADS,
            (rows, np.int64(rows.stride(0)), *map(np.int32, numbers), digits, totals, steps),
            shared_bytes=8 * THREADS,
        )
    )
    return _Quantized(digits, totals, steps, n_digits)


def add_sjlt(
    kernels: Kernels,
    rows: Tensor,
    row_offset: int,
    *,
    seed: int,
    checkpoint: int,
    sparsity: int,
    out: Tensor,
) -> None:
    """Add the sums by bucket of consecutive row blocks to ``out``.

    Parameters
    ----------
    kernels
        The kernels of the device that the tensors are on.
    rows
        Shape (B, rows): float32, float16 or bfloat16, with adjacent columns. Only the last block
        may be short.
    row_offset, seed, checkpoint, sparsity, out
        First row; address of the matrix; nonzeros per row; and sums (B, proj_dim), float64, with
        adjacent columns, which the product is added to.

    Notes
    -----
    Exactness: the same bits as on a CPU. Cost: B * rows * sparsity additions in shared memory; the
    gradients are read twice (the second time from the cache), and again for every 16384 columns
    (8192 from a sparsity of 8 on). Memory in addition to ``rows`` and ``out``: about 64 MB of sums,
    at least those of one block.
    """
    n_samples, proj_dim = out.shape
    tile = sparse_tile(proj_dim, sparsity, n_samples)
    dtype = torch.int32 if tile.item_bytes == 4 else torch.int64
    name = f"sjlt_{dtype_name(rows)}_{str(dtype).removeprefix('torch.')}"
    for run in runs(rows.shape[1], n_samples * tile.n_columns * tile.item_bytes):
        shape = (run.n_blocks, n_samples)
        steps = rows.new_empty(shape, dtype=torch.float64)
        for columns in tile.columns(proj_dim):
            sums = rows.new_empty((*shape, columns.n), dtype=dtype)
            part = rows[:, run.first : run.stop]
            head = (part, np.int64(part.stride(0)))
            address = (np.uint64(row_offset + run.first), np.uint64(seed), np.uint32(checkpoint))
            column_range = map(np.uint32, (proj_dim, columns.first, columns.n))
            numbers = map(np.int32, (run.n_rows, n_samples, tile.group))
            kernels.launch(
                Launch(
                    name,
                    (-(-n_samples // tile.group), run.n_blocks),
                    THREADS,
                    (*head, *numbers, *address, np.int32(sparsity), *column_range, sums, steps),
                    tile.shared_bytes,
                )
            )
            target = out[:, columns.first : columns.first + columns.n]
            combine(kernels, sums, None, steps, 1, target)


def combine(
    kernels: Kernels,
    sums: Tensor,
    totals: Tensor | None,
    steps: Tensor,
    n_digits: int,
    out: Tensor,
) -> None:
    """Add the sums of row blocks, (blocks, lines, columns), to features, in the order of blocks."""
    n_blocks, n_lines, pitch = sums.shape
    numbers = (n_blocks, len(out), n_digits, n_lines, pitch, out.shape[1])
    kernels.launch(
        Launch(
            f"combine_{dtype_name(sums)}",
            combine_grid(*out.shape),
            TILE_THREADS,
            (sums, totals, steps, *map(np.int32, numbers), out, np.int64(out.stride(0))),
        )
    )


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype in the names of kernels."""
    return str(tensor.dtype).removeprefix("torch.")


# -------------------------------------------------- tiles and grids, which depend on the data alone


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
