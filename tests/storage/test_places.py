"""Stores, results, tables and weights in folders whose names look like something else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import trakdask as td
from tests.storage.integers import NAMES, A, features, save
from trakdask.command_line.samples import named


@pytest.mark.parametrize("name", ["a::b", "file:train", "x[1]?#%20"])
def test_every_door__takes_a_local_path_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    saved = save(features(A, NAMES[:2]), f"{name}/f.zarr")
    assert (tmp_path / name / "f.zarr" / "zarr.json").is_file()
    td.assign_coords(f"{name}/f.zarr", {"mine": np.arange(40)})
    assert td.verify(f"{name}/f.zarr", checksums=True).empty
    scores = td.score(saved, saved)
    for _ in range(2):
        td.to_zarr(scores, f"{name}/s.zarr", overwrite=True)
        td.to_parquet(td.top_k(scores, k=2), f"{name}/s.parquet", overwrite=True)
    xr.testing.assert_equal(named(f"{name}/s.zarr")[0].score.compute(), scores.compute())
    for pattern in (f"{name}/s.parquet", [f"{name}/s.parquet"]):
        samples = td.from_dataframe(pattern, variables={"mine": "score"})
        assert samples.sizes["sample"] == 80
        assert np.isfinite(samples.mine.values).all()
    torch.save(torch.nn.Linear(4, 2).state_dict(), f"{name}/w.pt")
    model = td.Model(torch.nn.Linear(4, 2), [f"{name}/w.pt"], "image_classification")
    image = {"image": np.eye(4, dtype="f4"), "label": np.arange(4) % 2}
    projector = td.SJLT(4)
    options = {"sketch": projector, "store": f"{name}/g.zarr", "progress": False}
    td.fit(td.from_arrays(image), model, 2, **options)
    assert {path.name for path in tmp_path.iterdir()} == {name}
    there = {"f.zarr", "s.zarr", "s.parquet", "w.pt", "g.zarr.fit"}
    assert {path.name for path in (tmp_path / name).iterdir()} == there
