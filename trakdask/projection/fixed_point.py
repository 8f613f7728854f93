"""Block fixed-point: gradients as small integers, and exact products of these with random signs.

A gradient is rounded to integers times a power of two per (sample, row block). Integer sums do not
depend on their order, so a projected block has the same bits on every device, for every batch and
tile. The price is a rounding error, which depends on the number of bits.

A matrix of signs is multiplied as its bits, 8 bits of the integers at a time: the entry is 1 - 2 b,
and sum q (1 - 2 b) = sum q - 2 sum q b, so that one product of small integers suffices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from timeit import repeat

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trakdask.projection.acceleration import numba_kernels
from trakdask.projection.philox import ROWS_PER_COUNTER, fill_words
from trakdask.tensors import Scratch, in_float64
from trakdask.torch_internals import int8_matmul

FRACTION_BITS = {1: 7, 2: 14, 3: 22}
"""Exponent t by number of 8-bit digits: the largest element of a block is at most 2**t units."""

# Adding 1.5 * 2**23 in float32 rounds to an integer, half to even: the bits of the sum, read as an
# integer, are that integer plus the bits of the constant (whose low 22 are 0).
_ROUNDING = 1.5 * 2**23
_ROUNDING_BITS = 0x4B400000
_TINY = 2.0**-100

# Rows and columns of a tile of signs, so that it fits in the cache; they do not affect results
# beyond the rounding of products with vectors.
_ROW_TILE, _COLUMN_TILE = 2048, 256

_scratch = Scratch()


def quantize(block: Tensor, fraction_bits: int) -> tuple[Tensor, Tensor]:
    """Round one row block to integers, with a power-of-two scale per sample.

    Parameters
    ----------
    block
        Shape (B, rows) on the CPU, any float dtype (rounded to float32), B >= 1,
        1 <= rows <= 16384. Rows of the tensor may be strided.
    fraction_bits
        Exponent t, 7 to 22: the largest element becomes an integer of at most 2**t.

    Returns
    -------
    The integers, shape (B, rows), int32, and the step, shape (B,), float64: the value of one unit,
    a power of two; NaN for a sample that is not finite in this block.

    Notes
    -----
    Exactness: the scaled value is rounded once, half to even; scaling is exact, also for subnormal
    and for the largest values.
    """
    if (kernels := numba_kernels()) is None:
        return round_by_torch(block, fraction_bits)
    integers = _scratch.take("integers", block.shape, torch.int32)
    flat, stride = flatten(block)
    factors, steps = compiled_scales(flat, stride, block.shape, fraction_bits)
    kernels.integers(flat, stride, factors, integers.numpy())
    return integers, torch.from_numpy(steps)


def round_by_torch(blocks: Tensor, fraction_bits: int) -> tuple[Tensor, Tensor]:
    """Do the same for one or several row blocks, (..., rows), on any device.

    The step is on the CPU for a device without float64.
    """
    # NaN and infinity propagate.
    largest = torch.maximum(blocks.amax(-1), -blocks.amin(-1)).float()
    lift, scale, step = _scales(largest, fraction_bits)
    rounded = _scratch.take("rounded", blocks.shape, torch.float32, blocks.device)
    torch.mul(rounded.copy_(blocks).mul_(lift), scale, out=rounded).add_(_ROUNDING)
    return rounded.view(torch.int32).sub_(_ROUNDING_BITS), step


def flatten(block: Tensor) -> tuple[npt.NDArray[np.float32], int]:
    """Return a block on the CPU as one run of float32, and the stride from sample to sample."""
    block = block.detach().float()
    if block.stride(1) != 1 or block.stride(0) < 0:
        block = block.contiguous()
    stride = block.stride(0) if len(block) > 1 else block.shape[1]
    flat = block.as_strided(((len(block) - 1) * stride + block.shape[1],), (1,))
    return flat.numpy(), stride


def compiled_scales(
    flat: npt.NDArray[np.float32], stride: int, shape: Sequence[int], fraction_bits: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64]]:
    """Compute both factors before rounding, (B, 2), and the step after it, (B,), by numba."""
    n_samples, n_rows = shape
    factors, step = np.empty((n_samples, 2), np.float32), np.empty(n_samples)
    bits, factor_bits = flat.view(np.int32), factors.view(np.int32)
    numba_kernels().scales(bits, stride, n_rows, fraction_bits, factor_bits, step)
    return factors, step


def _scales(largest: Tensor, fraction_bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return two factors (..., 1) float32 before rounding and the step (...) float64 after it.

    There are two factors, both powers of two, because the scale of a block of subnormals would
    exceed the float32 range.
    """
    tiny = (largest > 0) & (largest < _TINY)
    lift = torch.ones_like(largest).masked_fill_(tiny, 1 / _TINY)
    finite = torch.isfinite(largest)
    # The bits of a float32, and no logarithm: the exponent has to be the same on every processor.
    bits = torch.where(finite & (largest > 0), largest * lift, 0.5).view(torch.int32)
    # The bits of the power of two that scales to fraction_bits, in [-126, 127].
    scale = ((fraction_bits + 253 - (bits >> 23)) << 23).view(torch.float32)
    factors = torch.where(finite, torch.stack([lift, scale]), torch.nan)
    return lift[..., None], scale[..., None], 1 / in_float64(factors).prod(0)


