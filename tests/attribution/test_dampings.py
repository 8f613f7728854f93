"""What is no damping is refused when it is given, not when something is computed."""

from __future__ import annotations

import re

import numpy as np
import pytest
import xarray as xr

import trakdask as td
from trakdask.attribution.dampings import given_damping, relative_damping
from trakdask.testing import raise_if_dask_computes, simulate_features


@pytest.mark.parametrize("value", [-1, np.nan, np.inf, "1", None, True])
def test_absolute__refuses_what_is_no_damping(value: object) -> None:
    with pytest.raises(ValueError, match=rf"value.* >= 0.*got {re.escape(repr(value))}"):
        td.Absolute(value)


@pytest.mark.parametrize("value", [-1, np.nan, np.inf, "auto", None, True, [0.1]])
def testrelative_damping__refuses_what_is_no_number(value: object) -> None:
    with pytest.raises(ValueError, match="expected damping as 'auto'"):
        relative_damping(value)


def testgiven_damping__takes_checkpoints_by_name() -> None:
    features = simulate_features(8, 4, 3)
    given = xr.DataArray([3.0, 1.0, 2.0], coords={"checkpoint": ["c2", "c0", "c1"]})
    with raise_if_dask_computes():
        found = given_damping(features, given.chunk(checkpoint=2))
    assert found.chunks == ((1, 1, 1),)
    assert found.compute().tolist() == [1.0, 2.0, 3.0]
    assert td.damping(features, damping=given).damping.values.tolist() == [1.0, 2.0, 3.0]
