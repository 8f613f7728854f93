"""Block fixed-point: gradients as small integers times a power of two per (sample, row block).

Integer sums do not depend on their order, so a projected block has the same bits on every device,
for every batch and tile. The price is a rounding error, which depends on the number of 8-bit
digits.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trakdask.projection.acceleration import compiled
from trakdask.projection.philox import ROWS_PER_COUNTER
from trakdask.projection.row_map import ROW_BLOCK

SLAB_ROWS = 2048
"""Rows of one integer product, so that a tile of bits fits in the cache; no effect on results."""

FRACTION_BITS = {1: 7, 2: 14, 3: 22}
"""Exponent t by number of digits: the largest element of a block is at most 2**t units."""

# Adding 1.5 * 2**23 in float32 rounds to an integer, half to even: the bits of the sum, read as an
# integer, are that integer plus the bits of the constant (of which the low 22 are 0).
_ROUNDING = 1.5 * 2**23
_ROUNDING_BITS = 0x4B400000
_GROUP_ELEMENTS = 1 << 18
_TINY = 2.0**-100


class Scratch(threading.local):
    """Named buffers that a thread reuses between blocks; each grows to the largest request."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a contiguous buffer of this shape; its content is undefined."""
        n = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < n:
            # A tensor created in inference mode could not be modified outside of it later.
            with torch.inference_mode(False):
                buffer = self._buffers[name, dtype] = torch.empty(n, dtype=dtype)
        return buffer[:n].view(*shape)


@dataclass(frozen=True)
class QuantizedBlock:
    """One row block of gradients as integers.

    Parameters
    ----------
    slabs
        Runs of consecutive rows, each (n_digits * B, rows), int8, contiguous, with the least
        significant digits of all samples first. A value is the sum of digit * 256**position. The
        last slab is padded with rows of zeros to a multiple of 128.
    step
        The value of one unit, shape (B,), float64, a power of two; NaN for a sample that is not
        finite in this block.
    n_digits
        Number of digits.
    """

    slabs: tuple[Tensor, ...]
    step: Tensor
    n_digits: int


