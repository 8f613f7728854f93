"""Results written for others: scores and rankings as zarr, rankings as parquet."""

from __future__ import annotations

import os

import fsspec
import xarray as xr

from trakdask.locations import location
from trakdask.variables import RANK, TARGET

__all__ = ["to_parquet", "to_zarr"]


def to_zarr(
    data: xr.DataArray | xr.Dataset, store: str | os.PathLike[str], *, overwrite: bool = False
) -> None:
    """Compute lazy scores (or any labelled result) into a zarr v3 store, tile by tile.

    Parameters
    ----------
    data
        Result of :func:`score`, :func:`top_k` or :func:`group_score`.
    store
        Folder or fsspec URL. Read it with ``xarray.open_zarr(store, consolidated=False)``.
    overwrite
        Replace what is there.

    Raises
    ------
    FileExistsError
        If the store exists and ``overwrite`` is false.
    """
    place = _free_place(store, overwrite)
    ds = data.to_dataset(name=data.name or "score") if isinstance(data, xr.DataArray) else data
    encoding = {
        str(n): {"compressors": None} for n, v in ds.data_vars.items() if v.dtype.kind == "f"
    }
    ds.to_zarr(place, mode="w", consolidated=False, zarr_format=3, encoding=encoding)


def to_parquet(top: xr.Dataset, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Compute a ranking into parquet files: one row per (target, rank), metadata beside it.

    Parameters
    ----------
    top
        Lazy Dataset of :func:`top_k`, (target, rank).
    path
        Folder or fsspec URL; one file per block of targets.
    overwrite
        Replace what is there.

    Notes
    -----
    Columns: ``target`` and ``rank`` (positions from 0), ``score``, ``position`` of the training
    sample, its coords by their names, the target's coords with the prefix ``target_``.

    Raises
    ------
    ValueError
        If ``top`` is no ranking: the full (sample, target) matrix belongs into :func:`to_zarr`.
    FileExistsError
        If the folder exists and ``overwrite`` is false.
    """
    if not isinstance(top, xr.Dataset) or RANK not in top.dims:
        found = type(top).__name__ if not isinstance(top, xr.Dataset) else tuple(top.dims)
        raise ValueError(
            f"to_parquet got {found}; needed the Dataset (target, rank) of td.top_k. "
            "Write a full score matrix with td.to_zarr(scores, path)."
        )
    place = _free_place(path, overwrite)
    blocks = top.score.variable.chunksizes.get(TARGET, -1)
    frame = top.chunk({TARGET: blocks, RANK: -1}).to_dask_dataframe(dim_order=[TARGET, RANK])
    frame.to_parquet(place, write_index=False, overwrite=overwrite)


def _free_place(path: str | os.PathLike[str], overwrite: bool) -> str:
    place = location(path)
    fs, inside = fsspec.core.url_to_fs(place)
    if not overwrite and fs.exists(inside):
        raise FileExistsError(
            f"{place!r} exists; needed a new path. Type overwrite=True to replace it."
        )
    return place
