"""Exact products of integers with matrices of random signs, 8 bits at a time.

A matrix of signs is multiplied as its bits: the entry is 1 - 2 b, and
sum q (1 - 2 b) = sum q - 2 sum q b, so that one product of small integers suffices.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trakdask.projection.memory import Scratch
from trakdask.projection.philox import ROWS_PER_COUNTER, fill_words
from trakdask.torch_internals import int8_matmul

SLAB_ROWS = 2048
"""Rows of one product, so that a tile of bits fits in the cache; no effect on results."""

_scratch = Scratch()


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


def signs_of(packed: npt.NDArray[np.uint8], row: int, n_rows: int) -> Tensor:
    """Return the matrix of signs of some rows, (n_columns, n_rows), float64."""
    lead = row % ROWS_PER_COUNTER
    bits = np.unpackbits(packed[:-1], axis=1, bitorder="little")[:, lead : lead + n_rows]
    return torch.from_numpy(bits).double().mul_(-2).add_(1)


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
    for start in range(0, padded, SLAB_ROWS):
        stop = min(start + SLAB_ROWS, padded)
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
    if int8_matmul_is_usable():
        int8_matmul(bits, digits, out)
    else:
        out.copy_(torch.mm(bits.float(), digits.float().T))


@cache
def int8_matmul_is_usable() -> bool:
    """Return whether this torch multiplies int8 matrices exactly, and faster than float32 ones."""
    try:
        exact = all(_int8_is_exact(shape) for shape in [(1, 1, 128), (3, 2, 384), (33, 65, 2048)])
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False
    bits, digits, out = _probe_operands(128, 64, SLAB_ROWS)
    return exact and _seconds(partial(int8_matmul, bits, digits, out)) < 2 * _seconds(
        lambda: torch.mm(bits.float(), digits.float().T)
    )


def _probe_operands(n: int, m: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    # Fixed operands, because the probe must not use torch's global generator.
    bits = (torch.arange(n * k) * 7 % 11 % 2).to(torch.int8).view(n, k)
    digits = (torch.arange(m * k) * 97 % 256 - 128).to(torch.int8).view(m, k)
    # Processors without VNNI add two products in 16 bits, which silently overflows for these.
    bits[0], bits[-1], digits[0] = 127, 1, -128
    return bits, digits, torch.empty(n, m, dtype=torch.int32)


def _int8_is_exact(shape: tuple[int, int, int]) -> bool:
    bits, digits, out = _probe_operands(*shape)
    int8_matmul(bits, digits, out)
    return torch.equal(out.double(), bits.double() @ digits.double().T)


def _seconds(run: Callable[[], object]) -> float:
    """Return the duration of the fastest of a few runs, which other work affects least."""
    durations = []
    for _ in range(4):
        start = time.perf_counter()
        run()
        durations.append(time.perf_counter() - start)
    return min(durations)
