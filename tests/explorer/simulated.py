"""Features, targets and the estimator of the tests of questions."""

from __future__ import annotations

import numpy as np
import xarray as xr

import trakdask as td

N, M, P, C = 90, 40, 12, 3


LAMBDA = 2.5


def data(n: int, seed: int) -> xr.Dataset:
    features = td.testing.simulate_features(n, P, C, chunks=17, seed=seed)
    rng = np.random.default_rng(seed)
    return features.assign_coords(
        source=("sample", rng.choice(["web", "book", "wiki"], n)),
        length=("sample", rng.integers(0, 100, n)),
    )


FEATURES, TARGETS = data(N, 0), data(M, 1)


LABEL, SOURCE, LENGTH = (FEATURES[name].values for name in ("label", "source", "length"))


TRAK = td.Trak(damping=td.Absolute(LAMBDA))
