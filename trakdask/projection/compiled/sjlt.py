"""Sums of integers by bucket; see :mod:`trakdask.projection.sjlt`.

Blocks are passed as in :mod:`trakdask.projection.compiled.quantize`. They are rounded here, 128
rows at a time, which stay in the nearest cache until they are added.
"""

from __future__ import annotations

import numpy as np
from numba import int32, uint32, uint64

from trakdask.projection.compiled.jit import jit
from trakdask.projection.compiled.quantize import rounded

FEW_SAMPLES = 4
"""Up to this many samples, adding one after the other is faster than adding them side by side."""

_LANES = 8
_SLAB_ROWS = 128
_COLUMNS = 64  # transposed at a time


def lanes(n_samples: int) -> int:
    """Return the length of a bucket's row of sums: whole vectors, unless there are few samples."""
    return n_samples if n_samples <= FEW_SAMPLES else -(-n_samples // _LANES) * _LANES


@jit
def scatter(flat, stride, factors, words, sparsity, sums):
    """Round a block and add it, with signs, to the sums of every bucket.

    ``factors`` is (B, 2), ``words`` (groups, rows, 4), ``sums`` (proj_dim, lanes).
    """
    if len(factors) <= FEW_SAMPLES:
        _scatter_samples(flat, stride, factors, words, sparsity, sums)
        return
    # With samples innermost, a nonzero takes one addition of two contiguous vectors.
    n_rows, n_lanes = words.shape[1], sums.shape[1]
    packed = np.zeros((_SLAB_ROWS // 4, n_lanes), np.int64)
    values = np.empty((_SLAB_ROWS, n_lanes), np.int32)
    for first in range(0, n_rows, _SLAB_ROWS):
        last = min(first + _SLAB_ROWS, n_rows)
        _round_slab(flat[first:], stride, last - first, factors, packed, values)
        for group in range(len(words)):
            n_nonzeros = min(4, sparsity - 4 * group)
            _scatter_slab(values, words[group, first:last, :n_nonzeros], sums)


@jit
def _round_slab(flat, stride, n_rows, factors, packed, values):
    """Write the rounded values, samples innermost."""
    line = np.zeros(_SLAB_ROWS, np.int16)
    # Transposing takes one store per element; four elements of 16 bits are stored together.
    fours = line.view(np.int64)
    for b in range(len(factors)):
        run, lift, scale = flat[b * stride : b * stride + n_rows], factors[b, 0], factors[b, 1]
        for r in range(n_rows):
            line[r] = rounded(run[r], lift, scale)
        for k in range(len(fours)):
            packed[k, b] = fours[k]
    for k in range(len(packed)):
        four = packed[k]
        for j in range(4):
            row, shift = values[4 * k + j], 48 - 16 * j
            for b in range(len(row)):
                row[b] = (four[b] << shift) >> 48


@jit
def _scatter_slab(values, words, sums):
    proj_dim = uint64(len(sums))
    for r in range(len(words)):
        row = values[r]
        for j in range(words.shape[1]):
            word = words[r, j]
            bucket = sums[_bucket(word, proj_dim)]
            for b in range(len(bucket)):
                bucket[b] += _signed(row[b], word)


@jit
def _scatter_samples(flat, stride, factors, words, sparsity, sums):
    proj_dim = uint64(len(sums))
    for b in range(len(factors)):
        lift, scale = factors[b, 0], factors[b, 1]
        for group in range(len(words)):
            n_nonzeros = min(4, sparsity - 4 * group)
            for r in range(words.shape[1]):
                value = rounded(flat[b * stride + r], lift, scale)
                for j in range(n_nonzeros):
                    word = words[group, r, j]
                    sums[_bucket(word, proj_dim), b] += _signed(value, word)


@jit
def _bucket(word, proj_dim):
    return (uint64(word) * proj_dim) >> uint64(32)


@jit
def _signed(value, word):
    """Return the value, negated if the lowest bit of the word is set, without branching."""
    mask = -int32(word & uint32(1))
    return (value ^ mask) - mask


@jit
def add_scaled(sums, step, out):
    """Add sums (proj_dim, lanes) times the step (B,) to ``out`` (B, proj_dim)."""
    for first in range(0, out.shape[1], _COLUMNS):
        last = min(first + _COLUMNS, out.shape[1])
        for b in range(len(out)):
            row = out[b, first:last]
            for j in range(len(row)):
                row[j] += sums[first + j, b] * step[b]
