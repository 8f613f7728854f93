"""Leave samples out of a store, and choose its λ anew: what is reduced from it changes."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import xarray as xr

from trakdask.attribution.dampings import require_calibration
from trakdask.storage.group import DROPPED, changing
from trakdask.storage.reading import dropped_mask, open
from trakdask.storage.sums import update_factors, update_sums, weights_of
from trakdask.variables import SAMPLE

__all__ = ["calibrate", "drop"]


def drop(
    store: str | os.PathLike[str],
    *,
    where: xr.DataArray | Callable[[xr.Dataset], xr.DataArray],
    storage_options: Mapping[str, Any] | None = None,
) -> xr.Dataset:
    """Leave samples out of a store from now on, and out of the gram matrix that it keeps.

    Parameters
    ----------
    store
        Folder or fsspec URL that :func:`save` wrote, complete.
    where
        True for the samples to drop: boolean (sample), along what :func:`open` returns; or a
        function of that Dataset, as in ``where=lambda ds: ds.source == "spam"``.
    storage_options
        Given to fsspec with a URL, as xarray does.

    Returns
    -------
    What :func:`open` returns from now on.

    Raises
    ------
    ValueError
        If ``where`` is no boolean (sample), or drops all.
    IncompleteFeaturesError
        If the store is not complete.
    StoreBusyError
        If another process writes the store.

    Notes
    -----
    The features stay on the disk; ``td.open(store, dropped=True)`` shows and marks them. What is
    kept beside them is corrected by the dropped rows alone. Integers give the same bits as a sum
    over what is left; else the difference adds a rounding error like that of the sum itself, as
    long as what goes weighs less (by the trace) than what is left. Where it weighs more, or is not
    finite, the sums of the checkpoint are reduced again from what is left. Where λ and the
    eigenvectors of the gram matrix are stored, they are computed again, with λ chosen by training
    samples.

    Examples
    --------
    >>> import tempfile
    >>> import trakdask as td
    >>> features = td.testing.simulate_features(n_samples=8, proj_dim=4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = td.save(features, f"{folder}/f.zarr", progress=False)
    ...     left = td.drop(f"{folder}/f.zarr", where=saved.label == 1)
    ...     left.sizes["sample"]
    4
    """
    with changing(store, storage_options, "td.drop") as group:
        group.require_complete()
        chosen = _chosen(open(store, storage_options=storage_options), where)
        if chosen.any():
            before, mask = copy.deepcopy(group), dropped_mask(group)
            mask[np.flatnonzero(~mask)[chosen]] = True
            group.write_small({DROPPED: xr.Variable(SAMPLE, mask)})
            update_sums(before, group, weights_of(before), gone=mask)
            update_factors(before, group)
    return open(store, storage_options=storage_options)


def _chosen(ds: xr.Dataset, where: Any) -> np.ndarray:
    """Return which of the samples are to be dropped."""
    mask = where(ds) if callable(where) else where
    content = f"{mask!r:.60} ({type(mask).__name__})"
    if isinstance(mask, xr.DataArray):
        content = f"{mask.dtype} {dict(mask.sizes)}"
        if mask.dtype == bool and dict(mask.sizes) == {SAMPLE: ds.sizes[SAMPLE]}:
            chosen = np.asarray(mask.values)
            if not chosen.all():
                return chosen
            content = f"true for all {len(chosen)}"
    raise ValueError(
        f"expected where= as a boolean DataArray ({SAMPLE}: {ds.sizes[SAMPLE]}), true for some "
        f"samples, or a function that returns one, got {content}; try "
        "where=lambda ds: ds.source == 'spam', with a coord of yours"
    )


def calibrate(
    store: str | os.PathLike[str],
    held_out: xr.Dataset | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> xr.Dataset:
    """Store λ and the eigenvectors of the gram matrix, so that no query computes them.

    :func:`save` does this, too; this is to choose λ anew, and for a proj_dim above 8192.

    Parameters
    ----------
    store
        Folder or fsspec URL that :func:`save` wrote, complete, with its gram matrix.
    held_out
        Features of 50 or more held-out samples whose outputs choose λ, as ``calibrate=`` of
        :func:`damping`; by default training samples choose.
    storage_options
        Given to fsspec with a URL, as xarray does.

    Returns
    -------
    What :func:`open` returns from now on.

    Raises
    ------
    ValueError
        If the store has no gram matrix, or ``held_out`` cannot choose λ for its estimator.
    StoreMismatchError
        If ``held_out`` was featurized in another way.
    IncompleteFeaturesError
        If the store is not complete.
    StoreBusyError
        If another process writes the store.

    Notes
    -----
    Cost: one eigendecomposition per checkpoint, about 9 p³ flops and 32 p² bytes in a task, unless
    the store has it already; the features of up to 1000 training samples are read to choose λ. For
    a store of ``estimator="trak"`` whose λ is chosen by outputs (classification), one pass over the
    features as well. Features are not computed again.

    Examples
    --------
    >>> import tempfile
    >>> import trakdask as td
    >>> features = td.testing.simulate_features(n_samples=8, proj_dim=4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = td.save(features, f"{folder}/f.zarr", progress=False)
    ...     td.calibrate(f"{folder}/f.zarr").damping.attrs["rule"]
    '0.03 tr(K^2)/tr(K)'
    """
    with changing(store, storage_options, "td.calibrate") as group:
        group.require_complete()
        if weights_of(group) is None:
            raise ValueError(
                f"expected a store with a gram matrix, got {group.folder.url!r} with "
                f"{sorted(group.arrays)}; try td.save(features, store) with gram=True"
            )
        if held_out is not None:
            require_calibration(open(store, storage_options=storage_options), held_out)
        update_factors(copy.deepcopy(group), group, held_out, again=True)
    return open(store, storage_options=storage_options)
