"""Whether the curvature of a model makes its scores worse: what its outputs say of that.

Scores of all training samples for one target add up to its output, in a linear model. A scale by
the curvature damps the directions that most samples share. That makes scores better where a model
was trained to the end. A model that was hardly trained, or has few samples of a class, is damped
far more, and its scores get worse: the sums then follow the outputs better without the scale.
"""

from __future__ import annotations

from typing import Any

import dask
import numpy as np
import torch
import xarray as xr
from torch import Tensor

from trakdask.arrays.damping import GRID
from trakdask.arrays.weights import gram_weights
from trakdask.featurization.block import run_samples, running
from trakdask.featurization.job import FeaturizeJob
from trakdask.featurization.preparation import prepare
from trakdask.fits.keeping import kept_sketches
from trakdask.fits.weights import weighted
from trakdask.models.model import Model
from trakdask.projection import SJLT
from trakdask.projection.fitted import Fitted
from trakdask.projection.maps import Maps
from trakdask.projection.stream import ProjectionStream

_PLAIN, _LEADING, _SCALED = SJLT(2048), 1024, SJLT(1024)
"""The sketch without curvature; leading coordinates, and the sketch of all others with it. They
have as much noise as features of a fit: a sketch alone has more, and mistakes it for curvature."""

_POWER = 0.5
"""The power of Q in the weights of ``Soft``."""

_LARGER = 0.3
"""How much larger the correlation without curvature must be, in Fisher's z. It was larger by 0.304
to 0.391 on two tasks, where curvature lost 0.026 to 0.079 of the LDS, and by at most 0.258 on 26
others. See ``2026-11-30-outputs.txt``."""


def totals_of(samples: xr.Dataset, model: Model, curvature: Fitted, **options: Any) -> np.ndarray:
    """Return outputs, and sums of scores without and with curvature, at each checkpoint.

    (sample, 1 + 2 ρ, checkpoint) float64, with the ρ of :data:`trakdask.arrays.damping.GRID`. Cost:
    a pass over the samples with two sketches, and 20 n³ flops for each checkpoint.
    """
    names = [checkpoint.name for checkpoint in model.checkpoints]
    scales = [
        weighted(curvature.at_checkpoints([name]), None, model.shapes, _LEADING) for name in names
    ]
    projector = Fitted.joined(scales).then(_SCALED)
    prepared = prepare(samples, model, projector=projector, **options)
    n_columns = _PLAIN.proj_dim + prepared.job.proj_dim
    rows = kept_sketches(_two_sketches, prepared, n_columns, "two-sketches")
    return np.stack(dask.compute(*map(dask.delayed(_totals_at), rows)), -1)


def _two_sketches(
    job: FeaturizeJob, item: np.ndarray, rows: tuple[slice], *arrays: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Return sketches of a block without and with curvature, (sample, column, 1), f and Q."""
    checkpoint, fit = item.item()
    with running(job, checkpoint, rows, arrays) as samples:
        maps = Maps(job.projector, job.row_map, checkpoint.id, fit, samples.device)
        n_columns = _PLAIN.proj_dim + job.proj_dim
        return run_samples(
            samples, checkpoint, n_columns, lambda _, batch: _Both(maps, batch.size), maps.rotations
        )


class _Both:
    """A stream that projects gradients as they are, and scaled.

    A rotation changes no product of two gradients, so both sketches are of rotated ones.
    """

    def __init__(self, maps: Maps, n_samples: int) -> None:
        at = n_samples, maps.checkpoint, maps.device
        self._plain = ProjectionStream(_PLAIN, maps.row_map, *at)
        self._scaled = maps.open(n_samples)

    def __call__(self, name: str, gradient: Tensor, first: int | None = None, /) -> None:
        """Take the rotated gradients of a parameter, (n, numel), or a slice of them."""
        self._plain.add(name, gradient, first)
        self._scaled(name, gradient, first)

    def result(self) -> Tensor:
        """Return both sketches, side by side."""
        return torch.cat([self._plain.result(), self._scaled.result()], 1)


def _totals_at(both: np.ndarray) -> np.ndarray:
    """Return outputs, and sums of scores by each of two sketches, (sample, 1 + 2 ρ)."""
    *sketches, others = np.split(both.astype(np.float64), [_PLAIN.proj_dim, -2], 1)
    f, q = others.T
    return np.column_stack([f, *(left_out_totals(x @ x.T, q) for x in sketches)])


def left_out_totals(products: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return the sum of the scores of all other samples for each one, (sample, ρ).

    As :func:`trakdask.arrays.damping.left_out`, from products of samples alone: with a weight h,
    (K + λ)⁻¹ = (I - Φᵀ √h (√h Φ Φᵀ √h + λ)⁻¹ √h Φ) / λ. Cost: 9 n³ flops, and 4 n² for each ρ.
    """
    h, g = gram_weights(q, _POWER), q**_POWER
    roots = np.sqrt(h)
    values, vectors = np.linalg.eigh(roots[:, None] * products * roots)
    turned, n = (products * roots) @ vectors, len(q)
    result = np.full((n, len(GRID)), np.nan)
    for i, lam in enumerate(GRID * max(values.sum(), 0) / n):
        if lam > 0:  # gradients that are 0 say nothing
            damped = turned / (np.maximum(values, 0) + lam)
            total = (products @ g - damped @ (turned.T @ g)) / lam
            leverage = (np.diag(products) - (damped * turned).sum(1)) / lam
            result[:, i] = (total - g * leverage) / (1 - h * leverage)
    return result


def follows_better_without(totals: np.ndarray) -> bool:
    """Return whether outputs follow sums of scores clearly better without curvature.

    Parameters
    ----------
    totals
        What :func:`totals_of` returns, of all checkpoints.
    """
    output, *sums = totals.mean(-1).T
    with np.errstate(invalid="ignore", divide="ignore"):  # of sums that are all the same, or NaN
        z = np.arctanh([np.corrcoef(output, each)[0, 1] for each in sums]).reshape(2, -1)
    without, with_curvature = (np.nanmax(each, initial=-np.inf) for each in z)
    return bool(without > with_curvature + _LARGER)
