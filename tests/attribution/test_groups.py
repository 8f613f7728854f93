"""Numbers of groups against pandas; combined targets against combined scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import trakdask as td
from trakdask.attribution import groups
from trakdask.testing import simulate_features

WORDS = np.array(["b", "", "a", "b", "ä", "c", "a"], np.dtypes.StringDType())
TIMES = np.array(["2026-01-02", "NaT", "2025-01-01", "2026-01-02"], "datetime64[ns]")


@pytest.mark.parametrize("rows", [1, 2, 3, 100])
@pytest.mark.parametrize(
    "values",
    [
        WORDS,
        TIMES,
        np.array([3, 1, 3, -2, 7], np.int8),
        np.array([np.nan, 2.5, -0.5, np.nan, 2.5]),
        np.array([True, False, True]),
        np.array([np.nan, np.nan]),
        np.arange(1000) % 300,
        np.empty(0),
        np.array([2**63 + 1, 0], np.uint64),
    ],
    ids=lambda values: f"{values.dtype}-{len(values)}",
)
def test_group_codes__are_those_of_pandas(
    values: np.ndarray, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "_ROWS_AT_ONCE", rows)
    codes, found = groups.group_codes(values)
    expected_codes, expected = pd.factorize(values, sort=True)
    np.testing.assert_array_equal(codes, expected_codes)
    np.testing.assert_array_equal(found, np.asarray(expected))
    assert found.dtype == np.asarray(expected).dtype
    assert codes.dtype.kind == "i"


# --- combine --------------------------------------------------------------------------------------

X = simulate_features(20, 4, 3, chunks=8).astype("f8")
T = simulate_features(7, 4, 3, chunks=3, seed=1).astype("f8")
KIND = np.array(["b", "a", "b", "", "a", "b", "c"], object)
KIND[3] = None
NAMED = T.assign_coords(kind=("sample", KIND))
ESTIMATORS = [*(kind(damping=0.1) for kind in (td.Trak, td.Soft, td.RelatIF)), "grad_dot"]


@pytest.mark.parametrize(
    ("estimator", "how"),
    [*((each, "mean") for each in ESTIMATORS), (ESTIMATORS[0], "sum")],
    ids=str,
)
def test_combine__scores_of_a_group_are_those_of_its_members(estimator, how: str) -> None:
    found = td.score(X, td.combine(NAMED, by="kind", how=how), estimator)
    assert found.target_kind.values.tolist() == ["a", "b", "c"]
    apart = td.score(X, T, estimator).values
    for column, kind in enumerate("abc"):
        expected = getattr(apart[:, kind == KIND], how)(1)
        np.testing.assert_allclose(found[:, column], expected, rtol=1e-8, atol=1e-12)


CONTRASTS = {
    "array": {"a - b": [1, -1, 0, 0, 0, 0, 0], "all": np.ones(7)},
    "positions": {"a - b": {0: 1, 1: -1}, "all": dict.fromkeys(range(7), 1)},
    "labelled": xr.DataArray(
        [[1, -1, 0, 0, 0, 0, 0], np.ones(7)],
        coords={"combination": ["a - b", "all"]},
        dims=("combination", "sample"),
    ),
}


@pytest.mark.parametrize("weights", CONTRASTS.values(), ids=CONTRASTS)
def test_combine__weights_may_have_any_form(weights) -> None:
    scores = td.score(X, td.combine(T, weights=weights), td.Trak(damping=0.1))
    apart = td.score(X, T, td.Trak(damping=0.1)).values
    assert scores.target_combination.values.tolist() == ["a - b", "all"]
    np.testing.assert_allclose(scores[:, 0], apart[:, 0] - apart[:, 1], rtol=1e-7, atol=1e-10)
    np.testing.assert_allclose(scores[:, 1], apart.sum(1), rtol=1e-7, atol=1e-10)


def test_combine__failed_targets_count_only_where_their_weight_does() -> None:
    broken = T.compute()
    broken.feature[2] = np.nan
    broken.output[2] = np.nan
    made = td.combine(broken, weights={"without": {0: 1, 6: 1}, "with": {0: 1, 2: 1}}).compute()
    assert np.isfinite(made.feature[0]).all()
    assert np.isfinite(made.output[0]).all()
    assert np.isnan(made.feature[1]).all()
    assert np.isnan(made.output[1]).all()


@pytest.mark.parametrize(
    "how",
    [{"by": "kind"}, {"weights": {"first - second": {0: 1, 1: -1}}}, {"metric": "accuracy"}],
    ids=["by", "weights", "metric"],
)
def test_combined_targets__are_saved_and_opened_like_others(how, tmp_path: Path) -> None:
    made = td.combine(NAMED.astype("f4"), **how)
    stored = td.save(made, tmp_path / "t.zarr", estimator=None, progress=False)
    again = td.save(made, tmp_path / "t.zarr", estimator=None, progress=False)  # nothing is missing
    xr.testing.assert_identical(again, stored)
    assert stored.attrs["combined"] == made.attrs["combined"]
    tops = (td.top_k(td.score(X.astype("f4"), targets), 3) for targets in (stored, made))
    xr.testing.assert_identical(*(top.compute().drop_attrs() for top in tops))


# --- groups whose samples failed ------------------------------------------------------------------

SEEDS, ASKED = (simulate_features(n, 4, 5, chunks=8, seed=n).astype("f8") for n in (20, 3))
SOURCE = np.array(["a", "b", "c", "d"])[np.arange(20) % 4]


def failed(rows: np.ndarray) -> xr.Dataset:
    whole = xr.DataArray(~rows, dims="sample")
    names = ("feature", "output", "out_to_loss")
    return SEEDS.assign({name: SEEDS[name].where(whole) for name in names})


@pytest.mark.parametrize(
    ("estimator", "by"),
    [
        *(("soft", "coord"), ("trak", "parts"), ("relatif", "coord")),
        *(("grad_dot", "parts"), ("grad_cos", "coord"), ("grad_cos", "parts")),
    ],
)
def test_groups__whose_samples_all_failed_are_nan(estimator: str, by: str) -> None:
    train = failed((SOURCE == "b") | (np.arange(20) == 4))
    train = train.assign_coords(source=("sample", SOURCE))
    groups = "source"
    if by == "parts":
        groups = xr.DataArray(SOURCE[:, None] == list("abcd"), dims=("sample", "source"))
    dense = td.score(train, ASKED, estimator).values
    expected = np.stack([np.nansum(dense[name == SOURCE], axis=0) for name in "abcd"])
    expected[1] = np.nan
    options = {"estimator": estimator, "by": groups * 1.0 if by == "parts" else groups}
    close = {"rtol": 1e-6, "atol": 1e-9}
    np.testing.assert_allclose(td.group_score(train, ASKED, **options), expected, **close)
    found = td.group_score(train, ASKED, **options, level=0.9).compute()
    np.testing.assert_allclose(found.score, expected, **close)
    np.testing.assert_array_equal(np.isnan(found.upper), np.isnan(expected))
    share = expected.sum(1) / np.nansum(dense)
    found = td.group_score(train, ASKED, **options, share=True)
    np.testing.assert_allclose(found, share, **close)
    raised = td.group_score(train, ASKED, **options, metric="loss").values[:, 0]
    np.testing.assert_array_equal(np.isnan(raised), np.isnan(share))


def test_groups__without_samples_sum_to_0() -> None:
    train = SEEDS.assign_coords(source=("sample", SOURCE), half=("sample", SOURCE > "b"))
    found = td.group_score(train, ASKED, "grad_dot", by=["source", "half"])
    assert not found.sel(source="a", half=True).any()
    parts = xr.DataArray(np.eye(20, 5), dims=("sample", "author"))[:, ::-1]
    parts[:, 0] = 0
    assert not td.group_score(train, ASKED, "grad_dot", by=parts)[0].any()
