"""The oracle of projections: every matrix by its definition, and products with it in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trakdask.projection import (
    ROW_BLOCK,
    SJLT,
    Identity,
    Mask,
    Projector,
    Rademacher,
    RowMap,
    project,
)

FRACTION_BITS = {"int8x1": 7, "int8x2": 14, "int8x3": 22}
RADEMACHER, SPARSE, MASK = range(3)  # streams

_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox4x32(
    counter: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike, npt.ArrayLike],
    key: tuple[int, int],
) -> npt.NDArray[np.uint32]:
    """Evaluate Philox4x32-10 for every counter of a grid; return the words, (4, *grid).

    References
    ----------
    Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Random123).

    Examples
    --------
    >>> [hex(word) for word in philox4x32((0, 0, 0, 0), (0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(word, np.uint64) for word in counter))
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c2 = (p1 >> _HALF) ^ c1 ^ np.uint64(k0), (p0 >> _HALF) ^ c3 ^ np.uint64(k1)
        c1, c3 = p1 & _LOW, p0 & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3]).astype(np.uint32)


def words(
    stream: int, index: npt.ArrayLike, column: npt.ArrayLike, seed: int, checkpoint: int
) -> npt.NDArray[np.uint32]:
    """Return the words at an address, (4, *grid)."""
    index = np.asarray(index, np.uint64)
    high = (index >> _HALF) | np.uint64(stream << 16)
    return philox4x32((index & _LOW, column, checkpoint, high), (seed & 0xFFFFFFFF, seed >> 32))


def signs(
    row: int,
    n_rows: int,
    column: int,
    n_columns: int,
    *,
    seed: int,
    checkpoint: int,
    stream: int = 0,
) -> npt.NDArray[np.float64]:
    """Return a window of a dense matrix of signs, (n_rows, n_columns)."""
    rows = np.arange(row, row + n_rows, dtype=np.uint64)
    blocks, position = np.unique(rows >> np.uint64(7), return_inverse=True)
    columns = np.arange(column, column + n_columns, dtype=np.uint64)
    four = words(stream, blocks[:, None], columns, seed, checkpoint)
    word = four[(rows >> np.uint64(5)) & np.uint64(3), position]
    return 1.0 - 2.0 * ((word >> (rows[:, None] & np.uint64(31))) & np.uint64(1))


