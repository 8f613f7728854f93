"""Detection of classes, subclasses and marks: labels, means, intervals, and what they tell."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
import xarray as xr
from sklearn.metrics import roc_auc_score

import trakdask as td
from trakdask.testing import raise_if_dask_computes

N, M = 60, 12
RNG = np.random.default_rng(1)
DIGIT, TARGET_DIGIT = RNG.integers(4, size=N), RNG.integers(4, size=M)
LABEL, TARGET_LABEL = DIGIT // 2, TARGET_DIGIT // 2
MARKED, TARGET_MARKED = RNG.random(N) < 0.2, RNG.random(M) < 0.5
COORDS = {
    "digit": ("sample", DIGIT),
    "target_digit": ("target", TARGET_DIGIT),
    "label": ("sample", LABEL.astype(str)),
    "target_label": ("target", TARGET_LABEL.astype(str)),
    "marked": ("sample", MARKED),
    "target_marked": ("target", TARGET_MARKED),
    "name": ("target", [f"t{i}" for i in range(M)]),
}
SAME_LABEL = LABEL[:, None] == TARGET_LABEL
SAME_DIGIT = DIGIT[:, None] == TARGET_DIGIT


def labelled(values: np.ndarray, *more: str) -> xr.DataArray:
    return xr.DataArray(values, dims=("sample", "target", *more), coords=COORDS)


SCORES = labelled(RNG.standard_normal((N, M)) + 0.5 * SAME_LABEL)


def in_chunks(scores: xr.DataArray, *sizes: int) -> xr.DataArray:
    """Return lazy scores, whose coords stay in memory."""
    return scores.copy(data=da.from_array(scores.values, sizes))


def of_order(scores: np.ndarray, same: np.ndarray, k: int) -> np.ndarray:
    """The share of the top k of each target that is of its class."""
    top = np.argsort(-scores, axis=0)[:k]
    return np.take_along_axis(same, top, axis=0).mean(axis=0)


# --- class_detection ------------------------------------------------------------------------------


def test_class_detection__of_every_target() -> None:
    with raise_if_dask_computes():
        result = td.evaluate.class_detection(in_chunks(SCORES, 7, 5), "digit", ks=[1, 5])
    result = result.compute()
    auc = [roc_auc_score(SAME_DIGIT[:, t], SCORES.values[:, t]) for t in range(M)]
    np.testing.assert_allclose(result.auc, auc)
    for k in (1, 5):
        precision = of_order(SCORES.values, SAME_DIGIT, k)
        np.testing.assert_allclose(result.precision.sel(k=k), precision)
        np.testing.assert_allclose(result.recall.sel(k=k), precision * k / SAME_DIGIT.sum(axis=0))
    assert result["name"].values.tolist() == COORDS["name"][1]
    np.testing.assert_allclose(result.chance, SAME_DIGIT.mean(axis=0))
    for name in ("auc", "reciprocal_rank", "precision", "recall"):
        np.testing.assert_allclose(result[f"{name}_mean"], result[name].mean("target"))
        low, high = result[f"{name}_interval"].transpose("bound", ...).values
        assert (low < result[f"{name}_mean"]).all()
        assert (high > result[f"{name}_mean"]).all()


@pytest.mark.usefixtures("client")
def test_class_detection__schedulers_and_chunks_are_invisible() -> None:
    on_cluster = td.evaluate.class_detection(in_chunks(SCORES, 7, 5), resamples=20).compute()
    result = td.evaluate.class_detection(in_chunks(SCORES, 60, 12), resamples=20)
    for scheduler in ("synchronous", "threads"):
        xr.testing.assert_identical(result.compute(scheduler=scheduler), on_cluster)


def test_class_detection__subclass_within_the_class() -> None:
    """Scores of the labels alone find the subclass, unless one looks within the class."""
    of_labels = labelled(SAME_LABEL * 10 + RNG.standard_normal((N, M)))
    everywhere = td.evaluate.class_detection(of_labels, "digit").compute()
    within = td.evaluate.class_detection(of_labels, "digit", within="label").compute()
    assert float(everywhere.auc_mean) > 0.75
    low, high = within.auc_interval.values
    assert low < 0.5 < high
    np.testing.assert_allclose(
        within.chance, (SAME_DIGIT & SAME_LABEL).sum(axis=0) / SAME_LABEL.sum(axis=0)
    )
    for t in range(M):
        ranked = SAME_LABEL[:, t]
        expected = roc_auc_score(SAME_DIGIT[ranked, t], of_labels.values[ranked, t])
        np.testing.assert_allclose(within.auc[t], expected)


def test_class_detection__targets_without_samples_are_left_out() -> None:
    other = np.array([9, *TARGET_DIGIT[1:]])
    result = td.evaluate.class_detection(
        SCORES.assign_coords(target_digit=("target", other)), "digit"
    ).compute()
    assert np.isnan(result.auc[0])
    np.testing.assert_allclose(result.auc_mean, result.auc[1:].mean())
