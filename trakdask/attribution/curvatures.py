"""The curvature of the loss, in whose coordinates features predict better from few checkpoints."""

from __future__ import annotations

from typing import Any, Literal

import dask
import dask.array as da
import numpy as np
import xarray as xr

from trakdask.attribution.estimators import (
    DEFAULT_ESTIMATOR,
    DEFAULT_POWER,
    Estimator,
    Power,
    gather_options,
)
from trakdask.featurization.job import DType
from trakdask.featurization.lazy import Gradients, lazy_curvature, prepare
from trakdask.models.curvature import leading_coordinates, scaling
from trakdask.models.model import Model
from trakdask.projection import Identity
from trakdask.variables import CHECKPOINT

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
    estimator: Estimator = DEFAULT_ESTIMATOR,
    power: Power = DEFAULT_POWER,
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
    estimator, power
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
    weights = gather_options(xr.Dataset(attrs=prepared.attrs), estimator, power).weights
    assert not isinstance(weights.power, da.Array)
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
        attrs=attrs | {"damping": float(damping), "gram_weights": weights.gram},
    )
