"""Options that belong together, and the rule that chooses λ, against a table."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

import trakdask as td
from trakdask.attribution.estimators import gather_options
from trakdask.testing import simulate_features

FEATURES = simulate_features(10, 4, 2, chunks=4)
IMAGES = FEATURES.assign_attrs(task="ImageClassification()")
REGRESSION = FEATURES.assign_attrs(task="Regression()")
H = xr.DataArray(np.arange(10.0), dims="sample")


def gather(features=FEATURES, estimator="trak", damping="auto", **options):
    given = {"power": 0.5, "calibrate": None, "weights": None, **options}
    return gather_options(features, estimator, damping=damping, **given)


@pytest.mark.parametrize(
    ("features", "estimator", "damping", "expected"),
    [
        (FEATURES, "trak", "auto", False),
        (FEATURES, "soft", "auto", True),
        (IMAGES, "trak", "auto", True),
        (FEATURES, "trak", "completeness", True),
        (IMAGES, "soft", "closed_form", False),
        (IMAGES, "soft", 0.1, False),
        (IMAGES, "soft", td.Absolute(1.0), False),
        (IMAGES, "soft", xr.Dataset({"damping": ("checkpoint", [1.0, 1.0])}), False),
    ],
)
def test_options__damped_by_outputs(features, estimator, damping, expected: bool) -> None:
    assert gather(features, estimator, damping).is_damped_by_outputs is expected


@pytest.mark.parametrize(
    ("features", "damping", "rule"),
    [
        (FEATURES, "auto", "closed_form"),
        (REGRESSION, "auto", "trace"),
        (IMAGES, "auto", "completeness"),
        (IMAGES, "closed_form", "closed_form"),
        (IMAGES, 0.1, None),
    ],
)
def test_options__rule(features, damping, rule: str | None) -> None:
    assert gather(features, "trak", damping).rule == rule


def test_gather_options__stay_as_given() -> None:
    options = gather(IMAGES, "soft", calibrate=FEATURES, weights=H)
    assert options.calibrate is FEATURES
    assert options.weights is H
    rates = {"c0": 0.1, "c1": 0.2}
    assert gather(estimator="tracin", learning_rates=rates).learning_rates is rates


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"learning_rates": {}}, "got 'trak'"),
        ({"calibrate": FEATURES}, "damping='auto' and estimator='trak'"),
        ({"calibrate": FEATURES, "damping": 0.1}, r"damping=0\.1"),
        ({"estimator": "grad_dot", "damping": 0.1}, "'grad_dot'.* got damping;"),
        ({"estimator": "grad_cos", "calibrate": FEATURES}, "got calibrate;"),
        ({"estimator": "tracin", "weights": H, "damping": 0.1}, "got damping, weights;"),
        ({"estimator": "tracn"}, "'tracn'"),
        ({"estimator": "tracin", "allowed": ("auto", "trak")}, "got 'tracin'"),
    ],
)
def test_gather_options__without_effect(options, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        gather(**options)
