"""The base of projectors with CUDA kernels, and the steps that their products consist of.

The bits are the same as on a CPU, because gradients are rounded in the same way and added up as
integers, and only the sums of blocks are added in float64, in order. The size of the cache
determines tiles, and memory determines how many row blocks are processed together; neither affects
results. Every kernel is compared with the CPU before it is first used.
"""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from trakdask.errors import KernelError, warn_once
from trakdask.projection.acceleration import on_gpu
from trakdask.projection.cuda.launch import Argument, Kernels, kernels_for
from trakdask.projection.fixed_point import FRACTION_BITS, float_matmul
from trakdask.projection.philox import ROWS_PER_COUNTER
from trakdask.projection.protocol import Projector
from trakdask.projection.rows import ROW_BLOCK
from trakdask.torch_internals import int8_matmul

THREADS = 512
"""Threads of a block that works on one sample of one row block; a power of two."""

_TILE_THREADS = 256  # of a block that fills or combines a tile
_RUN_BYTES = 2**26  # most memory for digits, and for sums, at a time
_MOST_BLOCKS = 2**15  # a grid has at most 65535 in y
_DEPTH_STEP = 128
_LINE_STEP, _LEAST_LINES = 8, 24  # torch._int_mm needs a multiple of 8, more than 16
_COLUMN_STEP = 8

_PROOF_ROWS = 2 * ROW_BLOCK + 300  # two whole blocks, processed together, and a short one
# No multiple of what products are padded to, so that padding is compared, too.
_PROOF_WIDTH = 77

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_log = logging.getLogger(__name__)
_proven: dict[Hashable, Kernels | None] = {}
_proving = threading.Lock()


@dataclass(frozen=True)
class GpuProjector(Projector):
    """A projector with ways of its own for blocks that are on an accelerator."""

    rounds_row_blocks: ClassVar[bool] = True

    proj_dim: int

    @abstractmethod
    def project_on_gpu(
        self, kernels: Kernels, rows: Tensor, row_offset: int, checkpoint: int, out: Tensor
    ) -> None:
        """Add the projection of consecutive row blocks to ``out``, with the bits of a CPU.

        Parameters
        ----------
        kernels
            The kernels of the device that the tensors are on. No call waits for the device.
        rows
            Shape (B, rows): float32, float16 or bfloat16, with adjacent columns. Only the last
            block may be short.
        row_offset, checkpoint
            First row, and address of the matrix.
        out
            Sums (B, proj_dim), float64, with adjacent columns, which the product is added to.
        """

    @abstractmethod
    def project_by_torch(self, rows: Tensor, row_offset: int, checkpoint: int, out: Tensor) -> None:
        """Do the same by operations of torch, on any device, and for rows of any strides."""

    def project_rows(self, rows: Tensor, row_offset: int, checkpoint: int, out: Tensor) -> None:
        """Add the projection of consecutive row blocks to ``out``; see ``Projector``.

        On any device but the CPU, these are operations of torch, or the CUDA kernels where
        :func:`kernels_that_work` returns some. All give the bits of the CPU.
        """
        if not on_gpu(rows):
            super().project_rows(rows, row_offset, checkpoint, out)
            return
        # Kernels read 16 or 32 bits, and columns that lie side by side.
        rows = rows if rows.dtype in _DTYPES else rows.float()
        if (kernels := kernels_that_work(self, rows)) is None:
            self.project_by_torch(rows, row_offset, checkpoint, out)
            return
        rows = rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()
        self.project_on_gpu(kernels, rows, row_offset, checkpoint, out)


def kernels_that_work(projector: GpuProjector, rows: Tensor) -> Kernels | None:
    """Return the kernels that project some rows; None if operations of torch do.

    Kernels are used where they have given the bits of the CPU for a small tile, which is tried once
    per process, device and kernel. Where an NVIDIA GPU has none that do, a warning says why.
    """
    # Few columns suffice: a wrong kernel, option or compiler changes the bits of all of them.
    small = replace(projector, proj_dim=min(projector.proj_dim, _PROOF_WIDTH))
    key = (rows.device, rows.dtype, small)
    # Others wait, since a kernel that is not proven must not be used meanwhile.
    with _proving:
        if key not in _proven:
            try:
                _proven[key] = kernels_for(rows.device)
                if (kernels := _proven[key]) is not None:
                    _require_bits_of_cpu(small, kernels, _proof_tile(rows.dtype), rows.device)
            except (ImportError, KernelError) as err:
                _proven[key] = None
                text = f"gradients are projected by torch, which is slower on a GPU, because: {err}"
                warn_once(("kernels", rows.device), text, _log.warning)
        return _proven[key]


