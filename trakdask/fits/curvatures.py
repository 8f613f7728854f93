"""Fit the curvature of the loss to samples: sums over them, and the matrices behind it.

The small matrices of the axes come from per-sample gradients alone, Σ h M Mᵀ for each axis of a
parameter, as in Shampoo. So every engine and every kind of layer works, and no layer needs a rule.
The eigenvalues are measured in the coordinates of the eigenvectors, and not multiplied from the
eigenvalues of the axes, which makes the difference between K-FAC and EK-FAC.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cache, partial
from typing import Any

import dask
import dask.array as da
import numpy as np
import torch
import xarray as xr
from dask.base import tokenize
from torch import Tensor, nn

from trakdask.arrays.weights import gram_weights
from trakdask.attribution.estimators import EstimatorLike, with_gram
from trakdask.bars import block_bar
from trakdask.checks import require_integer
from trakdask.featurization.block import run_samples, running
from trakdask.featurization.graphs import GraphInputs, block_tasks
from trakdask.featurization.job import FeaturizeJob
from trakdask.featurization.preparation import model_of, prepare, require_model
from trakdask.fits.keeping import kept_blocks
from trakdask.models.gradients import out_to_loss_of
from trakdask.models.model import EMBEDDINGS, Model
from trakdask.models.products import wide
from trakdask.models.rules import output_axis
from trakdask.models.tasks import Batch, Forward
from trakdask.models.tasks.language import CausalLM, TokenClassification
from trakdask.projection import Identity
from trakdask.projection.fitted import Curvature, Fitted
from trakdask.projection.maps import Stream
from trakdask.tensors import (
    LONGEST_BLOCK,
    Scratch,
    Shapes,
    Turning,
    axes_of,
    factors_of,
    float64_device,
    in_float64,
    places_of,
    rotations,
)

SKETCHED_COLUMNS = 16
"""Columns to which M is reduced by random signs R before M Mᵀ is added up.

If the sum of all products of elements is a Kronecker product, Σ h M C Mᵀ is the same matrix for
every C, up to a factor. So R Rᵀ in the place of the identity saves nearly all of the work.
"""

NOISE = (8 * float(np.finfo(np.float32).eps)) ** 2
"""Share of the largest mean square of a parameter's gradients below which others are rounding.

Some gradients are 0 in exact arithmetic, as of a bias of attention's keys, or in front of a
normalization: terms as large as other gradients cancel. In float32 a few units of their last digit
remain, which other batch sizes change. To divide by them would make features of them.
"""

_SHORT_AXIS = 512
"""Longest axis whose products are added up in float64.

