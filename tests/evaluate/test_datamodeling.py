"""Masks; LDS against a loop over scipy's spearmanr, its intervals against a known truth."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from distributed import Client
from scipy import stats

import trakdask as td
from trakdask import arrays
from trakdask.testing import simulate_features

lds = td.evaluate.lds
FEATURES = simulate_features(n_samples=30, proj_dim=4)


def test_subsets__lazy_seeded_and_labelled(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = td.evaluate.subsets(td.score(FEATURES, FEATURES), 12, fraction=0.2, seed=3)
    assert (masks.dims, masks.dtype) == (("subset", "sample"), bool)
    assert (masks.sum("sample") == 6).all()
    assert set(masks.coords) == {"label"}
    monkeypatch.setattr(arrays.subsets, "_BYTES_PER_BLOCK", 60)  # two rows per block
    more = td.evaluate.subsets(30, 20, fraction=0.2, seed=3)
    assert more.data.numblocks == (10, 1)
    np.testing.assert_array_equal(more[:12], masks)
    assert len(np.unique(more, axis=0)) == 20
    assert (td.evaluate.subsets(30, 12, fraction=0.2) != masks).any()


@pytest.mark.parametrize("form", ["coord", "array"])
def test_subsets__by_label(form: str) -> None:
    source = np.array(list("abcdef") * 4 + list("aabbbf"), dtype=object)
    samples = FEATURES.assign_coords(source=("sample", source))
    by = {"coord": "source", "array": source}[form]
    masks = td.evaluate.subsets(samples, 8, by=by, fraction=1 / 3)
    for mask in masks.values:
        assert len(set(source[mask])) == 2
        assert not set(source[mask]) & set(source[~mask])


def test_leave_one_out__each_once_or_some() -> None:
    masks = td.evaluate.leave_one_out(FEATURES)
    some = td.evaluate.leave_one_out(30, [7, 7, 2])
    np.testing.assert_array_equal(~masks, np.eye(30, dtype=bool))
    assert (~some.values).nonzero()[1].tolist() == some.left_out.values.tolist() == [7, 7, 2]


# --- lds -----------------------------------------------------------------------------------------


def spearmans(scores: np.ndarray, masks: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """One target after the other, NaN where anything is; outputs (subset, seed, target)."""
    found = np.full(scores.shape[1], np.nan)
    for t in range(scores.shape[1]):
        predicted = [scores[mask, t].astype(np.float64).sum() for mask in masks]
        retrained = outputs[:, :, t].mean(axis=1)
        if np.isnan(scores[:, t]).any() or np.isnan(retrained).any():
            continue
        if len(set(predicted)) > 1 and len(set(retrained)) > 1:
            found[t] = stats.spearmanr(predicted, retrained).statistic
    return found


# Integers, so that sums are exact and many predictions and outputs are equal.
RNG = np.random.default_rng(0)
SCORES = xr.DataArray(RNG.integers(9, size=(40, 7)).astype(np.float32), dims=("sample", "target"))
MASKS = td.evaluate.subsets(40, 30).compute(scheduler="synchronous")
OUTPUTS = xr.dot(MASKS, SCORES, dim="sample").expand_dims(seed=2, axis=1)
OUTPUTS = OUTPUTS + RNG.integers(27, size=(30, 2, 7))


def test_lds__equals_a_loop_over_scipy() -> None:
    scores, outputs = SCORES.copy(), OUTPUTS.copy()
    scores[3, 1] = np.nan
    outputs[4, 1, 2] = np.nan
    scores[:, 3] = 0
    outputs[:, :, 4] = 5
    found = lds(scores, MASKS, outputs, resamples=20).compute()
    expected = spearmans(scores.values, MASKS.values, outputs.values)
    assert np.isnan(expected).tolist() == [False, True, True, True, True, False, False]
    np.testing.assert_allclose(found.lds, expected, atol=1e-12)
    assert float(found.lds_mean) == pytest.approx(np.nanmean(expected))
    assert found.interval.notnull().all()  # a draw without any known target is left out


def test_lds__ceiling_of_each_target() -> None:
    found = lds(SCORES, MASKS, OUTPUTS, resamples=5).ceiling.values
    first, second = OUTPUTS.values[:, 0], OUTPUTS.values[:, 1]
    r = np.array([stats.spearmanr(first[:, t], second[:, t]).statistic for t in range(7)])
    np.testing.assert_allclose(found, np.sqrt(2 * r / (1 + r)), atol=1e-12)
    one = lds(SCORES, MASKS, OUTPUTS.isel(seed=0), resamples=5).compute()
    np.testing.assert_allclose(
        one.lds, spearmans(SCORES.values, MASKS.values, OUTPUTS.values[:, :1])
    )
    assert one.ceiling.isnull().all()


def test_lds__further_dimensions_share_their_resamples() -> None:
    several = {"plain": SCORES, "minus": -SCORES, "again": SCORES}
    result = lds(several, MASKS, OUTPUTS, resamples=50).compute()
    alone = lds(SCORES, MASKS, OUTPUTS, resamples=50)
    assert result.lds.dims == ("target", "estimator")
    for name in ("plain", "again"):
        for variable in ("lds", "lds_mean", "ceiling", "ceiling_mean"):
            found = result[variable].sel(estimator=name) if "lds" in variable else result[variable]
            np.testing.assert_array_equal(found, alone[variable])
    np.testing.assert_allclose(result.lds.sel(estimator="minus"), -alone.lds)
    draws = result.draws.transpose("estimator", "draw").values
    np.testing.assert_allclose(draws[0], draws[2], atol=1e-12)
    np.testing.assert_allclose(draws[0], -draws[1], atol=1e-12)


def test_lds__chunks_order_of_dimensions_and_scheduler_are_invisible(
    process_client: Client,
) -> None:
    scores, outputs = SCORES.chunk(sample=3, target=2), OUTPUTS.chunk(subset=7)
    result = lds(scores.T, MASKS.chunk(subset=4).T, outputs.transpose("target", ...), resamples=20)
    expected = lds(SCORES, MASKS, OUTPUTS, resamples=20).compute(scheduler="sync").drop_attrs()
    for scheduler in ("sync", "threads", process_client):
        found = result.compute(scheduler=scheduler).drop_attrs()
        xr.testing.assert_identical(found, expected)


def test_lds__lazy_and_labelled() -> None:
    features = simulate_features(n_samples=40, proj_dim=8)
    scores = td.score(features, features, average=False)
    outputs = xr.DataArray(np.zeros((9, 40)), dims=("subset", "target")).chunk()
    result = lds(scores, td.evaluate.subsets(features, 9), outputs, confidence=0.9)
    assert result.lds.chunks is not None
    assert result.lds.dims == ("target", "checkpoint")
    assert result.draws.dims == ("draw", "checkpoint")
    assert result.target_label.dims == ("target",)
    assert result.attrs == {"resamples": 1000, "seed": 0, "confidence": 0.9}


# --- coverage -------------------------------------------------------------------------------------
