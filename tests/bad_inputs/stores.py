"""Places on the disk that are not what they should be, for tables of bad inputs."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

import trakdask as td

FEATURES = td.testing.simulate_features(n_samples=8, proj_dim=4, chunks=4)
TARGETS = td.testing.simulate_features(n_samples=3, proj_dim=4, chunks=4, seed=1)


@functools.cache
def template() -> Path:
    """Return a store to copy: 8 samples, of which two were dropped."""
    store = Path(tempfile.mkdtemp()) / "f.zarr"
    td.save(FEATURES, store, progress=False)
    td.drop(store, where=lambda ds: xr.DataArray(np.arange(8) < 2, dims="sample"))
    return store


@functools.cache
def scores() -> xr.DataArray:
    return td.score(FEATURES, TARGETS, td.Trak(damping=0.1)).compute()


def store_in(folder: Path) -> Path:
    shutil.copytree(template(), folder / "f.zarr")
    return folder / "f.zarr"


def loop(folder: Path) -> Path:
    (folder / "a").symlink_to(folder / "b")
    (folder / "b").symlink_to(folder / "a")
    return folder / "a" / "f.zarr"


def file(folder: Path) -> Path:
    (folder / "notes.txt").write_text("mine")
    return folder / "notes.txt"


def foreign_folder(folder: Path) -> Path:
    (folder / "mine").mkdir()
    file(folder / "mine")
    return folder / "mine"


def foreign_zarr(folder: Path, zarr_format: Any = 3) -> Path:
    ds = xr.Dataset({"x": ("y", np.arange(3))})
    ds.to_zarr(folder / "mine.zarr", consolidated=False, zarr_format=zarr_format)
    return folder / "mine.zarr"


def older_zarr(folder: Path) -> Path:
    return foreign_zarr(folder, 2)


def foreign_parquet(folder: Path) -> Path:
    (folder / "mine").mkdir()
    pd.DataFrame({"x": [1]}).to_parquet(folder / "mine/part-00000-00000.parquet")
    return folder / "mine"


def text_as_parquet(folder: Path) -> Path:
    (folder / "mine").mkdir()
    (folder / "mine/part-00000-00000.parquet").write_text("x")
    return folder / "mine"
