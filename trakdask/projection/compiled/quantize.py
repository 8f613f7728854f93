"""Block fixed-point in machine code; see :mod:`trakdask.projection.quantize`.

A block is passed as one run of float32 and the stride from sample to sample, because loops over
rows of a strided array would not be vectorised.
"""

from __future__ import annotations

from math import ldexp

import numpy as np
from numba import int8, int32

from trakdask.projection.compiled.jit import jit

_ROUNDING = np.float32(1.5 * 2**23)
_INFINITY = 0x7F800000
_TINY = 0x0D800000  # 2**-100


@jit
def scales(bits, stride, n_rows, fraction_bits, factor_bits, step):
    """Write per sample the two factors before rounding, (B, 2), and the step after it, (B,).

    Gradients and factors are float32, given as int32 with the same bits: magnitudes are compared as
    integers, so that one pass also detects NaN. (Taking such a view in here takes numba three
    seconds to compile.)
    """
    for b in range(len(step)):
        row, largest = bits[b * stride : b * stride + n_rows], int32(0)
        for r in range(n_rows):
            magnitude = int32(row[r] & int32(0x7FFFFFFF))
            largest = magnitude if magnitude > largest else largest
        finite = largest < _INFINITY
        raised = 100 if 0 < largest < _TINY else 0
        exponent = _exponent(largest, raised) if finite else 1
        factor_bits[b, 0] = (127 + raised) << 23
        factor_bits[b, 1] = (127 + fraction_bits - exponent) << 23
        step[b] = ldexp(1.0, exponent - fraction_bits - raised) if finite else np.nan


@jit
def _exponent(magnitude_bits, raised):
    """Return e with 2**(e-1) <= magnitude * 2**raised < 2**e, 0 for zero, from float32 bits."""
    if magnitude_bits == 0:
        return 0
    if magnitude_bits >= 1 << 23:
        return (magnitude_bits >> 23) - 126 + raised
    exponent = -149 + raised  # subnormal: count the bits
    while magnitude_bits:
        magnitude_bits >>= 1
        exponent += 1
    return exponent


@jit
def rounded(value, lift, scale):
    """Round to an integer, half to even; within [-2**22, 2**22]."""
    return int32(((value * lift) * scale + _ROUNDING) - _ROUNDING)


@jit
def integers(flat, stride, factors, out):
    """Write the rounded values, (B, rows) int32."""
    n_rows = out.shape[1]
    for b in range(out.shape[0]):
        values, lift, scale = flat[b * stride : b * stride + n_rows], factors[b, 0], factors[b, 1]
        for r in range(n_rows):
            out[b, r] = rounded(values[r], lift, scale)


@jit
def digits(flat, stride, n_rows, factors, out):
    """Write balanced base-256 digits, (slab, digit, sample, row) int8, of consecutive slabs."""
    n_slabs, _, n_samples, slab_rows = out.shape
    for slab in range(n_slabs):
        n = min(slab_rows, n_rows - slab * slab_rows)
        for b in range(n_samples):
            first = b * stride + slab * slab_rows
            _split(flat[first : first + n], factors[b, 0], factors[b, 1], out[slab, :, b])


@jit
def _split(values, lift, scale, out):
    n_digits = len(out)
    if n_digits == 1:
        for r in range(len(values)):
            out[0, r] = min(max(rounded(values[r], lift, scale), int32(-127)), int32(127))
        return
    for r in range(len(values)):
        integer = rounded(values[r], lift, scale)
        low = int8(integer)
        rest = (integer - low) >> 8
        out[0, r] = low
        if n_digits == 2:
            out[1, r] = rest
        else:
            middle = int8(rest)
            out[1, r] = middle
            out[2, r] = (rest - middle) >> 8
