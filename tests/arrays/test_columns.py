"""Chunks of whole columns: the budget holds, and values do not change."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest

from trakdask.arrays import columns


@pytest.mark.parametrize(("budget", "most"), [(2**26, 4), (10 * 8 * 3, 3), (1, 1)])
def test_whole_columns__stay_within_the_budget(
    monkeypatch: pytest.MonkeyPatch, budget: int, most: int
) -> None:
    monkeypatch.setattr(columns, "_BYTES", budget)
    score = da.random.default_rng(0).random((10, 9), chunks=(3, 4))
    whole = columns.whole_columns(score)
    assert whole.chunks[0] == (10,)
    assert max(whole.chunks[1]) == most
    np.testing.assert_array_equal(whole.compute(), score.compute())
