"""Simulated features have the shape of real ones, and blocks that depend on nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from tests.laziness import raise_if_dask_computes
from trakdask.testing import simulate_features


def test_raise_if_dask_computes__raises() -> None:
    features = simulate_features()
    with raise_if_dask_computes(), pytest.raises(AssertionError, match="lazy"):
        features.feature.compute()
    assert features.feature.compute().shape == (64, 16, 2)


def test_simulate_features__a_block_depends_on_its_position_and_the_seed_alone() -> None:
    few, more = (simulate_features(n, 3, c, chunks=4).compute() for n, c in ((8, 1), (12, 2)))
    for name, array in few.data_vars.items():
        np.testing.assert_array_equal(array, more[name][:8, ..., :1])
    other = simulate_features(8, 3, 1, chunks=4, seed=1)
    assert not (other.feature.values == few.feature.values).any()
    first, second = few.feature.values[:4], few.feature.values[4:]
    assert not (first == second).any()
    assert not (more.feature.values[..., 0] == more.feature.values[..., 1]).any()
