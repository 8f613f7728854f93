"""Float64 features in memory, chunked as featurize returns them, for several test modules."""

from __future__ import annotations

import dask.array as da
import numpy as np
import xarray as xr

from trakdask.testing import simulate_features


def with_values(features: xr.Dataset, **values: np.ndarray) -> xr.Dataset:
    """Replace variables, chunk by chunk."""
    return features.assign(
        {
            name: features[name].copy(data=da.from_array(data, chunks=features[name].data.chunks))
            for name, data in values.items()
        }
    )


def float64_features(n: int, p: int, c: int, seed: int, chunks: int) -> xr.Dataset:
    """Gaussian features, uniform Q, and outputs that are 0."""
    rng, shape = np.random.default_rng(seed), (n, c)
    feature, q = rng.standard_normal((n, p, c)), rng.random(shape)
    simulated = simulate_features(n, p, c, chunks=chunks)
    return with_values(simulated, feature=feature, out_to_loss=q, output=np.zeros(shape))
