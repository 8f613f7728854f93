"""Copy results for other programs. Apart from the jobs, as this needs no torch."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow.dataset

import trakdask as td
from trakdask.command_line.configuration import about, require_ending
from trakdask.command_line.samples import opened_zarr
from trakdask.files import matching, replacing


def copy(result: str, path: str) -> None:
    """Copy a result that a command wrote: zarr to parquet, netCDF or CSV, parquet to CSV.

    Raises
    ------
    ConfigurationError
        If this is no such result, or the path exists or has another ending.
    """
    is_table = Path(result).suffix == ".parquet"
    with about("export"):
        opened = _parquet(result) if is_table else opened_zarr(result)
        require_ending(path, (".csv",) if is_table else (".csv", ".parquet", ".nc"))
        if not path.endswith(".parquet") and os.path.exists(path):
            raise FileExistsError(f"expected a new file, got {path!r}, which exists")
    if is_table:
        return _to_csv(opened, path)
    data = opened["score"] if list(opened.data_vars) == ["score"] else opened
    data = data.assign_attrs(opened.attrs)
    if path.endswith(".parquet"):
        return td.to_parquet(data, path)
    if path.endswith(".csv"):
        with TemporaryDirectory() as folder:
            td.to_parquet(data, table := f"{folder}/table.parquet")
            return _to_csv(_parquet(table), path)
    with replacing(path) as partial:
        data.to_netcdf(partial)


def _parquet(result: str) -> Any:
    """Open all files of a folder, or of a URL, as one table."""
    system, (folder,) = matching(result)
    return pyarrow.dataset.dataset(folder, filesystem=system)


def _to_csv(table: Any, path: str) -> None:
    """Write a table as text, some rows at a time."""
    with replacing(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        for number, rows in enumerate(table.to_batches()):
            rows.to_pandas().to_csv(file, index=False, header=number == 0)