def quantize_block(block: Tensor, n_digits: int, scratch: Scratch) -> QuantizedBlock:
    """Round one row block to fixed point, with a power-of-two scale per sample.

    Parameters
    ----------
    block
        Shape (B, rows), any float dtype (rounded to float32), B >= 1, 1 <= rows <= 16384. Rows of
        the tensor may be strided.
    n_digits
        1, 2 or 3.
    scratch
        Buffers of the calling thread. The result is a view of them, valid until the next call.

    Returns
    -------
    The digits and the step of every sample.

    Notes
    -----
    Exactness: the scaled value is rounded once, half to even; scaling is exact, also for subnormal
    and for the largest values. With one digit, values that round to 128 are clamped to 127.
    Cost: ``n_digits`` bytes per element plus a fixed working set.
    """
    n_samples, n_rows = block.shape
    full, last = _empty_slabs(n_samples, n_rows, n_digits, scratch)
    slabs = tuple(full) if last is None else (*full, last)
    slabs = tuple(slab.flatten(0, 1) for slab in slabs)
    if (kernels := compiled("quantize")) is not None and block.device.type == "cpu":
        flat, stride = flatten(block)
        factors, steps = compiled_scales(flat, stride, block.shape, FRACTION_BITS[n_digits])
        head = len(full) * SLAB_ROWS
        kernels.digits(flat, stride, head, factors, full.numpy())
        if last is not None:
            kernels.digits(flat[head:], stride, n_rows - head, factors, last[None].numpy())
        return QuantizedBlock(slabs, torch.from_numpy(steps), n_digits)
    lift, scale, step = _scales(_largest(block), FRACTION_BITS[n_digits])
    group = max(1, _GROUP_ELEMENTS // n_rows)
    for start in range(0, n_samples, group):
        samples = slice(start, min(start + group, n_samples))
        rounded = scratch.take("rounded", block[samples].shape, torch.float32)
        lifted = _lifted(block[samples], None if lift is None else lift[samples], rounded)
        torch.mul(lifted, scale[samples], out=rounded).add_(_ROUNDING)
        if n_digits == 1:
            rounded.clamp_(_ROUNDING - 127, _ROUNDING + 127)
        _split_digits(rounded.view(torch.int32), full, last, start, n_digits)
    return QuantizedBlock(slabs, step, n_digits)


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
    compiled("quantize").scales(bits, stride, n_rows, fraction_bits, factor_bits, step)
    return factors, step


def quantize_integers(block: Tensor, fraction_bits: int, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """Round one row block to integers, with a power-of-two scale per sample.

    Parameters
    ----------
    block
        Shape (B, rows), any float dtype (rounded to float32), B >= 1, 1 <= rows <= 16384. Rows of
        the tensor may be strided.
    fraction_bits
        Exponent t, 7 to 22: the largest element becomes an integer of at most 2**t.
    scratch
        Buffers of the calling thread. The result is a view of them, valid until the next call.

    Returns
    -------
    The integers, shape (B, rows), int32, and the step, shape (B,), float64: the value of one unit,
    a power of two; NaN for a sample that is not finite in this block.
    """
    rounded = scratch.take("rounded", block.shape, torch.float32)
    if (kernels := compiled("quantize")) is not None and block.device.type == "cpu":
        flat, stride = flatten(block)
        factors, steps = compiled_scales(flat, stride, block.shape, fraction_bits)
        integers = rounded.view(torch.int32)
        kernels.integers(flat, stride, factors, integers.numpy())
        return integers, torch.from_numpy(steps)
    lift, scale, step = _scales(_largest(block), fraction_bits)
    torch.mul(_lifted(block, lift, rounded), scale, out=rounded).add_(_ROUNDING)
    return rounded.view(torch.int32).sub_(_ROUNDING_BITS), step


def _lifted(block: Tensor, lift: Tensor | None, out: Tensor) -> Tensor:
    """Return the gradients as float32, with tiny ones scaled up; ``block`` itself if possible."""
    if lift is None and block.dtype == torch.float32:
        return block
    out.copy_(block)
    return out if lift is None else out.mul_(lift)


def _empty_slabs(
    n_samples: int, n_rows: int, n_digits: int, scratch: Scratch
) -> tuple[Tensor, Tensor | None]:
    """Return buffers (slabs, n_digits, B, 2048) and, for remaining rows, (n_digits, B, rows)."""
    assert 0 < n_rows <= ROW_BLOCK
    n_full, rest = divmod(n_rows, SLAB_ROWS)
    full = scratch.take("slabs", (n_full, n_digits, n_samples, SLAB_ROWS), torch.int8)
    if not rest:
        return full, None
    padded = -(-rest // ROWS_PER_COUNTER) * ROWS_PER_COUNTER
    last = scratch.take("last_slab", (n_digits, n_samples, padded), torch.int8)
    last[..., rest:] = 0
    return full, last


def _largest(block: Tensor) -> Tensor:
    """Return (B,) float32: the largest magnitude; NaN and infinity propagate."""
    return torch.maximum(block.amax(1), -block.amin(1)).float()


def _scales(largest: Tensor, fraction_bits: int) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the factors (B, 1) float32 before rounding and the step (B,) float64 after it.

    There are two factors, both powers of two, because the scale of a block of subnormals would
    exceed the float32 range. The first one is None if no sample needs it.
    """
    tiny = (largest > 0) & (largest < _TINY)
    lift = torch.ones_like(largest).masked_fill_(tiny, 1 / _TINY)
    finite = torch.isfinite(largest)
    exponent = torch.frexp(torch.where(finite, largest * lift, 1.0)).exponent
    # The bits of the float32 power of two with this exponent, in [-126, 127].
    scale = ((fraction_bits - exponent + 127) << 23).view(torch.float32)
    step = torch.where(finite, 1 / (scale.double() * lift.double()), torch.nan)
    return lift[:, None] if bool(tiny.any()) else None, scale[:, None], step


def _split_digits(
    integers: Tensor, full: Tensor, last: Tensor | None, start: int, n_digits: int
) -> None:
    """Write balanced base-256 digits, the least significant first; this changes ``integers``."""
    n_full, stop = len(full), start + len(integers)
    head = integers[:, : n_full * SLAB_ROWS].view(len(integers), n_full, SLAB_ROWS).transpose(0, 1)
    tail = integers[:, n_full * SLAB_ROWS :]
    offset = _ROUNDING_BITS
    for position in range(n_digits):
        if position:
            integers.add_(128 - offset).bitwise_right_shift_(8)
            offset = 0
        full[:, position, start:stop].copy_(head)
        if last is not None:
            last[position, start:stop, : tail.shape[1]].copy_(tail)