def nonzeros(
    projector: SJLT, row: int, n_rows: int, checkpoint: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the columns and signs of the nonzeros of some rows, both (n_rows, sparsity)."""
    groups = np.arange(-(-projector.sparsity // 4))
    rows = np.arange(row, row + n_rows, dtype=np.uint64)[:, None]
    four = words(SPARSE, rows, groups, projector.seed, checkpoint)
    word = np.moveaxis(four, 0, -1).reshape(n_rows, -1)[:, : projector.sparsity].astype(np.uint64)
    columns = word * np.uint64(projector.proj_dim) >> _HALF
    return columns.astype(np.int64), 1.0 - 2.0 * (word & np.uint64(1))


def mask_order(n_rows: int, seed: int, checkpoint: int) -> list[int]:
    """Return all rows in the order of their keys, which Python's integers hold."""
    low0, high0, low1, high1 = words(MASK, np.arange(-(-n_rows // 2)), 0, seed, checkpoint).tolist()
    keys = [
        low | high << 32
        for pair in zip(zip(low0, high0, strict=True), zip(low1, high1, strict=True), strict=True)
        for low, high in pair
    ]
    return sorted(range(n_rows), key=keys.__getitem__)


def matrix(projector: Projector, row_map: RowMap, checkpoint: int) -> Tensor:
    """Return the whole matrix before it is scaled, (n_rows, width) float64."""
    n_rows = row_map.n_rows
    match projector:
        case Identity():
            return torch.eye(n_rows, dtype=torch.float64)
        case Rademacher(proj_dim=width, seed=seed):
            whole = signs(0, n_rows, 0, width, seed=seed, checkpoint=checkpoint)
        case SJLT():
            whole = np.zeros((n_rows, projector.proj_dim))
            columns, values = nonzeros(projector, 0, n_rows, checkpoint)
            np.add.at(whole, (np.arange(n_rows)[:, None], columns), values)
        case Mask(keep=keep, then=then):
            kept = mask_order(n_rows, projector.seed, checkpoint)[:keep]
            kept = kept if isinstance(then, Identity) else sorted(kept)
            inner = RowMap.from_shapes({"kept": (keep,)}, alignment=then.row_alignment)
            whole = np.zeros((n_rows, then.width(keep)))
            whole[kept] = matrix(then, inner, checkpoint).numpy()
    return torch.from_numpy(whole)


def scale(projector: Projector, n_rows: int) -> float:
    """Return the factor of the matrix that makes products of features right on average."""
    match projector:
        case SJLT():
            return float(projector.sparsity**-0.5)
        case Mask(keep=keep, then=then):
            return float((n_rows / keep) ** 0.5) * scale(then, keep)
        case Identity():
            return 1.0
    return float(projector.width(n_rows) ** -0.5)


def explicit(projector: Projector, row_map: RowMap, checkpoint: int) -> Tensor:
    """Return the matrix whose product with a gradient is a feature, (n_rows, width) float64."""
    return matrix(projector, row_map, checkpoint) * scale(projector, row_map.n_rows)


def rounded(block: Tensor, fraction_bits: int) -> Tensor:
    """Round one block of rows as the definition says, sample by sample, in float64."""
    out = torch.empty(block.shape, dtype=torch.float64)
    for sample, values in zip(out, block.float().double(), strict=True):
        if not values.isfinite().all():
            sample[:] = torch.nan
            continue
        step = 2.0 ** (math.frexp(values.abs().max().item())[1] - fraction_bits)
        integers = (values / step).round()  # half to even
        if fraction_bits == FRACTION_BITS["int8x1"]:
            integers.clamp_(-127, 127)
        sample[:] = integers * step
    return out


def flatten(gradients: Mapping[str, Tensor], row_map: RowMap) -> Tensor:
    """Put gradients where the row map says, with zeros between them."""
    n_samples = len(next(iter(gradients.values())))
    flat = torch.zeros(n_samples, row_map.n_rows, dtype=torch.float64)
    for name, gradient in gradients.items():
        first = row_map.offset(name)
        flat[:, first : first + row_map.size(name)] = gradient.reshape(n_samples, -1)
    return flat


def project_by_hand(
    projector: Projector, gradients: Mapping[str, Tensor], row_map: RowMap, checkpoint: int
) -> Tensor:
    """Multiply rounded gradients with the whole matrix, block by block."""
    flat, whole = flatten(gradients, row_map), matrix(projector, row_map, checkpoint)
    if isinstance(projector, Mask):  # other entries have no influence, not even on blocks
        rows = sorted(mask_order(row_map.n_rows, projector.seed, checkpoint)[: projector.keep])
        flat, whole = flat[:, rows], whole[rows]
    is_rounded = not isinstance(getattr(projector, "then", projector), Identity)
    bits = FRACTION_BITS[getattr(projector, "arithmetic", "int8x2")]
    out = torch.zeros(len(flat), whole.shape[1], dtype=torch.float64)
    for first in range(0, flat.shape[1], ROW_BLOCK):
        block = flat[:, first : first + ROW_BLOCK]
        values = rounded(block, bits) if is_rounded else block
        out += values @ whole[first : first + ROW_BLOCK]
    return (out * scale(projector, row_map.n_rows)).float()


def project_flat(projector: Projector, flat: Tensor, checkpoint: int = 4) -> Tensor:
    """Project gradients of one parameter."""
    rows = RowMap.from_shapes({"flat": flat.shape[1:]}, alignment=projector.row_alignment)
    return project(projector, {"flat": flat}, rows, checkpoint)


def project_blocks(
    projector: Projector, rows: Tensor, row: int = 0, checkpoint: int = 4, out: Tensor | None = None
) -> Tensor:
    """Return sums, 0 or given ones, to which blocks of rows are added one by one, not scaled."""
    if out is None:
        out = torch.zeros(len(rows), projector.width(rows.shape[1]), dtype=torch.float64)
    for first in range(0, rows.shape[1], ROW_BLOCK):
        projector.project_block(rows[:, first : first + ROW_BLOCK], row + first, checkpoint, out)
    return out


def normal(n_samples: int, n_rows: int) -> Tensor:
    """Return gradients that are the same in every run."""
    return torch.randn(n_samples, n_rows, generator=torch.Generator().manual_seed(n_rows))
