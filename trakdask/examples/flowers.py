"""Features of flowers: scores to try things on, in a second."""

from __future__ import annotations

import functools

import numpy as np
import xarray as xr
from torch import nn

from trakdask.examples.classifiers import train_classifier
from trakdask.featurization.lazy import featurize
from trakdask.models.model import Model
from trakdask.projection import Identity
from trakdask.samples.array_source import from_arrays


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


@functools.cache
def iris_features() -> tuple[xr.Dataset, xr.Dataset]:
    """Train five small classifiers on 120 irises, and featurize these and 30 others.

    Returns
    -------
    Features of the training samples and of the targets, in memory, whole gradients of 67
    parameters at five checkpoints, with the coords ``label`` and ``species``.

    Raises
    ------
    ImportError
        If scikit-learn is not installed.

    Examples
    --------
    >>> features, targets = iris_features()
    >>> features.sizes["sample"], targets.sizes["sample"]
    (120, 30)
    """
    from sklearn.datasets import load_iris  # optional dependency: only the examples need it

    bunch = load_iris()
    order = np.random.default_rng(0).permutation(150)
    x = ((bunch.data - bunch.data.mean(0)) / bunch.data.std(0)).astype(np.float32)[order]
    label = bunch.target.astype(np.int64)[order]
    species = bunch.target_names.astype(str)[label]
    train, targets = (
        from_arrays({"x": x[rows]}, coords={"label": label[rows], "species": species[rows]})
        for rows in (slice(120), slice(120, 150))
    )
    states = [
        train_classifier(_perceptron, x[:120], label[:120], seed=seed, epochs=20, lr=0.03)
        for seed in range(5)
    ]
    model = Model(_perceptron, states, task="classification")
    features = featurize(train, model, Identity()).compute()
    return features, featurize(targets, model, like=features).compute()
