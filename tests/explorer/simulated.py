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


def halves() -> tuple[xr.Dataset, xr.Dataset]:
    """Return features of six checkpoints of known halves, and targets whose outputs follow them.

    Class 2 is in the source d alone.
    """
    train, targets = (
        td.testing.simulate_features(n, P, 6, chunks=17, seed=seed) for n, seed in ((N, 0), (60, 1))
    )
    for ds in (train, targets):  # so alike that each checkpoint predicts the others
        ds["feature"] = ds.feature + 4 * ds.feature.isel(checkpoint=0, drop=True)
    masks = td.evaluate.subsets(train, 6).rename(subset="checkpoint").compute()
    source = np.array(["a", "b", "c", "d"], object)[np.arange(N) % 4]
    label = np.where(np.arange(N) % 12 == 3, 2, np.arange(N) % 2)
    train = train.assign(trained_on=masks)
    train = train.assign_coords(source=("sample", source), label=("sample", label))
    scores = td.score(train, targets, TRAK).values
    output = 3 + 10 * scores.T @ masks.transpose("sample", "checkpoint").values
    noise = np.random.default_rng(0).standard_normal(output.shape) * output.std() / 20
    targets["output"] = targets.output.copy(data=(output + noise).astype(np.float32))
    targets = targets.assign_coords(label=("sample", np.arange(60) % 3))
    about = {"task": "ImageClassification()", "label": "label", "default_estimator": "soft"}
    return train.assign_attrs(about), targets.assign_attrs(about)
