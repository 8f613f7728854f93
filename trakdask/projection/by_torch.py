"""Projections by operations of torch alone, on any of its devices, with the bits of the CPU.

Gradients are rounded and added up as integers on their device. Only the sums of row blocks are
added in float64, in order: where ``out`` is, which is the CPU for a device without float64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trakdask.projection.cuda.products import runs
from trakdask.projection.fixed_point import FRACTION_BITS, float_matmul, round_by_torch
from trakdask.projection.philox import ROWS_PER_COUNTER, round_keys
from trakdask.projection.rows import ROW_BLOCK

_WORDS_BYTES = 128 * ROW_BLOCK  # of the counters of a block, and of their temporary values
_COLUMN_TILE = 1024
_LOW = 0xFFFFFFFF


def project(
    rows: Tensor, row: int, out: Tensor, n_digits: int, sums_of: Callable[[Tensor, int], Tensor]
) -> None:
    """Add the projection of consecutive row blocks, (B, rows), to ``out``, (B, width) float64.

    ``sums_of`` takes rounded gradients, (B, blocks, rows) int32, and the number of their first row.
    It returns their products with a matrix of signs, (B, blocks, width), integers.
    """
    for run in runs(rows.shape[1], _WORDS_BYTES + 4 * len(rows) * (ROW_BLOCK + out.shape[1])):
        blocks = rows[:, run.first : run.stop].unflatten(1, (run.n_blocks, run.n_rows))
        integers, steps = round_by_torch(blocks, FRACTION_BITS[n_digits])
        sums, steps = sums_of(integers, row + run.first).to(out.device), steps.to(out.device)
        for block in range(run.n_blocks):  # a product with a power of two is exact
            out.addcmul_(sums[:, block].double(), steps[:, block, None])


def sparse_sums(integers: Tensor, row: int, *, width: int, sparsity: int, **address: int) -> Tensor:
    """Multiply rounded gradients with the matrix of ``SJLT``; see :func:`project`."""
    n_samples, n_blocks, n_rows = integers.shape
    flat, device = integers.flatten(1), integers.device
    index = torch.arange(row, row + n_blocks * n_rows, device=device)
    first = torch.arange(n_blocks, device=device).repeat_interleave(n_rows) * width
    total = flat.new_zeros(())
    for counter in range(-(-sparsity // 4)):
        # |sums| <= 2**14 * 16384 * 4 = 2**30.
        sums = flat.new_zeros(n_samples, n_blocks * width)
        for word in _words(index, counter, **address)[: sparsity - 4 * counter]:
            places = first + (word * width >> 32)
            sums.scatter_add_(1, places.expand(n_samples, -1), flat * (1 - 2 * (word & 1)).int())
        total = sums if not counter else sums + total.long()
    return total.unflatten(1, (n_blocks, width))


def dense_sums(integers: Tensor, row: int, *, width: int, n_digits: int, **address: int) -> Tensor:
    """Multiply rounded gradients with the matrix of ``Rademacher``; see :func:`project`."""
    # 1. Balanced base-256 digits, those of the lowest position of all samples first.
    rest, digits, device = integers, [], integers.device
    if n_digits == 1:
        rest = rest.clamp(-127, 127)  # 2**7 is no signed digit
    sums = rest.sum(-1, keepdim=True).repeat(1, 1, width)
    for _ in range(n_digits):
        digits.append((rest + 128 & 255) - 128)
        rest = rest - digits[-1] >> 8
    operand, places = torch.cat(digits).float(), torch.arange(8, device=device)
    for block in range(integers.shape[1]):
        first = (row + block * integers.shape[2]) // ROWS_PER_COUNTER
        n_counters = -(-integers.shape[2] // ROWS_PER_COUNTER)
        index = torch.arange(first, first + n_counters, device=device)
        for column in range(0, width, _COLUMN_TILE):
            columns = torch.arange(column, min(column + _COLUMN_TILE, width), device=device)
            # 2. The bits of a tile, lowest first: of 8 bytes of a word, the first 4 have some.
            words = torch.stack(_words(index, columns[:, None], **address), -1)
            parts = words[..., None].view(torch.uint8)[..., :4, None]
            bits = (parts >> places.byte() & 1).flatten(1)[:, : integers.shape[2]]
            # 3. The entry of the matrix is 1 - 2 * bit.
            products = integers.new_empty(len(operand), len(bits))
            float_matmul(operand[:, block], bits, products)
            for position, product in enumerate(products.chunk(n_digits)):
                tile = sums[:, block, column : column + _COLUMN_TILE]
                tile.sub_(product.long(), alpha=2 * 256**position)
    return sums


def _words(
    index: Tensor, column: Tensor | int, *, seed: int, checkpoint: int, stream: int
) -> tuple[Tensor, ...]:
    """Return the four words of some counters, int64, in the shape of ``index`` and ``column``."""
    even: list[Tensor | int] = [index & _LOW, checkpoint]
    odd: list[Tensor | int] = [column, index >> 32 | stream << 16]
    for keys in round_keys(seed):
        # int64 wraps, which keeps all 64 bits of a product.
        high, low = even[1] * 0xCD9E8D57, even[0] * 0xD2511F53
        even = [(p >> 32 & _LOW) ^ w ^ k for p, w, k in zip((high, low), odd, keys, strict=True)]
        odd = [high & _LOW, low & _LOW]
    return even[0], odd[0], even[1], odd[1]  # type: ignore[return-value]
