"""Leave samples out of a store: they are marked, and taken out of what is reduced from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import xarray as xr

from trakdask.files import Folder
from trakdask.storage.group import DROPPED, Group
from trakdask.storage.lock import lock
from trakdask.storage.opening import open
from trakdask.storage.sums import dropped_mask, update_factors, update_sums, weights_of
from trakdask.variables import SAMPLE

__all__ = ["drop"]


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
        If ``where`` is no boolean (sample), drops all, or raises an error.
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
    folder = Folder.at(store, storage_options)
    Group.read(folder)  # nothing is written where there is no store
    with lock(folder, "td.drop") as require_held:
        before, group = Group.read(folder), Group.read(folder)
        before.require_complete()
        chosen = _chosen(open(store, storage_options=storage_options), where)
        if chosen.any():
            mask = dropped_mask(before)
            mask[np.flatnonzero(~mask)[chosen]] = True
            group.write_small({DROPPED: xr.Variable(SAMPLE, mask)})
            update_sums(before, group, weights_of(before), gone=mask)
            update_factors(before, group)
            require_held()
            group.commit()
        group.sweep()
    return open(store, storage_options=storage_options)


def _chosen(ds: xr.Dataset, where: Any) -> np.ndarray:
    mask = _called(where, ds) if callable(where) else where
    given = f"{mask!r:.60} ({type(mask).__name__})"
    if isinstance(mask, xr.DataArray):
        given = f"{mask.dtype} {dict(mask.sizes)}"
        if mask.dtype == bool and dict(mask.sizes) == {SAMPLE: ds.sizes[SAMPLE]}:
            chosen = np.asarray(mask.values)
            if not chosen.all():
                return chosen
            given = f"true for all {len(chosen)}"
    raise ValueError(
        f"expected where= as a boolean DataArray ({SAMPLE}: {ds.sizes[SAMPLE]}), true for some "
        f"samples, or a function that returns one, got {given}; try "
        "where=lambda ds: ds.source == 'spam', with a coord of yours"
    )


def _called(where: Callable[[xr.Dataset], Any], ds: xr.Dataset) -> Any:
    try:
        return where(ds)
    except Exception as err:
        raise ValueError(
            f"expected where= to return a boolean DataArray ({SAMPLE}: {ds.sizes[SAMPLE]}), but it "
            f"raised {type(err).__name__}: {err}; try it on td.open(store), which has the coords "
            f"{sorted(map(str, ds.coords))}"
        ) from err
