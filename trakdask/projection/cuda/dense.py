"""Dense products on a GPU: a tile of entries in the cache, an exact int8 product, float64 sums.

The matrix entries of a row block are drawn tile by tile, and multiplied by the int8 product of
torch. The bits are those of a CPU, because gradients are quantised in the same way and added up as
integers, and only the sums of blocks are added in float64, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trakdask.projection.cuda.launch import Argument, Kernels, Launch
from trakdask.projection.cuda.layout import (
    THREADS,
    TILE_THREADS,
    Columns,
    Run,
    combine_grid,
    dense_block_bytes,
    dense_columns,
    fill_grid,
    lines,
    quantize_grid,
    runs,
)
from trakdask.projection.philox import BYTES_PER_COUNTER, ROWS_PER_COUNTER
from trakdask.projection.quantize import FRACTION_BITS

FillTile = Callable[[Tensor, int, Columns], None]
"""A function of (into, first row, columns) that writes a window of the matrix to ``into``."""


@dataclass(frozen=True)
class _Quantized:
    """The row blocks of one run as integers; see ``kernels/quantize.cu``."""

    digits: Tensor
    totals: Tensor
    steps: Tensor
    n_digits: int


def accumulate_rademacher(
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
        As in :func:`trakdask.projection.dense_products.accumulate_rademacher`; ``out`` with
        adjacent columns.

    Notes
    -----
    Exactness: the same bits as on a CPU. Cost: 2 * n_digits * B * rows * width integer operations
    and one byte written and read in the cache per entry of the matrix, once for all samples. Memory
    in addition to ``rows`` and ``out``: about 64 MB of digits and sums, at least those of one
    block, and a tile. No call waits for the device.
    """

    def fill(into: Tensor, row: int, columns: Columns) -> None:
        fill_bits(kernels, into, row_offset + row, columns, seed=seed, checkpoint=checkpoint)

    _accumulate(kernels, rows, n_digits, fill, out, of_bits=True)


def fill_bits(
    kernels: Kernels, into: Tensor, row: int, columns: Columns, *, seed: int, checkpoint: int
) -> None:
    """Write a window of the bits of the Rademacher matrix, (columns, rows), from ``row`` on."""
    n_counters = into.shape[1] // ROWS_PER_COUNTER
    window = _window(row // ROWS_PER_COUNTER, n_counters, columns)
    arguments = [*window, np.uint64(seed), np.uint32(checkpoint), into]
    grid = fill_grid(columns.padded, n_counters)
    kernels.launch(
        Launch("rademacher_bits", grid, TILE_THREADS, arguments, shared_bytes=16 * TILE_THREADS)
    )


def accumulate_gaussian(
    kernels: Kernels,
    rows: Tensor,
    row_offset: int,
    *,
    seed: int,
    checkpoint: int,
    n_digits: int,
    table: Tensor,
    out: Tensor,
) -> None:
    """Add the product of consecutive row blocks with the matrix of normal numbers to ``out``.

    ``table`` contains the 256 entries, int8, on the device. The other parameters are those of
    :func:`accumulate_rademacher`.
    """

    def fill(into: Tensor, row: int, columns: Columns) -> None:
        n_counters = into.shape[1] // BYTES_PER_COUNTER
        window = _window((row_offset + row) // BYTES_PER_COUNTER, n_counters, columns)
        arguments = [table, *window, np.uint64(seed), np.uint32(checkpoint), into]
        grid = fill_grid(columns.padded, n_counters)
        kernels.launch(Launch("gaussian_entries", grid, TILE_THREADS, arguments, shared_bytes=256))

    _accumulate(kernels, rows, n_digits, fill, out, of_bits=False)


def _accumulate(
    kernels: Kernels, rows: Tensor, n_digits: int, fill: FillTile, out: Tensor, *, of_bits: bool
) -> None:
    tiles = list(dense_columns(out.shape[1], kernels.cache_bytes))
    n_samples = len(rows)
    for run in runs(rows.shape[1], dense_block_bytes(n_samples, n_digits, tiles[0])):
        quantized = quantize(kernels, rows[:, run.first : run.stop], run, n_digits)
        for columns in tiles:
            sums = _product(quantized, run, columns, fill)
            target = out[:, columns.first : columns.first + columns.n]
            combine(kernels, sums, quantized.totals if of_bits else None, quantized.steps,
                    n_digits, target)  # fmt: skip


def _product(quantized: _Quantized, run: Run, columns: Columns, fill: FillTile) -> Tensor:
    """Return exact products of digits and a tile of entries, (blocks, lines, columns), int32."""
    digits = quantized.digits
    sums = digits.new_empty((*digits.shape[:2], columns.padded), dtype=torch.int32)
    entries = digits.new_empty(columns.padded, run.depth)
    for block in range(run.n_blocks):
        fill(entries, run.first + block * run.n_rows, columns)
        torch._int_mm(digits[block], entries.T, out=sums[block])
    return sums


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


def _window(first_counter: int, n_counters: int, columns: Columns) -> tuple[Argument, ...]:
    return (
        np.uint64(first_counter),
        np.int32(n_counters),
        np.uint32(columns.first),
        np.int32(columns.padded),
    )
