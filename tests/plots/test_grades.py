"""The plot shows the grades and their errors."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

import trakdask as td


@pytest.fixture(scope="module")
def result() -> xr.Dataset:
    features, targets = (
        td.testing.simulate_features(n_samples=40, proj_dim=5, n_checkpoints=4, seed=seed)
        for seed in range(2)
    )
    masks = td.evaluate.subsets(40, 4).rename(subset="checkpoint")
    features = features.assign(trained_on=masks)
    estimators = {"cosines": "grad_cos", "products": "grad_dot"}
    return td.evaluate.cross_validate(features, targets, estimators)


def test_grades_and_differences_are_those_of_the_result(result) -> None:
    (ax,) = td.plots.cross_validation(result).axes
    (points, *_), *_ = ax.containers
    np.testing.assert_allclose(points.get_xdata(), result.lds_mean)
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == ["without one checkpoint", "grade ± its error"]
    first, second = (label.get_text() for label in ax.get_yticklabels())
    assert first == f"cosines\n{float(result.lds_mean[0]):.2f}"
    grade, difference = float(result.lds_mean[1]), float(result.difference[1])
    assert second.startswith(f"products\n{grade:.2f} ({difference:+.3f} ± ")


def test_one_kind_of_scores_has_no_difference(result) -> None:
    one = result.isel(estimator=0, drop=True).drop_vars(["difference", "difference_error"])
    (ax,) = td.plots.cross_validation(one).axes
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        f"scores\n{float(one.lds_mean):.2f}"
    ]
