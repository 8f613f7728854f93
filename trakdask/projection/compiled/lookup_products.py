"""The Rademacher product by table lookup: random bits select from tabulated sums of rows.

A column of bits adds up a subset of the rows, and 5 rows have only 32 subsets. So per sample and
run of 16 rows there are three tables (rows 0-4 and 5-9 with 32 sums each, rows 10-15 with 64), and
one permutation instruction of AVX-512 looks up the sums for 32 columns: five or six rows at a time,
whereas a multiply-add instruction processes four. All numbers are integers; nothing is rounded.

References
----------
Arlazarov et al. 1970, "On economical construction of the transitive closure of a directed graph"
(the method of the four Russians).
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import binding, ir
from numba import float64, int8, int32, int64, uint32
from numba.core import cgutils, types
from numba.extending import intrinsic

from trakdask.projection.compiled.jit import jit
from trakdask.projection.compiled.quantize import rounded
from trakdask.projection.compiled.random_words import philox

COLUMNS = 256
"""Columns of a tile: 8 registers of 32 columns, so that the sums of two digits take 16 of them."""

CHUNK = 256
"""Rows whose sums of one digit always fit in 16 bits: 256 * -128 = -2**15."""

_LANES = 32
_REGISTERS = COLUMNS // _LANES
_RUN = 16
_RUNS = CHUNK // _RUN
_ENTRIES = 32 + 32 + 64

TABLE_ENTRIES = _RUNS * _ENTRIES
"""Table entries of one sample, digit and chunk, int16."""
PLANES = 3 * _RUNS
"""Words per column that hold the bits of one chunk, uint16."""


def is_available() -> bool:
    """Return whether this processor has AVX-512 and numba compiles for exactly this processor."""
    settings: Any = numba.config
    tuned = settings.CPU_NAME or settings.CPU_FEATURES or settings.DISABLE_JIT
    has_avx512 = bool(binding.get_host_cpu_features().get("avx512bw"))
    return has_avx512 and bool(settings.ENABLE_AVX) and not tuned


@jit
def subset_sums(flat, stride, n_rows, factors, address, buffers, totals, sums):
    """Add up the integers of a block's samples, and per column those whose bit is set.

    Parameters
    ----------
    flat, stride, n_rows, factors
        The block and its scales, as in :mod:`trakdask.projection.compiled.quantize`.
    address
        First row, first column, checkpoint, two words of the key: int64.
    buffers
        Digits (n_digits, CHUNK) int16, tables (B, n_digits * TABLE_ENTRIES) int16, words
        (4, COLUMNS) uint32, planes (PLANES, COLUMNS // 2) uint32.
    totals
        (2, B) int64, changed in place: the sums over all rows. Part 0 holds the two lower digits,
        part 1 the third one, in units of 2**16.
    sums
        (1 or 2, B, columns) int32, changed in place: the same over the rows whose bit is set; two
        parts for three digits; columns are a multiple of COLUMNS.
    """
    digits, tables, words, planes = buffers
    n_samples, n_columns = sums.shape[1:]
    for start in range(0, n_rows, CHUNK):
        n = min(CHUNK, n_rows - start)
        n_runs = (n + _RUN - 1) // _RUN
        for b in range(n_samples):
            values = flat[b * stride + start : b * stride + start + n]
            _split(values, factors[b, 0], factors[b, 1], digits, totals[:, b])
            _fill_tables(digits, n_runs, tables[b])
        for first in range(0, n_columns, COLUMNS):
            _fill_planes(address, start, first, n_runs, words, planes)
            for b in range(n_samples):
                _look_up(tables[b], planes, n_runs, len(digits), sums[:, b, first:])


@jit
def add_signed(totals, sums, step, out, first):
    """Add (total - 2 * sum over set bits) * step to ``out``, (B, width) float64, from a column on.

    That is the sum with signs, since an entry is 1 - 2 * bit; exact up to the one addition.
    """
    n = min(sums.shape[2], out.shape[1] - first)
    for b in range(out.shape[0]):
        low, row = sums[0, b], out[b, first : first + n]
        if len(sums) == 1:
            for j in range(n):
                row[j] += float64(totals[0, b] - 2 * int64(low[j])) * step[b]
        else:
            high = sums[1, b]
            total = totals[0, b] + (totals[1, b] << 16)
            for j in range(n):
                ones = int64(low[j]) + (int64(high[j]) << 16)
                row[j] += float64(total - 2 * ones) * step[b]


@jit
def _split(values, lift, scale, digits, totals):
    """Write the digits of one sample, padded with zeros to a whole run; add them up."""
    n, n_digits = len(values), len(digits)
    digits[:, n : -(-n // _RUN) * _RUN] = 0
    low, high = int32(0), int32(0)
    if n_digits == 1:
        for r in range(n):
            integer = min(max(rounded(values[r], lift, scale), int32(-127)), int32(127))
            digits[0, r] = integer
            low += integer
    elif n_digits == 2:
        for r in range(n):
            integer = rounded(values[r], lift, scale)
            digits[0, r] = int8(integer)
            digits[1, r] = (integer - int8(integer)) >> 8
            low += integer
    else:
        for r in range(n):
            integer = rounded(values[r], lift, scale)
            rest = int32((integer - int8(integer)) >> 8)
            top = int32((rest - int8(rest)) >> 8)
            digits[0, r] = int8(integer)
            digits[1, r] = int8(rest)
            digits[2, r] = top
            low += int32(integer - (top << 16))
            high += top
    totals[0] += low
    totals[1] += high


@jit
def _fill_tables(digits, n_runs, tables):
    first = 0
    while first < len(digits):  # pairs of digits, then a single one
        n = min(2, len(digits) - first)
        five = tables[first * TABLE_ENTRIES :]
        six = five[n_runs * n * 64 :]
        for run in range(n_runs):
            for d in range(n):
                _fill_run(
                    digits[first + d, run * _RUN :].ctypes.data,
                    five[(2 * run * n + d) * 32 :].ctypes.data,
                    five[((2 * run + 1) * n + d) * 32 :].ctypes.data,
                    six[(run * n + d) * 64 :].ctypes.data,
                )
        first += n


@jit
def _fill_planes(address, row, column, n_runs, words, planes):
    """Write the bits of runs of 16 rows: from bit 0, from 5, and from 10 on, each in a plane.

    One uint32 holds the 16 bits of column j and, above, those of column j + 128. Permutations look
    at the lowest 5 or 6 bits of a half only, so nothing is masked.
    """
    first_row, first_column, checkpoint, k0, k1 = address
    five, six = planes[: 2 * n_runs], planes[2 * n_runs :]
    for run in range(0, n_runs, 2):
        if run % 8 == 0:
            index = ((first_row + row) >> 7) + run // 8
            _draw(index, first_column + column, checkpoint, k0, k1, words)
        word = words[run // 2 % 4]
        _pack_low(word, five[2 * run], five[2 * run + 1], six[run])
        if run + 1 < n_runs:
            _pack_high(word, five[2 * run + 2], five[2 * run + 3], six[run + 1])


@jit
def _draw(index, column, checkpoint, k0, k1, words):
    # Addresses are int64 and cut here: given as uint32, LLVM makes code that takes twice as long.
    w0, w1, w2, w3 = words[0], words[1], words[2], words[3]
    for j in range(COLUMNS):
        w0[j], w1[j], w2[j], w3[j] = philox(
            uint32(index),
            uint32(column + j),
            uint32(checkpoint),
            uint32(index >> 32),
            uint32(k0),
            uint32(k1),
        )


@jit
def _pack_low(word, low, middle, high):
    for j in range(COLUMNS // 2):
        bits = uint32((word[j] & uint32(0xFFFF)) | (word[j + COLUMNS // 2] << uint32(16)))
        low[j], middle[j], high[j] = bits, bits >> uint32(5), bits >> uint32(10)


@jit
def _pack_high(word, low, middle, high):
    for j in range(COLUMNS // 2):
        bits = uint32((word[j] >> uint32(16)) | (word[j + COLUMNS // 2] & uint32(0xFFFF0000)))
        low[j], middle[j], high[j] = bits, bits >> uint32(5), bits >> uint32(10)


@jit
def _look_up(tables, planes, n_runs, n_digits, sums):
    if n_digits == 1:
        _add_one(tables.ctypes.data, planes.ctypes.data, n_runs, sums[0].ctypes.data)
        return
    _add_two(tables.ctypes.data, planes.ctypes.data, n_runs, sums[0].ctypes.data)
    if n_digits == 3:
        third = tables[2 * TABLE_ENTRIES :]
        _add_one(third.ctypes.data, planes.ctypes.data, n_runs, sums[1].ctypes.data)


# ------------------------------------------------------------------------- the machine code itself
# This is LLVM IR, because numba compiles no loop to a permutation. Arguments are addresses, and not
# arrays; vectors need not be aligned.

_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_SUMS = ir.VectorType(_I16, _LANES)
_WIDE = ir.VectorType(_I32, _LANES // 2)
_ZERO = _SUMS([0] * _LANES)


def _load(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    value = builder.load(_pointer(builder, address, offset, kind))
    value.align = 2
    return value


def _store(builder: Any, value: Any, address: Any, offset: int) -> None:
    builder.store(value, _pointer(builder, address, offset, value.type)).align = 2


def _pointer(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    return builder.inttoptr(builder.add(address, _I64(offset)), kind.as_pointer())


def _permutation(builder: Any, name: str, n_tables: int) -> Any:
    """Declare an instruction that picks 32 entries of one or two registers by index."""
    kind = ir.FunctionType(_SUMS, [_SUMS] * (n_tables + 1))
    return cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.avx512.{name}.hi.512")


def _emit_look_up(builder: Any, arguments: Any, n_digits: int) -> None:
    """Look up the sums of all runs for one sample and one tile of columns; add them to memory."""
    tables, planes, n_runs, out = arguments
    sums = [
        [cgutils.alloca_once_value(builder, _ZERO) for _ in range(_REGISTERS)]
        for _ in range(n_digits)
    ]
    n_five = builder.mul(n_runs, _I64(2))
    # One loop per kind of table: adding up two look-ups before the running sum would be allowed
    # to LLVM, which then spills registers.
    pick = _permutation(builder, "permvar", 1)
    with cgutils.for_range(builder, n_five) as loop:
        _emit_step(
            builder, tables, planes, loop.index, sums, lambda t, i: builder.call(pick, [t[0], i]), 1
        )
    tables = builder.add(tables, builder.mul(n_five, _I64(64 * n_digits)))
    planes = builder.add(planes, builder.mul(n_five, _I64(2 * COLUMNS)))
    pick_two = _permutation(builder, "vpermi2var", 2)
    with cgutils.for_range(builder, n_runs) as loop:
        _emit_step(
            builder,
            tables,
            planes,
            loop.index,
            sums,
            lambda t, i: builder.call(pick_two, [t[0], i, t[1]]),
            2,
        )
    _emit_combination(builder, sums, out)


def _emit_step(
    builder: Any, tables: Any, planes: Any, index: Any, sums: Any, pick: Any, n: int
) -> None:
    """Add the entries of one run's tables, each of ``n`` registers, to the running sums."""
    tables = builder.add(tables, builder.mul(index, _I64(64 * n * len(sums))))
    planes = builder.add(planes, builder.mul(index, _I64(2 * COLUMNS)))
    entries = [
        [_load(builder, tables, 64 * (n * digit + i), _SUMS) for i in range(n)]
        for digit in range(len(sums))
    ]
    for register in range(_REGISTERS):
        bits = _load(builder, planes, 64 * register, _SUMS)
        for digit, running in enumerate(sums):
            picked = pick(entries[digit], bits)
            total = builder.add(builder.load(running[register]), picked)
            builder.store(total, running[register])


def _emit_combination(builder: Any, sums: Any, out: Any) -> None:
    """Add digit 0 + 256 * digit 1 to the int32 sums in memory: columns j, then columns j + 128."""
    for register in range(_REGISTERS):
        for half in range(2):
            offset = 64 * register + 2 * COLUMNS * half
            total = _load(builder, out, offset, _WIDE)
            for digit, running in enumerate(sums):
                part = builder.bitcast(builder.load(running[register]), _WIDE)
                if half == 0:
                    part = builder.shl(part, _WIDE([16] * (_LANES // 2)))
                part = builder.ashr(part, _WIDE([16] * (_LANES // 2)))
                shift = _WIDE([8 * digit] * (_LANES // 2))
                total = builder.add(total, builder.shl(part, shift))
            _store(builder, total, out, offset)


def _emit_tables(builder: Any, arguments: Any) -> None:
    """Write the tables of 16 digits: entry i of a table is the sum of the digits at bits of i."""
    digits, low, middle, high = arguments
    table = _emit_subsets(builder, digits, range(5))
    _store(builder, table, low, 0)
    table = _emit_subsets(builder, digits, range(5, 10))
    _store(builder, table, middle, 0)
    table = _emit_subsets(builder, digits, range(10, 15))
    _store(builder, table, high, 0)
    _store(builder, builder.add(table, _emit_broadcast(builder, digits, 15)), high, 64)


def _emit_subsets(builder: Any, digits: Any, rows: range) -> Any:
    table = _ZERO
    for bit, row in enumerate(rows):
        mask = _SUMS([-(entry >> bit & 1) for entry in range(_LANES)])
        table = builder.add(table, builder.and_(_emit_broadcast(builder, digits, row), mask))
    return table


def _emit_broadcast(builder: Any, digits: Any, row: int) -> Any:
    first = builder.insert_element(_ZERO, _load(builder, digits, 2 * row, _I16), _I32(0))
    return builder.shuffle_vector(first, _ZERO, _WIDE_ZERO)


_WIDE_ZERO = ir.VectorType(_I32, _LANES)([0] * _LANES)


def _void(emit: Any) -> Any:
    """Make a function of four addresses that numba code can call."""

    def typed(typing_context: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            emit(builder, arguments)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 4), generate

    return intrinsic(typed)


_add_one = _void(lambda builder, arguments: _emit_look_up(builder, arguments, 1))
_add_two = _void(lambda builder, arguments: _emit_look_up(builder, arguments, 2))
_fill_run = _void(_emit_tables)
