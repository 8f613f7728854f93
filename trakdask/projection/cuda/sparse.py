"""Sums by bucket on a GPU, in shared memory; as integers, so that their order does not matter."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trakdask.projection.cuda.dense import combine, dtype_name
from trakdask.projection.cuda.launch import Kernels, Launch
from trakdask.projection.cuda.layout import THREADS, runs, sparse_tile


def accumulate_sjlt(
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
        As in :func:`trakdask.projection.sjlt.accumulate_sjlt`; ``out`` with adjacent columns.

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
