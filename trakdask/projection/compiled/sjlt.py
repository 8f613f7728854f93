"""Sums of integers by bucket; see :mod:`trakdask.projection.sjlt`.

Blocks are passed as in :mod:`trakdask.projection.compiled.quantize`. The values of 32 samples lie
side by side, so that a nonzero of the matrix takes one addition of whole vectors, and the sums of a
bucket stay in registers. Vectors are written out for LLVM, which has instructions for them on every
processor: loops over 32 samples would be compiled with checks that take longer than the sums.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types, uint32, uint64
from numba.core import cgutils
from numba.extending import intrinsic

from trakdask.projection.compiled.jit import jit
from trakdask.projection.compiled.quantize import rounded

LANES = 32
"""Number of samples that are added side by side."""

_RUN = 1024  # rows that are rounded at a time: those of all lanes stay in the nearest cache
_LINE = _RUN + LANES  # lines a power of two apart would share few places of the cache
_COLUMNS = 64  # transposed at a time
_MOST = 1 << 16  # nonzeros whose sum fits in 32 bits


@jit
def sort_nonzeros(words, sparsity, proj_dim, rows, starts):
    """Sort the nonzeros of a row block by column, in each column those of +1 first.

    ``words`` is (groups, rows, 4). The results are the ``rows`` of all nonzeros, and where in them
    the nonzeros of column k and value +1 start, ``starts[2 * k]``, and those of value -1,
    ``starts[2 * k + 1]``. Of the 2 * proj_dim + 2 starts, the last one is for the sorting alone.
    """
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
    return 2 * ((uint64(word) * uint64(proj_dim)) >> uint64(32)) + uint64(word & uint32(1))


@jit
def round_samples(flat, stride, factors, n_rows, values):
    """Write the rounded values of up to 32 samples, (rows, lanes) int16.

    The rows of ``values`` are a multiple of 32. What is in lanes without a sample, and in rows
    after ``n_rows``, is undefined.
    """
    lines = np.empty((LANES, _LINE), np.int16)
    for first in range(0, n_rows, _RUN):
        n = min(_RUN, n_rows - first)
        for b in range(len(factors)):
            run = flat[b * stride + first : b * stride + first + n]
            _round(run, factors[b, 0], factors[b, 1], lines[b])
        for r in range(0, n, LANES):
            _transpose(lines.ctypes.data + 2 * r, values[first + r :].ctypes.data)


@jit
def _round(run, lift, scale, line):
    for r in range(len(run)):
        line[r] = rounded(run[r], lift, scale)


@jit
def add_sums(values, rows, starts, step, out):
    """Add the sums of every column times the step (B,) to ``out``, (B, proj_dim)."""
    sums = np.empty((_COLUMNS, LANES))
    for first in range(0, out.shape[1], _COLUMNS):
        last = min(first + _COLUMNS, out.shape[1])
        sums[:] = 0
        for k in range(first, last):
            _sum_column(values, rows, starts[2 * k : 2 * k + 3], sums[k - first])
        for b in range(len(out)):
            row = out[b, first:last]
            for j in range(len(row)):
                row[j] += sums[j, b] * step[b]


@jit
def _sum_column(values, rows, starts, sums):
    start, middle, stop = starts[0], starts[1], starts[2]
    for a in range(start, stop, _MOST):
        b = min(a + _MOST, stop)
        turn = min(max(a, middle), b)
        _add_rows(values.ctypes.data, rows.ctypes.data, a, turn, b, sums.ctypes.data)


_I16, _I64 = ir.IntType(16), ir.IntType(64)
_VALUES = ir.VectorType(_I16, LANES)
_SUMS = ir.VectorType(ir.IntType(32), LANES)
_DOUBLES = ir.VectorType(ir.DoubleType(), LANES)


def _load(builder: Any, address: Any, kind: Any, align: int) -> Any:
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def _store(builder: Any, value: Any, address: Any, align: int) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = align


def _emit_sum(builder: Any, arguments: Any) -> None:
    """Add the values of rows [start, turn), less those of rows [turn, stop), to the sums."""
    values, rows, start, turn, stop, sums = arguments
    running = cgutils.alloca_once_value(builder, _SUMS([0] * LANES))
    for first, last, operation in ((start, turn, builder.add), (turn, stop, builder.sub)):
        with cgutils.for_range(builder, builder.sub(last, first)) as loop:
            at = builder.add(rows, builder.shl(builder.add(first, loop.index), _I64(1)))
            row = builder.zext(_load(builder, at, _I16, 2), _I64)
            address = builder.add(values, builder.mul(row, _I64(2 * LANES)))
            value = builder.sext(_load(builder, address, _VALUES, 2), _SUMS)
            builder.store(operation(builder.load(running), value), running)
    total = builder.sitofp(builder.load(running), _DOUBLES)
    _store(builder, builder.fadd(_load(builder, sums, _DOUBLES, 8), total), sums, 8)


def _emit_transposition(builder: Any, arguments: Any) -> None:
    """Transpose 32 × 32 numbers of 16 bits by exchanging ever smaller squares."""
    source, target = arguments
    lines = [
        _load(builder, builder.add(source, _I64(2 * _LINE * i)), _VALUES, 2) for i in range(LANES)
    ]
    for width in (16, 8, 4, 2, 1):
        # Lane j of a pair of lines (a, b): numbers below 32 are lanes of a, others of b.
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
    if n_arguments == 2:
        return intrinsic(lambda typing_context, a, b: (signature, generate))
    return intrinsic(lambda typing_context, a, b, c, d, e, f: (signature, generate))


_transpose = _void(_emit_transposition, 2)
_add_rows = _void(_emit_sum, 6)