def _require_bits_of_cpu(
    projector: GpuProjector, kernels: Kernels, tile: Tensor, device: torch.device
) -> None:
    expected = torch.zeros(len(tile), projector.proj_dim, dtype=torch.float64)
    for row in range(0, _PROOF_ROWS, ROW_BLOCK):
        projector.project_block(tile[:, row : row + ROW_BLOCK], row, 1, expected)
    on_device = torch.zeros_like(expected, device=device)
    projector.project_on_gpu(kernels, tile.to(device), 0, 1, on_device)
    actual = on_device.cpu()
    # NaN differs from itself, and is right where the CPU has it, too.
    wrong = (actual != expected) & ~(actual.isnan() & expected.isnan())
    if wrong.any():
        raise KernelError(
            f"expected the kernels of {projector} to give the bits of the CPU, "
            f"got other bits in {int(wrong.sum())} of {wrong.numel()} sums for {tile.dtype} "
            f"gradients on {kernels.description}; try reporting this message"
        )


def _proof_tile(dtype: torch.dtype) -> Tensor:
    """Return gradients of five samples: dense, tiny, zero, not finite, and an outlier."""
    # Without a generator, because this must neither use torch's nor depend on its version.
    steps = torch.arange(5 * _PROOF_ROWS, dtype=torch.int64).view(5, -1)
    tile = ((steps * 7919 + steps * steps % 613) % 2003 - 1001).to(dtype) / 1024
    tile[1] *= torch.finfo(dtype).tiny / 8  # subnormal
    tile[2] = 0
    tile[3, 99] = torch.nan
    tile[4, -1] = 1000
    return tile


# ---------------------------------------------------------------------------- steps of the products


def quantize(
    kernels: Kernels, rows: Tensor, run: Run, n_digits: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Round the row blocks of a run; return digits, totals and steps: see ``quantize.cu``."""
    n_samples, n_lines = len(rows), lines(len(rows), n_digits)
    # (blocks, lines, depth): a line for each digit of a sample, and lines of zeros up to a number
    # that the product takes.
    part = rows[:, run.first : run.stop]
    digits = rows.new_empty((run.n_blocks, n_lines, run.depth), dtype=torch.int8)
    totals = rows.new_empty((run.n_blocks, n_samples), dtype=torch.int64)
    steps = rows.new_empty((run.n_blocks, n_samples), dtype=torch.float64)
    numbers = (run.n_rows, n_samples, FRACTION_BITS[n_digits], n_lines, run.depth)
    # One block of threads per sample, and one per line of zeros.
    grid = n_lines - (n_digits - 1) * n_samples, run.n_blocks
    arguments: list[Argument] = [part, np.int64(part.stride(0)), *map(np.int32, numbers)]
    name = f"quantize_{dtype_name(rows.dtype)}_{n_digits}"
    kernels.launch(name, grid, THREADS, [*arguments, digits, totals, steps], 8 * THREADS)
    return digits, totals, steps


def fill_bits(
    kernels: Kernels, bits: Tensor, row: int, column: int, seed: int, checkpoint: int
) -> None:
    """Write a window of the bits of the Rademacher matrix, (columns, rows)."""
    n_columns, n_counters = len(bits), bits.shape[1] // ROWS_PER_COUNTER
    counters = np.uint64(row // ROWS_PER_COUNTER), np.int32(n_counters)
    window = np.uint32(column), np.int32(n_columns)
    arguments = (*counters, *window, np.uint64(seed), np.uint32(checkpoint), bits)
    grid = -(-n_columns * n_counters // _TILE_THREADS), 1  # a thread per counter
    kernels.launch("rademacher_bits", grid, _TILE_THREADS, arguments, 16 * _TILE_THREADS)


def multiply(digits: Tensor, bits: Tensor, out: Tensor) -> None:
    """Write the exact product digits bitsᵀ, (lines, columns), to an int32 tensor."""
    try:
        int8_matmul(digits, bits, out)
    except RuntimeError:  # cuBLAS has none for some shapes on some GPUs
        float_matmul(digits, bits, out)


def combine(
    kernels: Kernels,
    sums: Tensor,
    steps: Tensor,
    out: Tensor,
    totals: Tensor | None = None,
    n_digits: int = 1,
) -> None:
    """Add the sums of row blocks, (blocks, lines, columns), to features, in the order of blocks."""
    n_blocks, n_lines, pitch = sums.shape
    n_samples, n_columns = out.shape
    numbers = map(np.int32, (n_blocks, n_samples, n_digits, n_lines, pitch, n_columns))
    grid = n_samples, -(-n_columns // _TILE_THREADS)  # a thread per sum
    arguments = (sums, totals, steps, *numbers, out, np.int64(out.stride(0)))
    kernels.launch(f"combine_{dtype_name(sums.dtype)}", grid, _TILE_THREADS, arguments)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in the names of kernels."""
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------- tiles, which depend on the data alone


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


def runs(n_rows: int, block_bytes: int) -> Iterator[Run]:
    """Cut consecutive rows, which begin with a block, into runs.

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


def tile_columns(width: int, cache_bytes: int) -> int:
    """Return how many columns to multiply at once: entries of one byte that fill half a cache."""
    most = max(_COLUMN_STEP, cache_bytes // 2 // ROW_BLOCK)
    return _up(-(-width // -(-width // most)), _COLUMN_STEP)


def padded_columns(n_columns: int) -> int:
    """Return the columns of a tile as an operand, padded as the product requires."""
    return _up(n_columns, _COLUMN_STEP)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
