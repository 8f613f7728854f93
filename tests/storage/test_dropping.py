"""Dropped samples are gone from what opens, and from the sums, as if they had never been.

The oracle is a float64 sum over the rows that are left; features are small integers, so that it
is exact.
"""

from __future__ import annotations

from pathlib import Path

import dask.array as da
import numpy as np
import pytest
import xarray as xr

import trakdask as td
from trakdask.attribution.estimators import Weights
from trakdask.attribution.grams import stored_matrix
from trakdask.testing import simulate_features


def integers(n: int, seed: int, n_checkpoints: int = 2) -> xr.Dataset:
    ds = simulate_features(
        n_samples=n, proj_dim=6, n_checkpoints=n_checkpoints, chunks=16, seed=seed
    )
    values = np.random.default_rng(seed).integers(-4, 5, ds.feature.shape).astype("f4")
    data = da.from_array(
        values, chunks=(16, -1, 1), name="feature-" + f"{seed:031d}{n_checkpoints}"
    )
    coords = {"number": ("sample", 1000 * seed + np.arange(n))}
    return ds.assign(feature=(ds.feature.dims, data)).assign_coords(coords)


A, B = integers(40, 0), integers(24, 1)


def save(features: xr.Dataset, store: Path, **options: object) -> xr.Dataset:
    return td.save(features, store, progress=False, **options)


def assert_left(opened: xr.Dataset, *parts: xr.Dataset, without: list[int]) -> None:
    expected = xr.concat([part.compute() for part in parts], "sample", combine_attrs="override")
    expected = expected.isel(sample=~np.isin(expected.number, without))
    for name in ("feature", "output", "out_to_loss", "number", "label"):
        np.testing.assert_array_equal(opened[name], expected[name])
    x = expected.feature.values.astype("f8")
    np.testing.assert_array_equal(opened.gram, np.einsum("npc,nqc->pqc", x, x))
    assert opened.gram.attrs["n_samples"] == len(x)
    assert stored_matrix(opened, "gram", Weights()) is not None
    assert "dropped" not in opened.coords


@pytest.fixture
def store(tmp_path: Path) -> Path:
    save(A, tmp_path / "f.zarr")
    return tmp_path / "f.zarr"


def test_drop__rows_and_their_share_of_the_gram(store: Path) -> None:
    opened = td.drop(store, where=lambda ds: ds.number < 5)
    assert_left(opened, A, without=list(range(5)))
    assert td.verify(store, checksums=True).empty


def test_drop__again_and_nothing(store: Path) -> None:
    td.drop(store, where=lambda ds: ds.number < 5)
    opened = td.drop(store, where=lambda ds: ds.number.isin([7, 30]))
    assert_left(opened, A, without=[*range(5), 7, 30])
    again = td.drop(store, where=xr.zeros_like(opened.number, bool))
    assert_left(again, A, without=[*range(5), 7, 30])


def test_drop__most_of_them(store: Path) -> None:
    """What goes weighs more than what stays: the sums are made again."""
    without = [n for n in range(40) if n not in (3, 17, 39)]
    assert_left(td.drop(store, where=lambda ds: ds.number.isin(without)), A, without=without)


def test_drop__rows_that_are_not_finite(tmp_path: Path) -> None:
    bad = A.copy()
    values = A.feature.values.copy()
    values[7] = np.inf  # NaN would be a sample that failed: no part of any sum
    name = "feature-" + 32 * "b"
    bad["feature"] = (A.feature.dims, da.from_array(values, chunks=(16, -1, 1), name=name))
    assert not np.isfinite(save(bad, tmp_path / "f.zarr").gram).any()
    assert_left(td.drop(tmp_path / "f.zarr", where=lambda ds: ds.number == 7), A, without=[7])


def test_drop__then_append_samples(store: Path) -> None:
    td.drop(store, where=lambda ds: ds.number < 5)
    opened = save(B, store, append_dim="sample")
    assert_left(opened, A, B, without=list(range(5)))
    opened = td.drop(store, where=lambda ds: ds.number.isin([39, 1001]))
    assert_left(opened, A, B, without=[*range(5), 39, 1001])
    assert td.verify(store, checksums=True).empty


def test_drop__then_append_a_checkpoint(store: Path) -> None:
    td.drop(store, where=lambda ds: ds.number < 5)
    three = integers(40, 0, 3)
    third = three.isel(checkpoint=[2])
    name = "feature-" + 32 * "c"
    data = da.from_array(third.feature.values, chunks=(16, -1, 1), name=name)
    third = third.assign(feature=(third.feature.dims, data)).assign_attrs(source=A.attrs["source"])
    opened = save(third, store, append_dim="checkpoint")
    expected = xr.concat(
        [A.compute(), third.compute()], "checkpoint", coords="minimal", compat="override",
        combine_attrs="override",
    )  # fmt: skip
    assert_left(opened, expected, without=list(range(5)))


def test_drop__shown(store: Path) -> None:
    assert not td.open(store, dropped=True).dropped.any()
    td.drop(store, where=lambda ds: ds.number < 5)
    shown = td.open(store, dropped=True)
    np.testing.assert_array_equal(shown.feature, A.feature)
    np.testing.assert_array_equal(shown.dropped, np.arange(40) < 5)
    assert "gram" not in shown


def test_drop__without_a_gram(tmp_path: Path) -> None:
    save(A, tmp_path / "f.zarr", gram=False)
    opened = td.drop(tmp_path / "f.zarr", where=lambda ds: ds.number < 5)
    assert opened.sizes["sample"] == 35
    assert "gram" not in opened


def test_drop__a_lost_mask_brings_nothing_back_without_a_word(store: Path) -> None:
    td.drop(store, where=lambda ds: ds.number < 5)
    (chunk,) = (path for path in store.glob("dropped/c*/**/*") if path.is_file())
    chunk.unlink()
    with pytest.raises(td.errors.IncompleteFeaturesError, match="dropped"):
        td.open(store)
    (fault,) = td.verify(store).to_dict("records")
    assert fault["path"].startswith("dropped/")
    assert "td.drop" in fault["remedy"]
    td.verify(store, repair=True)
    assert td.open(store).sizes["sample"] == 40
    assert_left(td.save(A, store, progress=False), A, without=[])
    assert_left(td.drop(store, where=lambda ds: ds.number < 5), A, without=list(range(5)))
