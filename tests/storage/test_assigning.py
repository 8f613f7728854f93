"""Metadata of a store that changes without a feature being computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr

import trakdask as td
from tests.laziness import raise_if_dask_computes
from tests.storage.integers import NAMES, A, B, save
from tests.storage.integers import features as integers

N = 60
TWO = NAMES[:2]
ANIMALS = np.array(["cat", "dgo"] * (N // 2), object)
RIGHT = np.array(["cat", "dog"] * (N // 2), object)
ZERO = np.zeros(N)


def features(rows: slice = A, names: tuple[str, ...] = TWO) -> xr.Dataset:
    return integers(rows, names).assign_coords(animal=("sample", ANIMALS[rows]))


def fill(store: Path) -> None:
    save(features(), store)


def assert_coords(opened: xr.Dataset, rows: np.ndarray, **coords: np.ndarray) -> None:
    expected = {"number": np.arange(N), "animal": ANIMALS, "label": np.arange(N) % 2, **coords}
    assert {str(name) for name in opened.coords} == {"checkpoint", *expected}
    for name, values in expected.items():
        np.testing.assert_array_equal(opened[name], values[rows])


def test_assign_coords__corrects_and_adds(store: Path) -> None:
    before, rows = td.open(store), np.arange(40)
    days = pd.date_range("2026-01-01", periods=N).values
    with raise_if_dask_computes():
        opened = td.assign_coords(store, {"animal": RIGHT[A], "day": days[A]})
    assert_coords(opened, rows, animal=RIGHT, day=days)
    np.testing.assert_array_equal(opened.feature, before.feature)
    assert td.verify(store, checksums=True).empty
    opened = td.assign_coords(store, {"weight": ZERO[A]})  # the others stay
    assert_coords(opened, rows, animal=RIGHT, day=days, weight=ZERO)
    assert td.verify(store, checksums=True).empty
    opened = td.assign_coords(store, {"number": [f"id-{n}" for n in rows]})  # another kind
    assert opened.number.values.tolist()[:2] == ["id-0", "id-1"]


def test_assign_coords__with_dropped_samples(store: Path) -> None:
    td.drop(store, where=lambda ds: ds.number.isin([1, 5]))
    rows = np.setdiff1d(np.arange(40), [1, 5])
    assert_coords(td.assign_coords(store, {"animal": RIGHT[rows]}), rows, animal=RIGHT)
    assert td.open(store, dropped=True).animal.values[[1, 5]].tolist() == ["dgo", "dgo"]
    assert_coords(td.assign_coords(store, {"animal": RIGHT[A]}), rows, animal=RIGHT)
    assert td.open(store, dropped=True).animal.values[[1, 5]].tolist() == ["dog", "dog"]
    for coords in ({"weight": ZERO[:38]}, {"number": ["a"] * 38}):
        with pytest.raises(ValueError, match=r"all 40 samples.*2 of them were dropped, got 38"):
            td.assign_coords(store, coords)
    td.assign_coords(store, {"weight": np.arange(40.0)})
    opened = td.drop(store, where=lambda ds: ds.weight == 7)
    assert_coords(opened, np.setdiff1d(rows, 7), animal=RIGHT, weight=np.arange(40.0))


def test_assign_coords__compares_the_coords_of_an_array(store: Path) -> None:
    """By all that are not assigned, of all samples or of those that count."""

    def shuffled(**options: bool) -> xr.DataArray:
        return td.open(store, **options).animal.isel(sample=slice(None, None, -1))

    for name in ("animal", "other"):
        with pytest.raises(ValueError, match=r"'(number|label)' at sample 0"):
            td.assign_coords(store, {name: shuffled()})
    td.drop(store, where="number < 2")
    for options in ({}, {"dropped": True}):
        with pytest.raises(ValueError, match=r"'(number|label|dropped)' at sample"):
            td.assign_coords(store, {"animal": shuffled(**options)})
    changed = td.open(store).assign_coords(number=("sample", np.arange(38) + 7))
    opened = td.assign_coords(store, {"number": changed.number, "animal": changed.animal})
    np.testing.assert_array_equal(opened.number, np.arange(38) + 7)


FAR, FINE = np.array(["5000-01-01"], "M8[s]"), np.array(["2000-01-01T00:00:00.000000001"], "M8[ns]")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (np.arange(40) + 2**60, np.arange(40) / 2),
        (np.arange(40, dtype="u8") + 2**63, -np.arange(40)),
        (np.linspace(0, 1, 40), np.arange(40) + 2**60),
        (FAR.repeat(40), FINE.repeat(40)),
    ],
)
def test_values_that_one_dtype_cannot_hold_change_no_other_sample(
    tmp_path: Path, old: np.ndarray, new: np.ndarray
) -> None:
    """Neither of dropped samples, nor of those that were saved before."""
    store = tmp_path / "f.zarr"
    save(features().assign_coords(mine=("sample", old)), store)
    td.drop(store, where="number < 2")
    with pytest.raises(ValueError, match=r"'mine', which is .* so far, and now"):
        td.assign_coords(store, {"mine": new[2:]})
    more = features(B).assign_coords(mine=("sample", new[:20]))
    with pytest.raises(td.errors.StoreMismatchError, match=r"'mine'.*one dtype"):
        save(more, store, append_dim="sample")
    np.testing.assert_array_equal(td.open(store, dropped=True).mine, old)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (np.arange(40, dtype="i1"), np.arange(40) / 3),
        (FINE.repeat(40), np.array(["2001-01-01"], "M8[s]").repeat(40)),
        (np.array(["a"] * 40), np.array(["bcd"] * 40)),
    ],
)
def test_values_of_dropped_samples_stay(tmp_path: Path, old: np.ndarray, new: np.ndarray) -> None:
    store = tmp_path / "f.zarr"
    save(features().assign_coords(mine=("sample", old)), store)
    for condition in ("number < 2", "number == 39"):
        td.drop(store, where=condition)
    td.assign_coords(store, {"mine": new[2:39]})
    mine = td.open(store, dropped=True).mine.values
    np.testing.assert_array_equal(mine[[0, 1, 39]], old[[0, 1, 39]])
    np.testing.assert_array_equal(mine[2:39], new[2:39])


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("animal", RIGHT, "dgo instead of dog"),
        ("animal", np.arange(N), "cat instead of 0"),
        ("weight", ZERO, None),
    ],
)
def test_save__coords_that_differ_are_refused_by_name(
    store: Path, name: str, values: np.ndarray, words: str | None
) -> None:
    """Both ways: coords that were saved again, and coords assigned before saving again."""
    changed = features().assign_coords({name: ("sample", values[A])})
    with pytest.raises(td.errors.StoreMismatchError, match=rf"coord '{name}'.*td.assign_coords\("):
        save(changed, store)
    td.assign_coords(store, {name: values[A]})
    assert_coords(save(changed, store), np.arange(40), **{name: values})
    if words is not None:
        with pytest.raises(td.errors.StoreMismatchError, match=words):
            save(features(), store)
    opened = save(features().drop_vars(name, errors="ignore"), store)
    assert_coords(opened, np.arange(40), **{name: values})


def test_featurize__metadata_are_no_part_of_the_source(tmp_path: Path) -> None:
    """Neither text nor numbers; but the label is, which the task reads."""
    model = td.Model(torch.nn.Linear(4, 3), task="image_classification")

    def featurized(**coords: np.ndarray) -> xr.Dataset:
        known = {"label": np.arange(6) % 3, "year": np.arange(6) + 2000, "animal": ANIMALS[:6]}
        samples = td.from_arrays({"image": np.ones((6, 4), "f4")}, coords={**known, **coords})
        return td.featurize(samples, model, projector=td.SJLT(4))

    plain, corrected = featurized(), featurized(year=np.arange(6), animal=RIGHT[:6])
    assert corrected.attrs["source"] == plain.attrs["source"]
    assert corrected.feature.data.name == plain.feature.data.name
    save(plain, tmp_path / "f.zarr")
    save(plain, tmp_path / "g.zarr")
    with pytest.raises(td.errors.StoreMismatchError, match="differ in source"):
        save(featurized(label=np.zeros(6, int)), tmp_path / "f.zarr")
    td.assign_coords(tmp_path / "f.zarr", {"year": np.arange(6), "animal": RIGHT[:6]})
    for name in ("label", "image"):
        with pytest.warns(UserWarning, match=rf"got \['{name}'\].*of the values that it has read"):
            td.assign_coords(tmp_path / "g.zarr", {name: np.zeros(6, int)})
    np.testing.assert_array_equal(save(corrected, tmp_path / "f.zarr").year, np.arange(6))
