"""Dense products on a CPU: entries from counters, exact integer sums, float64 over row blocks.

Three implementations give the same bits; each process measures once which one is the fastest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trakdask.projection.lookup_products import accumulate_by_lookup, lookup_is_available
from trakdask.projection.philox import BYTES_PER_COUNTER, ROWS_PER_COUNTER, STREAM_RADEMACHER
from trakdask.projection.quantize import SLAB_ROWS, QuantizedBlock, Scratch, quantize_block
from trakdask.projection.random_words import fill_words
from trakdask.projection.row_map import ROW_BLOCK

_COLUMN_TILE = 2048
_scratch = Scratch()


def accumulate_rademacher(
    block: Tensor,
    row_offset: int,
    *,
    seed: int,
    checkpoint: int,
    n_digits: int,
    out: Tensor,
) -> None:
    """Add the product of one row block with the Rademacher matrix to ``out``.

    Parameters
    ----------
    block
        Shape (B, rows) on the CPU, any float dtype, 1 <= rows <= 16384.
    row_offset
        Row of the first element, a multiple of 16384.
    seed, checkpoint
        Address of the matrix.
    n_digits
        8-bit digits per gradient element: 1, 2 or 3.
    out
        Shape (B, width), float64, changed in place: sum_r block[b, r] * P[row_offset + r, j] is
        added to entry (b, j), without the factor width**-0.5.

    Notes
    -----
    Exactness: the product of the quantised block is exact, so it does not depend on the batch, on
    tiles, on threads or on the implementation; one float64 addition per block rounds ``out``.
    Cost: see :func:`~trakdask.projection.lookup_products.accumulate_by_lookup`, which is used if
    numba is installed, the processor has AVX-512 and it is faster, and
    :func:`accumulate_by_matmul`.
    """
    accumulate = accumulate_by_lookup if lookup_is_faster() else accumulate_by_matmul
    accumulate(block, row_offset, seed=seed, checkpoint=checkpoint, n_digits=n_digits, out=out)


def accumulate_by_matmul(
    block: Tensor,
    row_offset: int,
    *,
    seed: int,
    checkpoint: int,
    n_digits: int,
    out: Tensor,
) -> None:
    """Add the product of one row block with the Rademacher matrix to ``out``, by matrix products.

    The parameters are those of :func:`accumulate_rademacher`.

    Notes
    -----
    Cost: 2 * n_digits * B * rows * width integer operations, and rows * width random bits,
    which are never held all at once: buffers are about 12 MB plus n_digits * B * rows bytes plus
    16 KB * (1 + n_digits) * B.
    """
    quantized = quantize_block(block, n_digits, _scratch)
    n_bytes = sum(slab.shape[1] for slab in quantized.slabs) // 8
    total = digit_sum(_bits_product(np.full((1, n_bytes), 0xFF, np.uint8), quantized), n_digits)
    width = out.shape[1]
    for col_start in range(0, width, _COLUMN_TILE):
        n_cols = min(_COLUMN_TILE, width - col_start)
        packed = _packed_bits(row_offset, block.shape[1], col_start, n_cols, seed, checkpoint)
        ones = digit_sum(_bits_product(packed, quantized), n_digits)
        # sum q * (1 - 2 b) = sum q - 2 * sum q * b, so bits suffice.
        signed = ones.mul_(-2).add_(total).mul_(quantized.step)
        out[:, col_start : col_start + n_cols].add_(signed.T)


def lookup_is_faster() -> bool:
    """Return whether table lookup is faster than the matrix product, measured once per process."""
    return lookup_is_available() and _lookup_wins()


@cache
def _lookup_wins() -> bool:
    block, out = torch.ones(32, SLAB_ROWS), torch.zeros(32, 512, dtype=torch.float64)
    lookup, matmul = (
        _seconds(partial(way, block, 0, seed=0, checkpoint=0, n_digits=2, out=out))
        for way in (accumulate_by_lookup, accumulate_by_matmul)
    )
    return lookup < matmul


def dense_buffer_bytes(n_digits: int, n_samples: int = 512) -> int:
    """Return the working memory of one thread, for micro-batches of ``n_samples``."""
    return 12 * 2**20 + n_digits * n_samples * ROW_BLOCK + 2**14 * (1 + n_digits) * n_samples


def integer_matmul(bits: Tensor, digits: Tensor, out: Tensor) -> None:
    """Write the exact product ``bits @ digits.T`` to ``out``.

    Parameters
    ----------
    bits
        Shape (n, k), int8: values 0 and 1 if k <= 16384, or any values if k <= 1024.
    digits
        Shape (m, k), int8.
    out
        Shape (n, m), int32.

    Notes
    -----
    Exactness: both implementations are exact, since a float32 holds every sum: at most
    128 * 16384 = 2**21, or 128 * 127 * 1024 < 2**24. The choice, made once per process by
    :func:`int8_matmul_is_usable`, changes the speed only.
    """
    product = _int8_product if int8_matmul_is_usable() else _float32_product
    product(bits, digits, out)


@cache
def int8_matmul_is_usable() -> bool:
    """Return whether this torch multiplies int8 matrices exactly, and faster than float32 ones."""
    try:
        exact = all(_int8_is_exact(shape) for shape in [(1, 1, 128), (3, 2, 384), (33, 65, 2048)])
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False
    operands = _probe_operands(128, 64, SLAB_ROWS)
    return exact and _seconds(partial(_int8_product, *operands)) < 2 * _seconds(
        partial(_float32_product, *operands)
    )


def _int8_product(bits: Tensor, digits: Tensor, out: Tensor) -> None:
    torch._int_mm(bits, digits.T, out=out)


def _float32_product(bits: Tensor, digits: Tensor, out: Tensor) -> None:
    out.copy_(torch.mm(bits.float(), digits.float().T))


def _probe_operands(n: int, m: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    # Fixed operands, because the probe must not use torch's global generator.
    bits = (torch.arange(n * k) * 7 % 11 % 2).to(torch.int8).view(n, k)
    digits = (torch.arange(m * k) * 97 % 256 - 128).to(torch.int8).view(m, k)
    # Processors without VNNI add two products in 16 bits, which silently overflows for these.
    bits[0], bits[-1], digits[0] = 127, 1, -128
    return bits, digits, torch.empty(n, m, dtype=torch.int32)


def _int8_is_exact(shape: tuple[int, int, int]) -> bool:
    bits, digits, out = _probe_operands(*shape)
    _int8_product(bits, digits, out)
    return torch.equal(out.double(), bits.double() @ digits.double().T)


def _seconds(run: Callable[[], None]) -> float:
    """Return the duration of the fastest of a few runs, which other work affects least."""
    durations = []
    for _ in range(4):
        start = time.perf_counter()
        run()
        durations.append(time.perf_counter() - start)
    return min(durations)


def _packed_bits(
    row_offset: int, n_rows: int, col_start: int, n_cols: int, seed: int, checkpoint: int
) -> npt.NDArray[np.uint8]:
    """Return the bits of consecutive rows, (n_cols, bytes), uint8, the lowest bit first."""
    n_blocks = -(-n_rows // ROWS_PER_COUNTER)
    words = _scratch.take("words", (n_cols, n_blocks, 2), torch.int64).numpy().view(np.uint64)
    fill_words(
        words,
        row_offset // ROWS_PER_COUNTER,
        col_start,
        seed=seed,
        checkpoint=checkpoint,
        stream=STREAM_RADEMACHER,
    )
    return words.view(np.uint8).reshape(n_cols, n_blocks * BYTES_PER_COUNTER)


def _bits_product(packed: npt.NDArray[np.uint8], quantized: QuantizedBlock) -> Tensor:
    """Return the sums of the digits whose bit is set, (n_cols, n_digits * B), int32."""
    shape = (len(packed), len(quantized.slabs[0]))
    total = _scratch.take("total", shape, torch.int32).zero_()
    part = _scratch.take("part", shape, torch.int32)
    first = 0
    for slab in quantized.slabs:
        last = first + slab.shape[1] // 8
        bits = np.unpackbits(packed[:, first:last], axis=1, bitorder="little")
        integer_matmul(torch.from_numpy(bits.view(np.int8)), slab, part)
        total.add_(part)
        first = last
    return total


def digit_sum(sums: Tensor, n_digits: int) -> Tensor:
    """Combine (n, n_digits * B) int32 sums of digits to (n, B) float64 sums of values, exactly."""
    *lower, highest = sums.chunk(n_digits, dim=1)
    values = highest.double()
    for digits in reversed(lower):
        values.mul_(256).add_(digits)
    return values
