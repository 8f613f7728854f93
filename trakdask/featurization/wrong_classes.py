"""The curvature between the wrong classes, which the gram matrix of a classifier lacks.

The gram matrix knows how steep the loss is along the gradient of the margin between the correct
class and all others. A classifier's loss also curves where probability moves from one wrong class
to another. With r as the distribution over the wrong classes, and logits with a constant derivative
v, the loss with the gradient -q^a ∇f has the Hessian

    a q^a (1 - q) ∇f ∇fᵀ + q^a vᵀ (diag r - r rᵀ) v.

Divided by a, the first term is that of the gram matrix of ``Soft``. In the second one,
diag r - r rᵀ = E_k[(e_k - r)(e_k - r)ᵀ] for k drawn from r, and vᵀ (e_k - r) = ∇ log r_k. Here k is
the most likely wrong class, not a drawn one, so that no seed matters: the matrix is the mean of
2 √q ψ ψᵀ, where ψ is the projection of ∇ log r_k. It is 0 for two classes.

A part of the samples will do, because the matrix is a mean; so it is of no special samples, and
stays what it is when samples are appended or dropped.
"""

from __future__ import annotations

import copy

import dask.array as da
import xarray as xr

from trakdask import arrays
from trakdask.featurization.job import Job
from trakdask.models.model import Model
from trakdask.models.tasks.supervised import Classification, WrongClass
from trakdask.samples import drawn, validate_samples
from trakdask.variables import SAMPLE

_SHARE = 4
"""One of so many samples: it costs a quarter of the features' time, and at most 0.005 of the gain
in LDS that all of them bring (``tests/benchmarks/fits.py``)."""

_WIDEST = 8192
"""The matrix of wider features takes more memory than it is worth."""

_POWER = 0.5
"""a, that of the gram matrix of ``Soft``."""


def has_wrong_classes(job: Job) -> bool:
    """Return whether a task compares the correct class with several wrong ones, by their logits."""
    task = job.model.task
    is_plain = isinstance(task, Classification) and type(task).output is Classification.output
    return is_plain and job.proj_dim <= _WIDEST


def part_of(samples: xr.Dataset, block: int) -> xr.Dataset:
    """Return the samples that the matrix is computed from, in as many blocks."""
    n = -(-samples.sizes[SAMPLE] // _SHARE)
    return drawn(validate_samples(samples), n, -(-block // _SHARE))


def between(model: Model) -> Model:
    """Return the model whose output is the log probability of the likeliest wrong class."""
    other, task = copy.copy(model), model.task
    assert isinstance(task, Classification)
    other.task = WrongClass(task.inputs, task.label, task.temperature, task.positional)
    return other


def mean_matrix(feature: da.Array, q: da.Array) -> da.Array:
    """Return the mean of 2 √q ψ ψᵀ, (proj_dim, proj_dim_1, checkpoint), lazy.

    Samples that failed, whose rows are NaN, are left out.
    """
    total = arrays.gram.gram(feature, q**_POWER / _POWER)
    n_samples = da.isfinite(q).sum(axis=0)
    mean: da.Array = total / da.maximum(n_samples, 1)
    return mean
