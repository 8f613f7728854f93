"""The unit of the scores that figures show."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

import trakdask as td


@pytest.mark.parametrize(
    ("values", "exponent"), [([3e-4, -2e-5], -4), ([-12.0], 1), ([0.0], 0), ([np.nan, 1.0], 0)]
)
def test_power_of_ten(values: list[float], exponent: int) -> None:
    assert td.plots.power_of_ten(xr.DataArray(values)) == exponent
