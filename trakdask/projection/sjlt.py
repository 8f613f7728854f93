"""The sparse Johnson-Lindenstrauss transform: a few random signs per row, and sums by bucket."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from trakdask.projection.acceleration import compiled
from trakdask.projection.cuda import GpuProjector, Kernels
from trakdask.projection.cuda import sparse as sparse_on_gpu
from trakdask.projection.nonzeros import Nonzeros, SparseMatrix, nonzeros_of
from trakdask.projection.protocol import ROUNDING_ERROR, Cost, allowed
from trakdask.projection.quantize import (
    Scratch,
    compiled_scales,
    flatten,
    quantize_integers,
)
from trakdask.projection.row_map import ROW_BLOCK

_FRACTION_BITS = 14

# Chosen so that the sums of a tile of samples fit in a cache; they do not affect results.
_MOST_SAMPLES, _LEAST_SAMPLES, _TILE_SUMS = 32, 8, 2**19

_scratch = Scratch()


@dataclass(frozen=True)
class SJLT(GpuProjector):
    """Project with a sparse matrix: every row has ``sparsity`` random signs in random columns.

    A gradient element takes ``sparsity`` additions, whatever ``proj_dim`` is; with a dense matrix
    it takes ``proj_dim`` of them. The error of feature products is the same on average.

    Parameters
    ----------
    proj_dim
        Number of feature columns, the buckets, in [1, 2**31).
    sparsity
        Number s of nonzeros per row, in [1, 64]. A value of 1 is the fastest, and suitable for
        gradients that are spread over many rows; see the notes on tails.
    seed
        Integer in [0, 2**64).

    Raises
    ------
    TypeError, ValueError
        If an argument has another type, or is out of range.

    Notes
    -----
    Definition: nonzero j of row r, 0 <= j < sparsity, is a function of one random word:

    .. code-block:: text

        ctr    = (r & 0xffffffff, j >> 2, checkpoint, (r >> 32) | 1 << 16)
        w      = Philox4x32-10(ctr, key)[j & 3]           # key as for every other kind
        bucket = (w * proj_dim) >> 32
        value  = (1 - 2 * (w & 1)) * sparsity**-0.5       # nonzeros that share a bucket add up

    Variance: for gradients g and h of norm 1, φ(g)·φ(h) has mean g·h and variance
    (1 + (g·h)² - 2/s Σ g_r² h_r²) / proj_dim, hence at most 2 / proj_dim, as with dense random
    signs. Nonzeros of one row that share a bucket add up or cancel: the squared length of a row has
    mean 1 and variance 2 (s - 1) / (s proj_dim), which is 0 for s = 1. The mean of a product is
    exact up to proj_dim / 2**64, since bucket and sign come from one word.

    Tails: two rows share a bucket with a probability of about s² / proj_dim, which changes the
    product by 1 / s of their size. If gradients are concentrated on a few rows, errors have the
    same variance but are rare and large: for two gradients with one nonzero row each, their
    kurtosis is about 3 + proj_dim / s². This is the price of the speed of ``sparsity=1``.

    Columns: a smaller ``proj_dim`` is not a prefix of a larger one. If it divides the larger one,
    sums of adjacent columns of the larger matrix are the columns of the smaller matrix (in exact
    arithmetic), since floor(floor(w k p / 2**32) / k) = floor(w p / 2**32).

    Exactness: a gradient is rounded once per sample and block of 16384 rows, to multiples of a
    power of two with 14 bits after the binary point. The error of an element is at most 2**-14
    times the largest magnitude of its block, and the relative error of a block at most
    2**-14 * largest / root mean square, so outliers cost accuracy. Sums per bucket are exact
    integers, hence bitwise independent of batch, tile, thread count and implementation. Features
    take one float64 addition per block.

    References
    ----------
    Kane and Nelson 2014, "Sparser Johnson-Lindenstrauss transforms". Charikar, Chen and
    Farach-Colton 2002, "Finding frequent items in data streams" (count sketch: sparsity=1). Hu et
    al. 2025, "GraSS: scalable data attribution with gradient sparsification and sparse projection".

    Examples
    --------
    >>> SJLT(proj_dim=512).width(n_rows=10**6)
    512
    """

    kind: ClassVar[str] = "sjlt"

    proj_dim: int = field(default=4096, metadata=allowed(range(1, 2**31), 4096))
    sparsity: int = field(default=4, metadata=allowed(range(1, 65), 4))
    seed: int = field(default=0, metadata=allowed(range(2**64), 0))

    def scale(self, n_rows: int) -> float:
        """Return ``sparsity**-0.5``, the magnitude of a nonzero."""
        return float(self.sparsity**-0.5)

    def cost(self, n_rows: int) -> Cost:
        """Return the cost of projecting gradients of ``n_rows`` elements."""
        return Cost(
            operations=2 * self.sparsity * n_rows,
            random_bits=128 * SparseMatrix(self.proj_dim, self.sparsity, 0, 0).n_groups * n_rows,
            buffer_bytes=_buffer_bytes(self.proj_dim, self.sparsity),
            rounding_error=ROUNDING_ERROR["int8x2"],
            product_error=self._product_error(),
        )

    def project_on_cpu(self, block: Tensor, row_offset: int, checkpoint: int, out: Tensor) -> None:
        """Add the projection of one row block to ``out``, both on the CPU.

        Notes
        -----
        Cost: see :func:`accumulate_sjlt`.
        """
        accumulate_sjlt(
            block,
            row_offset,
            seed=self.seed,
            checkpoint=checkpoint,
            sparsity=self.sparsity,
            out=out,
        )

    def project_on_gpu(
        self, kernels: Kernels, rows: Tensor, row_offset: int, checkpoint: int, out: Tensor
    ) -> None:
        """Add the projection of consecutive row blocks to ``out``, on their GPU.

        Notes
        -----
        Cost: see :func:`trakdask.projection.cuda.sparse.accumulate_sjlt`.
        """
        sparse_on_gpu.accumulate_sjlt(
            kernels,
            rows,
            row_offset,
            seed=self.seed,
            checkpoint=checkpoint,
            sparsity=self.sparsity,
            out=out,
        )


def accumulate_sjlt(
    block: Tensor,
    row_offset: int,
    *,
    seed: int,
    checkpoint: int,
    sparsity: int,
    out: Tensor,
) -> None:
    """Add the sums by bucket of one row block to ``out``.

    Parameters
    ----------
    block
        Shape (B, rows) on the CPU, any float dtype, 1 <= rows <= 16384.
    row_offset
        Row of the first element, in [0, 2**47).
    seed, checkpoint
        Address of the matrix.
    sparsity
        Nonzeros per row.
    out
        Shape (B, proj_dim), float64, changed in place: the product of the block with the matrix is
        added, without the factor sparsity**-0.5.

    Notes
    -----
    Exactness: the product of the quantised block is exact, with or without numba; one float64
    addition per block rounds ``out``.
    Cost: B * rows * sparsity integer additions and B * proj_dim float64 additions; see
    :func:`trakdask.projection.nonzeros.nonzeros_of` for the matrix.
    """
    matrix = SparseMatrix(out.shape[1], sparsity, seed, checkpoint)
    add_product(block, nonzeros_of(matrix, row_offset, block.shape[1]), out)


def add_product(block: Tensor, nonzeros: Nonzeros, out: Tensor) -> None:
    """Add the product of a row block (B, rows) with its nonzeros to ``out``, (B, proj_dim)."""
    is_compiled = compiled("sjlt") is not None
    tile = compiled("sjlt").LANES if is_compiled else _tile_samples(out.shape[1])
    add = _add_compiled if is_compiled else partial(_add_bags, _bags(nonzeros))
    for start in range(0, len(block), tile):
        add(block[start : start + tile], nonzeros, out[start : start + tile])


def _tile_samples(proj_dim: int) -> int:
    return max(_LEAST_SAMPLES, min(_MOST_SAMPLES, _TILE_SUMS // proj_dim))


def _buffer_bytes(proj_dim: int, sparsity: int) -> int:
    """Return an upper bound for one thread, which is reached without numba and with few columns."""
    tile = _tile_samples(proj_dim)
    n_groups = SparseMatrix(proj_dim, sparsity, 0, 0).n_groups
    per_row = 16 * n_groups + 64 * sparsity + 20 * tile
    return ROW_BLOCK * per_row + 12 * proj_dim * tile + 40 * proj_dim


def _add_compiled(block: Tensor, nonzeros: Nonzeros, out: Tensor) -> None:
    kernels = compiled("sjlt")
    flat, stride = flatten(block)
    factors, step = compiled_scales(flat, stride, block.shape, _FRACTION_BITS)
    n_rows = -(-block.shape[1] // kernels.LANES) * kernels.LANES
    values = _scratch.take("values", (n_rows, kernels.LANES), torch.int16).numpy()
    kernels.round_samples(flat, stride, factors, block.shape[1], values)
    kernels.add_sums(values, *nonzeros, step, out.numpy())


class _Bags(NamedTuple):
    """The nonzeros of a row block by bucket: rows, signs, and the start of each bucket."""

    rows: Tensor
    signs: Tensor
    starts: Tensor


def _bags(nonzeros: Nonzeros) -> _Bags:
    sizes = np.diff(nonzeros.starts)
    # float32 holds sums up to 2**24 exactly. Only few columns have larger bags than that.
    exact = (sizes[::2] + sizes[1::2]).max() <= 2 ** (24 - _FRACTION_BITS)
    plus_and_minus = np.array([1, -1], np.float32 if exact else np.float64)
    signs = np.repeat(np.tile(plus_and_minus, len(sizes) // 2), sizes)
    arrays = (nonzeros.rows.astype(np.int64), signs, nonzeros.starts[:-1:2].astype(np.int64))
    return _Bags(*map(torch.from_numpy, arrays))


def _add_bags(bags: _Bags, block: Tensor, nonzeros: Nonzeros, out: Tensor) -> None:
    integers, step = quantize_integers(block, _FRACTION_BITS, _scratch)
    dtype = bags.signs.dtype
    values = _scratch.take("values", integers.shape, dtype).copy_(integers)
    table = _scratch.take("table", integers.T.shape, dtype).copy_(values.T)
    sums = embedding_bag(bags.rows, table, bags.starts, mode="sum", per_sample_weights=bags.signs)
    out.add_(sums.double().mul_(step).T)
