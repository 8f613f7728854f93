"""Fit a projector to a model: the curvature, and the principal components of the sketch."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import dask
import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.bars import block_bar, duration
from trakdask.checks import require_flags, require_integer, shown
from trakdask.errors import IncompleteFeaturesError
from trakdask.featurization.lazy import featurize
from trakdask.featurization.preparation import inputs_of, model_of, projector_of, require_model
from trakdask.files import Folder
from trakdask.fits.components import with_components
from trakdask.fits.curvatures import curvature_with, differentiates_words, kept_axes, writes_words
from trakdask.fits.following import follows_better_without, totals_of
from trakdask.fits.keeping import kept_blocks, kept_fits
from trakdask.fits.moments import MomentsLike, second_moments
from trakdask.fits.weights import FACTS, scores_by_group, weighted, weights_of
from trakdask.models.model import Model
from trakdask.models.tasks.protocol import task_facts
from trakdask.models.tasks.supervised import Classification, WrongClass
from trakdask.planning.fits import N_CURVATURE, N_WEIGHTS, sketch_of
from trakdask.projection import Projector
from trakdask.projection.fitted import Fitted
from trakdask.projection.protocol import from_spec
from trakdask.provenance import digest, require_same
from trakdask.samples.array_source import validate_samples
from trakdask.samples.datasets import drawn, drawn_places, source_of
from trakdask.storage.reading import open
from trakdask.storage.writing import kept_beside
from trakdask.tensors import LONGEST_BLOCK, Turning
from trakdask.variables import PROJ_DIM, SAMPLE, WRONG_CLASSES

_FEW_SAMPLES = 500
"""With fewer, the curvature made scores worse on all three tasks of 2026-11-24-recipe.txt."""

_LONG_S = 60.0
"""Whoever waits longer is told how long, and what would be cheaper."""

_WIDEST_MATRIX = 8192
"""The matrix of wider features takes more memory than it is worth."""

_SOFT_POWER = 0.5
"""a, the power in the gram matrix of ``Soft``."""


def fit(
    samples: xr.Dataset,
    model: Model,
    proj_dim: int = 1024,
    *,
    curvature: bool | Literal["auto"] = "auto",
    weights: bool | Literal["auto"] = "auto",
    components: bool = True,
    sketch: Projector | Literal["auto"] = "auto",
    moments: MomentsLike | None = None,
    n_samples: int = 2000,
    store: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: bool = True,
    **options: Any,
) -> Fitted:
    """Fit a projector to a model, which makes features of few columns that predict well.

    A random projection treats all directions of a gradient alike. A fitted one scales gradients by
    the curvature of the loss, sketches them, and keeps the directions in which the gradients of
    your samples differ most. Features take half of the space and predict better. For models of
    texts, layers also get weights. For a classifier of several classes the fit also measures how
    the loss curves between the wrong classes, which :class:`Soft` adds to the gram matrix. Features
    keep the fit, so that targets are made by ``td.featurize(test, model, like=features)``.

    Parameters
    ----------
    samples
        Training samples, as in :func:`featurize`.
    model
        The model, at all checkpoints that features are to be computed for.
    proj_dim
        Columns of the features; fewer, where fewer samples are fitted. Models of images need few,
        texts and more samples need many.
    curvature
        Whether gradients are scaled by :func:`~trakdask.fits.curvature`, half of the sketch being
        leading coordinates. ``"auto"`` leaves it out if there are ``moments``, or fewer than 500
        samples to fit it to, where it made scores worse; or if a classifier's outputs follow the
        sums of scores clearly better without it, as after a short training, or with few samples of
        a class. The store decides where there is one.
    weights
        Whether the gradients of each layer are multiplied by a weight: see Notes. ``"auto"`` says
        yes for models of tokens, which have an ``Embedding`` or a task of texts, if a matrix of
        tokens is among the parameters, or as the store has it. Elsewhere weights made scores worse
        more often than better.
    components
        Whether the sketch is reduced by :func:`~trakdask.fits.principal_components`. Without it,
        the sketch itself gets ``proj_dim`` columns.
    sketch
        The projector that gradients meet first. ``"auto"``: an :class:`SJLT` of up to a quarter as
        many columns as the model has parameters, but 4,096 to 32,768; or that of the store.
    moments
        Adam's second moments at each checkpoint, as in :func:`~trakdask.fits.second_moments`.
    n_samples
        How many of the samples the components are fitted to, and up to 600 of them the curvatures;
        all of them for models of tokens. They are drawn at random, always the same ones.
    store, storage_options
        Where the features will be saved, as in :func:`save`. The fit of checkpoints whose features
        it has is taken from there. Fits of other checkpoints are kept beside, in a folder whose
        name ends in ``.fit``, until :func:`save` has stored them, and so is each block of a pass
        until the pass is done: a kill loses the blocks in flight, and the same call goes on.
    progress
        Show a bar of blocks of samples, over all passes and checkpoints, with the time left; and
        after ten seconds, if it will all take more than a minute, what would be cheaper.
    **options
        ``gradients``, ``batch_size``, ``dtype`` and ``device`` of :func:`featurize`.

    Returns
    -------
    The projector, in memory.

    Raises
    ------
    TypeError, ValueError, BlockError
        As :func:`featurize` and the functions of its steps.
    StoreMismatchError
        If the features of the store were made by a projector that was fitted in another way.

    Notes
    -----
    A parameter has much weight if scores by its gradients alone agree between your checkpoints, and
    if these gradients have many directions. The weight α multiplies gradients after the scale of
    the curvature; biases and other vectors have one together. α = (R D)², times a number for all.
    D = tr(K)² / tr(K²) is the number of directions of the products K of these gradients, each with
    the weight of its sample in the gram matrix. R = C r / (1 + (C - 1) r), for C checkpoints, is
    the reliability of scores that K alone gives, whose mean correlation between two checkpoints is
    r. With one checkpoint R is 1; only in a causal language model all but the layer that writes
    words have √0.03. A matrix with less than 1 % of the weighted squared length has the weight 0,
    and features are made without its gradients. :func:`trakdask.plots.weights` draws the weights,
    which are in the first of ``steps`` of the projector, and in attrs of its features. Checkpoints
    that are appended to a store have the weights of the store.

    The projector also has the features of these ``n_samples``, which :func:`featurize` then need
    not compute again.

    It is computed at once, on the active client or on threads, at as many checkpoints side by side
    as there are tasks for. Until they are summed, a store on the disk of workers keeps 8 bytes for
    each parameter and each entry of an axis' matrix, of every block. Cost:
    one pass over ``n_samples`` samples, four over 600 of them (two for the curvature, one to ask
    whether it helps, one for the wrong classes). Models of tokens, which are not asked, take all
    samples in their place, and 300 for weights. Then come the eigenvectors of all products.
    Memory does not grow with the number of all samples.

    Examples
    --------
    >>> import numpy as np, torch, trakdask as td
    >>> samples = td.from_arrays({"image": np.eye(4, dtype="f4"), "label": np.arange(4) % 3})
    >>> model = td.Model(torch.nn.Linear(4, 3), task="image_classification")
    >>> projector = td.fit(samples, model, 3, sketch=td.SJLT(8), progress=False)
    >>> td.featurize(samples, model, projector).sizes["proj_dim"]
    3
    """
    require_model(model)
    n_samples = require_integer("n_samples", n_samples, 1, remedy="try n_samples=2000")
    proj_dim = require_integer("proj_dim", proj_dim, 1, remedy="try proj_dim=1024")
    require_flags(components=components, progress=progress)
    for option, value in (("curvature", curvature), ("weights", weights)):
        if value not in (True, False, "auto"):
            raise ValueError(
                f"expected {option}=True, False or 'auto', got {shown(value)}; try 'auto'"
            )
    features = None
    if store is not None:
        with suppress(FileNotFoundError, IncompleteFeaturesError):
            features = open(store, load_coords=False, storage_options=storage_options)
    before = {} if features is None else json.loads(features.attrs.get("fitted_to", "{}"))
    if sketch == "auto":  # a store goes on with the sketch that it has
        known = before.get("sketch")
        sketch = sketch_of(model.shapes) if known is None else from_spec(known)
    if not isinstance(sketch, Projector):
        raise TypeError(
            f"expected a projector as sketch, got {sketch!r}; try sketch=td.SJLT(proj_dim=8192)"
        )
    if not components and hasattr(sketch, "proj_dim"):
        sketch = replace(sketch, proj_dim=proj_dim)  # type: ignore[call-arg]
    samples = validate_samples(samples)
    part = drawn(samples, n_samples, samples.chunksizes[SAMPLE][0])
    n_few = n_samples if model.reads_tokens else N_CURVATURE
    few = drawn(part, n_few, part.chunksizes[SAMPLE][0])
    stored = None if features is None else projector_of(features)
    is_asked = False  # whether outputs decide
    if curvature == "auto":
        curvature = moments is None and part.sizes[SAMPLE] >= _FEW_SAMPLES
        if stored is not None:
            curvature = curvature and before.get("curvature", True)
        elif curvature and not model.reads_tokens and weights is not True:
            is_asked = task_facts(model.task).get("loss_kind") == "cross-entropy"
    known_step = None if stored is None else stored.curvature
    kept_weights = None if known_step is None else known_step.weights
    turning = Turning(kept_axes(model), LONGEST_BLOCK)
    if known_step is not None:
        turning = known_step.turning
    if weights == "auto":
        weights = differentiates_words(model) if stored is None else kept_weights is not None
        weights = bool(weights and curvature)
    if weights and not curvature:
        raise ValueError(
            "expected curvature=True, whose scale is what weights multiply, got "
            f"weights=True for {part.sizes[SAMPLE]} samples without it; try weights=False"
        )
    weights = bool(weights)
    read = inputs_of(part, model.for_variables({str(n): a.ndim for n, a in part.variables.items()}))
    source = source_of(part.drop_vars([n for n in part.data_vars if n not in read]), read)
    n_components = min(proj_dim, part.sizes[SAMPLE])
    first = Fitted(()) if moments is None else second_moments(model, moments, progress=False)
    asked = {
        "proj_dim": proj_dim, "curvature": curvature, "weights": weights, "components": components,
        "sketch": sketch.spec(), "n_samples": n_samples, "samples": source, **options,
    }  # fmt: skip
    folder = None if store is None else kept_beside(Folder.at(store, storage_options))
    if stored is not None:
        before.setdefault("weights", kept_weights is not None)  # as older stores do not say it
        what = f"the projector that is asked for and the one of {os.fspath(store or '')!r}"
        require_same(
            json.loads(json.dumps(asked, sort_keys=True)), before, what=what, names=tuple(asked)
        )

    # 1. The store has some checkpoints; what was kept of the others is not computed again.
    names = [checkpoint.name for checkpoint in model.checkpoints]
    known = [] if stored is None else [n for n in names if n in stored.model["checkpoints"]]
    todo = [name for name in names if name not in known]
    n, n_few = (len(each.chunksizes[SAMPLE]) for each in (part, few))
    n_weights = 1 if few.sizes[SAMPLE] > N_WEIGHTS else n_few  # one block, if they are drawn
    is_measured = weights and stored is None  # those of a store stay
    of_curvature = (2 * n_few + n_weights * is_measured + n_few * is_asked) * curvature
    of_sketch = n * components + n_few * compares_classes(model.task)

    def kept(step: str, digests: Mapping[str, Any], total: int, compute: Any) -> dict[str, Fitted]:
        files = {}
        for name in todo:
            of_one = model.at_checkpoints([name]).spec()
            of = {**asked, "model": of_one, "before": digests.get(name)}
            of["facts"] = [is_measured, is_asked, turning]
            files[name] = f"{step}-{digest(of)[:32]}.npz"
        return kept_fits(folder, files, model, compute, n, total)

    total = len(todo) * (of_curvature + of_sketch)
    n_fewer = -(-part.sizes[SAMPLE] // 4)
    # Features of what is fitted come with the fit, and only those of the others are left.
    n_others = samples.sizes[SAMPLE] - part.sizes[SAMPLE] * components
    n_later = len(todo) * -(-n_others // samples.chunksizes[SAMPLE][0])
    places = source_of(samples, read), drawn_places(samples.sizes[SAMPLE], n_samples)
    tell = partial(_estimate, n_later, n_fewer)
    with block_bar("fit", total, show=progress, estimate=tell):
        # 2. The scale of gradients at each checkpoint, and the weights that all of them have.
        steps = {name: first.at_checkpoints([name]) for name in todo}
        n_leading, rest = 0, sketch
        if curvature:
            compute = partial(_curvature, few, options, is_measured, is_asked, turning)
            scales = kept("curvature", {}, of_curvature, compute)
            totals = [fit.arrays["totals"] for fit in scales.values() if is_asked]
            curvature = not (is_asked and follows_better_without(np.concatenate(totals, -1)))
        if curvature:
            columns: int | None = getattr(sketch, "proj_dim", None)
            if columns is not None:  # else the whole gradient has room for all
                n_leading = columns // 2  # half of them are leading coordinates
                rest = replace(sketch, proj_dim=columns - n_leading)  # type: ignore[call-arg]
            if is_measured and scales:
                facts = {n: [fit.arrays[n] for fit in scales.values()] for n in FACTS}
                whole = {n: np.concatenate(parts, -1) for n, parts in facts.items()}
                kept_weights = weights_of(whole, model.shapes, writes_words(model))
            for name, fit in scales.items():
                steps[name] = weighted(fit, kept_weights, model.shapes, n_leading)
        # 3. At each checkpoint, the sketch, its components, and how it curves between classes.
        digests = {name: dict(fit.digests) for name, fit in steps.items()}
        n_columns = n_components if components else 0
        run = partial(_sketched, part, few, options, steps, rest, n_columns, places)
        done = kept("sketch", digests, of_sketch, run)
    if stored is not None:
        done |= {name: stored.at_checkpoints([name]) for name in known}
    origin = json.dumps({**asked, "curvature": curvature}, sort_keys=True)
    return replace(Fitted.joined([done[name] for name in names]), origin=origin)


def _estimate(n_blocks: int, n_fewer: int, left_s: float, block_s: float) -> str:
    """Say how long a fit and features of so many blocks will take, if it is more than a minute.

    Examples
    --------
    >>> _estimate(100, 500, 1.6, 0.1)
    ''
    >>> text, cheaper, _ = _estimate(100, 500, 48.0, 3.0).replace("; ", ". ").split(". ", 2)
    >>> text, cheaper
    ('The fit takes about 48 s more, and features of all samples then about 5 min',
     'Cheaper: td.fit(..., n_samples=500) fits fewer samples')
    >>> _estimate(0, 500, 61.0, 3.0).partition(".")[0]
    'The fit takes about 61 s more'
    """
    features_s = n_blocks * block_s
    if left_s + features_s < _LONG_S:
        return ""
    then = f", and features of all samples then about {duration(features_s)}" * bool(n_blocks)
    return (
        f"The fit takes about {duration(left_s)} more{then}. Cheaper: "
        f"td.fit(..., n_samples={n_fewer}) fits fewer samples; "
        "td.Model(..., parameters=...) differentiates fewer layers; "
        "td.save(td.featurize(samples, model), store) has random columns, and needs no fit"
    )


def _curvature(
    few: xr.Dataset,
    options: Mapping[str, Any],
    has_weights: bool,
    is_asked: bool,
    turning: Turning,
    model: Model,
) -> Fitted:
    """Return the curvature, with what says how much parameters, or the curvature, are believed."""
    fit = curvature_with(turning, few, model, **options)
    if has_weights:
        return fit.beside(scores_by_group(few, model, fit, **options))
    return fit.beside({"totals": totals_of(few, model, fit, **options)}) if is_asked else fit


def _sketched(
    part: xr.Dataset,
    few: xr.Dataset,
    options: Mapping[str, Any],
    steps: Mapping[str, Fitted],
    sketch: Projector,
    n_components: int,
    places: tuple[str, np.ndarray],
    model: Model,
) -> Fitted:
    """Return the whole projector, with the curvature between wrong classes."""
    parts = [steps[checkpoint.name] for checkpoint in model.checkpoints]
    fit = Fitted.joined(parts) if parts[0].arrays else parts[0]
    if fit.arrays:  # parameters without weight need no gradients
        model = model.differentiating(fit.differentiated(model.shapes))
    fit = fit.then(sketch)
    if n_components:
        wide = featurize(part, model, fit, **options)
        fit = with_components(wide, n_components, fit, places)
    matrix = wrong_classes(few, model, fit, **options)
    fit = replace(fit, model=model_of(model.spec()))
    return fit if matrix is None else fit.beside({WRONG_CLASSES: matrix})


def wrong_classes(
    samples: xr.Dataset, model: Model, projector: Fitted, **options: Any
) -> np.ndarray | None:
    """Return the mean of 2 √q ψ ψᵀ over samples, (proj_dim, proj_dim_1, checkpoint) float32.

    It is how the loss bends between the wrong classes, which the gram matrix of a classifier lacks.
    None if the task does not compare the correct class with several wrong ones, by their logits, or
    features are very wide.

    The gram matrix knows how steep the loss is along the gradient of the margin between the correct
    class and all others. A classifier's loss also bends where probability moves from one wrong
    class to another. With r as the distribution over the wrong classes, and logits with a constant
    derivative v, the loss with the gradient -q^a ∇f has the Hessian

        a q^a (1 - q) ∇f ∇fᵀ + q^a vᵀ (diag r - r rᵀ) v.

    Divided by a, the first term is the one of the gram matrix of ``Soft``. In the second one,
    diag r - r rᵀ = E_k[(e_k - r)(e_k - r)ᵀ] for k drawn from r, and vᵀ (e_k - r) = ∇ log r_k. Here
    k is the most likely wrong class, not a drawn one, so that no seed matters: the matrix is the
    mean of 2 √q ψ ψᵀ, where ψ is the projection of ∇ log r_k. It is 0 for two classes.

    A part of the samples will do, because the matrix is a mean. It stays the same when samples are
    appended or dropped. Its pass costs as much as the features of these samples.
    """
    model = model.for_variables({str(n): array.ndim for n, array in samples.variables.items()})
    task, between = model.task, copy.copy(model)
    if not compares_classes(task):
        return None
    assert isinstance(task, Classification)
    between.task = WrongClass(task)
    features = featurize(samples, between, projector, **options)
    if features.sizes[PROJ_DIM] > _WIDEST_MATRIX:
        return None
    q = features.out_to_loss.data[:, None, :]
    both = da.concatenate([features.feature.data, q], axis=1).rechunk({1: -1})
    kept = [kept_blocks(both[..., i : i + 1]) for i in range(both.shape[2])]
    totals = [arrays.gram.gram(x[:, :-1], x[:, -1] ** _SOFT_POWER / _SOFT_POWER) for x in kept]
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
