"""What coords of a store are compared by, joined from and written again from.

The oracle is the Dataset in memory that was saved.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import trakdask as td
from trakdask.storage.coords import kind_of, require_kinds, require_names, require_same_coords
from trakdask.testing import simulate_features

N = 12
DAYS = np.datetime64("2026-01-01", "ns") + np.arange(N) * np.timedelta64(1, "D")
VALUES = {
    "number": np.where(np.arange(N) % 3 == 0, np.nan, np.arange(N) / 2),
    "day": np.where(np.arange(N) == 4, np.datetime64("NaT"), DAYS),
    "spent": np.where(np.arange(N) == 5, np.timedelta64("NaT"), DAYS - DAYS[0]),
    "animal": np.array(["cat", "dog"] * (N // 2), np.dtypes.StringDType()),
    "clean": np.arange(N) % 2 == 0,
}
COORDS = {name: xr.Variable("sample", values, {"unit": name}) for name, values in VALUES.items()}


def features(seed: int = 0) -> xr.Dataset:
    made = simulate_features(N, 4, 1, chunks=4, seed=seed).drop_vars("label")
    return made.assign_coords(COORDS).assign_attrs(source=f"source {seed}")


def save(ds: xr.Dataset, store: Path, **options: object) -> xr.Dataset:
    return td.save(ds, store, gram=False, progress=False, **options)


@pytest.mark.parametrize(
    ("dtypes", "kind"),
    [
        (["i1", "u8", "f2", "f8"], "numbers"),
        ([object, np.dtypes.StringDType(), "U3"], "text"),
        (["M8[s]", "M8[ns]"], "times"),
        (["m8[s]", "m8[ns]"], "durations"),
        ([bool], "booleans"),
        (["c8"], "complex64"),
    ],
)
def test_kind_of__whatever_the_width(dtypes: list[object], kind: str) -> None:
    assert [kind_of(np.dtype(dtype)) for dtype in dtypes] == [kind] * len(dtypes)


def test_require_same_coords__missing_values_are_alike() -> None:
    require_same_coords(features(), COORDS, "store")


@pytest.mark.parametrize("name", VALUES)
def test_require_same_coords__names_the_first_sample_that_differs(name: str) -> None:
    values = COORDS[name].values.copy()
    values[[7, 9]] = values[[6, 8]]
    with pytest.raises(td.StoreMismatchError, match=rf"'{name}'.* at sample 7, .* first of 2 "):
        require_same_coords(features(), {**COORDS, name: xr.Variable("sample", values)}, "store")


def test_require_same_coords__value_where_one_is_missing() -> None:
    filled = COORDS["number"].fillna(1.0)
    with pytest.raises(td.StoreMismatchError, match=r"got nan instead of 1\.0 at sample 0"):
        require_same_coords(features(), {**COORDS, "number": filled}, "store")


@pytest.mark.parametrize("width", ["f4", "i8", "u1"])
def test_require_kinds__numbers_of_any_width(width: str) -> None:
    ours = features().assign_coords(number=("sample", np.arange(N).astype(width)))
    require_kinds(ours, COORDS, "store")
    with pytest.raises(td.StoreMismatchError, match=r"'number'.*as numbers.*got StringDType"):
        require_kinds(ours.assign_coords(number=COORDS["animal"]), COORDS, "store")


@pytest.mark.parametrize("name", ["a/b", "a\\b", "", "..", "a\nb", "__a", "feature", "n" * 201])
def test_require_names__folders_that_there_cannot_be(name: str) -> None:
    require_names(["a b", "ä", "n" * 200])
    with pytest.raises(ValueError, match="printable and without slashes"):
        require_names([name])


def test_sample_coords__attrs_of_what_is_joined_are_those_of_the_first(tmp_path: Path) -> None:
    save(features(), tmp_path / "f.zarr")
    opened = save(features(1), tmp_path / "f.zarr", append_dim="sample")
    for name, coord in COORDS.items():
        np.testing.assert_array_equal(opened[name], np.concatenate([coord.values] * 2))
        assert opened[name].attrs["unit"] == name


def test_sample_coords__names_of_lazy_ones_follow_the_samples(tmp_path: Path) -> None:
    """A scheduler that knows a name would take the values of another store for these."""
    names = set()
    for seed in range(2):
        save(features(seed), tmp_path / f"{seed}.zarr")
        opened = td.open(tmp_path / f"{seed}.zarr", load_coords=False)
        names |= {opened[name].data.name for name in VALUES}
    assert len(names) == 2 * len(VALUES)


def test_restore_coords__only_what_was_lost(tmp_path: Path) -> None:
    store = tmp_path / "f.zarr"
    save(features(), store)
    lost, kept = (store / name / "c" / "0" for name in ("number", "clean"))
    written = lost.read_bytes()
    lost.unlink()
    kept.write_bytes(bytes(len(kept.read_bytes())))
    save(features(), store)
    assert lost.read_bytes() == written
    xr.testing.assert_equal(td.open(store).clean.variable, COORDS["clean"])


def test_restore_coords__never_from_other_values(tmp_path: Path) -> None:
    store = tmp_path / "f.zarr"
    save(features(), store)
    (store / "number/c/0").unlink()
    others = features().assign_coords(number=("sample", np.arange(N) * 2.5))
    with pytest.raises(td.IncompleteFeaturesError, match="number"):
        save(others, store)
    assert not (store / "number/c/0").exists()
