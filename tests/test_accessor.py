"""The methods of the accessor are the public functions."""

from __future__ import annotations

import inspect

import pytest
import xarray as xr

import trakdask as td
from trakdask.accessor import FeaturesAccessor, ScoresAccessor

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
