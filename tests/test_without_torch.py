"""A process that only asks needs no torch, whose import takes a second and 200 MB.

The first pages of the explorer need no distributed, either.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import trakdask as td

ASKS = """
import sys

sys.modules["torch"] = None  # whoever imports it gets an error

import numpy as np
import xarray as xr

import trakdask as td
from trakdask.command_line.commands import app

for page in ("targets", "target"):
    line = f"explore train.zarr targets.zarr --view page={page} --save {page}.html"
    app(line.split(), standalone_mode=False)
assert "distributed" not in sys.modules

train, targets = td.open("train.zarr"), td.open("targets.zarr")
for estimator in ("auto", "trak", "relatif", "grad_dot", "grad_cos"):
    scores = td.score(train, targets, estimator=estimator).compute()
assert td.group_score(train, targets, by="source").compute().shape == (2, 5)
assert td.damping(train).compute().damping.shape == (4,)
assert td.self_influence(train).compute().shape == (60,)
assert td.gram(train).compute().shape == (16, 16, 4)
assert td.combine(targets, by="source").feature.compute().shape == (2, 16, 4)
assert td.combine(targets, metric="accuracy").feature.compute().shape == (1, 16, 4)
assert td.evaluate.metric(targets.output, targets, "loss").compute().shape == (4, 1)
assert td.group_score(train, targets, by="source", metric="loss").compute().shape == (2, 1)

top = td.top_k(td.score(train, targets), 3, where="source == 'web'")
td.to_parquet(top, "top.parquet")
td.to_zarr(td.score(train, targets), "scores.zarr")

app(["verify", "train.zarr"], standalone_mode=False)

masks = td.evaluate.subsets(train, 8).compute()
outputs = xr.DataArray(np.random.default_rng(0).random((8, 5)), dims=("subset", "target"))
assert td.evaluate.lds(td.score(train, targets), masks, outputs).compute().lds.shape == (5,)

explorer = td.explore(train, targets, marks=td.explorer.Marks.beside("train.zarr"))
explorer.app("page=target&target=3")
explorer.save_html("page.html", "page=target&target=3")

halves = td.evaluate.subsets(train, 4).rename(subset="checkpoint")
known = td.assign_coords("train.zarr", {"day": np.arange(60), "trained_on": halves})
assert td.evaluate.cross_validate(known, targets).lds.shape == (5,)
td.calibrate("train.zarr")
td.drop("train.zarr", where=lambda ds: ds.day < 5)
assert td.verify("train.zarr", checksums=True).empty
assert td.save(td.open("train.zarr"), "copy.zarr", progress=False).sizes["sample"] == 55
"""


def test_process_that_only_asks__needs_no_torch(tmp_path: Path, run_python) -> None:
    rng = np.random.default_rng(0)
    images, source = rng.random((65, 8), np.float32), np.array(["web", "book"])[np.arange(65) % 2]
    coords = {"label": np.arange(65) % 3, "source": source}
    samples = td.from_arrays({"image": images}, coords=coords, chunks=20)
    weights = []
    for seed in range(4):
        torch.manual_seed(seed)
        weights.append(torch.nn.Linear(8, 3).state_dict())
    model = td.Model(torch.nn.Linear(8, 3), weights)
    features = td.featurize(samples, model, projector=td.SJLT(16))
    train, targets = features.isel(sample=slice(60)), features.isel(sample=slice(60, None))
    td.save(train, tmp_path / "train.zarr", progress=False)
    td.save(targets, tmp_path / "targets.zarr", estimator=None, progress=False)
    printed = run_python("-W", "ignore", "-c", ASKS, cwd=tmp_path)
    assert "targets.html is written" in printed
