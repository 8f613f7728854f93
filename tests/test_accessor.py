"""The methods of the accessor are the public functions."""

from __future__ import annotations

import inspect

import pytest
import xarray as xr

import trakdask as td
from trakdask.accessor import FeaturesAccessor, ScoresAccessor
from trakdask.testing import simulate_features

METHODS = [
    pytest.param(data, name, id=f"{accessor.__name__}.{name}")
    for accessor, data in ((FeaturesAccessor, xr.Dataset()), (ScoresAccessor, xr.DataArray(1.0)))
    for name in vars(accessor)
    if not name.startswith("_")
]


@pytest.mark.parametrize(("data", "name"), METHODS)
def test_method__is_the_function_of_the_data(data: xr.Dataset, name: str) -> None:
    function, method = getattr(td, name), getattr(data.trak, name)
    assert method.__doc__ == function.__doc__
    assert name in dir(data.trak)
    parameters = list(inspect.signature(function).parameters.values())
    assert list(inspect.signature(method).parameters.values()) == parameters[1:]


def test_method__same_results_as_the_functions() -> None:
    features, targets = simulate_features(20, 4, 2, chunks=8), simulate_features(5, 4, 2, seed=1)
    scores = features.trak.score(targets)
    xr.testing.assert_identical(scores.compute(), td.score(features, targets).compute())
    xr.testing.assert_identical(scores.trak.top_k(2).compute(), td.top_k(scores, 2).compute())
    grouped = features.trak.group_score(targets, by="label")
    expected = td.group_score(features, targets, by="label")
    xr.testing.assert_identical(grouped.compute(), expected.compute())