In float32 the eigenvectors of eigenvalues that are far below the largest turn with the batch size.
For longer axes the products would take too much of a fit's time.
"""

_COLUMNS = 65536
"""Columns of gradients that are squared at a time: with fewer, calls of torch take longer."""

_scratch = Scratch()


def curvature(
    samples: xr.Dataset,
    model: Model,
    *,
    damping: float = 10.0,
    leading: int = 1024,
    block: int | None = LONGEST_BLOCK,
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
    block
        How many coordinates of an axis share eigenvectors: longer axes are divided into parts as
        equal as can be, such as queries, keys and values, because to turn long axes takes most of
        the time. None for whole axes, also of outputs, as in EK-FAC.
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

    - ``curvature_eigenvectors`` (entry, checkpoint) float32: a matrix for each block of each axis
      of a parameter (of a kernel: out, in, and all places together), unless the axis is longer than
      4096, or is that of a layer's outputs;
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
    lengths of the blocks of its axes. Memory: Σd² + P numbers, with the number of parameters P; and
    in a task, the gradients of a micro-batch with respect to the largest parameter.

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
    require_model(model)
    if block is not None:
        block = require_integer("block", block, 1, remedy="try block=1024, or None for whole axes")
    return curvature_with(
        Turning({} if block is None else kept_axes(model), block), samples, model,
        damping=damping, leading=leading, estimator=estimator, progress=progress, **options,
    )  # fmt: skip


def kept_axes(model: Model) -> dict[str, int]:
    """Return, by matrix, the axis that keeps its coordinates: that of the outputs of its layer.

    Each output is a neuron, which other samples use than its neighbours do. A mixture of neurons is
    used by all samples, so that its eigenvalue says less: with three checkpoints MNIST lost 0.052,
    and a wide perceptron 0.077 (``2026-11-30-outputs.txt``). An embedding has no neurons, unless
    words are also written with it, and is turned as a whole.
    """
    module = model.meta_module()
    layers = (part for part in module.modules() if not isinstance(part, EMBEDDINGS))
    axes = {id(x): output_axis(layer) for layer in layers for x in layer.parameters(recurse=False)}
    return {
        name: axes[id(tensor)]
        for name, tensor in module.named_parameters()
        if name in model.shapes and tensor.ndim > 1 and id(tensor) in axes
    }


def writes_words(model: Model) -> str | None:
    """Return the matrix that makes logits of words, in a causal language model; else None."""
    if not isinstance(model.task, CausalLM) or isinstance(model.task, TokenClassification):
        return None
    module = model.meta_module()
    named = getattr(module, "get_output_embeddings", lambda: None)()
    layers = [part for part in module.modules() if isinstance(part, nn.Linear)]
    last = getattr(named or layers[-1], "weight", None) if named or layers else None
    named_as = (name for name, tensor in module.named_parameters() if tensor is last)
    return next((name for name in named_as if name in model.shapes), None)


def differentiates_words(model: Model) -> bool:
    """Return whether a matrix of words is among the parameters of a model that reads tokens.

    Also if no module says which matrix this is. Else, as with adapters, all layers are alike.
    """
    if not model.reads_tokens or writes_words(model) is not None:
        return model.reads_tokens
    module = model.meta_module()
    embeddings = (part for part in module.modules() if isinstance(part, EMBEDDINGS))
    of_words = {id(part.weight) for part in embeddings}
    selected = {id(tensor) for n, tensor in module.named_parameters() if n in model.shapes}
    return not of_words or not of_words.isdisjoint(selected)


def curvature_with(
    turning: Turning, samples: xr.Dataset, model: Model, *, damping: float = 10.0,
    leading: int = 0, estimator: EstimatorLike = "auto", progress: bool = False, **options: Any,
) -> Fitted:  # fmt: skip
    """Do as :func:`curvature`, with the axes that a store turns."""
    if not 0 <= damping < np.inf:
        raise ValueError(f"expected a finite damping >= 0, got {damping!r}; try damping=10")
    leading = require_integer("leading", leading, 0, remedy="try leading=1024")
    one_by_one = (model.at_checkpoints([checkpoint.name]) for checkpoint in model.checkpoints)
    prepared = [
        prepare(samples, one, projector=Identity(), adds_up=True, **options) for one in one_by_one
    ]
    weights = with_gram(xr.Dataset(attrs=prepared[0].attrs), estimator).of_sums()
    with block_bar("curvature", 2 * len(prepared[0].rows) * len(prepared), show=progress):
        (both,) = dask.compute([_lazy_curvature(each, weights.power, turning) for each in prepared])
    fits = []
    for one, (vectors, values) in zip(prepared, both, strict=True):
        scale = scale_of(values[:, 0], one.job.model.shapes, damping)
        kept = leading_coordinates(values[:, 0] * scale.astype(np.float64) ** 2, leading)
        arrays = {
            "curvature_eigenvectors": vectors,
            "curvature_scale": scale[:, None],
            "curvature_leading": kept[:, None],
        }
        step = Curvature(float(damping), weights.power, len(kept), None, *turning)
        fits.append(Fitted(()).with_arrays(step, arrays, model_of(one.attrs)))
    return Fitted.joined(fits)


def _lazy_curvature(
    prepared: GraphInputs, power: float | None, turning: Turning
) -> tuple[da.Array, da.Array]:
    """Return eigenvectors (entry, checkpoint) and mean eigenvalues (coordinate, checkpoint).

    Two passes over the samples, a task for every block of each; their sums are added up in a tree.
    """
    job, token = prepared.job, tokenize(prepared.token, power, turning)
    shapes, n_coordinates = job.model.shapes, job.row_map.n_parameters
    n_entries = max((place.stop for *_, place in factors_of(shapes, turning)), default=0)

    def summed(kind: Any, length: int, title: str, *eigenvectors: Any) -> da.Array:
        blocks = block_tasks(
            partial(_add_up_block, kind, power, turning, length),
            "sec", prepared, token, *eigenvectors,
            new_axes={"e": length}, adjust_chunks={"s": 1}, name=f"{title}-{token}",
            dtype=np.float64,
        )  # fmt: skip
        return kept_blocks(blocks).sum(axis=0, split_every=4)

    sums = summed(AxisProducts, n_entries, "axis-products", None, None)
    vectors = da.map_blocks(eigenvectors_of, sums, shapes, turning, dtype=np.float32)
    squares = summed(SquaredCoordinates, n_coordinates, "squares", vectors, "xc")
    return vectors, squares / sum(prepared.rows)


def _add_up_block(
    kind: type[AxisProducts | SquaredCoordinates],
    power: float | None,
    turning: Turning,
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
            return kind(shapes, h.to(samples.device), total, turning)

        matrices = None
        if eigenvectors is not None:
            matrices = rotations(eigenvectors[:, 0], shapes, samples.device, turning)
        run_samples(samples, checkpoint, 0, open_stream, matrices)
        if not np.isfinite(total).all():
            raise ValueError(
                "expected finite gradients for the curvature, got NaN or infinity; try "
                "td.featurize(samples, model, on_error='record'), which says in which samples"
            )
    return total[None, :, None]


class Sums:
    """A sink that adds up something over the gradients of a micro-batch, and keeps no rows.

    Parameters
    ----------
    shapes
        The selected parameters.
    weights
        h of each sample, (n,), on the device of the gradients.
    total
        The total, to which the sums are added once all gradients are there: a micro-batch that
        runs out of memory is divided and starts again.
    turning
        Which axes have eigenvectors.
    """

    def __init__(
        self, shapes: Shapes, weights: Tensor, total: np.ndarray, turning: Turning
    ) -> None:
        self._shapes, self._weights, self._total = shapes, weights, total
        device = float64_device(weights.device)
        self._sums = torch.zeros(total.shape, dtype=torch.float64, device=device)

    def result(self) -> Tensor:
        """Add the sums to the total, and return rows without columns."""
        self._total += self._sums.numpy(force=True)
        return torch.empty(len(self._weights), 0)


class AxisProducts(Sums):
    """Adds up Σ h M Mᵀ, the small matrix of every axis, (entry,)."""

    def __init__(
        self, shapes: Shapes, weights: Tensor, total: np.ndarray, turning: Turning
    ) -> None:
        super().__init__(shapes, weights, total, turning)
        self._factors: dict[str, dict[int, list[tuple[slice, slice]]]] = {n: {} for n in shapes}
        for name, axis, columns, place in factors_of(shapes, turning):
            self._factors[name].setdefault(axis, []).append((columns, place))
        self._whole: dict[str, Tensor] = {}

    def __call__(self, name: str, gradient: Tensor, first: int | None = None, /) -> None:
        """Add the gradients of a parameter, (n, numel), or a slice of them."""
        shape = len(gradient), math.prod(self._shapes[name])
        if first is not None:
            # 1. The products take whole gradients. A copy, because the next slice overwrites this.
            stop, like = first + gradient.shape[1], (gradient.dtype, gradient.device)
            if first == 0:
                self._whole[name] = _scratch.take_out("whole", math.prod(shape), *like)
            whole = self._whole[name][: math.prod(shape)].view(shape)
            whole[:, first:stop] = gradient
            if stop < shape[1]:
                return
            gradient = whole
        value = wide(gradient).reshape(len(gradient), *axes_of(self._shapes[name]))
        roots = self._weights.sqrt().to(value)[:, None]
        for axis, blocks in self._factors[name].items():
            # 2. M of each sample, with this axis first: a view, unless it is between two others.
            matrices = value.movedim(axis + 1, 1)
            if axis == value.ndim - 2:
                matrices = value.flatten(1, -2).mT
            elif axis > 0:
                moved = _scratch.take("moved", matrices.shape, value.dtype, value.device)
                matrices = moved.copy_(matrices)
            matrices = matrices.flatten(2)
            # 3. Few columns of it are as good, and only these get the weight.
            if matrices.shape[2] > SKETCHED_COLUMNS:
                matrices = matrices @ signs(matrices.shape[2]).to(matrices)
            rows = (matrices.movedim(1, 0) * roots).flatten(1)
            for columns, place in blocks:
                block = rows[columns]
                block = in_float64(block) if len(block) <= _SHORT_AXIS else block
                self._sums[place] += in_float64((block @ block.T).flatten())
        if name in self._whole:
            _scratch.put_back("whole", self._whole.pop(name))


class SquaredCoordinates(Sums):
    """Adds up Σ h g² of every coordinate, (coordinate,), the eigenvalues times n."""

    def __call__(self, name: str, gradient: Tensor, first: int | None = None, /) -> None:
        """Add the rotated gradients of a parameter, (n, numel), or a slice of them."""
        start = places_of(self._shapes)[name].start + (first or 0)
        # Squares of some columns at a time stay in the cache, and take no new memory.
        for columns in gradient.float().split(_COLUMNS, 1):
            squares = self._weights @ columns.square()
            self._sums[start : start + len(squares)] += in_float64(squares)
            start += len(squares)


@cache
def signs(n_rows: int) -> Tensor:
    """Return the random signs that reduce matrices, (n_rows, 16), the same in every process.

    Models have few lengths of matrices, and to draw the signs takes longer than to use them once.
    """
    draws = np.random.RandomState(0).randint(0, 2, (n_rows, SKETCHED_COLUMNS))
    return torch.from_numpy(2.0 * draws - 1).float()


def eigenvectors_of(sums: np.ndarray, shapes: Shapes, turning: Turning) -> np.ndarray:
    """Return the eigenvectors of the matrix of every block, (entry, ...) float32.

    Examples
    --------
    >>> sums = np.array([1.0, 0, 0, 4, 9, 0, 0, 16])
    >>> eigenvectors_of(sums, {"weight": (2, 2)}, Turning({})).tolist()
    [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0]
    """
    vectors = np.empty(sums.shape, np.float32)
    for _, _, columns, place in factors_of(shapes, turning):
        length = columns.stop - columns.start
        _, turns = np.linalg.eigh(sums[place].reshape(length, length))
        vectors[place] = signed(turns).reshape(sums[place].shape)
    return vectors


def signed(columns: np.ndarray) -> np.ndarray:
    """Return eigenvectors, each with a sign that does not depend on rounding.

    Examples
    --------
    >>> signed(np.array([[-3.0, 4.0], [4.0, 3.0]])).tolist()
    [[3.0, 4.0], [-4.0, 3.0]]
    """
    # A fixed direction, which hardly any eigenvector is perpendicular to.
    direction = np.random.RandomState(0).standard_normal(len(columns))
    return columns * np.where(direction @ columns < 0, -1, 1).astype(columns.dtype)


def rounding_of(squares: np.ndarray, shapes: Shapes) -> dict[str, float]:
    """Return the mean square of each parameter's gradients that may be nothing but rounding.

    The terms that cancel are as large as gradients of the same module, whose size may be far from
    that of other modules, or, of a parameter alone in its module, as any others.

    Examples
    --------
    >>> rounding_of(np.array([4.0, 1.0]), {"0.weight": (1,), "0.bias": (1,)})
    {'0.weight': 3.6...e-12, '0.bias': 3.6...e-12}
    """
    means = {name: float(squares[place].mean()) for name, place in places_of(shapes).items()}
    modules: dict[str, list[float]] = defaultdict(list)
    for name, mean in means.items():
        modules[name.rpartition(".")[0]].append(mean)
    least = NOISE / 64 * max(means.values())
    return {name: max(least, NOISE * max(modules[name.rpartition(".")[0]])) for name in means}


def scale_of(eigenvalues: np.ndarray, shapes: Shapes, damping: float) -> np.ndarray:
    """Return 1/√(Λ + δ Λ̄), with the mean Λ̄ over each parameter; 0 where that is rounding.

    Examples
    --------
    >>> shapes = {"weight": (2,), "bias": (1,)}
    >>> scale_of(np.array([1.0, 7.0, 1e-14]), shapes, damping=2.0).tolist()
    [0.333..., 0.258..., 0.0]
    """
    damped, least = np.zeros_like(eigenvalues), rounding_of(eigenvalues, shapes)
    for name, place in places_of(shapes).items():
        values = eigenvalues[place]
        if values.mean() > least[name]:
            sums = values + damping * values.mean()
            damped[place] = np.where(sums > NOISE * values.max(), sums, 0)
    roots = np.sqrt(np.where(damped > 0, damped, np.inf))
    return (1 / roots).astype(np.float32)


def leading_coordinates(lengths: np.ndarray, n_leading: int) -> np.ndarray:
    """Return the numbers of the coordinates in which scaled gradients are longest, sorted.

    Examples
    --------
    >>> leading_coordinates(np.array([9.0, 4.0, 2.0, 5.0]), 2).tolist()
    [0, 3]
    """
    return np.sort(np.argsort(-lengths, kind="stable")[:n_leading]).astype(np.int64)
