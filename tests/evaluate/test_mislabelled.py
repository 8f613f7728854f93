"""AUC of suspect labels, against the share of pairs that are in order."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from scipy import stats

import trakdask as td

RNG = np.random.default_rng(0)
WRONG = RNG.random(50) < 0.2
VALUES = xr.DataArray(
    RNG.integers(8, size=(50, 3)) + 3 * WRONG[:, None], dims=("sample", "checkpoint")
).assign_coords(checkpoint=["a", "b", "c"])


def test_mislabelled_curve__auc_of_every_entry() -> None:
    result = td.evaluate.mislabelled_curve(VALUES.chunk(sample=7, checkpoint=1), WRONG)
    above = VALUES.values[WRONG][:, None] - VALUES.values[~WRONG]  # of all pairs
    np.testing.assert_allclose(result.auc, ((above > 0) + 0.5 * (above == 0)).mean((0, 1)))
    assert result.checkpoint.values.tolist() == ["a", "b", "c"]
    low, high = result.auc_interval.values
    wider = td.evaluate.mislabelled_curve(VALUES, WRONG, confidence=0.99).auc_interval.values
    assert (np.diff([wider[0], low, result.auc, high, wider[1]], axis=0) > 0).all()


def found_by_hand(values: np.ndarray, n_inspected: int) -> float:
    """The share of wrong labels among the highest values, on average over orders of equal ones."""
    shares = []
    for seed in range(300):
        order = np.random.default_rng(seed).permutation(50)
        first = order[np.argsort(-values[order], kind="stable")][:n_inspected]
        shares.append(WRONG[first].sum() / WRONG.sum())
    return float(np.mean(shares))


def test_mislabelled_curve__of_every_entry() -> None:
    chunked = VALUES.chunk(sample=7)
    curve = td.evaluate.mislabelled_curve(chunked, WRONG, [0.1, 0.26, 0.8]).compute()
    for c in range(3):
        for share in (0.1, 0.26, 0.8):
            expected = found_by_hand(VALUES.values[:, c], round(share * 50))
            found = curve.found.isel(checkpoint=c).sel(fraction=share)
            assert float(found) == pytest.approx(expected, abs=0.02)
    assert curve.checkpoint.values.tolist() == ["a", "b", "c"]
    assert (curve.found <= curve.best + 1e-12).all()
    wilson = stats.binomtest(1, int(WRONG.sum())).proportion_ci(method="wilson")
    first_is_wrong = xr.DataArray(np.arange(50) == np.argmax(WRONG), dims="sample").astype(float)
    one = td.evaluate.mislabelled_curve(first_is_wrong, WRONG, [0.02]).interval.values
    np.testing.assert_allclose(one[:, 0], wilson)


def test_mislabelled_curve__area_is_that_under_the_curve() -> None:
    every = np.arange(1, 50) / 50
    curve = td.evaluate.mislabelled_curve(VALUES, WRONG, every).compute()
    ends = np.zeros((1, 3)), curve.found.values, np.ones((1, 3))
    under = np.trapezoid(np.concatenate(ends), dx=1 / 50, axis=0)
    np.testing.assert_allclose(curve.area, under)
    area_of_best = 1 - WRONG.mean() / 2
    for area, of_auc in ((curve.area, curve.auc), (curve.area_interval, curve.auc_interval)):
        # From 0 and 1 of the AUC to the areas of the worst and the best order.
        expected = (1 - area_of_best) + (2 * area_of_best - 1) * of_auc
        np.testing.assert_allclose(area, expected)


def test_mislabelled_curve__random_orders_are_in_the_random_interval() -> None:
    draws = np.random.default_rng(0).random((50, 400))
    curve = td.evaluate.mislabelled_curve(
        xr.DataArray(draws, dims=("sample", "draw")), WRONG, [0.2, 0.5], confidence=0.9
    ).compute()
    low, high = (curve.random_interval.sel(bound=bound) for bound in ("low", "high"))
    inside = ((curve.found >= low) & (curve.found <= high)).mean("draw").values
    assert (inside > 0.87).all()
    between = ((curve.found > low) & (curve.found < high)).mean("draw").values
    assert (between < 0.93).all()
