"""The curvature between wrong classes, which the gram matrix of a classifier lacks."""

from __future__ import annotations

import copy
from typing import Any

import xarray as xr

from trakdask.attribution.estimators import GRAM_POWER
from trakdask.attribution.grams import gram
from trakdask.featurization.lazy import featurize
from trakdask.models.model import Model
from trakdask.models.tasks import task_spec
from trakdask.models.tasks.supervised import Classification, WrongClass
from trakdask.provenance import FEATURE_SPEC
from trakdask.samples import validate_samples
from trakdask.variables import WRONG_CLASSES


def wrong_classes(samples: xr.Dataset, model: Model, **options: Any) -> xr.DataArray:
    """Compute the curvature between the wrong classes, which the gram matrix lacks.

    The gram matrix knows how steep the loss is along the gradient of the margin between the correct
    class and all others. A classifier's loss also curves where probability moves from one wrong
    class to another. Scores with ``estimator="soft"`` add this matrix to the gram matrix if it is a
    variable of the training features, ``features["wrong_classes"]``. Targets need none.

    Parameters
    ----------
    samples
        Training samples, as in :func:`featurize`.
    model
        The model of the features; its task is a :class:`~trakdask.models.tasks.Classification`.
    **options
        Those of :func:`featurize`, as for the features.

    Returns
    -------
    Lazy DataArray ``wrong_classes`` (proj_dim, proj_dim_1, checkpoint), float64, one chunk per
    checkpoint, to keep with ``to_zarr``: 8 p² bytes per checkpoint. Matrices of more samples can be
    added to it.

    Raises
    ------
    TypeError
        If the task is no classification by logits of several classes.
    ValueError, BlockError
        As :func:`featurize`.

    Notes
    -----
    With r as the distribution over the wrong classes, and logits with a constant derivative v, the
    loss with the gradient -q^a ∇f has the Hessian a q^a (1 - q) ∇f ∇fᵀ + q^a vᵀ (diag r - r rᵀ) v.
    Divided by a, the first term is that of the gram matrix of ``"soft"``. In the second one,
    diag r - r rᵀ = E_k[(e_k - r)(e_k - r)ᵀ] for k drawn from r, and vᵀ (e_k - r) = ∇ log r_k. Here
    k is the most likely wrong class, not a drawn one, so that no seed matters: the matrix is the
    sum of 2 √q ψ ψᵀ, where ψ is the projection of ∇ log r_k. It is 0 for two classes.

    λ is chosen without this matrix, by the rule of :func:`damping`.
    Cost: that of :func:`featurize` once more, and of :func:`gram`; no features are kept. A query
    takes p³/3 flops more for each checkpoint, instead of using stored eigenvectors.

    Examples
    --------
    >>> import numpy as np, torch, trakdask as td
    >>> samples = td.from_arrays({"image": np.eye(4, dtype="f4"), "label": np.arange(4) % 3})
    >>> model = td.Model(torch.nn.Linear(4, 3), task="image_classification")
    >>> features = td.featurize(samples, model, projector=td.SJLT(8))
    >>> features["wrong_classes"] = td.wrong_classes(samples, model, projector=td.SJLT(8))
    >>> td.score(features, features, damping="trace").attrs["gram_weights"]
    'q^0.5 (1 - q), and 2 q^0.5 between wrong classes'
    """
    samples = validate_samples(samples)
    model = model.for_variables({str(n): array.ndim for n, array in samples.variables.items()})
    task, between = model.task, copy.copy(model)
    if not isinstance(task, Classification) or type(task).output is not Classification.output:
        raise TypeError(
            "expected a model that classifies by the logits of several classes, got the task "
            f"{task_spec(task)}; try scores without the wrong classes"
        )
    between.task = WrongClass(task.inputs, task.label, task.temperature, task.positional)
    features = featurize(samples, between, **options)
    matrix = gram(features, weights=features.out_to_loss**GRAM_POWER / GRAM_POWER)
    how = features.attrs | model.spec()
    matrix.attrs = {name: how[name] for name in FEATURE_SPEC if name in how}
    return matrix.rename(WRONG_CLASSES)
