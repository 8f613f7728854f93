"""AUC of suspect labels, against the share of pairs that are in order."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

import trakdask as td
from trakdask.testing import raise_if_dask_computes

RNG = np.random.default_rng(0)
WRONG = RNG.random(50) < 0.2
VALUES = xr.DataArray(
    RNG.integers(8, size=(50, 3)) + 3 * WRONG[:, None], dims=("sample", "checkpoint")
).assign_coords(checkpoint=["a", "b", "c"])


def pairs_in_order(values: np.ndarray) -> float:
    above = values[WRONG][:, None] - values[~WRONG]
    return float(np.mean((above > 0) + 0.5 * (above == 0)))


def test_mislabelled_auc__of_every_entry() -> None:
    with raise_if_dask_computes():
        result = td.evaluate.mislabelled_auc(VALUES.chunk(sample=7, checkpoint=1), WRONG)
        assert "auc" in repr(result)
    expected = [pairs_in_order(column) for column in VALUES.values.T]
    np.testing.assert_allclose(result.auc, expected)
    assert result.checkpoint.values.tolist() == ["a", "b", "c"]
    low, high = result.interval.values
    assert (low < result.auc).all()
    assert (result.auc < high).all()
    wider = td.evaluate.mislabelled_auc(VALUES, WRONG, confidence=0.99).interval.values
    assert (wider[0] < low).all()
    assert (wider[1] > high).all()


def test_mislabelled_auc__of_one_vector() -> None:
    result = td.evaluate.mislabelled_auc(VALUES[:, 0], xr.DataArray(WRONG, dims="sample"))
    assert float(result.auc) == pytest.approx(pairs_in_order(VALUES.values[:, 0]))
    assert result.interval.sel(bound="low") < result.auc < result.interval.sel(bound="high")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_mislabelled": WRONG[:9]}, "samples in is_mislabelled and values, got 9 and 50"),
        ({"is_mislabelled": WRONG.astype(int)}, "is_mislabelled .*bool .*got int64"),
        ({"is_mislabelled": WRONG & ~WRONG}, "is_mislabelled, got 0 wrong ones of 50"),
        ({"values": VALUES.values}, "values .*DataArray .*got a ndarray"),
        ({"confidence": 0}, "confidence between 0 and 1, got 0"),
    ],
)
def test_mislabelled_auc__refused(change: dict[str, object], message: str) -> None:
    given = {"values": VALUES, "is_mislabelled": WRONG, **change}
    with pytest.raises((TypeError, ValueError), match=message):
        td.evaluate.mislabelled_auc(**given)


def test_mislabelled_auc__nan_is_an_error_when_computed() -> None:
    values = VALUES.astype(float)
    values[[7, 9], 0] = np.nan
    result = td.evaluate.mislabelled_auc(values, WRONG)
    with pytest.raises(ValueError, match=r"NaN in 2 of 50 .*sample 7\b"):
        result.compute(scheduler="sync")
