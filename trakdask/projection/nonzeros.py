"""The nonzeros of a sparse random matrix, sorted by column, and kept between micro-batches."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from trakdask.projection.acceleration import compiled
from trakdask.projection.philox import STREAM_SJLT
from trakdask.projection.quantize import Scratch
from trakdask.projection.random_words import fill_words

__all__ = ["BUDGET_BYTES", "Nonzeros", "SparseMatrix", "nonzeros_of", "sort_nonzeros"]

BUDGET_BYTES = 2**27
"""Memory of a process for nonzeros that it keeps: those of 15 million rows at sparsity 4."""

_NONZEROS_PER_COUNTER = 4

_scratch = Scratch()


class SparseMatrix(NamedTuple):
    """What determines the nonzeros of an SJLT at one checkpoint."""

    proj_dim: int
    sparsity: int
    seed: int
    checkpoint: int

    @property
    def n_groups(self) -> int:
        """Number of counters of a row."""
        return -(-self.sparsity // _NONZEROS_PER_COUNTER)


class Nonzeros(NamedTuple):
    """The nonzeros of a row block by column, in each column those of +1 before those of -1.

    Parameters
    ----------
    rows
        Row of each nonzero inside of the block, uint16.
    starts
        Of column k, the nonzeros of value +1 are ``rows[starts[2 * k] : starts[2 * k + 1]]``, and
        those of value -1 end at ``starts[2 * k + 2]``; int32.
    """

    rows: npt.NDArray[np.uint16]
    starts: npt.NDArray[np.int32]

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return self.rows.nbytes + self.starts.nbytes


def nonzeros_of(matrix: SparseMatrix, row_offset: int, n_rows: int) -> Nonzeros:
    """Return the nonzeros of one row block, drawn and sorted unless they have been kept.

    Parameters
    ----------
    matrix
        The matrix.
    row_offset
        First row of the block, in [0, 2**47).
    n_rows
        Number of rows, at most 16384.

    Notes
    -----
    Cost: one call of the random number generator for each row and four nonzeros, and sorting by
    counting. A process keeps the nonzeros of recent blocks, up to 128 MiB in all.
    """
    block = row_offset, n_rows
    if (known := _kept.get(matrix, block)) is not None:
        return known
    nonzeros = sort_nonzeros(_random_words(matrix, row_offset, n_rows), matrix)
    _kept.add(matrix, block, nonzeros)
    return nonzeros


def _random_words(matrix: SparseMatrix, row_offset: int, n_rows: int) -> npt.NDArray[np.uint32]:
    """Return (groups, rows, 4), uint32; nonzero j has word j & 3 of group j >> 2."""
    shape = (matrix.n_groups, n_rows, 2)
    words = _scratch.take("words", shape, torch.int64).numpy().view(np.uint64)
    seed, checkpoint = matrix.seed, matrix.checkpoint
    fill_words(words, row_offset, 0, seed=seed, checkpoint=checkpoint, stream=STREAM_SJLT)
    return words.view(np.uint32)


def sort_nonzeros(words: npt.NDArray[np.uint32], matrix: SparseMatrix) -> Nonzeros:
    """Return the nonzeros that random words (groups, rows, 4) stand for."""
    proj_dim, sparsity = matrix.proj_dim, matrix.sparsity
    if (kernels := compiled("sjlt")) is not None:
        rows = np.empty(words.shape[1] * sparsity, np.uint16)
        starts = np.empty(2 * proj_dim + 2, np.int32)
        kernels.sort_nonzeros(words, sparsity, proj_dim, rows, starts)
        return Nonzeros(rows, starts[:-1])
    chosen = words.swapaxes(0, 1).reshape(words.shape[1], -1)[:, :sparsity].ravel()
    buckets = (chosen.astype(np.uint64) * np.uint64(proj_dim)) >> np.uint64(32)
    places = 2 * buckets + (chosen & 1)
    sizes = np.bincount(places.astype(np.int64), minlength=2 * proj_dim)
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    return Nonzeros((_order(places, proj_dim) // sparsity).astype(np.uint16), starts)


def _order(places: npt.NDArray[np.uint64], proj_dim: int) -> npt.NDArray[np.int64]:
    """Return the order by place, 16 bits at a time, because numpy sorts these by counting."""
    order = np.argsort(places.astype(np.uint16), kind="stable")
    if 2 * proj_dim <= 2**16:
        return order
    high = (places >> np.uint64(16)).astype(np.uint16)
    return order[np.argsort(high[order], kind="stable")]


class _Kept:
    """Nonzeros of row blocks by matrix, as many as fit in the memory that is set apart for them.

    Blocks are used in turns, once per micro-batch. What is full therefore stays as it is: throwing
    out the oldest block for a new one would throw out every block before it is used again. Only
    other matrices make way.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._bytes = 0
        self._matrices: OrderedDict[SparseMatrix, dict[tuple[int, int], Nonzeros]] = OrderedDict()
        self._lock = Lock()

    def get(self, matrix: SparseMatrix, block: tuple[int, int]) -> Nonzeros | None:
        with self._lock:
            if matrix not in self._matrices:
                return None
            self._matrices.move_to_end(matrix)
            return self._matrices[matrix].get(block)

    def add(self, matrix: SparseMatrix, block: tuple[int, int], nonzeros: Nonzeros) -> None:
        with self._lock:
            blocks = self._matrices.setdefault(matrix, {})
            while self._bytes + nonzeros.nbytes > self._budget:
                oldest = next(iter(self._matrices))
                if oldest == matrix:
                    return
                self._bytes -= sum(each.nbytes for each in self._matrices.pop(oldest).values())
            if block not in blocks:
                blocks[block] = nonzeros
                self._bytes += nonzeros.nbytes


_kept = _Kept(BUDGET_BYTES)
