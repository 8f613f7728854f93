"""The curvature of the loss, in whose coordinates and with which features predict better."""

from __future__ import annotations

import copy
from typing import Any, Literal

import dask
import numpy as np
import xarray as xr

from trakdask.attribution.estimators import EstimatorLike, with_gram
from trakdask.attribution.grams import gram
from trakdask.featurization.job import DType
from trakdask.featurization.lazy import Gradients, featurize, lazy_curvature, prepare
from trakdask.models.curvature import leading_coordinates, scaling
from trakdask.models.model import Model
from trakdask.models.tasks import task_spec
from trakdask.models.tasks.supervised import Classification, WrongClass
from trakdask.projection import Identity
from trakdask.provenance import FEATURE_SPEC
from trakdask.samples import validate_samples
from trakdask.variables import CHECKPOINT, WRONG_CLASSES

_VARIABLES = {
    "eigenvectors": ("entry", "eigenvectors of every axis of every parameter, row by row"),
    "eigenvalue": ("coordinate", "mean over samples of h g^2, g in the coordinates of the axes"),
    "scale": ("coordinate", "what gradients are multiplied by in these coordinates"),
    "leading": ("rank", "coordinates with most of the scaled curvature, the largest first"),
}


def curvature(
    samples: xr.Dataset,
    model: Model,
    *,
    damping: float = 100.0,
    estimator: EstimatorLike = "auto",
    gradients: Gradients = "auto",
    batch_size: int | Literal["auto"] = "auto",
    dtype: DType | None = None,
    device: str = "auto",
) -> xr.Dataset:
    """Fit the curvature of the loss on some training samples, for :meth:`Model.with_curvature`.

    A gram matrix of features damps all directions of a sketch alike. The curvature is known much
    better for each layer by itself: its eigenvectors are products of those of small matrices, as in
    EK-FAC. Features of gradients that are scaled by it predict better, from one checkpoint most of
    all, and most for convolutional networks. They take the same space, and queries the same time.

    Parameters
    ----------
    samples
        Training samples, as in :func:`featurize`. A part of them, drawn at random, will do:
        ``tests/benchmarks/curvature.py`` fits a quarter of about a thousand.
    model
        The model, at all checkpoints that features are to be computed for.
    damping
        δ: each eigenvalue Λ becomes Λ + δ times the mean of its parameter. The smaller, the more
        even are the directions that are projected together; ``1`` suits features of the whole
        gradient (:class:`Identity`).
    estimator
        As in :func:`score`; samples have the weights h that they have in its gram matrix.
    gradients, batch_size, dtype, device
        As in :func:`featurize`.

    Returns
    -------
    Dataset in memory, to keep with ``to_zarr``, with

    - ``eigenvectors`` (entry, checkpoint) float32: a matrix for each axis of a parameter (of a
      kernel: out, in, and all places together), unless it is longer than 4096;
    - ``eigenvalue`` (coordinate, checkpoint) float64: Λ, the mean of h g² in these coordinates;
    - ``scale`` (coordinate, checkpoint) float32: 1/√(Λ + δ mean Λ);
    - ``leading`` (rank, checkpoint) int64: coordinates in the order of Λ · scale².

    Raises
    ------
    TypeError, ValueError, BlockError
        As :func:`featurize`; also if gradients are not finite.

    Notes
    -----
    It is computed at once, since features of training samples and of targets need the same values.
    Cost: two passes over the samples, each with 2 Σd flops for every parameter, where d are the
    lengths of its axes. Memory: Σd² + 2P numbers, with the number of parameters P; and in a task,
    the gradients of a micro-batch with respect to the largest parameter.

    References
    ----------
    George et al. 2018, "Fast Approximate Natural Gradient Descent in a Kronecker-factored
    Eigenbasis"; Grosse et al. 2023, "Studying Large Language Model Generalization with Influence
    Functions"; the matrices of the axes are those of Gupta et al. 2018, "Shampoo".

    Examples
    --------
    >>> import numpy as np, torch, trakdask as td
    >>> samples = td.from_arrays({"image": np.eye(4, dtype="f4"), "label": np.arange(4) % 3})
    >>> model = td.Model(torch.nn.Linear(4, 3), task="image_classification")
    >>> fitted = td.curvature(samples, model)
    >>> dict(fitted.sizes)
    {'entry': 25, 'checkpoint': 1, 'coordinate': 15, 'rank': 15}
    """
    if not damping >= 0:
        raise ValueError(f"expected damping >= 0, got {damping!r}; try damping=100")
    prepared = prepare(
        samples,
        model.without_components(),
        projector=Identity(),
        gradients=gradients,
        batch_size=batch_size,
        dtype=dtype,
        device=device,
        on_error="raise",
        adds_up=True,
    )
    weights = with_gram(xr.Dataset(attrs=prepared.attrs), estimator).of_sums()
    vectors, values = dask.compute(*lazy_curvature(prepared, weights.power))
    scale = np.apply_along_axis(scaling, 0, values, prepared.job.model.shapes, damping)
    leading = np.stack(list(map(leading_coordinates, values.T, scale.T)), 1)
    pairs = zip(_VARIABLES.items(), (vectors, values, scale, leading), strict=True)
    names = ("task", "parameters", "checkpoints", "source", "trakdask_version")
    attrs: dict[str, Any] = {name: prepared.attrs[name] for name in names}
    return xr.Dataset(
        {
            name: ((dim, CHECKPOINT), data, {"description": text})
            for (name, (dim, text)), data in pairs
        },
        coords={CHECKPOINT: prepared.coords[CHECKPOINT]},
        attrs=attrs | {"damping": float(damping), "gram_weights": weights.gram_weights},
    )


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
    >>> td.score(features, features, td.Soft(damping="trace")).attrs["gram_weights"]
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
    matrix = gram(features, weights=2 * features.out_to_loss**0.5)
    how = features.attrs | model.spec()
    matrix.attrs = {name: how[name] for name in FEATURE_SPEC if name in how}
    return matrix.rename(WRONG_CLASSES)