def sign_bits(
    row: int, n_rows: int, column: int, n_columns: int, *, seed: int, checkpoint: int, stream: int
) -> npt.NDArray[np.uint8]:
    """Return the bits of all counters that contain some rows, (n_columns + 1, bytes), lowest first.

    The last line consists of ones, so that its product is the sum of the integers. The bits are
    valid until the next call in this thread.
    """
    first, last = row // ROWS_PER_COUNTER, -(-(row + n_rows) // ROWS_PER_COUNTER)
    shape = (n_columns + 1, last - first, 2)
    words = _scratch.take("words", shape, torch.int64).numpy().view(np.uint64)
    fill_words(words[:-1], first, column, seed=seed, checkpoint=checkpoint, stream=stream)
    words[-1] = 2**64 - 1
    return words.view(np.uint8).reshape(n_columns + 1, -1)


def signs(row: int, n_rows: int, column: int, n_columns: int, **address: int) -> Tensor:
    """Return a window of a matrix of signs, (n_columns, n_rows), float64."""
    packed, lead = sign_bits(row, n_rows, column, n_columns, **address), row % ROWS_PER_COUNTER
    bits = np.unpackbits(packed[:-1], axis=1, bitorder="little")[:, lead : lead + n_rows]
    return torch.from_numpy(bits).double().mul_(-2).add_(1)


def multiply_signs(vectors: Tensor, first: int, n_rows: int, **address: int) -> Tensor:
    """Return the products of vectors (m, columns) with rows of a matrix of signs, (m, n_rows)."""
    out = vectors.new_zeros(len(vectors), n_rows)
    for row in range(0, n_rows, _ROW_TILE):
        rows = slice(row, min(row + _ROW_TILE, n_rows))
        for column in range(0, vectors.shape[1], _COLUMN_TILE):
            part = vectors[:, column : column + _COLUMN_TILE]
            tile = signs(first + row, rows.stop - row, column, part.shape[1], **address)
            out[:, rows] += part @ tile.float()
    return out


