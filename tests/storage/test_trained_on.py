"""Which checkpoints were trained on which samples, from the samples to a store and back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import trakdask as td
from trakdask.errors import StoreMismatchError
from trakdask.files import Folder
from trakdask.storage.group import Group

N, C = 40, 6


@pytest.fixture(scope="module")
def masks() -> xr.DataArray:
    return td.evaluate.subsets(N, C).rename(subset="checkpoint").compute()


@pytest.fixture(scope="module")
def model() -> td.Model:
    torch.manual_seed(0)
    weights = {f"c{i}": torch.nn.Linear(4, 2).state_dict() for i in range(C)}
    return td.Model(torch.nn.Linear(4, 2), weights, "image_classification")


@pytest.fixture(scope="module")
def features(masks: xr.DataArray, model: td.Model) -> xr.Dataset:
    image = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32)
    samples = td.from_arrays({"image": image}, coords={"label": image[:, 0] > 0}, chunks=16)
    samples = samples.assign_coords(trained_on=masks, label=samples.label.astype(int))
    return td.featurize(samples, model, td.Identity())


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "f.zarr"


def save(features: xr.Dataset, store: Path, append_dim=None, estimator=None) -> xr.Dataset:
    """Save without sums, which no mask changes."""
    return td.save(features, store, append_dim=append_dim, estimator=estimator, progress=False)


def is_stored(store: Path, masks: xr.DataArray) -> bool:
    """Return whether a store has these masks, for xarray, too, and every chunk of them."""
    there = [td.open(store).trained_on, xr.open_zarr(store, chunks=None).trained_on]
    assert td.verify(store, checksums=True).empty
    expected = masks.transpose("sample", "checkpoint").values
    return all((each.values == expected).all() for each in there)


def test_masks_are_matched_by_the_names_of_checkpoints(features, masks, model) -> None:
    named = masks.assign_coords(checkpoint=[f"c{i}" for i in range(C)])[::-1]
    samples = td.from_arrays({"image": np.zeros((N, 4), "f4")}, coords={"label": [0] * N})
    other = td.featurize(samples.assign_coords(trained_on=named), model, td.Identity())
    np.testing.assert_array_equal(other.trained_on.values, masks.T.values)
    unnamed = masks[:4]
    with pytest.raises(ValueError, match=r"'checkpoint': 6.*masks.rename"):
        td.featurize(samples.assign_coords(trained_on=unnamed), model)


@pytest.mark.filterwarnings("ignore:expected no unfinished append")
def test_appends_in_both_directions_keep_them(features, masks, store) -> None:
    first, last = features.isel(sample=slice(26)), features.isel(sample=slice(26, None))
    save(first.isel(checkpoint=slice(4)), store)
    save(last.isel(checkpoint=slice(4)), store, "sample")
    save(first.isel(checkpoint=slice(4, None)), store, "checkpoint")
    save(last.isel(checkpoint=slice(4, None)), store, "checkpoint")
    assert is_stored(store, masks)


def test_who_says_nothing_was_trained_on_all(features, masks, store) -> None:
    save(features.isel(sample=slice(26)), store)
    save(features.isel(sample=slice(26, None)).drop_vars("trained_on"), store, "sample")
    whole = masks.copy(data=masks.values | (np.arange(N) >= 26))
    assert is_stored(store, whole)


def test_other_masks_of_the_same_samples_are_refused(features, store) -> None:
    save(features, store)
    with pytest.raises(StoreMismatchError, match=r"trained_on.*assign_coords"):
        save(features.assign(trained_on=~features.trained_on), store)
    bare = save(features.drop_vars("trained_on"), store.with_name("bare.zarr"))
    with pytest.raises(StoreMismatchError, match=r"differ in variables.*assign_coords"):
        save(features, store.with_name("bare.zarr"))
    assert "trained_on" not in bare


def test_they_are_assigned_to_a_store_that_exists(features, masks, store) -> None:
    save(features.drop_vars("trained_on"), store)
    td.assign_coords(store, {"trained_on": masks, "source": ["web"] * N})
    assert is_stored(store, masks)
    td.assign_coords(store, {"trained_on": ~masks})
    assert is_stored(store, ~masks)
    group = Group.read(Folder.at(store))
    there = {path.relative_to(store).as_posix() for path in store.glob("trained_on/c*/**/*")}
    there |= {path.relative_to(store).as_posix() for path in store.glob("trained_on/c.*")}
    chunks = {f"trained_on/{group.chunk_key('trained_on', i)}" for i in np.ndindex(1, C)}
    assert {name for name in there if (store / name).is_file()} == chunks
    with pytest.raises(ValueError, match="bool DataArray"):
        td.assign_coords(store, {"trained_on": masks.values})
    assert is_stored(store, ~masks)


def test_dropped_samples_take_theirs_with_them(features, masks, store) -> None:
    save(features, store)
    left = td.drop(store, where=xr.DataArray(np.arange(N) < 5, dims="sample"))
    np.testing.assert_array_equal(left.trained_on.values, masks.T.values[5:])
    td.assign_coords(store, {"trained_on": ~masks[:, 5:]})
    np.testing.assert_array_equal(td.open(store).trained_on.values, ~masks.T.values[5:])
    shown = td.open(store, dropped=True).trained_on.values
    np.testing.assert_array_equal(shown, np.r_[masks.T.values[:5], ~masks.T.values[5:]])
    td.assign_coords(store, {"trained_on": ~masks})  # along all samples
    np.testing.assert_array_equal(td.open(store, dropped=True).trained_on.values, ~masks.T.values)


def test_saving_chooses_by_left_out_checkpoints_and_keeps_the_choice(features, store) -> None:
    opened = save(features, store, estimator="auto")
    assert "grade" in opened.damping.attrs
    again, lazily = td.damping(opened), td.damping(features)
    xr.testing.assert_allclose(again.compute(), lazily.compute())
    assert td.damping(opened.isel(sample=slice(3))).damping.values == pytest.approx(
        opened.damping.values
    )
