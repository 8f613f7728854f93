"""Fit the curvature of the loss to samples."""

from __future__ import annotations

from functools import partial
from typing import Any

import dask
import dask.array as da
import numpy as np
import torch
import xarray as xr
from dask.base import tokenize

from trakdask.arrays.weights import gram_weights
from trakdask.attribution.estimators import EstimatorLike, with_gram
from trakdask.bars import block_bar
from trakdask.checks import require_integer
from trakdask.featurization.block import run_samples, running
from trakdask.featurization.graphs import GraphInputs, block_tasks
from trakdask.featurization.job import FeaturizeJob
from trakdask.featurization.preparation import model_of, prepare, require_model
from trakdask.fits.keeping import kept_blocks
from trakdask.fits.sums import (
    AxisProducts,
    SquaredCoordinates,
    eigenvectors_of,
    leading_coordinates,
    scale_of,
)
from trakdask.models.gradients import out_to_loss_of
from trakdask.models.model import Model
from trakdask.models.tasks import Batch, Forward
from trakdask.projection import Identity
from trakdask.projection.fitted import Curvature, Fitted
from trakdask.projection.maps import Stream
from trakdask.tensors import factors_of, rotations


def curvature(
    samples: xr.Dataset,
    model: Model,
    *,
    damping: float = 10.0,
    leading: int = 1024,
    estimator: EstimatorLike = "auto",
    progress: bool = True,
    **options: Any,
) -> Fitted:
    """Fit the curvature of the loss to some training samples: the first step of a projector.

    A gram matrix of features damps all directions of a sketch alike. The curvature is known much
    better for each layer by itself: its eigenvectors are products of eigenvectors of small
    matrices, as in EK-FAC. Features of gradients that are scaled by it predict better, from one
    checkpoint most of all, and most for convolutional networks. They take the same space, and
    queries the same time.

    Parameters
    ----------
    samples
        Training samples, as in :func:`trakdask.featurize`. A part of them, drawn at random, will
        do: ``2026-11-24-fits.txt`` fitted a quarter of about a thousand.
    model
        The model, at all checkpoints that features are to be computed for.
    damping
        δ: each eigenvalue Λ becomes Λ + δ times the mean of its parameter. The smaller, the more
        even are the directions of the features. ``2026-11-24-recipe.txt`` compares 1 to 100.
    leading
        How many of the coordinates with most of the scaled curvature become columns of their own,
        beside the columns of the projector that follows. 0 before :class:`trakdask.Identity`.
    estimator
        As in :func:`trakdask.score`; samples have the weights h that they have in its gram matrix.
    progress
        Show a bar of blocks of samples, over both passes and all checkpoints.
    **options
        ``gradients``, ``batch_size``, ``dtype`` and ``device`` of :func:`trakdask.featurize`.

    Returns
    -------
    The first step of a projector, in memory; ``.then(td.SJLT(1024))`` makes a projector of it. It
    holds, and features of it have as variables,

    - ``curvature_eigenvectors`` (entry, checkpoint) float32: a matrix for each axis of a parameter
      (of a kernel: out, in, and all places together), unless it is longer than 4096;
    - ``curvature_scale`` (coordinate, checkpoint) float32: 1/√(Λ + δ mean Λ), where Λ is the mean
      of h g² in the coordinates of the eigenvectors; 0 for gradients that are nothing but rounding,
      as of the bias of attention's keys;
    - ``curvature_leading`` (leading, checkpoint) int64: coordinates with most Λ · scale², sorted.

    Raises
    ------
    TypeError, ValueError, BlockError
        As :func:`trakdask.featurize`; also if gradients are not finite.

    Notes
    -----
    It is computed at once, since features of training samples and of targets need the same values.
    Cost: two passes over the samples, each with 2 Σd flops for every parameter, where d are the
    lengths of its axes. Memory: Σd² + P numbers, with the number of parameters P; and in a task,
    the gradients of a micro-batch with respect to the largest parameter.

    References
    ----------
    George et al. 2018, "Fast Approximate Natural Gradient Descent in a Kronecker-factored
    Eigenbasis"; Grosse et al. 2023, "Studying Large Language Model Generalization with Influence
    Functions"; the matrices of the axes are from Gupta et al. 2018, "Shampoo".

    Examples
    --------
    >>> import numpy as np, torch, trakdask as td
    >>> samples = td.from_arrays({"image": np.eye(4, dtype="f4"), "label": np.arange(4) % 3})
    >>> model = td.Model(torch.nn.Linear(4, 3), task="image_classification")
    >>> projector = td.fits.curvature(samples, model, leading=4, progress=False).then(td.SJLT(4))
    >>> td.featurize(samples, model, projector).sizes["proj_dim"]
    8
    """
    if not 0 <= damping < np.inf:
        raise ValueError(f"expected a finite damping >= 0, got {damping!r}; try damping=10")
    leading = require_integer("leading", leading, 0, remedy="try leading=1024")
    require_model(model)
    one_by_one = (model.at_checkpoints([checkpoint.name]) for checkpoint in model.checkpoints)
    prepared = [
        prepare(samples, one, projector=Identity(), adds_up=True, **options) for one in one_by_one
    ]
    weights = with_gram(xr.Dataset(attrs=prepared[0].attrs), estimator).of_sums()
    with block_bar("curvature", 2 * len(prepared[0].rows) * len(prepared), show=progress):
        (both,) = dask.compute([_lazy_curvature(each, weights.power) for each in prepared])
    fits = []
    for one, (vectors, values) in zip(prepared, both, strict=True):
        scale = scale_of(values[:, 0], one.job.model.shapes, damping)
        kept = leading_coordinates(values[:, 0] * scale.astype(np.float64) ** 2, leading)
        arrays = {
            "curvature_eigenvectors": vectors,
            "curvature_scale": scale[:, None],
            "curvature_leading": kept[:, None],
        }
        step = Curvature(float(damping), weights.power, len(kept))
        fits.append(Fitted(()).with_arrays(step, arrays, model_of(one.attrs)))
    return Fitted.joined(fits)


