"""The sparse Johnson-Lindenstrauss transform: a few random signs per row, and sums by bucket."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from trakdask.projection import by_torch
from trakdask.projection.acceleration import numba_kernels
from trakdask.projection.cuda import Argument, GpuProjector, Kernels, products
from trakdask.projection.fixed_point import FRACTION_BITS, compiled_scales, flatten, quantize
from trakdask.projection.philox import STREAM_SJLT, fill_words
from trakdask.projection.protocol import ROUNDING_ERROR, Cost, allowed
from trakdask.projection.rows import ROW_BLOCK, RowMap
from trakdask.tensors import Scratch

_KEPT_BYTES = 2**27  # nonzeros that a process keeps: 15 million rows at sparsity 4
_N_DIGITS = 2
_FRACTION_BITS = FRACTION_BITS[_N_DIGITS]

# Chosen so that the sums of a tile of samples fit in a cache; they do not affect results.
_MOST_SAMPLES, _LEAST_SAMPLES, _TILE_SUMS = 32, 8, 2**19

# On a GPU: shared memory of a block of threads, which every GPU that torch supports has, and the
# samples that share drawn words, as many as the kernel holds in registers.
_SHARED_BYTES, _MOST_GROUP = 64 * 2**10, 4

_FEW_IN_COLUMN = 8
"""With so many nonzeros of a row block in a column, or fewer, sums by row take half of the time.
Sums of up to four nonzeros in each row, of 14 bits and a sign, fit in 32 bits."""

Places = npt.NDArray[np.unsignedinteger[Any]]
"""Nonzeros by row, (rows, sparsity): 2 k for +1 in column k, 2 k + 1 for -1."""

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
        # Memory of one thread, which is reached without numba and with few columns.
        tile, n_counters = _tile_samples(self.proj_dim), _n_counters(self.sparsity)
        per_row = 16 * n_counters + 64 * self.sparsity + 20 * tile
        return Cost(
            operations=2 * self.sparsity * n_rows,
            random_bits=128 * n_counters * n_rows,
            buffer_bytes=ROW_BLOCK * per_row + 12 * self.proj_dim * tile + 40 * self.proj_dim,
            rounding_error=ROUNDING_ERROR["int8x2"],
            product_error=self._product_error(),
        )

    def sample_tile(self) -> int | None:
        """Return how many samples numba's kernels take; see ``Projector``."""
        kernels = numba_kernels()
        return None if kernels is None else int(kernels.LANES)

    def project_block(self, block: Tensor, row_offset: int, checkpoint: int, out: Tensor) -> None:
        """Add the projection of one row block to ``out``, both on the CPU; see ``Projector``.

        Notes
        -----
        Cost: B * rows * sparsity integer additions and B * proj_dim float64 additions; see
        :func:`nonzeros_of` for the matrix.
        """
        nonzeros = self.nonzeros(checkpoint, row_offset, block.shape[1])
        if (kernels := numba_kernels()) is not None:
            for start in range(0, len(block), kernels.LANES):
                samples = slice(start, start + kernels.LANES)
                _add_compiled(kernels, nonzeros, block[samples], out[samples])
            return
        # 1. The nonzeros by bucket: rows, signs, and the start of each bucket.
        assert isinstance(nonzeros, Nonzeros)
        sizes = np.diff(nonzeros.starts)
        # float32 holds sums up to 2**24 exactly. Only few columns have larger bags than that.
        exact = (sizes[::2] + sizes[1::2]).max() <= 2 ** (24 - _FRACTION_BITS)
        plus_and_minus = np.array([1, -1], np.float32 if exact else np.float64)
        signs = torch.from_numpy(np.repeat(np.tile(plus_and_minus, len(sizes) // 2), sizes))
        rows = torch.from_numpy(nonzeros.rows.astype(np.int64))
        starts = torch.from_numpy(nonzeros.starts[:-1:2].astype(np.int64))
        # 2. The sums of some samples at a time.
        tile = _tile_samples(self.proj_dim)
        for start in range(0, len(block), tile):
            integers, step = quantize(block[start : start + tile], _FRACTION_BITS)
            # Two copies: one that casts and transposes at once takes longer than both.
            values = _scratch.take("values", integers.shape, signs.dtype).copy_(integers)
            table = _scratch.take("table", integers.T.shape, signs.dtype).copy_(values.T)
            sums = embedding_bag(rows, table, starts, mode="sum", per_sample_weights=signs)
            out[start : start + tile].add_(sums.double().mul_(step).T)

    def project_on_gpu(
        self, kernels: Kernels, rows: Tensor, row_offset: int, checkpoint: int, out: Tensor
    ) -> None:
        """Add the projection of consecutive row blocks to ``out``; see ``GpuProjector``.

        Notes
        -----
        Cost: B * rows * sparsity additions in shared memory; the gradients are read twice (the
        second time from the cache), and again for every 16384 columns (8192 from a sparsity of 8
        on). Memory in addition to ``rows`` and ``out``: about 64 MB of sums, at least for one
        block.
        """
        n_samples = len(rows)
        # |sums| <= 2**14 * 16384 * sparsity = 2**28 * sparsity. In shared memory, NVIDIA's
        # GPUs have no addition of 64 bits, and take several times as long for it.
        dtype = torch.int32 if self.sparsity < 8 else torch.int64
        n_sums = _SHARED_BYTES // dtype.itemsize
        tile = min(self.proj_dim, n_sums)
        group = max(1, min(_MOST_GROUP, n_samples, n_sums // tile))
        shared_bytes = max(4 * products.THREADS, group * tile * dtype.itemsize)
        name = f"sjlt_{products.dtype_name(rows.dtype)}_{products.dtype_name(dtype)}"
        for run in products.runs(rows.shape[1], n_samples * tile * dtype.itemsize):
            part = rows[:, run.first : run.stop]
            steps = rows.new_empty((run.n_blocks, n_samples), dtype=torch.float64)
            numbers = tuple(map(np.int32, (run.n_rows, n_samples, group)))
            address = map(np.uint64, (row_offset + run.first, self.seed))
            # In the order, and of the widths, of the parameters of the kernel: nothing checks them.
            head: list[Argument] = [part, np.int64(part.stride(0)), *numbers, *address]
            for column in range(0, self.proj_dim, tile):
                target = out[:, column : min(column + tile, self.proj_dim)]
                n_columns = target.shape[1]
                sums = rows.new_empty((run.n_blocks, n_samples, n_columns), dtype=dtype)
                columns = map(np.uint32, (self.proj_dim, column, n_columns))
                matrix = (np.uint32(checkpoint), np.int32(self.sparsity), *columns)
                grid = -(-n_samples // group), run.n_blocks
                arguments = [*head, *matrix, sums, steps]
                kernels.launch(name, grid, products.THREADS, arguments, shared_bytes)
                products.combine(kernels, sums, steps, target)

    def project_by_torch(self, rows: Tensor, row_offset: int, checkpoint: int, out: Tensor) -> None:
        """Add the projection of consecutive row blocks to ``out``; see ``GpuProjector``."""
        matrix = {"width": self.proj_dim, "sparsity": self.sparsity, "seed": self.seed}
        at = {"checkpoint": checkpoint, "stream": STREAM_SJLT}

        def sums_of(integers: Tensor, row: int) -> Tensor:
            return by_torch.sparse_sums(integers, row, **matrix, **at)

        by_torch.project(rows, row_offset, out, _N_DIGITS, sums_of)

    def multiply_vectors(self, row_map: RowMap, checkpoint: int, vectors: Tensor) -> Tensor:
        """Return the product with the matrix from the other side; see ``Projector``."""
        table = vectors.T.contiguous()
        out = vectors.new_empty(len(vectors), row_map.n_rows)
        for row in range(0, row_map.n_rows, ROW_BLOCK):
            n_rows = min(ROW_BLOCK, row_map.n_rows - row)
            buckets, is_negative = _buckets(self, self._words(checkpoint, row, n_rows))
            signs = torch.from_numpy(1 - 2 * is_negative.astype(np.float32))
            columns = torch.from_numpy(buckets.astype(np.int64))
            sums = embedding_bag(columns, table, mode="sum", per_sample_weights=signs)
            out[:, row : row + n_rows] = sums.T
        return out

    def nonzeros(self, checkpoint: int, row_offset: int, n_rows: int) -> Nonzeros | Places:
        """Return the nonzeros of one row block, drawn and sorted unless they have been kept.

        Notes
        -----
        Cost: one call of the random number generator for each row and four nonzeros, and sorting by
        counting. A process keeps the nonzeros of recent blocks, up to 128 MiB in all.
        """
        kernels, s = numba_kernels(), self.sparsity
        few = s <= 4 and ROW_BLOCK * s <= _FEW_IN_COLUMN * self.proj_dim
        by_row = few and kernels is not None
        matrix, block = (self, checkpoint, by_row), (row_offset, n_rows)
        if (kept := _kept.get(matrix, block)) is not None:
            return kept
        words = self._words(checkpoint, row_offset, n_rows)
        if by_row:
            nonzeros: Nonzeros | Places = np.empty(
                (n_rows, s), np.uint16 if self.proj_dim <= 2**15 else np.uint32
            )
            kernels.write_places(words, s, self.proj_dim, nonzeros)
        else:
            # Sorted by column, the sum of a column stays in registers while its rows are read.
            nonzeros = sort_nonzeros(self, words)
        _kept.add(matrix, block, nonzeros)
        return nonzeros

    def _words(self, checkpoint: int, row: int, n_rows: int) -> npt.NDArray[np.uint32]:
        """Return random words, (counters, rows, 4), valid until the next call in this thread."""
        shape = (_n_counters(self.sparsity), n_rows, 2)
        words = _scratch.take("words", shape, torch.int64).numpy().view(np.uint64)
        fill_words(words, row, 0, seed=self.seed, checkpoint=checkpoint, stream=STREAM_SJLT)
        return words.view(np.uint32)


def _tile_samples(proj_dim: int) -> int:
    return max(_LEAST_SAMPLES, min(_MOST_SAMPLES, _TILE_SUMS // proj_dim))


def _add_compiled(kernels: Any, nonzeros: Nonzeros | Places, block: Tensor, out: Tensor) -> None:
    flat, stride = flatten(block)
    factors, step = compiled_scales(flat, stride, block.shape, _FRACTION_BITS)
    # The kernel writes whole squares of 16 rows, also behind the last row.
    n_rows = -(-block.shape[1] // kernels.LANES) * kernels.LANES
    values = _scratch.take("values", (n_rows, kernels.LANES), torch.int16).numpy()
    kernels.round_samples(flat, stride, factors, block.shape[1], values)
    steps = np.zeros(kernels.LANES)  # no lane without a sample adds anything
    steps[: len(step)] = step
    is_tile = out.stride() == (1, kernels.LANES)  # else the sums make a detour through one
    sums = out if is_tile else out.new_zeros(out.shape[1], kernels.LANES).T[: len(out)]
    tile = sums.as_strided((out.shape[1], kernels.LANES), (kernels.LANES, 1))
    if not is_tile:
        sums.copy_(out)
    if isinstance(nonzeros, Nonzeros):
        kernels.add_sums(values, *nonzeros, steps, tile.numpy())
    else:
        integers = _scratch.take("integers", tile.shape, torch.int32).numpy()
        kernels.scatter_sums(values, nonzeros, integers, steps, tile.numpy())
    if not is_tile:
        out.copy_(sums)


def _n_counters(sparsity: int) -> int:
    """Return the counters of a row; each has four nonzeros."""
    return -(-sparsity // 4)


class Nonzeros(NamedTuple):
    """The nonzeros of a row block by column, in each column +1 before -1.

    Parameters
    ----------
    rows
        Row of each nonzero inside of the block, uint16.
    starts
        In column k, the nonzeros of value +1 are ``rows[starts[2 * k] : starts[2 * k + 1]]``, and
        the nonzeros of value -1 end at ``starts[2 * k + 2]``; int32.
    """

    rows: npt.NDArray[np.uint16]
    starts: npt.NDArray[np.int32]

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return self.rows.nbytes + self.starts.nbytes


def sort_nonzeros(projector: SJLT, words: npt.NDArray[np.uint32]) -> Nonzeros:
    """Return the nonzeros that random words (counters, rows, 4) stand for."""
    proj_dim, sparsity = projector.proj_dim, projector.sparsity
    if (kernels := numba_kernels()) is not None:
        rows = np.empty(words.shape[1] * sparsity, np.uint16)
        starts = np.empty(2 * proj_dim + 2, np.int32)
        kernels.sort_nonzeros(words, sparsity, proj_dim, rows, starts)
        return Nonzeros(rows, starts[:-1])
    buckets, is_negative = _buckets(projector, words)
    places = (2 * buckets + is_negative).ravel()
    sizes = np.bincount(places.astype(np.int64), minlength=2 * proj_dim)
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    # By place, 16 bits at a time, because numpy sorts these by counting.
    order = np.argsort(places.astype(np.uint16), kind="stable")
    if 2 * proj_dim > 2**16:
        high = (places >> np.uint64(16)).astype(np.uint16)
        order = order[np.argsort(high[order], kind="stable")]
    return Nonzeros((order // sparsity).astype(np.uint16), starts)


def _buckets(
    projector: SJLT, words: npt.NDArray[np.uint32]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
    """Return columns and lowest bits of all nonzeros, both (rows, sparsity).

    Nonzero j has word j & 3 of counter j >> 2.
    """
    chosen = words.swapaxes(0, 1).reshape(words.shape[1], -1)[:, : projector.sparsity]
    # mulhi(w, proj_dim): the high 32 bits of a product are uniform on the columns.
    buckets = (chosen.astype(np.uint64) * np.uint64(projector.proj_dim)) >> np.uint64(32)
    return buckets, chosen & np.uint32(1)


class _Kept:
    """Nonzeros of row blocks by matrix, as many as fit in the memory that is set apart for them.

    Blocks are used in turns, once per micro-batch. A full buffer therefore stays as it is: throwing
    out the oldest block for a new one would throw out every block before it is used again. Only
    other matrices make way.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._bytes = 0
        self._matrices: dict[tuple[SJLT, int, bool], dict[tuple[int, int], Any]] = {}
        self._lock = Lock()

    def get(self, matrix: tuple[SJLT, int, bool], block: tuple[int, int]) -> Any:
        # Without the lock: at worst a block is drawn that another thread is about to add.
        return self._matrices.get(matrix, {}).get(block)

    def add(self, matrix: tuple[SJLT, int, bool], block: tuple[int, int], nonzeros: Any) -> None:
        with self._lock:
            blocks = self._matrices.setdefault(matrix, {})
            if self._bytes + nonzeros.nbytes > self._budget and len(self._matrices) > 1:
                self._matrices = {matrix: blocks}
                self._bytes = sum(kept.nbytes for kept in blocks.values())
            if block not in blocks and self._bytes + nonzeros.nbytes <= self._budget:
                blocks[block] = nonzeros
                self._bytes += nonzeros.nbytes


_kept = _Kept(_KEPT_BYTES)
