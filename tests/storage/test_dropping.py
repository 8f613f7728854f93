"""Dropped samples are gone from what opens, and from the sums, as if they had never been."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import trakdask as td
from tests.storage.integers import NAMES, VALUES, A, B, assert_rows, features, save
from trakdask.attribution.gauss_newton import Trak
from trakdask.attribution.grams import stored_matrix

LEFT = range(5, 40)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Hold 40 samples; the first five are dropped."""
    save(features(A, NAMES[:2]), tmp_path / "f.zarr")
    opened = td.drop(tmp_path / "f.zarr", where=lambda ds: ds.number < 5)
    assert_rows(opened, LEFT, 2)
    assert stored_matrix(opened, "gram", Trak()) is not None
    shown = td.open(tmp_path / "f.zarr", dropped=True)
    np.testing.assert_array_equal(shown.feature, VALUES[:40, :, :2])
    np.testing.assert_array_equal(shown.dropped, np.arange(40) < 5)
    assert "gram" not in shown
    assert td.verify(tmp_path / "f.zarr", checksums=True).empty
    return tmp_path / "f.zarr"


def test_drop__again_and_nothing(store: Path) -> None:
    left = [n for n in LEFT if n not in (7, 30)]
    opened = td.drop(store, where=lambda ds: ds.number.isin([7, 30]))
    assert_rows(opened, left, 2)
    assert_rows(td.drop(store, where=xr.zeros_like(opened.number, bool)), left, 2)


def test_drop__by_a_condition(store: Path) -> None:
    assert_rows(td.drop(store, where="number == 7 or number > 35"), [5, 6, *range(8, 36)], 2)
    assert_rows(td.drop(store, where="sample < 2"), range(8, 36), 2)  # positions of what is left


def test_drop__rows_that_are_not_finite(tmp_path: Path) -> None:
    bad = features(A)
    bad["feature"] = bad.feature.where(bad.number != 7, np.inf)  # NaN would be a failed sample
    assert not np.isfinite(save(bad, tmp_path / "f.zarr").gram).any()
    left = [n for n in range(40) if n != 7]
    assert_rows(td.drop(tmp_path / "f.zarr", where=lambda ds: ds.number == 7), left)


def test_drop__then_append_samples(store: Path) -> None:
    opened = save(features(B, NAMES[:2]), store, append_dim="sample")
    assert_rows(opened, range(5, 60), 2)
    opened = td.drop(store, where=lambda ds: ds.number.isin([39, 41]))
    assert_rows(opened, [n for n in range(5, 60) if n not in (39, 41)], 2)
    assert td.verify(store, checksums=True).empty


def test_drop__then_append_a_checkpoint(store: Path) -> None:
    assert_rows(save(features(A, NAMES[2:]), store, append_dim="checkpoint"), LEFT)


def test_drop__without_a_gram(tmp_path: Path) -> None:
    opened = save(features(), tmp_path / "f.zarr", estimator=None)
    assert not td.open(tmp_path / "f.zarr", dropped=True).dropped.any()
    opened = td.drop(tmp_path / "f.zarr", where=lambda ds: ds.number < 5)
    assert opened.sizes["sample"] == 35
    assert "gram" not in opened


def test_drop__a_lost_mask_brings_nothing_back_without_a_word(store: Path) -> None:
    (chunk,) = store.glob("dropped/c*")
    chunk.unlink()
    with pytest.raises(td.errors.IncompleteFeaturesError, match="dropped"):
        td.open(store)
    (fault,) = td.verify(store).to_dict("records")
    assert fault["path"].startswith("dropped/")
    assert "td.drop" in fault["remedy"]
    td.verify(store, repair=True)
    assert td.open(store).sizes["sample"] == 40
    assert_rows(save(features(A, NAMES[:2]), store), range(40), 2)
    assert_rows(td.drop(store, where=lambda ds: ds.number < 5), LEFT, 2)