def _lazy_curvature(prepared: GraphInputs, power: float | None) -> tuple[da.Array, da.Array]:
    """Return eigenvectors (entry, checkpoint) and mean eigenvalues (coordinate, checkpoint).

    Two passes over the samples, a task for every block of each; their sums are added up in a tree.
    """
    job, token = prepared.job, tokenize(prepared.token, power)
    shapes, n_coordinates = job.model.shapes, job.row_map.n_parameters
    n_entries = max((place.stop for *_, place in factors_of(shapes)), default=0)

    def summed(kind: Any, length: int, title: str, *eigenvectors: Any) -> da.Array:
        blocks = block_tasks(
            partial(_add_up_block, kind, power, length), "sec", prepared, token, *eigenvectors,
            new_axes={"e": length}, adjust_chunks={"s": 1}, name=f"{title}-{token}",
            dtype=np.float64,
        )  # fmt: skip
        return kept_blocks(blocks).sum(axis=0, split_every=4)

    sums = summed(AxisProducts, n_entries, "axis-products", None, None)
    vectors = da.map_blocks(eigenvectors_of, sums, shapes, dtype=np.float32)
    squares = summed(SquaredCoordinates, n_coordinates, "squares", vectors, "xc")
    return vectors, squares / sum(prepared.rows)


def _add_up_block(
    kind: type[AxisProducts | SquaredCoordinates],
    power: float | None,
    length: int,
    job: FeaturizeJob,
    item: np.ndarray,
    rows: tuple[slice],
    eigenvectors: np.ndarray | None,
    *arrays: np.ndarray,
) -> np.ndarray:
    """Return sums over a block, (1, length, 1) float64, with weights q^power (1 - q), or 1."""
    (checkpoint, _), total = item.item(), np.zeros(length)
    task, shapes = job.model.task, job.model.shapes
    with running(job, checkpoint, rows, arrays) as samples:

        def open_stream(forward: Forward, batch: Batch) -> Stream:
            h = torch.ones(batch.size)
            if power is not None:  # a forward pass of its own, before the gradients
                q = out_to_loss_of(forward, task, batch).numpy(force=True)
                h = torch.tensor(gram_weights(q, power), dtype=torch.float32)
            return kind(shapes, h.to(samples.device), total)

        matrices = None
        if eigenvectors is not None:
            matrices = rotations(eigenvectors[:, 0], shapes, samples.device)
        run_samples(samples, checkpoint, 0, open_stream, matrices)
        if not np.isfinite(total).all():
            raise ValueError(
                "expected finite gradients for the curvature, got NaN or infinity; try "
                "td.featurize(samples, model, on_error='record'), which says in which samples"
            )
    return total[None, :, None]
