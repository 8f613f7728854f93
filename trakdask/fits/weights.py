"""How much each parameter is believed: weights of its gradients.

A module's scores among training samples are partly noise of the training. Their correlation r
between checkpoints is their reliability, in the sense of test theory, and the mean of C checkpoints
has R = C r / (1 + (C - 1) r) (Spearman-Brown). Scores that agree can still be poor, if gradients
have few directions: D = tr(K)² / tr(K²) of their products K. So gradients of a parameter are
multiplied by (R D)², the square of its reliable directions, after the scale of the curvature.

Biases and other vectors share one weight, because few of them have a gradient that says much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import dask
import numpy as np
import torch
import xarray as xr
from torch import Tensor

from trakdask.arrays.evaluation import mean_agreement
from trakdask.arrays.weights import gram_weights
from trakdask.featurization.block import run_samples, running
from trakdask.featurization.job import FeaturizeJob
from trakdask.featurization.preparation import prepare
from trakdask.fits.curvatures import leading_coordinates
from trakdask.fits.keeping import kept_sketches
from trakdask.models.model import Model
from trakdask.models.tasks import Batch, Forward
from trakdask.planning.fits import N_WEIGHTS
from trakdask.projection import SJLT, Identity, RowMap
from trakdask.projection.fitted import Curvature, Fitted, Weights
from trakdask.projection.maps import Stream
from trakdask.projection.stream import ProjectionStream
from trakdask.samples.datasets import drawn
from trakdask.tensors import Shapes, Turning, factors_of, group_of, groups_of, places_of, rotations
from trakdask.variables import SAMPLE

FACTS = "scores", "traces", "directions"
"""What weights are made of."""

_TARGETS = 100
_WIDEST, _SKETCH_BYTES = 4096, 2**28

_LEAST = 0.01
"""The agreement of scores that do not agree; 0 for all parameters would leave nothing."""

_NEGLIGIBLE = 0.01
"""Groups with a smaller share of the weighted squared length are not differentiated."""

_INNER = 0.03
"""w of all but the layer that writes words, where one checkpoint cannot say that it is noise."""


# ------------------------------------------------------------------------------ at one checkpoint


def scores_by_group(
    samples: xr.Dataset, model: Model, curvature: Fitted, **options: Any
) -> dict[str, np.ndarray]:
    """Return what weights are made of, by group of parameters.

    ``scores`` (sample, target, group, checkpoint) float32 are those of training samples among
    themselves, by this group of parameters alone; ``traces`` and ``directions`` are (group,
    checkpoint). Cost: a pass over 300 samples, and as many³ flops for each group.
    """
    # 1. Sketches of scaled gradients, side by side; a group that is small enough is not sketched.
    some = drawn(samples, N_WEIGHTS, N_WEIGHTS)
    n, groups = some.sizes[SAMPLE], groups_of(model.shapes)
    width = min(_WIDEST, 2 ** math.floor(math.log2(_SKETCH_BYTES / (4 * n * len(groups)))))
    widths = [min(width, _size(model.shapes, names)) for names in groups.values()]
    prepared = prepare(some, model, projector=curvature.then(SJLT(width)), **options)
    step = curvature.curvature
    assert step is not None
    run = partial(_sketch_block, width, sum(widths), step.turning)
    rows = kept_sketches(run, prepared, sum(widths), "sketches")
    # 2. Of each group, products of samples and what follows from them, in a task per checkpoint.
    facts = [dask.delayed(_facts_at)(both, widths, step) for both in rows]
    columns_of = zip(*dask.compute(*facts), strict=True)
    return {name: np.stack(parts, -1) for name, parts in zip(FACTS, columns_of, strict=True)}


def _facts_at(both: np.ndarray, widths: list[int], step: Curvature) -> tuple[np.ndarray, ...]:
    """Return scores, traces and directions at one checkpoint, with groups along the last axis."""
    *of_groups, others = np.split(both, np.cumsum(widths), axis=1)
    n, q, facts = len(both), others[:, -1], []
    h = np.ones(n) if step.power is None else gram_weights(q, step.power)
    roots = np.sqrt(h)
    for x in of_groups:
        wide = x.astype(np.float64)
        kernel = wide @ wide.T
        weighted = roots[:, None] * kernel * roots
        trace, squares = np.trace(weighted), np.square(weighted).sum()
        lam = 10**0.75 * trace / n or 1.0  # as with weights; of gradients that are 0, all is 0
        # Scores φᵀ (Σ h φ φᵀ + λ)⁻¹ φ for the first samples, from products of samples alone.
        solved = np.linalg.solve(weighted + lam * np.eye(n), roots[:, None] * kernel[:, :_TARGETS])
        scores = (kernel[:, :_TARGETS] - (kernel * roots) @ solved) / lam
        directions = np.float64(trace**2 / squares if squares else 0)
        facts.append((scores.astype(np.float32), np.float64(trace / n), directions))
    return tuple(np.stack(parts, -1) for parts in zip(*facts, strict=True))


def _size(shapes: Shapes, names: Sequence[str]) -> int:
    return sum(math.prod(shapes[name]) for name in names)


def _sketch_block(
    width: int, n_columns: int, turning: Turning, job: FeaturizeJob, item: np.ndarray,
    rows: tuple[slice], *arrays: np.ndarray,
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """Return sketches of a block, (sample, column, 1), f and Q."""
    (checkpoint, fit), shapes = item.item(), job.model.shapes
    with running(job, checkpoint, rows, arrays) as samples:
        device = samples.device
        scale = torch.tensor(fit["curvature_scale"], device=device)
        matrices = rotations(fit["curvature_eigenvectors"], shapes, device, turning)

        def open_stream(_: Forward, batch: Batch) -> Stream:
            return _Sketches(shapes, scale, width, batch.size, checkpoint.id)

        return run_samples(samples, checkpoint, n_columns, open_stream, matrices)


class _Sketches:
    """A stream that scales gradients and projects those of each group to columns of their own."""

    def __init__(
        self, shapes: Shapes, scale: Tensor, width: int, n_samples: int, checkpoint: int
    ) -> None:
        self._places, self._scale = places_of(shapes), scale
        self._streams: dict[str, ProjectionStream] = {}
        for names in groups_of(shapes).values():
            projector = SJLT(width) if _size(shapes, names) > width else Identity()
            rows = {name: shapes[name] for name in names}
            row_map = RowMap.from_shapes(rows, alignment=projector.row_alignment)
            stream = ProjectionStream(projector, row_map, n_samples, checkpoint, scale.device)
            self._streams |= dict.fromkeys(names, stream)

    def __call__(self, name: str, gradient: Tensor, first: int | None = None, /) -> None:
        """Take the rotated gradients of a parameter, (n, numel), or a slice of them."""
        start = self._places[name].start + (first or 0)
        scaled = gradient * self._scale[start : start + gradient.shape[1]]
        self._streams[name].add(name, scaled, first)

    def result(self) -> Tensor:
        """Return the sketches of all groups, side by side."""
        return torch.cat([stream.result() for stream in dict.fromkeys(self._streams.values())], 1)


# ------------------------------------------------------------------------------ of all checkpoints


def weights_of(facts: Mapping[str, np.ndarray], shapes: Shapes, writer: str | None) -> Weights:
    """Return the weight of each group, and what it is made of.

    Parameters
    ----------
    facts
        What :func:`scores_by_group` returns, of all checkpoints.
    shapes
        The parameters.
    writer
        The one that writes words, in a causal language model.

    Returns
    -------
    For each group of parameters its ``weight`` α; its ``share`` of the squared length of gradients
    before, so that Σ α² share = 1; ``agreement`` r, of several checkpoints; and the number of
    ``directions``. The weight 0 says that its parameters are not differentiated.
    """
    titles = list(groups_of(shapes))
    share, directions = (facts[name].mean(-1) for name in ("traces", "directions"))
    share = share / share.sum()
    n_checkpoints = facts["scores"].shape[-1]
    agreement = mean_agreement(facts["scores"])
    if n_checkpoints > 1:
        r = np.maximum(agreement, _LEAST)
        alpha = (n_checkpoints * r / (1 + (n_checkpoints - 1) * r) * directions) ** 2
    else:
        is_inner = np.array([writer not in (None, title) for title in titles])
        alpha = np.where(is_inner, math.sqrt(_INNER), 1.0) * directions**2
    lengths = alpha**2 * share
    alpha[lengths < _NEGLIGIBLE * lengths.sum()] = 0
    alpha /= np.sqrt((alpha**2 * share).sum())
    columns = {"weight": alpha, "share": share, "directions": directions}
    if n_checkpoints > 1:
        columns["agreement"] = agreement
    return {
        title: {name: float(f"{column[i]:.6g}") for name, column in columns.items()}
        for i, title in enumerate(titles)
    }


def weighted(curvature: Fitted, weights: Weights | None, shapes: Shapes, n_leading: int) -> Fitted:
    """Return the curvature at one checkpoint with weights in its scale, and other leading columns.

    It lacks parameters whose weight is 0. The eigenvalues are those that the scale was made of:
    Λ s² = 1 - δ mean(Λ) s².
    """
    step, places = curvature.curvature, places_of(shapes)
    assert step is not None
    step = replace(step, weights=weights)
    plain, scales, lengths = curvature.arrays["curvature_scale"], [], []
    for name in (kept := step.differentiated(shapes)):
        s = plain[places[name]].astype(np.float64)
        alpha = weights[group_of(name, shapes)]["weight"] if weights else 1.0
        mean = np.square(1 / s).mean() / (1 + step.damping) if s.any() else 0
        scales.append((alpha * s).astype(np.float32))
        lengths.append(np.where(s > 0, alpha**2 * (1 - step.damping * mean * s**2), 0))
    vectors = curvature.arrays["curvature_eigenvectors"]
    factors = factors_of(shapes, step.turning)
    entries = [vectors[place] for name, _, _, place in factors if name in kept]
    leading = leading_coordinates(np.concatenate(lengths)[:, 0], n_leading)
    arrays = {
        "curvature_eigenvectors": np.concatenate([vectors[:0], *entries]),
        "curvature_scale": np.concatenate(scales),
        "curvature_leading": leading[:, None],
    }
    model = {**curvature.model, "parameters": {n: list(shapes[n]) for n in kept}}
    return Fitted(()).with_arrays(replace(step, leading=len(leading)), arrays, model)