def split_digits(integers: Tensor, n_digits: int, row: int) -> list[Tensor]:
    """Split integers into balanced base-256 digits: slabs of rows, as operands of a product.

    Parameters
    ----------
    integers
        Shape (..., rows), int32.
    n_digits
        Digits of each; an integer is the sum of digit * 256**position.
    row
        Row of the first integer. Zeros fill the counters that contain the first and the last row.

    Returns
    -------
    Runs of consecutive rows, each (n_digits * samples, rows), int8, contiguous, with the least
    significant digits of all samples first. They are valid until the next call in this thread.
    """
    *batch, n_rows = integers.shape
    lead = row % ROWS_PER_COUNTER
    padded = -(-(lead + n_rows) // ROWS_PER_COUNTER) * ROWS_PER_COUNTER
    slabs = []
    for start in range(0, padded, _ROW_TILE):
        stop = min(start + _ROW_TILE, padded)
        first, last = max(lead, start), min(lead + n_rows, stop)
        digits = _scratch.take(f"digits {start}", (n_digits, *batch, stop - start), torch.int8)
        if last - first < stop - start:
            digits.zero_()
        rest = _scratch.take("rest", (*batch, last - first), torch.int32)
        rest.copy_(integers[..., first - lead : last - lead])
        for position, digit in enumerate(digits):
            if position:
                rest.add_(128).bitwise_right_shift_(8)
            # The copy keeps the lowest 8 bits, as a number in [-128, 128).
            digit[..., first - start : last - start].copy_(rest)
        slabs.append(digits.flatten(0, -2))
    return slabs


def signed_sums(packed: npt.NDArray[np.uint8], slabs: list[Tensor], n_digits: int) -> Tensor:
    """Return the exact products of signs and integers, (n_columns, samples), float64.

    ``packed`` are the :func:`sign_bits` of the rows of ``slabs``, which :func:`split_digits` made.
    """
    shape = (len(packed), len(slabs[0]))
    total = _scratch.take("total", shape, torch.int32).zero_()
    part = _scratch.take("part", shape, torch.int32)
    first = 0
    for slab in slabs:
        last = first + slab.shape[1] // 8
        bits = np.unpackbits(packed[:, first:last], axis=1, bitorder="little")
        integer_matmul(torch.from_numpy(bits.view(np.int8)), slab, part)
        total.add_(part)
        first = last
    *lower, highest = total.chunk(n_digits, dim=1)
    sums = highest.double()
    for digits in reversed(lower):
        sums.mul_(256).add_(digits)
    return sums[:-1].mul_(-2).add_(sums[-1])


def integer_matmul(bits: Tensor, digits: Tensor, out: Tensor) -> None:
    """Write the exact product ``bits @ digits.T`` to ``out``.

    Parameters
    ----------
    bits
        Shape (n, k), int8, 0 or 1; k <= 16384.
    digits
        Shape (m, k), int8.
    out
        Shape (n, m), int32.

    Notes
    -----
    Exactness: both implementations are exact, since a float32 holds every sum: at most
    128 * 16384 = 2**21. The choice, made once per process by :func:`int8_matmul_is_usable`,
    changes the speed only.
    """
    product = int8_matmul if int8_matmul_is_usable() else float_matmul
    product(bits, digits, out)


@cache
def int8_matmul_is_usable() -> bool:
    """Return whether this torch multiplies int8 matrices exactly, and faster than float32 ones."""
    try:
        for n, m, k in [(1, 1, 128), (3, 2, 384), (128, 64, _ROW_TILE)]:
            # Fixed operands, because the probe must not use torch's global generator.
            bits = (torch.arange(n * k) * 7 % 11 % 2).to(torch.int8).view(n, k)
            digits = (torch.arange(m * k) * 97 % 256 - 128).to(torch.int8).view(m, k)
            # Processors without VNNI add two products in 16 bits, which silently overflows here.
            bits[0], bits[-1], digits[0] = 127, 1, -128
            out = torch.empty(n, m, dtype=torch.int32)
            int8_matmul(bits, digits, out)
            if not torch.equal(out.double(), bits.double() @ digits.double().T):
                return False
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False
    products = partial(int8_matmul, bits, digits, out), partial(float_matmul, bits, digits, out)
    int8_s, float_s = (min(repeat(product, number=1, repeat=4)) for product in products)
    return int8_s < 2 * float_s


def float_matmul(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write the product left rightᵀ of bits and digits to an int32 tensor, on any device.

    It is exact also by TF32 or bfloat16 inside float32 products, since a digit has 8 bits.
    """
    with torch.autocast(left.device.type, enabled=False):
        out.copy_(torch.mm(left.float(), right.float().T))
