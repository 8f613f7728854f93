"""The methods of the accessor are the public functions."""

from __future__ import annotations

import inspect

import pytest
import xarray as xr

import trakdask as td


@pytest.mark.parametrize("data", [xr.Dataset(), xr.DataArray(1.0)])
def test_methods__are_the_functions_of_the_data(data: xr.Dataset | xr.DataArray) -> None:
    assert "top_k" in dir(data.trak)
    assert ".trak.top_k()" in repr(data.trak)
    assert ("score" in dir(data.trak)) == isinstance(data, xr.Dataset)
    for name in dir(data.trak):
        function, method = getattr(td, name), getattr(data.trak, name)
        assert method.__doc__ == function.__doc__
        parameters = list(inspect.signature(function).parameters.values())
        assert list(inspect.signature(method).parameters.values()) == parameters[1:]
    for name in ("_repr_html_", "verify"):
        with pytest.raises(AttributeError, match=f"got '{name}'"):
            getattr(data.trak, name)
