from __future__ import annotations

import dask.array as da
import numpy as np
import pytest

from trakdask.arrays import blocks
from trakdask.arrays.blocks import add, blocks_with, flat, mean_weight


def test_add__sums_in_list_order_without_changing_its_inputs() -> None:
    blocks = [np.full((1, 2), value) for value in (1e16, 1.0, -1e16)]
    np.testing.assert_array_equal(add(blocks, keepdims=True), [[(1e16 + 1.0) - 1e16] * 2])
    assert add(blocks).shape == (2,)
    assert blocks[0][0, 0] == 1e16


def test_flat__nested_lists_in_order() -> None:
    parts = [np.array(i) for i in range(4)]
    assert [int(x) for x in flat([[parts[0]], [parts[1], [parts[2]]], parts[3]])] == [0, 1, 2, 3]


def test_mean_weight__over_checkpoints() -> None:
    parts = [np.array([[1.0], [2.0]], "f4"), np.array([[3.0], [6.0]], "f4")]
    np.testing.assert_array_equal(mean_weight(parts), [2, 4])
    np.testing.assert_array_equal(parts[0], [[1], [2]])


@pytest.mark.parametrize(("selected", "kept"), [([], []), ([0], [0]), ([2, 5], [1, 3]), ([4], [1])])
def test_blocks_with__any_selected_sample(selected: list[int], kept: list[int]) -> None:
    mask = np.zeros(6, bool)
    mask[selected] = True
    assert blocks_with(mask, (2, 3, 0, 1)) == kept


@pytest.mark.parametrize(("budget", "most"), [(2**26, 4), (10 * 8 * 3, 3), (1, 1)])
def test_whole_columns__stay_within_the_budget(
    monkeypatch: pytest.MonkeyPatch, budget: int, most: int
) -> None:
    monkeypatch.setattr(blocks, "_COLUMN_BYTES", budget)
    score = da.random.default_rng(0).random((10, 9), chunks=(3, 4))
    whole = blocks.whole_columns(score)
    assert whole.chunks[0] == (10,)
    assert max(whole.chunks[1]) == most
    np.testing.assert_array_equal(whole.compute(), score.compute())
