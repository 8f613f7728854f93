"""Kernels in machine code, compiled by numba: random words, rounding, and sums by bucket.

Each does what a function of another module also does without numba, in the same bits. A block is
passed as one run of float32 and the stride from sample to sample, because loops over rows of a
strided array would not be vectorised.

Four functions for the sums by bucket are vectors written out for LLVM, which has instructions for
them on every processor; everything else is plain numba. Loops of numba give the same bits. On an
AMD EPYC, with 32 lanes and a block of 16384 rows, they took twice as long for the transposition
and nearly ten times as long for the sums in 2048 columns (four times in 8192), since each checks
whether its arrays overlap, and keeps running sums in memory. The projection as a whole took three
to seven times as long.
"""

from __future__ import annotations

from math import ldexp
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import int32, types, uint32, uint64
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
"""Number of samples whose sums lie side by side: with more, wide sums would not fit in a cache."""


def jit(function: Any) -> Any:
    """Compile on first use, without the GIL; cache the machine code on disk if possible."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # "cannot cache function: no locator available": nothing is writable
        return numba.njit(**options)(function)


# ------------------------------------------------------------------ random words


@numba.njit(inline="always")  # a call that remained would prevent vectorisation
def _philox(c0, c1, c2, c3, k0, k1):
    """Return the four words of one counter; all uint32, so that loops over it vectorise."""
    for _ in range(10):
        p0, p1 = uint64(c0) * uint64(0xD2511F53), uint64(c2) * uint64(0xCD9E8D57)
        c0, c2 = (
            uint32(uint32(p1 >> uint64(32)) ^ c1 ^ k0),
            uint32(uint32(p0 >> uint64(32)) ^ c3 ^ k1),
        )
        c1, c3 = uint32(p1), uint32(p0)
        k0, k1 = uint32(k0 + uint32(0x9E3779B9)), uint32(k1 + uint32(0xBB67AE85))
    return c0, c1, c2, c3


@jit
def fill_words(out, index, column, checkpoint, stream, k0, k1):
    """Write the four words of every counter; see :func:`trakdask.projection.philox.fill_words`."""
    # The address comes as int64 and is cut to uint32 here: given as uint32, LLVM makes code that
    # takes twice as long.
    for j in range(out.shape[0]):
        pairs = out[j].reshape(2 * out.shape[1])
        for i in range(out.shape[1]):
            w0, w1, w2, w3 = _philox(
                uint32(index + i),
                uint32(column + j),
                uint32(checkpoint),
                uint32(((index + i) >> 32) | stream),
                uint32(k0),
                uint32(k1),
            )
            pairs[2 * i] = uint64(w0) | (uint64(w1) << uint64(32))
            pairs[2 * i + 1] = uint64(w2) | (uint64(w3) << uint64(32))


# ------------------------------------------------------------------ rounding

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
            # Without the sign, bits of floats are in the order of their values; infinity comes
            # after all numbers, and NaN after that.
            magnitude = int32(row[r] & int32(0x7FFFFFFF))
            largest = magnitude if magnitude > largest else largest
        finite = largest < _INFINITY
        # Below 2^-100 one factor could be larger than any float32: so there are two.
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
def _rounded(value, lift, scale):
    """Round to an integer, half to even; within [-2**22, 2**22]."""
    return int32(((value * lift) * scale + _ROUNDING) - _ROUNDING)


@jit
def integers(flat, stride, factors, out):
    """Write the rounded values, (B, rows) int32."""
    n_rows = out.shape[1]
    for b in range(out.shape[0]):
        values, lift, scale = flat[b * stride : b * stride + n_rows], factors[b, 0], factors[b, 1]
        for r in range(n_rows):
            out[b, r] = _rounded(values[r], lift, scale)


# ------------------------------------------------------------------ sums by bucket

_RUN = 1024  # rows that are rounded at a time: all lanes of them stay in the nearest cache
_LINE = _RUN + LANES  # lines a power of two apart would share few places of the cache
_MOST = 1 << 16  # nonzeros whose sum fits in 32 bits


@jit
def sort_nonzeros(words, sparsity, proj_dim, rows, starts):
    """Sort the nonzeros of a row block by column, in each column first the nonzeros of +1.

    ``words`` is (groups, rows, 4). The results are the ``rows`` of all nonzeros, and where in them
    the nonzeros of column k and value +1 start, ``starts[2 * k]``, and the nonzeros of -1,
    ``starts[2 * k + 1]``. The last of the 2 * proj_dim + 2 starts serves the sorting alone.
    """
    # Counting sort: sizes two places ahead, so that starts are right after the second pass moved
    # each of them to the end of its run.
    starts[:] = 0
    for r in range(words.shape[1]):
        for j in range(sparsity):
            starts[_place(words[j >> 2, r, j & 3], proj_dim) + 2] += 1
    for k in range(len(starts) - 1):
        starts[k + 1] += starts[k]
    for r in range(words.shape[1]):
        for j in range(sparsity):
            place = _place(words[j >> 2, r, j & 3], proj_dim) + 1
            rows[starts[place]] = r
            starts[place] += 1


@jit
def _place(word, proj_dim):
    # The column from the high bits of a product, and the sign from the lowest bit, as by numpy in
    # :func:`trakdask.projection.sjlt._buckets`.
    return 2 * ((uint64(word) * uint64(proj_dim)) >> uint64(32)) + uint64(word & uint32(1))


@jit
def round_samples(flat, stride, factors, n_rows, values):
    """Write the rounded values of up to 16 samples, (rows, lanes) int16.

    The rows of ``values`` are a multiple of 16. The content of lanes without a sample, and of rows
    after ``n_rows``, is undefined.
    """
    lines = np.empty((LANES, _LINE), np.int16)
    for first in range(0, n_rows, _RUN):
        n = min(_RUN, n_rows - first)
        for b in range(len(factors)):
            run = flat[b * stride + first : b * stride + first + n]
            _round(run, factors[b, 0], factors[b, 1], lines[b])
        # Squares of 16 rows × 16 samples, so that the samples of a row lie side by side.
        for r in range(0, n, LANES):
            _transpose(lines.ctypes.data + 2 * r, values[first + r :].ctypes.data)


@jit
def _round(run, lift, scale, line):
    for r in range(len(run)):
        line[r] = _rounded(run[r], lift, scale)


@jit
def add_sums(values, rows, starts, step, out):
    """Add the sums of every column times the step (lanes,) to ``out``, (proj_dim, lanes)."""
    # Slices of arrays, or a call with arrays, would take longer than the few nonzeros of a column.
    sums = np.zeros(LANES, np.int64)
    at_values, at_rows = values.ctypes.data, rows.ctypes.data
    at_step, at_out = step.ctypes.data, out.ctypes.data
    for k in range(len(out)):
        start, middle, stop = starts[2 * k], starts[2 * k + 1], starts[2 * k + 2]
        if stop - start <= _MOST:
            _add_rows(at_values, at_rows, start, middle, stop, at_step, at_out + 8 * LANES * k)
            continue
        sums[:] = 0  # of few columns with many nonzeros in each row
        for i in range(start, stop):
            sign = 1 if i < middle else -1
            for lane in range(LANES):
                sums[lane] += sign * values[rows[i], lane]
        for lane in range(LANES):
            out[k, lane] += sums[lane] * step[lane]


@jit
def write_places(words, sparsity, proj_dim, places):
    """Write 2 k for a nonzero of +1 in column k, 2 k + 1 for one of -1, (rows, sparsity)."""
    for r in range(len(places)):
        for j in range(sparsity):
            places[r, j] = _place(words[j >> 2, r, j & 3], proj_dim)


@jit
def scatter_sums(values, places, sums, step, out):
    """Do as :func:`add_sums`, by rows, with ``sums`` (proj_dim, lanes) int32 as memory.

    Where columns have few nonzeros, processors cannot predict after how many of them the next
    column starts. Here no step depends on a number of nonzeros; at most ``_MOST`` of them are
    summed.
    """
    sums[:] = 0
    at_values, at_sums = values.ctypes.data, sums.ctypes.data
    at_step, at_out = step.ctypes.data, out.ctypes.data
    for r in range(len(places)):
        for j in range(places.shape[1]):
            place = uint64(places[r, j])
            at_sum = at_sums + 4 * LANES * (place >> uint64(1))
            _add_signed(at_values + 2 * LANES * r, place & uint64(1), at_sum)
    for k in range(len(out)):
        _move_sums(at_sums + 4 * LANES * k, at_step, at_out + 8 * LANES * k)


_I16, _I64 = ir.IntType(16), ir.IntType(64)
_VALUES = ir.VectorType(_I16, LANES)
_SUMS = ir.VectorType(ir.IntType(32), LANES)
_DOUBLES = ir.VectorType(ir.DoubleType(), LANES)


def _load(builder: Any, address: Any, kind: Any, align: int) -> Any:
    # Without this, LLVM takes a vector to lie at a multiple of its own size.
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def _store(builder: Any, value: Any, address: Any, align: int) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = align


def _scaled(builder: Any, sums: Any, step: Any, out: Any) -> None:
    """Add integers times a step to others."""
    scaled = builder.fmul(builder.sitofp(sums, _DOUBLES), _load(builder, step, _DOUBLES, 8))
    _store(builder, builder.fadd(_load(builder, out, _DOUBLES, 8), scaled), out, 8)


def _emit_sum(builder: Any, arguments: Any) -> None:
    """Add the values of rows [start, turn), less those of rows [turn, stop), times a step."""
    values, rows, start, turn, stop, step, out = arguments
    # Addresses are in bytes: 2 for the number of a row, and 2 for each lane of its values.
    running = cgutils.alloca_once_value(builder, _SUMS([0] * LANES))
    for first, last, operation in ((start, turn, builder.add), (turn, stop, builder.sub)):
        with cgutils.for_range(builder, builder.sub(last, first)) as loop:
            at = builder.add(rows, builder.shl(builder.add(first, loop.index), _I64(1)))
            row = builder.zext(_load(builder, at, _I16, 2), _I64)
            address = builder.add(values, builder.mul(row, _I64(2 * LANES)))
            value = builder.sext(_load(builder, address, _VALUES, 2), _SUMS)
            builder.store(operation(builder.load(running), value), running)
    _scaled(builder, builder.load(running), step, out)


def _emit_signed(builder: Any, arguments: Any) -> None:
    """Add the values of a row to sums, or subtract them if the number between is 1, and not 0."""
    values, is_negative, sums = arguments
    # -x is (x ^ m) - m for m = -1, and for m = 0 this is x: no branch that is half of the time new.
    nothing, first = ir.Constant(_SUMS, ir.Undefined), _SUMS([0] * LANES)
    negative = builder.neg(builder.trunc(is_negative, ir.IntType(32)))
    lane = builder.insert_element(nothing, negative, ir.IntType(32)(0))
    mask = builder.shuffle_vector(lane, nothing, first)
    value = builder.sext(_load(builder, values, _VALUES, 2), _SUMS)
    value = builder.sub(builder.xor(value, mask), mask)
    _store(builder, builder.add(_load(builder, sums, _SUMS, 4), value), sums, 4)


def _emit_move(builder: Any, arguments: Any) -> None:
    """Add sums times a step to others."""
    sums, step, out = arguments
    _scaled(builder, _load(builder, sums, _SUMS, 4), step, out)


def _emit_transposition(builder: Any, arguments: Any) -> None:
    """Transpose 16 × 16 numbers of 16 bits by exchanging ever smaller squares."""
    source, target = arguments
    lines = [
        _load(builder, builder.add(source, _I64(2 * _LINE * i)), _VALUES, 2) for i in range(LANES)
    ]
    for width in (8, 4, 2, 1):
        # Lane j of a pair of lines (a, b): numbers below 16 are lanes of a, others of b.
        upper = _SUMS([j + LANES - width if j & width else j for j in range(LANES)])
        lower = _SUMS([j + LANES if j & width else j + width for j in range(LANES)])
        for i in (i for i in range(LANES) if not i & width):
            a, b = lines[i], lines[i + width]
            lines[i] = builder.shuffle_vector(a, b, upper)
            lines[i + width] = builder.shuffle_vector(a, b, lower)
    for i, line in enumerate(lines):
        _store(builder, line, builder.add(target, _I64(2 * LANES * i)), 2)


def _void(emit: Any, n_arguments: int) -> Any:
    """Make a function of addresses and positions that numba code can call."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit(builder, arguments)
        return context.get_dummy_value()

    signature = types.void(*[types.intp] * n_arguments)
    # *arguments would not do: numba would make one tuple of them.
    if n_arguments == 2:
        return intrinsic(lambda typing_context, a, b: (signature, generate))
    if n_arguments == 3:
        return intrinsic(lambda typing_context, a, b, c: (signature, generate))
    return intrinsic(lambda typing_context, a, b, c, d, e, f, g: (signature, generate))


_transpose = _void(_emit_transposition, 2)
_add_signed, _move_sums = _void(_emit_signed, 3), _void(_emit_move, 3)
_add_rows = _void(_emit_sum, 7)
