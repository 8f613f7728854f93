"""How far the gradients of each parameter say the same at all checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np
import torch
import xarray as xr
from dask.base import tokenize
from torch import Tensor

from trakdask.featurization.block import Output, run_samples, running
from trakdask.featurization.graphs import block_tasks
from trakdask.featurization.job import FeaturizeJob
from trakdask.featurization.lazy import prepare
from trakdask.models.model import Model
from trakdask.models.rules import wide
from trakdask.projection import Identity
from trakdask.projection.axes import Shapes, places_of
from trakdask.samples import drawn, validate_samples

PARAMETER = "parameter"

_WIDTH = 4096
"""Columns of the sketch of a parameter that has more elements."""


def agreement(
    samples: xr.Dataset, model: Model, *, n_samples: int = 256, **options: Any
) -> xr.DataArray:
    """Measure for each parameter how far its gradients say the same at all checkpoints.

    Scores between training samples are made of the gradients of one parameter alone. What two
    trainings agree on is a property of the data; the rest is chance, which adds noise to the scores
    of all parameters. Parameters differ much in this: in a language model, only the head may agree.

    Parameters
    ----------
    samples
        Training samples, as in :func:`featurize`.
    model
        The model with two checkpoints or more, of trainings with different seeds or samples.
    n_samples
        How many of the samples are compared with each other: they are drawn at random, always the
        same ones.
    **options
        ``gradients``, ``batch_size``, ``dtype`` and ``device`` of :func:`featurize`.

    Returns
    -------
    (parameter) float64, in memory: the correlation between two checkpoints of the scores of all
    pairs of samples, a mean over pairs of checkpoints, and 0 where it is negative. Pass it on by
    ``td.fit(samples, model, weights=...)``, or leave out parameters by ``td.Model(parameters=)``.

    Raises
    ------
    TypeError, ValueError, BlockError
        As :func:`featurize`; also if there is only one checkpoint.

    Notes
    -----
    It is computed at once, on the active client or on threads. Cost: one pass over ``n_samples``
    samples. Memory: at most 16 KB for each of them and each parameter, of all checkpoints.

    Examples
    --------
    >>> import numpy as np, torch, trakdask as td
    >>> samples = td.from_arrays({"image": np.eye(4, dtype="f4"), "label": np.arange(4) % 3})
    >>> checkpoints = [torch.nn.Linear(4, 3).state_dict() for _ in range(2)]
    >>> build = lambda: torch.nn.Linear(4, 3)
    >>> model = td.Model(build, checkpoints=checkpoints, task="image_classification")
    >>> td.agreement(samples, model).parameter.values.tolist()
    ['weight', 'bias']
    """
    if len(model.checkpoints) < 2:
        raise ValueError("expected two checkpoints or more, got 1; try another seed of training")
    samples = validate_samples(samples)
    part = drawn(samples, n_samples, n_samples)
    prepared = prepare(part, model, projector=Identity(), adds_up=True, **options)
    places, token = _places(prepared.job.model.shapes), tokenize(prepared.token)
    sketches = block_tasks(
        _sketch_block, "sec", prepared, token, new_axes={"e": _width(places)},
        name=f"sketches-{token}", dtype=np.float32,
    ).compute()  # fmt: skip
    values = {
        name: _correlation(np.stack([_predictions(x) for x in np.moveaxis(rows, -1, 0)]))
        for name, rows in ((name, sketches[:, place]) for name, place in places.items())
    }
    return xr.DataArray(list(values.values()), {PARAMETER: list(values)}, name="agreement")


def _places(shapes: Shapes) -> dict[str, slice]:
    """Return which columns are the sketch of each parameter."""
    return places_of({name: (min(math.prod(shape), _WIDTH),) for name, shape in shapes.items()})


def _width(places: Mapping[str, slice]) -> int:
    """Return the number of columns of all sketches."""
    width: int = max(place.stop for place in places.values())
    return width


def _predictions(x: np.ndarray) -> np.ndarray:
    """Return how much each sample says about each other one, X (XᵀX + λ)⁻¹ Xᵀ, λ = tr(XᵀX)/n.

    The products alone are mostly about what all samples have in common.
    """
    products, n = x.astype(np.float64) @ x.T, len(x)
    damped = products + max(np.trace(products) / n, np.finfo(float).tiny) * np.eye(n)
    predictions: np.ndarray = np.linalg.solve(damped, products)[np.triu_indices(n, 1)]
    return predictions


def _correlation(products: np.ndarray) -> float:
    """Return the mean correlation of rows, 0 if it is negative or a row is constant."""
    centred = products - products.mean(1, keepdims=True)
    lengths = np.linalg.norm(centred, axis=1, keepdims=True)
    unit = centred / np.where(lengths > 0, lengths, 1)
    return max(0.0, float(np.mean([a @ b for a, b in combinations(unit, 2)])))


class _Sketches:
    """A sink that sketches the gradients of every parameter by itself: a random sign and column.

    The draws of a parameter are the same for all checkpoints, samples and micro-batches.
    """

    def __init__(self, shapes: Shapes, n: int) -> None:
        self._shapes, self._places = shapes, _places(shapes)
        self._sums = torch.zeros(n, _width(self._places))

    def __call__(self, name: str, gradient: Tensor, first: int | None = None, /) -> None:
        """Add the gradients of a parameter, (n, numel), or a slice of them."""
        place, size = self._places[name], math.prod(self._shapes[name])
        draws, rng = 2 * torch.arange(size), torch.Generator().manual_seed(0)
        if size > _WIDTH:
            draws = torch.randint(0, 2 * _WIDTH, (size,), generator=rng)
        draws = draws[first or 0 :][: gradient.shape[1]].to(gradient.device)
        signed = wide(gradient).float() * (1 - 2 * (draws % 2))
        sums = torch.zeros(len(gradient), place.stop - place.start, device=gradient.device)
        self._sums[:, place] += sums.index_add_(1, draws // 2, signed).cpu()

    def result(self) -> Tensor:
        """Return the sketches of all parameters."""
        return self._sums


def _sketch_block(
    job: FeaturizeJob, item: np.ndarray, start: np.ndarray, *arrays: np.ndarray
) -> np.ndarray:
    """Return the sketches of a block, (sample, column, 1)."""
    (checkpoint, _), shapes = item.item(), job.model.shapes
    with running(job, checkpoint, start, arrays) as samples:
        output = Output(_width(_places(shapes)), lambda _, batch: _Sketches(shapes, batch.size))
        sketches: np.ndarray = run_samples(samples, checkpoint, output)[0]
        return sketches
