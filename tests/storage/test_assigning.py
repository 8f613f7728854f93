"""Metadata of a store that changes without a feature being computed.

The oracle is a Dataset in memory, changed by xarray's own assign_coords.
"""

from __future__ import annotations

from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr

import trakdask as td
from trakdask.testing import raise_if_dask_computes, simulate_features

N = 40
ANIMALS = ["cat", "dgo"] * (N // 2)
RIGHT = ["cat", "dog"] * (N // 2)


def part(start: int, stop: int, checkpoints: tuple[int, ...] = (0, 1)) -> xr.Dataset:
    """Return lazy features of some rows; attrs and names as those of featurize."""
    whole = simulate_features(n_samples=N, proj_dim=4, n_checkpoints=3, chunks=8)
    ds = whole.isel(sample=slice(start, stop), checkpoint=list(checkpoints)).compute()
    names = [f"c{number}" for number in checkpoints]
    token = dask.base.tokenize(start, stop, checkpoints)
    feature = da.from_array(ds.feature.values, chunks=(8, -1, 1), name=f"feature-{token}")
    return ds.assign(feature=(ds.feature.dims, feature)).assign_coords(
        animal=("sample", ANIMALS[start:stop]), number=("sample", np.arange(start, stop))
    ).assign_attrs(
        source=f"{start}:{stop}", checkpoints={name: name for name in names},
        checkpoint_ids={name: int(name[1:]) for name in names},
    )  # fmt: skip


def save(features: xr.Dataset, store: Path, **options: object) -> xr.Dataset:
    return td.save(features, store, progress=False, **options)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    save(part(0, 24), tmp_path / "f.zarr")
    return tmp_path / "f.zarr"


def assert_coords(opened: xr.Dataset, rows: np.ndarray, **coords: object) -> None:
    expected = {"number": np.arange(N), "animal": ANIMALS, "label": np.arange(N) % 2, **coords}
    assert {str(name) for name in opened.coords} == {"checkpoint", *expected}
    for name, values in expected.items():
        np.testing.assert_array_equal(opened[name], np.asarray(values)[rows])


def test_assign_coords__corrects_and_adds(store: Path) -> None:
    before = td.open(store)
    days = pd.date_range("2026-01-01", periods=N).values
    with raise_if_dask_computes():
        opened = td.assign_coords(store, {"animal": RIGHT[:24], "day": days[:24]})
    assert_coords(opened, np.arange(24), animal=RIGHT, day=days)
    assert_coords(td.open(store), np.arange(24), animal=RIGHT, day=days)
    np.testing.assert_array_equal(opened.feature, before.feature)
    assert td.verify(store, checksums=True).empty
    weights = np.linspace(0, 1, N)
    opened = td.assign_coords(store, {"weight": weights[:24]})  # those of before stay
    assert_coords(opened, np.arange(24), animal=RIGHT, day=days, weight=weights)
    assert td.verify(store, checksums=True).empty


def test_assign_coords__another_dtype(store: Path) -> None:
    opened = td.assign_coords(store, {"number": [f"id-{n}" for n in range(24)]})
    assert opened.number.values.tolist()[:2] == ["id-0", "id-1"]


def test_assign_coords__then_append_samples(store: Path) -> None:
    td.assign_coords(store, {"animal": RIGHT[:24], "weight": np.zeros(24)})
    with pytest.raises(td.errors.StoreMismatchError, match=r"features.assign_coords\(weight=...\)"):
        save(part(24, 40), store, append_dim="sample")
    more = part(24, 40).assign_coords(weight=("sample", np.ones(16)))
    with pytest.raises(td.errors.StoreMismatchError, match=r"'weight'.*numbers.*got.*text"):
        save(more.assign_coords(weight=("sample", ["heavy"] * 16)), store, append_dim="sample")
    opened = save(more, store, append_dim="sample")
    animals, weights = RIGHT[:24] + ANIMALS[24:], np.repeat([0.0, 1.0], [24, 16])
    assert_coords(opened, np.arange(40), animal=animals, weight=weights)
    opened = td.assign_coords(store, {"animal": RIGHT})
    assert_coords(opened, np.arange(40), animal=RIGHT, weight=weights)
    assert td.verify(store, checksums=True).empty


def test_assign_coords__then_append_a_checkpoint(store: Path) -> None:
    td.assign_coords(store, {"animal": RIGHT[:24], "weight": np.zeros(24)})
    third = part(0, 24, (2,)).assign_attrs(source="0:24")
    with pytest.raises(td.errors.StoreMismatchError, match=r"'animal'.*dgo instead of dog.* 1;"):
        save(third, store, append_dim="checkpoint")
    opened = save(third.drop_vars("animal"), store, append_dim="checkpoint")
    assert opened.sizes["checkpoint"] == 3
    assert_coords(opened, np.arange(24), animal=RIGHT, weight=np.zeros(N))


def test_assign_coords__with_dropped_samples(store: Path) -> None:
    td.drop(store, where=lambda ds: ds.number.isin([1, 5]))
    rows = np.setdiff1d(np.arange(24), [1, 5])
    opened = td.assign_coords(store, {"animal": np.array(RIGHT)[rows]})
    assert_coords(opened, rows, animal=RIGHT)
    shown = td.open(store, dropped=True)
    assert shown.animal.values[[1, 5]].tolist() == ["dgo", "dgo"]
    opened = td.assign_coords(store, {"animal": RIGHT[:24]})
    assert_coords(opened, rows, animal=RIGHT)
    assert td.open(store, dropped=True).animal.values[[1, 5]].tolist() == ["dog", "dog"]
    for coords in ({"weight": np.zeros(22)}, {"number": ["a"] * 22}):
        with pytest.raises(ValueError, match=r"all 24 samples.*2 of them were dropped, got 22"):
            td.assign_coords(store, coords)
    opened = td.assign_coords(store, {"weight": np.arange(24.0)})
    assert_coords(opened, rows, animal=RIGHT, weight=np.arange(24.0))
    opened = td.drop(store, where=lambda ds: ds.weight == 7)
    assert_coords(opened, np.setdiff1d(rows, 7), animal=RIGHT, weight=np.arange(24.0))


@pytest.mark.parametrize(
    ("coords", "words"),
    [
        ({"animal": RIGHT}, "dgo instead of dog"),
        ({"number": np.arange(N) + 1}, "got 0 instead of 1 at sample 0"),
        ({"animal": np.arange(N)}, r"instead of int64"),
        ({"weight": np.zeros(N)}, None),
    ],
)
def test_save__coords_that_differ_are_refused_by_name(
    store: Path, coords: dict[str, object], words: str | None
) -> None:
    """Both ways: what was saved again, and what was assigned before saving again."""
    (name,) = coords
    features = part(0, 24)
    changed = features.assign_coords({name: ("sample", np.asarray(coords[name])[:24])})
    with pytest.raises(td.errors.StoreMismatchError, match=rf"coord '{name}'.*td.assign_coords\("):
        save(changed, store)
    td.assign_coords(store, {name: changed[name].values})
    opened = save(changed, store)
    assert_coords(opened, np.arange(24), **coords)
    if words is not None:
        with pytest.raises(td.errors.StoreMismatchError, match=words):
            save(features, store)
    opened = save(features.drop_vars(name, errors="ignore"), store)
    assert_coords(opened, np.arange(24), **coords)


def samples(**coords: object) -> xr.Dataset:
    x = np.random.default_rng(0).normal(size=(6, 4)).astype("f4")
    known = {"label": np.arange(6) % 3, "year": np.arange(6) + 2000, "animal": ANIMALS[:6]}
    return td.from_arrays({"image": x}, coords={**known, **coords}, chunks=4)


def featurized(**coords: object) -> xr.Dataset:
    torch.manual_seed(0)
    model = td.Model(torch.nn.Linear(4, 3), task="image_classification")
    return td.featurize(samples(**coords), model, projector=td.SJLT(4))


def test_featurize__metadata_are_no_part_of_the_source(tmp_path: Path) -> None:
    """Neither text nor numbers; but the label is, which the task reads."""
    features = featurized()
    for coords in ({"animal": RIGHT[:6]}, {"year": np.arange(6)}, {"extra": np.zeros(6)}):
        changed = featurized(**coords)
        assert changed.attrs["source"] == features.attrs["source"]
        assert changed.feature.data.name == features.feature.data.name
    assert featurized(label=np.zeros(6, int)).attrs["source"] != features.attrs["source"]
    save(features, tmp_path / "f.zarr")
    with pytest.raises(td.errors.StoreMismatchError, match="differ in source"):
        save(featurized(label=np.zeros(6, int)), tmp_path / "f.zarr")
    corrected = featurized(year=np.arange(6))
    with pytest.raises(td.errors.StoreMismatchError, match=r"'year'.*td.assign_coords"):
        save(corrected, tmp_path / "f.zarr")
    td.assign_coords(tmp_path / "f.zarr", {"year": np.arange(6)})
    opened = save(corrected, tmp_path / "f.zarr")
    np.testing.assert_array_equal(opened.year, np.arange(6))
