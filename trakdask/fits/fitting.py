"""Fit a projector to a model: the curvature, and the principal components of the sketch."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import xarray as xr

from trakdask.checks import require_integer, shown
from trakdask.errors import IncompleteFeaturesError
from trakdask.execution import polled_bar
from trakdask.featurization.preparation import inputs_of, model_of, projector_of, require_model
from trakdask.files import Folder
from trakdask.fits.components import principal_components, sketch_for
from trakdask.fits.curvatures import curvature as fit_curvature
from trakdask.fits.moments import MomentsLike, second_moments
from trakdask.fits.wrong_classes import wrong_classes
from trakdask.models.model import Model
from trakdask.projection import Projector
from trakdask.projection.fitted import Fitted
from trakdask.provenance import digest, require_same
from trakdask.samples import drawn, source_of, validate_samples
from trakdask.storage.reading import open
from trakdask.storage.writing import kept_beside
from trakdask.variables import SAMPLE, WRONG_CLASSES

_log = logging.getLogger(__name__)

_FEW_SAMPLES = 500
"""With fewer, the curvature made scores worse on all three tasks of 2026-11-24-recipe.txt."""


def fit(
    samples: xr.Dataset,
    model: Model,
    proj_dim: int = 1024,
    *,
    curvature: bool | Literal["auto"] = "auto",
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
    your samples differ most. Features take half of the space and predict better. For a
    classifier of several classes the fit also measures how the loss curves between the wrong
    classes, which :class:`Soft` adds to the gram matrix. Features keep the fit, so that
    targets are made by ``td.featurize(test, model, like=features)``.

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
        samples to fit it to, where it made scores worse.
    components
        Whether the sketch is reduced by :func:`~trakdask.fits.principal_components`. Without it,
        the sketch itself gets ``proj_dim`` columns.
    sketch
        The projector that gradients meet first. ``"auto"``: an :class:`SJLT` of up to a quarter as
        many columns as the model has parameters, but 8,192 to 32,768.
    moments
        Adam's second moments at each checkpoint, as in :func:`~trakdask.fits.second_moments`.
    n_samples
        How many of the samples are used: they are drawn at random, always the same ones.
    store, storage_options
        Where the features will be saved, as in :func:`save`. The fit of checkpoints whose features
        it has is taken from there. Fits of other checkpoints are kept beside, in a folder whose
        name ends in ``.fit``, until :func:`save` has stored them, so that the same call goes on
        after a kill.
    progress
        Show a bar of fitted checkpoints.
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
    It is computed at once, checkpoint by checkpoint, on the active client or on threads. Cost:
    four passes over ``n_samples`` samples, two of them for the curvature and one for the wrong
    classes, and the eigenvectors of the products of these samples: for the small models of
    ``tests/benchmarks/results/2026-11-24-fits.txt`` about what features of 12,000 samples cost.
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
    if curvature not in (True, False, "auto"):
        raise ValueError(
            f"expected curvature=True, False or 'auto', got {shown(curvature)}; try 'auto'"
        )
    if sketch == "auto":
        sketch = sketch_for(model)
    if not isinstance(sketch, Projector):
        raise TypeError(
            f"expected a projector as sketch, got {sketch!r}; try sketch=td.SJLT(proj_dim=8192)"
        )
    if not components and hasattr(sketch, "proj_dim"):
        sketch = replace(sketch, proj_dim=proj_dim)  # type: ignore[call-arg]
    samples = validate_samples(samples)
    part = drawn(samples, n_samples, samples.chunksizes[SAMPLE][0])
    if curvature == "auto":
        curvature = moments is None and part.sizes[SAMPLE] >= _FEW_SAMPLES
    read = inputs_of(part, model.for_variables({str(n): a.ndim for n, a in part.variables.items()}))
    source = source_of(part.drop_vars([n for n in part.data_vars if n not in read]), read)
    n_components = min(proj_dim, part.sizes[SAMPLE])
    first = Fitted(()) if moments is None else second_moments(model, moments, progress=False)
    asked = {
        "proj_dim": proj_dim, "curvature": curvature, "components": components,
        "sketch": sketch.spec(), "n_samples": n_samples, "samples": source, **options,
    }  # fmt: skip
    origin = json.dumps(asked, sort_keys=True)
    folder = None if store is None else kept_beside(Folder.at(store, storage_options))
    stored = None if store is None else _stored(store, storage_options, json.loads(origin))

    quiet = {**options, "progress": False}  # this bar counts checkpoints

    def fitted(one: Model) -> Fitted:
        steps = first.at_checkpoints(list(one.spec()["checkpoints"]))
        if not curvature:
            steps = steps.then(sketch)
        else:
            n_leading, rest = _halves(sketch)
            steps = fit_curvature(part, one, leading=n_leading, **quiet).then(rest)
        if components:
            steps = principal_components(part, one, n_components, projector=steps, **quiet)
        matrix = wrong_classes(part, one, steps, **options)
        more = {} if matrix is None else {WRONG_CLASSES: matrix}
        steps = replace(steps, arrays={**steps.arrays, **more}, model=model_of(one.spec()))
        known = {name: steps.digest_at(i) for i, name in enumerate(steps.digests)}
        return replace(steps, digests=known)

    parts: list[Fitted] = []
    names = [checkpoint.name for checkpoint in model.checkpoints]
    with polled_bar("fit", len(names), lambda: len(parts), show=progress):
        for name in names:
            one = model.at_checkpoints([name])
            if stored is not None and name in stored.model["checkpoints"]:
                parts.append(stored.at_checkpoints([name]))
                continue
            of = {**asked, "model": one.spec(), "moments": first.digests.get(name)}
            parts.append(_kept(folder, f"{digest(of)[:32]}.npz", partial(fitted, one)))
    return replace(Fitted.joined(parts), origin=origin)


def _stored(
    store: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None,
    asked: Mapping[str, Any],
) -> Fitted | None:
    """Return the projector of the features in a store, None if they are not complete."""
    try:
        features = open(store, load_coords=False, storage_options=storage_options)
    except (FileNotFoundError, IncompleteFeaturesError):
        return None
    what = f"the projector that is asked for and the one of {os.fspath(store)!r}"
    before = json.loads(features.attrs.get("fitted_to", "{}"))
    require_same(asked, before, what=what, names=tuple(asked))
    return projector_of(features)


def _halves(sketch: Projector) -> tuple[int, Projector]:
    """Return how many columns are leading coordinates, and the projector of the others."""
    columns: int | None = getattr(sketch, "proj_dim", None)
    if columns is None:  # the whole gradient has room for all
        return 0, sketch
    return columns // 2, replace(sketch, proj_dim=columns - columns // 2)  # type: ignore[call-arg]


def _kept(folder: Folder | None, name: str, fitted: Callable[[], Fitted]) -> Fitted:
    """Return the fit that a folder has under a name, which is computed and written if it lacks it.

    A file that cannot be read, or holds other values than it says, is computed again.
    """
    if folder is None:
        return fitted()
    try:
        content = dict(np.load(io.BytesIO(folder.read(name))))
        about = json.loads(str(content.pop("about")))
        if about.pop("of") != name:
            raise ValueError("it is of another model, or of other samples or options")
        fit = Fitted.from_spec(about.pop("projector"), arrays=content, **about)
        fit.require_digests()
        return fit
    except FileNotFoundError:
        pass
    except PermissionError:
        raise
    except Exception as err:  # bytes that anybody may have put there fail in many ways
        _log.warning(
            "%s/%s is no kept fit (%s), and is made again", folder.url, name, type(err).__name__
        )
    fit = fitted()
    about = {"of": name, "projector": fit.spec(), "digests": fit.digests, "model": fit.model}
    file = io.BytesIO()
    np.savez(file, about=np.array(json.dumps(about)), **fit.arrays)
    folder.write(name, file.getvalue())
    return fit
