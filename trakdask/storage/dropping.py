"""Leave samples out of a store: they are marked, and taken out of what is reduced from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import dask
import dask.array as da
import numpy as np
import xarray as xr
import zarr
from zarr.codecs import Crc32cCodec

from trakdask.attribution.estimators import Weights
from trakdask.files import Folder
from trakdask.storage.coords import DROPPED
from trakdask.storage.factors import renew_factors
from trakdask.storage.history import remove_obsolete, write_edit
from trakdask.storage.lease import lease
from trakdask.storage.opening import open
from trakdask.storage.parts import DROPS, GRAM, REDUCTIONS
from trakdask.storage.reductions import reduced
from trakdask.storage.snapshot import Snapshot, completed, require_settled, snapshot
from trakdask.storage.zarr_stores import Recorded
from trakdask.variables import CHECKPOINT, SAMPLE, VARIABLES

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
        If the store is not complete, or an append to it was cut short: finish that first.
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
    snapshot(folder)  # nothing is written where there is no store
    with lease(folder, "td.drop"):
        before = completed(snapshot(folder))
        require_settled(before, "td.drop")
        ds = open(store, storage_options=storage_options)
        chosen = _chosen(ds, where)
        if chosen.any():
            _write(before, ds, chosen)
        remove_obsolete(folder, DROPS)
        left = renew_factors(folder, open(store, storage_options=storage_options))
        folder.sweep()
    return left


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


def _write(before: Snapshot, ds: xr.Dataset, chosen: np.ndarray) -> None:
    """Write the mask of all that are dropped by now, and what is reduced from the others."""
    mask = before.dropped()
    mask[np.flatnonzero(~mask)[chosen]] = True

    def fill(_: Folder, store: Recorded) -> None:
        group = zarr.open_group(store, mode="r+", zarr_format=3)
        group.create_array(DROPPED, data=mask, chunks=mask.shape, compressors=[Crc32cCodec()])
        _write_reductions(group, ds, chosen)

    names = [str(name) for name in ds[CHECKPOINT].values]
    attrs = {"pieces": len(before.parts), "checkpoints": names}
    write_edit(before.folder, DROPS, attrs, fill)


def _write_reductions(group: zarr.Group, ds: xr.Dataset, chosen: np.ndarray) -> None:
    names = [name for name in REDUCTIONS if name in ds]
    arrays = {}
    for name in names:
        arrays[name] = group.create_array(
            name, shape=ds[name].shape, chunks=(*ds[name].shape[:-1], 1), dtype=ds[name].dtype,
            compressors=[Crc32cCodec()], fill_value=np.nan, attributes=dict(ds[name].attrs),
            dimension_names=VARIABLES[name].dims, config={"write_empty_chunks": True},
        )  # fmt: skip
    for index in range(ds.sizes[CHECKPOINT] if names else 0):
        for name, matrix in zip(names, _remaining(ds, chosen, names, index), strict=True):
            arrays[name][..., index : index + 1] = matrix


def _remaining(
    ds: xr.Dataset, chosen: np.ndarray, names: list[str], index: int
) -> list[np.ndarray]:
    """Return the reductions of one checkpoint without the chosen rows."""
    attrs = ds[GRAM].attrs
    weights = Weights(attrs["gram_weights"], attrs["loss_weights"], attrs.get("power"))
    gone, left = (ds.isel({SAMPLE: np.flatnonzero(rows)}) for rows in (chosen, ~chosen))

    def of(rows: xr.Dataset) -> list[da.Array]:
        """Of the sums that the weights need, an appended checkpoint may have ended some."""
        sums = dict(zip(weights.sums, reduced(rows, weights, index), strict=True))
        return [sums[name] for name in names]

    old = [ds[name].data[..., index : index + 1] for name in names]
    before, less = dask.compute(old, of(gone))
    with np.errstate(invalid="ignore"):  # infinity less infinity
        matrices = [total - part for total, part in zip(before, less, strict=True)]
    if np.trace(less[0][..., 0]) <= np.trace(matrices[0][..., 0]):  # false for NaN
        return matrices
    return list(dask.compute(*of(left)))
