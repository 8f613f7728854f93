"""The Rademacher product by table lookup, if numba and the processor support it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trakdask.projection.acceleration import compiled
from trakdask.projection.philox import split_seed
from trakdask.projection.quantize import FRACTION_BITS, Scratch, compiled_scales, flatten

_SAMPLES = 64  # their tables fit in a second-level cache; bits are drawn once per tile
_COLUMNS = 4096
_APART = 16  # a cache line; with strides of a power of two, samples would share a few lines

_scratch = Scratch()


def lookup_is_available() -> bool:
    """Return whether the kernel can run on this machine."""
    kernels = compiled("lookup_products")
    return kernels is not None and kernels.is_available()


def accumulate_by_lookup(
    block: Tensor,
    row_offset: int,
    *,
    seed: int,
    checkpoint: int,
    n_digits: int,
    out: Tensor,
) -> None:
    """Add the product of one row block with the Rademacher matrix to ``out``.

    The parameters and the bits of the result are those of
    :func:`~trakdask.projection.dense_products.accumulate_by_matmul`.

    Notes
    -----
    Cost: three look-ups per column, digit and 16 elements of a sample; random bits are drawn once
    per 64 samples. Buffers of one thread: about 1.6 MB, 2.8 MB for three digits.
    Threads: ``torch.get_num_threads()``, each with samples of its own.
    """
    flat, stride = flatten(block)
    factors, step = compiled_scales(flat, stride, block.shape, FRACTION_BITS[n_digits])
    n_threads = min(torch.get_num_threads(), len(block))
    tile = min(_SAMPLES, -(-len(block) // n_threads))
    buffers = [_Buffers.take(thread, tile, out.shape[1], n_digits) for thread in range(n_threads)]
    key = (checkpoint, *split_seed(seed))

    def work(thread: int) -> None:
        for start in range(thread * tile, len(block), n_threads * tile):
            part = slice(start, start + tile)
            values = _Values(flat[start * stride :], stride, block.shape[1], factors[part])
            buffers[thread].accumulate(values, step[part], row_offset, key, out[part].numpy())

    if n_threads == 1:
        work(0)
        return
    with ThreadPoolExecutor(n_threads) as pool:
        list(pool.map(work, range(n_threads)))


@dataclass(frozen=True)
class _Values:
    """Samples of a block as float32, and the factors that scale them to integers."""

    flat: npt.NDArray[np.float32]
    stride: int
    n_rows: int
    factors: npt.NDArray[np.float32]


@dataclass(frozen=True)
class _Buffers:
    """Buffers of one thread: digits, tables, words, planes, and the sums of a tile."""

    inputs: tuple[npt.NDArray[Any], ...]
    sums: npt.NDArray[np.int32]

    @classmethod
    def take(cls, thread: int, n_samples: int, width: int, n_digits: int) -> _Buffers:
        """Return buffers of the calling thread, which it reuses in later calls."""
        kernels = compiled("lookup_products")
        n_columns = min(_COLUMNS, -(-width // kernels.COLUMNS) * kernels.COLUMNS)
        shapes = {
            "digits": (n_digits, kernels.CHUNK),
            "tables": (n_samples, n_digits * kernels.TABLE_ENTRIES),
            "words": (4, kernels.COLUMNS),
            "planes": (kernels.PLANES, kernels.COLUMNS // 2),
            "sums": ((n_digits + 1) // 2, n_samples, n_columns + _APART),
        }
        narrow = {"digits", "tables"}
        taken = {
            name: _scratch.take(
                f"{name}{thread}", shape, torch.int16 if name in narrow else torch.int32
            ).numpy()
            for name, shape in shapes.items()
        }
        unsigned = (taken[name].view(np.uint32) for name in ("words", "planes"))
        return cls((taken["digits"], taken["tables"], *unsigned), taken["sums"])

    def accumulate(
        self,
        values: _Values,
        step: npt.NDArray[np.float64],
        row_offset: int,
        key: tuple[int, int, int],
        out: npt.NDArray[np.float64],
    ) -> None:
        """Add the product of a tile of samples to ``out``, (samples, width)."""
        kernels = compiled("lookup_products")
        digits, tables, *rest = self.inputs
        buffers = (digits, tables[: len(out)], *rest)
        for first in range(0, out.shape[1], _COLUMNS):
            width = min(_COLUMNS, out.shape[1] - first)
            n_columns = -(-width // kernels.COLUMNS) * kernels.COLUMNS
            sums = self.sums[:, : len(out), :n_columns]
            sums[...] = 0
            totals = np.zeros((2, len(out)), np.int64)
            block = (values.flat, values.stride, values.n_rows, values.factors)
            kernels.subset_sums(*block, (row_offset, first, *key), buffers, totals, sums)
            kernels.add_signed(totals, sums, step, out, first)
