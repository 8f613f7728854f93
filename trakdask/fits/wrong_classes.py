"""How the loss bends between the wrong classes, which the gram matrix of a classifier lacks.

The gram matrix knows how steep the loss is along the gradient of the margin between the correct
class and all others. A classifier's loss also bends where probability moves from one wrong class
to another. With r as the distribution over the wrong classes, and logits with a constant derivative
v, the loss with the gradient -q^a ∇f has the Hessian

    a q^a (1 - q) ∇f ∇fᵀ + q^a vᵀ (diag r - r rᵀ) v.

Divided by a, the first term is the one of the gram matrix of ``Soft``. In the second one,
diag r - r rᵀ = E_k[(e_k - r)(e_k - r)ᵀ] for k drawn from r, and vᵀ (e_k - r) = ∇ log r_k. Here k is
the most likely wrong class, not a drawn one, so that no seed matters: the matrix is the mean of
2 √q ψ ψᵀ, where ψ is the projection of ∇ log r_k. It is 0 for two classes.

A part of the samples will do, because the matrix is a mean. It stays the same when samples are
appended or dropped. Its pass costs as much as the features of these samples.
"""

from __future__ import annotations

import copy
from typing import Any

import dask
import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.featurization.lazy import featurize
from trakdask.fits.keeping import kept_blocks
from trakdask.models.model import Model
from trakdask.models.tasks.protocol import task_facts
from trakdask.models.tasks.supervised import Classification, WrongClass
from trakdask.projection.fitted import Fitted
from trakdask.samples.array_source import validate_samples
from trakdask.variables import PROJ_DIM

_WIDEST = 8192
"""The matrix of wider features takes more memory than it is worth."""

_POWER = 0.5
"""a, the power in the gram matrix of ``Soft``."""


def wrong_classes(
    samples: xr.Dataset, model: Model, projector: Fitted, **options: Any
) -> np.ndarray | None:
    """Return the mean of 2 √q ψ ψᵀ over samples, (proj_dim, proj_dim_1, checkpoint) float32.

    It is None if the task does not compare the correct class with several wrong ones, by their
    logits, or features are very wide.
    """
    samples = validate_samples(samples)
    model = model.for_variables({str(n): array.ndim for n, array in samples.variables.items()})
    task, between = model.task, copy.copy(model)
    if not compares_classes(task):
        return None
    assert isinstance(task, Classification)
    between.task = WrongClass(task)
    features = featurize(samples, between, projector, **options)
    if features.sizes[PROJ_DIM] > _WIDEST:
        return None
    q = features.out_to_loss.data[:, None, :]
    both = da.concatenate([features.feature.data, q], axis=1).rechunk({1: -1})
    kept = [kept_blocks(both[..., i : i + 1]) for i in range(both.shape[2])]
    totals = [arrays.gram.gram(x[:, :-1], x[:, -1] ** _POWER / _POWER) for x in kept]
    mean = np.concatenate(dask.compute(*totals), -1) / len(q)
    # As exact as the products that it is a mean of; bit by bit as a store has it, which keeps the
    # triangle, also where a GPU's product of a matrix with itself is not symmetric.
    return arrays.gram.mirrored(mean.astype(np.float32))


def compares_classes(task: Any) -> bool:
    """Return whether a task compares the correct class with wrong ones by their logits.

    Examples
    --------
    >>> import trakdask as td
    >>> compares_classes(td.tasks.ImageClassification()), compares_classes(td.tasks.CausalLM())
    (True, False)
    """
    has_margin = task_facts(task).get("loss_kind") == "cross-entropy"
    return isinstance(task, Classification) and has_margin
