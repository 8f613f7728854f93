"""Block fixed-point: gradients as small integers times a power of two per (sample, row block).

Integer sums do not depend on their order, so a projected block has the same bits on every device,
for every batch and tile. The price is a rounding error, which depends on the number of bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trakdask.projection.acceleration import numba_kernels
from trakdask.projection.memory import Scratch

FRACTION_BITS = {1: 7, 2: 14, 3: 22}
"""Exponent t by number of 8-bit digits: the largest element of a block is at most 2**t units."""

# Adding 1.5 * 2**23 in float32 rounds to an integer, half to even: the bits of the sum, read as an
# integer, are that integer plus the bits of the constant (of which the low 22 are 0).
_ROUNDING = 1.5 * 2**23
_ROUNDING_BITS = 0x4B400000
_TINY = 2.0**-100


def quantize(block: Tensor, fraction_bits: int, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """Round one row block to integers, with a power-of-two scale per sample.

    Parameters
    ----------
    block
        Shape (B, rows) on the CPU, any float dtype (rounded to float32), B >= 1,
        1 <= rows <= 16384. Rows of the tensor may be strided.
    fraction_bits
        Exponent t, 7 to 22: the largest element becomes an integer of at most 2**t.
    scratch
        Buffers of the calling thread. The result is a view of them, valid until the next call.

    Returns
    -------
    The integers, shape (B, rows), int32, and the step, shape (B,), float64: the value of one unit,
    a power of two; NaN for a sample that is not finite in this block.

    Notes
    -----
    Exactness: the scaled value is rounded once, half to even; scaling is exact, also for subnormal
    and for the largest values.
    """
    rounded = scratch.take("rounded", block.shape, torch.float32)
    if (kernels := numba_kernels()) is not None:
        flat, stride = flatten(block)
        factors, steps = compiled_scales(flat, stride, block.shape, fraction_bits)
        integers = rounded.view(torch.int32)
        kernels.integers(flat, stride, factors, integers.numpy())
        return integers, torch.from_numpy(steps)
    largest = torch.maximum(block.amax(1), -block.amin(1)).float()  # NaN and infinity propagate
    lift, scale, step = _scales(largest, fraction_bits)
    torch.mul(rounded.copy_(block).mul_(lift), scale, out=rounded).add_(_ROUNDING)
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
    """Return two factors (B, 1) float32 before rounding and the step (B,) float64 after it.

    There are two factors, both powers of two, because the scale of a block of subnormals would
    exceed the float32 range.
    """
    tiny = (largest > 0) & (largest < _TINY)
    lift = torch.ones_like(largest).masked_fill_(tiny, 1 / _TINY)
    finite = torch.isfinite(largest)
    # frexp, and no logarithm: the exponent has to be the same on every processor.
    exponent = torch.frexp(torch.where(finite, largest * lift, 1.0)).exponent
    # The bits of the float32 power of two with this exponent, in [-126, 127].
    scale = ((fraction_bits - exponent + 127) << 23).view(torch.float32)
    step = torch.where(finite, 1 / (scale.double() * lift.double()), torch.nan)
    return lift[:, None], scale[:, None], step
