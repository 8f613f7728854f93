from __future__ import annotations

from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
import torch
import xarray as xr
from dask.callbacks import Callback
from dask.utils import key_split

import trakdask as td
from trakdask.execution.layers import (
    bundle_of,
    feature_layer,
    featurize_layer,
    token_of,
)

TOKEN = "0123456789abcdef" * 2


def features(chunks: int = 4) -> xr.Dataset:
    images, labels = np.ones((4, 3), "f4"), [0, 1, 0, 1]
    samples = td.from_arrays({"image": images}, coords={"label": labels}, chunks=chunks)
    return td.featurize(samples, td.Model(torch.nn.Linear(3, 2)), projector=td.Identity())


def test_token_of__what_featurize_returns() -> None:
    made = features()
    name = made.feature.data.name
    token = token_of(name)
    assert token is not None
    assert feature_layer(token) == name
    assert featurize_layer(token) in made.feature.data.dask.layers


@pytest.mark.parametrize(
    "change", [lambda x: x[1:], lambda x: 2 * x, lambda x: x.rechunk((1, -1, 1))]
)
def test_token_of__none_for_what_was_made_of_it(change) -> None:
    assert token_of(change(features().feature.data).name) is None


@pytest.mark.parametrize("name", ["", TOKEN, f"feature-{TOKEN}0", f"xfeature-{TOKEN}", "feature-"])
def test_token_of__other_names(name: str) -> None:
    assert token_of(name) is None


def variables(made: xr.Dataset) -> dict[str, da.Array]:
    return {str(name): variable.data for name, variable in made.data_vars.items()}


def test_bundle_of__has_each_block_and_how_it_was_made() -> None:
    made = features()
    bundle = bundle_of(variables(made))
    assert bundle is not None
    assert not any("output" in layer for layer in bundle.dask.layers)
    feature, output, out_to_loss, device = bundle.to_delayed().item().compute()
    np.testing.assert_array_equal(feature, made.feature)
    np.testing.assert_array_equal(output, made.output)
    np.testing.assert_array_equal(out_to_loss, made.out_to_loss)
    assert device == {"device": "cpu"}


@pytest.mark.parametrize(
    "change",
    [
        lambda ds: ds.isel(sample=slice(2)),
        lambda ds: ds.assign(output=2 * ds.output),
        lambda ds: ds.compute().chunk(),
    ],
)
def test_bundle_of__none_for_what_was_changed(change) -> None:
    assert bundle_of(variables(change(features()))) is None


class TaskNames(Callback):
    """The names under which a dashboard groups the tasks that run inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def _pretask(self, key: Any, *_: Any) -> None:
        self.names.add(key_split(key))


@pytest.mark.filterwarnings("ignore:scores are made from 1 checkpoint:UserWarning")
def test_task_names__say_what_is_computed(tmp_path: Path) -> None:
    def names_of(call) -> set[str]:
        with dask.config.set(scheduler="sync"), TaskNames() as found:
            call()
        return found.names

    def save(saved: xr.Dataset, name: str, **more: Any) -> set[str]:
        return names_of(lambda: td.save(saved, tmp_path / name, progress=False, **more))

    made = features(chunks=2)
    assert save(made, "f.zarr") >= {
        "featurize", "gram-aggregate", "save-gram", "spectrum", "save-factors"
    }  # fmt: skip
    assert "featurize" in save(made, "of-targets.zarr", gram=False)
    assert "save-block" in save(made.isel(sample=[0, 1]), "selected.zarr", gram=False)
    train = td.open(tmp_path / "f.zarr")
    scores = td.score(train, train)
    assert "score" in names_of(scores.compute)
    assert "top-k-merge" in " ".join(names_of(td.top_k(scores, 2).compute))
    grouped = td.group_score(train, train, by="label")
    assert "group-sum" in " ".join(names_of(grouped.compute))
    assert "leverage" in " ".join(names_of(td.self_influence(train).compute))
    assert "open-out-to-loss" in names_of(train.out_to_loss.compute)
