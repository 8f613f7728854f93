"""Attribution in one call: fit, featurize, save, score."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import xarray as xr

from trakdask.attribution.scores import score
from trakdask.featurization.lazy import featurize
from trakdask.fits import fit
from trakdask.models.model import Model
from trakdask.saving import save

_OF_FEATURES = ("gradients", "batch_size", "dtype", "device")
"""Options of ``fit`` that ``featurize`` has, too."""


def attribute(
    train: xr.Dataset,
    test: xr.Dataset,
    model: Model,
    store: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    progress: bool = True,
    **options: Any,
) -> xr.DataArray:
    """Score training samples for test samples, with features that a store keeps.

    Does what these lines do, and goes on where an earlier call stopped::

        projector = td.fit(train, model, store=store)
        features = td.save(td.featurize(train, model, projector), store)
        targets = td.featurize(test, model, like=features).persist()
        scores = td.score(features, targets)

    Parameters
    ----------
    train, test
        Training samples, and the samples whose outputs are attributed, as in :func:`featurize`.
    model
        The model, with its checkpoints.
    store, storage_options
        Where the features of the training samples are kept, as in :func:`save`.
    progress
        Show bars; and after ten seconds, if it will all take more than a minute, how long, and what
        would be cheaper.
    **options
        Passed on to :func:`fit`; ``gradients``, ``batch_size``, ``dtype`` and ``device`` are also
        those of the features.

    Returns
    -------
    Lazy DataArray ``score`` (sample, target), as :func:`score` returns it. The features of the
    targets are computed already, so that questions do not run the model again.

    Raises
    ------
    StoreMismatchError, StoreBusyError, FileExistsError, BlockError, OSError
        As :func:`fit` and :func:`save`.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np, torch, trakdask as td
    >>> samples = td.from_arrays({"x": np.eye(4, dtype="f4"), "y": np.arange(4, dtype="f4")})
    >>> model = td.Model(torch.nn.Linear(4, 1), task=td.tasks.Regression(inputs="x", target="y"))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = f"{folder}/f.zarr"
    ...     scores = td.attribute(samples, samples, model, store, proj_dim=3, progress=False)
    ...     scores.dims
    ('sample', 'target')
    """
    where: dict[str, Any] = {"storage_options": storage_options, "progress": progress}
    projector = fit(train, model, store=store, **where, **options)
    # The fit takes gradients, too, and these options say how; the others are its own.
    of_features = {name: options[name] for name in _OF_FEATURES if name in options}
    features = save(featurize(train, model, projector, **of_features), store, **where)
    targets = featurize(test, model, like=features, **of_features).persist()
    return score(features, targets)
