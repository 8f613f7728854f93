"""The parts of large inputs that tasks get, or read from stores, against slices of numpy."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trakdask.arrays.blocks import add, block_starts
from trakdask.arrays.graphs import packed, unpacked

_sizes = st.lists(st.integers(0, 20), min_size=1, max_size=6).map(tuple)


@given(_sizes, st.sampled_from([1, 2, 3, 7, 8, 255, 256, 70_000]), st.integers(0, 2**32))
def test_packed_rows__are_the_integers(sizes: tuple[int, ...], most: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, most + 1, sum(sizes))
    rows, starts = packed(values, most, sizes), block_starts(sizes)
    for i in range(len(sizes)):
        block = unpacked(rows[(i,)])
        np.testing.assert_array_equal(block, values[starts[i] : starts[i + 1]])
        assert block.dtype == np.int64


def test_add__sums_in_list_order_without_changing_its_inputs() -> None:
    parts = [np.full((1, 2), value) for value in (1e16, 1.0, -1e16)]
    np.testing.assert_array_equal(add(parts, keepdims=True), [[(1e16 + 1.0) - 1e16] * 2])
    assert add(parts).shape == (2,)
    assert parts[0][0, 0] == 1e16
