"""Simulated features have the shape of real ones, and blocks that depend on nothing else."""

from __future__ import annotations

import dask
import numpy as np
import pytest

from trakdask.testing import raise_if_dask_computes, simulate_features


@pytest.mark.parametrize("scheduler", ["sync", "threads"])
def test_raise_if_dask_computes__raises(scheduler: str) -> None:
    features = simulate_features()
    with (
        dask.config.set(scheduler=scheduler),
        raise_if_dask_computes(),
        pytest.raises(AssertionError, match="lazy"),
    ):
        features.feature.compute()
    assert features.feature.compute().shape == (64, 16, 2)


def test_simulate_features__dims_chunks_and_dtypes() -> None:
    with raise_if_dask_computes():
        features = simulate_features(10, 3, 2, chunks=4)
    assert features.feature.chunks == ((4, 4, 2), (3,), (1, 1))
    assert features.feature.dims == ("sample", "proj_dim", "checkpoint")
    for name in ("output", "out_to_loss"):
        assert features[name].dims == ("sample", "checkpoint")
        assert features[name].chunks == ((4, 4, 2), (1, 1))
    computed = features.compute()
    assert {variable.dtype.str for variable in computed.data_vars.values()} == {"<f4"}
    assert set(computed.coords) == {"label", "checkpoint"}


def test_simulate_features__a_block_depends_on_its_position_and_the_seed_alone() -> None:
    few, more = (simulate_features(n, 3, c, chunks=4).compute() for n, c in ((8, 1), (12, 2)))
    for name, array in few.data_vars.items():
        np.testing.assert_array_equal(array, more[name][:8, ..., :1])
    other = simulate_features(8, 3, 1, chunks=4, seed=1)
    assert not (other.feature.values == few.feature.values).any()
    first, second = few.feature.values[:4], few.feature.values[4:]
    assert not (first == second).any()
    assert not (more.feature.values[..., 0] == more.feature.values[..., 1]).any()


def test_simulate_features__names_tell_the_arguments_apart() -> None:
    made = [simulate_features(), simulate_features(seed=1), simulate_features(chunks=8)]
    made += [simulate_features(n_samples=65), simulate_features(proj_dim=8)]
    made += [simulate_features(n_checkpoints=1)]
    assert len({features.feature.data.name for features in made}) == len(made)
    assert simulate_features().feature.data.name == made[0].feature.data.name
