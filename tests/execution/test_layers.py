from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
import torch
import xarray as xr

import trakdask as td
from trakdask.execution.layers import (
    bundle_of,
    feature_layer,
    featurize_layer,
    has_featurize_layer,
    token_of,
)

TOKEN = "0123456789abcdef" * 2


def features() -> xr.Dataset:
    samples = td.from_arrays({"image": np.ones((4, 3), "f4")}, coords={"label": [0, 1, 0, 1]})
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


def test_has_featurize_layer__until_gradients_are_computed() -> None:
    made = features()
    assert has_featurize_layer(made.feature.data.dask.layers)
    assert not has_featurize_layer(made.compute().chunk().feature.data.dask.layers)
    assert not has_featurize_layer([])


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
