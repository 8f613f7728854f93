"""Exports, read back by others: pandas, duckdb, xarray."""

from __future__ import annotations

from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pytest
import xarray as xr

import trakdask as td
from trakdask.testing import simulate_features

FEATURES = simulate_features(n_samples=40, proj_dim=8, chunks=16)


def test_to_parquet__reread_by_pandas_and_duckdb(tmp_path: Path) -> None:
    names = np.array([f"id-{i}" for i in range(40)], dtype=object)
    features = FEATURES.assign_coords(name=("sample", names))
    targets = simulate_features(n_samples=10, proj_dim=8, chunks=4, seed=1)
    top = td.top_k(td.score(features, targets), 3)
    td.to_parquet(top, tmp_path / "top.parquet")
    frame = pd.read_parquet(tmp_path / "top.parquet").sort_values(["target", "rank"])
    assert len(list((tmp_path / "top.parquet").glob("*.parquet"))) == 3  # one per target block
    assert len(frame) == 30
    computed = top.compute()
    for name in ("score", "position", "label", "name"):
        np.testing.assert_array_equal(frame[name], computed[name].values.ravel())
    np.testing.assert_array_equal(frame["target_label"], np.repeat(computed.target_label, 3))
    query = (
        f"select count(*), max(rank) from '{tmp_path}/top.parquet/*.parquet' where name = 'id-3'"
    )
    ((count, _),) = duckdb.sql(query).fetchall()
    assert count == (computed.name.values == "id-3").sum()


def test_to_parquet__refuses_other_things(tmp_path: Path) -> None:
    scores = td.score(FEATURES, FEATURES)
    with pytest.raises(ValueError, match="needed the Dataset"):
        td.to_parquet(scores, tmp_path / "s.parquet")
    top = td.top_k(scores, 2)
    td.to_parquet(top, tmp_path / "t.parquet")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        td.to_parquet(top, tmp_path / "t.parquet")
    td.to_parquet(top, tmp_path / "t.parquet", overwrite=True)
    assert len(pd.read_parquet(tmp_path / "t.parquet")) == 80


def test_to_zarr__scores_and_rankings(tmp_path: Path) -> None:
    scores = td.score(FEATURES, FEATURES.isel(sample=slice(5)))
    td.to_zarr(scores, tmp_path / "s.zarr")
    again = xr.open_zarr(tmp_path / "s.zarr", consolidated=False)
    np.testing.assert_array_equal(again.score, scores)
    assert again.score.attrs["formula"] == scores.attrs["formula"]
    np.testing.assert_array_equal(again.target_label, scores.target_label)
    top = td.top_k(scores, 2)
    td.to_zarr(top, tmp_path / "t.zarr")
    np.testing.assert_array_equal(
        xr.open_zarr(tmp_path / "t.zarr", consolidated=False).position, top.position
    )
    with pytest.raises(FileExistsError, match="overwrite=True"):
        td.to_zarr(top, tmp_path / "t.zarr")
