"""Bad inputs of what writes, changes and reads stores."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

import trakdask as td
from tests.bad_inputs.bad_input import BadInput, check, parametrize
from tests.bad_inputs.stores import (
    FEATURES,
    file,
    foreign_folder,
    foreign_zarr,
    store_in,
    without,
)


def save(features: Any = FEATURES, **options: Any) -> Callable[[Path], object]:
    return lambda folder: td.save(
        features, **{"store": folder / "new.zarr", "progress": False, **options}
    )


def save_again(features: xr.Dataset, **options: Any) -> Callable[[Path], object]:
    return lambda folder: td.save(features, store_in(folder), progress=False, **options)


def named(name: Any) -> Callable[[Path], object]:
    return save(FEATURES.assign_coords({name: ("sample", np.arange(8))}))


def with_coord(values: Any) -> Callable[[Path], object]:
    return save(FEATURES.assign_coords(mine=("sample", np.array(values))))


def flipped(path: str) -> Callable[[Path], Path]:
    def damaged(folder: Path) -> Path:
        store = store_in(folder)
        (found,) = store.glob(path)
        data = bytearray(found.read_bytes())
        data[len(data) // 2] ^= 1
        found.write_bytes(data)
        return store

    return damaged


def with_lock(content: bytes) -> Callable[[Path], Path]:
    def held(folder: Path) -> Path:
        store = store_in(folder)
        (store / "lock").write_bytes(content)
        return store

    return held


def verify(at: Callable[[Path], Any], **options: Any) -> Callable[[Path], object]:
    return lambda folder: td.verify(at(folder), **options)


def opened(at: Callable[[Path], Any], **options: Any) -> Callable[[Path], object]:
    return lambda folder: td.open(at(folder), **options)


def drop(where: Any) -> Callable[[Path], object]:
    return lambda folder: td.drop(store_in(folder), where=where)


def assign(coords: Any) -> Callable[[Path], object]:
    return lambda folder: td.assign_coords(store_in(folder), coords)


def along(values: Any, dim: str = "sample") -> xr.DataArray:
    return xr.DataArray(np.array(values), dims=dim)


ALIVE = json.dumps({"host": "elsewhere", "process": 7, "renewed": 4e9, "since": 0}).encode()

SAVE = [
    ("an array", save(FEATURES.feature), TypeError, ["DataArray"]),
    ("integer features", save(FEATURES.astype(int)), ValueError, ["int64"]),
    ("empty path", save(store=""), ValueError, ["''"]),
    ("unknown protocol", save(store="s4://bucket/f.zarr"), ValueError, ["s4"]),
    ("path of a file", lambda f: td.save(FEATURES, file(f)), NotADirectoryError, ["notes.txt"]),
    ("foreign folder", lambda f: td.save(FEATURES, foreign_folder(f)), FileExistsError, ["notes"]),
    ("foreign zarr", lambda f: td.save(FEATURES, foreign_zarr(f)), FileExistsError, ["mine.zarr"]),
    ("unknown dtype", save(dtype="float8"), ValueError, ["'float8'", "'float16'"]),
    ("unknown append_dim", save(append_dim="target"), ValueError, ["'target'", "'checkpoint'"]),
    ("negative retries", save(retries=-1), ValueError, ["-1"]),
    ("unknown estimator", save(estimator="trakk"), ValueError, ["'trakk'", "'trak'"]),
    ("an estimator without a gram matrix", save(estimator=td.GradDot()), ValueError, ["GradDot()", "gram matrix"]),
    ("no samples", save(FEATURES.isel(sample=[])), ValueError, ["sample", "0"]),
    ("checkpoint twice", save(FEATURES.isel(checkpoint=[0, 0])), ValueError, ["'c0', 'c0'"]),
    ("unknown checkpoints", save(FEATURES.assign_coords(checkpoint=["a", "b"])), ValueError, ["'a', 'b'", "'c0', 'c1'"]),
    ("no provenance", save(FEATURES.drop_attrs()), ValueError, ["projector"]),
    *[(f"coord named {name or 'nothing'}", named(name), ValueError, [f"'{name}'"]) for name in ("lock", "..", ".", "", "a/b", "zarr.json", "a b", "__x", "gram", "dropped")],
    ("coord of bytes", with_coord([b"a"] * 8), TypeError, ["'mine'", "S1"]),
    ("coord of several kinds", with_coord([None, *"abcdefg"]), ValueError, ["'mine'"]),
    ("other task", save_again(FEATURES.assign_attrs(task="other")), td.errors.StoreMismatchError, ["task", "other"]),
    ("other source", save_again(FEATURES.assign_attrs(source="mine")), td.errors.StoreMismatchError, ["'mine'"]),
    ("other label", save_again(FEATURES.assign_coords(label=("sample", np.full(8, 5)))), td.errors.StoreMismatchError, ["'label'", "5 instead of 0", "sample 0"]),
    ("new coord", save_again(FEATURES.assign_coords(mine=("sample", np.zeros(8)))), td.errors.StoreMismatchError, ["'mine'"]),
    ("other precision", save_again(FEATURES, dtype="float16"), td.errors.StoreMismatchError, ["float16"]),
    ("append with other width", save_again(FEATURES.isel(proj_dim=slice(2)).assign_attrs(source="more"), append_dim="sample"), td.errors.StoreMismatchError, ["4", "2"]),
    ("append with other coords", save_again(FEATURES.rename(label="mine").assign_attrs(source="more"), append_dim="sample"), td.errors.StoreMismatchError, ["'label'", "'mine'"]),
    ("append with fewer checkpoints", save_again(FEATURES.isel(checkpoint=[0]).assign_attrs(source="more"), append_dim="sample"), td.errors.StoreMismatchError, ["c1"]),
    ("a live writer", lambda f: td.save(FEATURES, with_lock(ALIVE)(f)), td.errors.StoreBusyError, ["process 7 on elsewhere", "lock"]),
]  # fmt: skip

OPEN = [
    ("lost mask of dropped samples", opened(without("dropped/c.0")), td.errors.IncompleteFeaturesError, ["dropped/c.0"]),
    ("features", opened(lambda _: FEATURES), TypeError, ["Dataset"]),
    ("nothing there", opened(lambda f: f / "f.zarr"), FileNotFoundError, ["f.zarr"]),
    ("foreign folder", opened(foreign_folder), FileNotFoundError, ["notes.txt"]),
    ("foreign zarr", opened(foreign_zarr), FileNotFoundError, ["mine.zarr"]),
    ("file", opened(file), NotADirectoryError, ["notes.txt"]),
    ("lost chunk of a coord", opened(without("label/c.0")), td.errors.IncompleteFeaturesError, ["label/c.0"]),
    ("flipped bit in a coord", opened(flipped("label/c.0")), ValueError, ["'label'"]),
]  # fmt: skip

VERIFY = [
    ("nothing there", verify(lambda f: f / "f.zarr", repair=True), FileNotFoundError, ["no store"]),
    ("foreign folder", verify(foreign_folder, repair=True), FileNotFoundError, ["notes.txt"]),
    ("foreign zarr", verify(foreign_zarr), FileNotFoundError, ["mine.zarr"]),
    ("file", verify(file), NotADirectoryError, ["notes.txt"]),
    ("a live writer", verify(with_lock(ALIVE), repair=True), td.errors.StoreBusyError, ["process 7"]),
]  # fmt: skip

DROP = [
    ("nothing there", lambda f: td.drop(f / "f.zarr", where=along([True])), FileNotFoundError, ["no store"]),
    ("an array", drop(np.arange(6) < 2), ValueError, ["(ndarray)"]),
    ("positions", drop(along([0, 1])), ValueError, ["int64 {'sample': 2}", "sample: 6"]),
    ("too many", drop(along([True, False] * 4)), ValueError, ["{'sample': 8}", "sample: 6"]),
    ("all samples", drop(along([True] * 6)), ValueError, ["true for all 6"]),
    ("a function that returns nothing", drop(lambda _: None), ValueError, ["NoneType"]),
]  # fmt: skip

ASSIGN = [
    ("nothing there", lambda f: td.assign_coords(f / "f.zarr", {"a": [1]}), FileNotFoundError, ["no store"]),
    ("too few", assign({"label": [1, 2]}), ValueError, ["'label'", "(2,)", "6"]),
    ("two dimensions", assign({"label": np.zeros((8, 2))}), ValueError, ["'label'", "(8, 2)"]),
    ("missing text", assign({"label": ["a", None] * 4}), ValueError, ["'label'"]),
    ("new, without dropped ones", assign({"mine": [1] * 6}), ValueError, ["'mine'", "8", "2 of them"]),
    ("another kind, without dropped ones", assign({"label": ["a"] * 6}), ValueError, ["'label'"]),
    *[(f"coord named {name or 'nothing'}", assign({name: [1] * 8}), ValueError, [f"'{name}'"]) for name in ("..", "", "a/b", "gram", "target_label", "sample", "zarr.json")],
]  # fmt: skip


CALIBRATE = [
    ("nothing there", lambda f: td.calibrate(f / "f.zarr"), FileNotFoundError, ["no store"]),
    ("a store without gram matrix", lambda f: td.calibrate(without_gram(f)), ValueError, ["gram", "'feature'"]),
    ("samples without outputs", lambda f: td.calibrate(store_in(f), FEATURES[["feature"]]), ValueError, ["'output'"]),
    ("few samples", lambda f: td.calibrate(store_in(f), FEATURES), ValueError, ["8", "50"]),
]  # fmt: skip


def without_gram(folder: Path) -> Path:
    td.save(FEATURES, folder / "f.zarr", estimator=None, progress=False)
    return folder / "f.zarr"


TABLES = {
    "save": SAVE,
    "open": OPEN,
    "verify": VERIFY,
    "drop": DROP,
    "assign_coords": ASSIGN,
    "calibrate": CALIBRATE,
}
ROWS = [BadInput(function, *row) for function, table in TABLES.items() for row in table]


@pytest.mark.filterwarnings("ignore::trakdask.errors.UnfinishedAppendWarning")
@parametrize(ROWS)
def test_bad_input(row: BadInput, tmp_path: Path) -> None:
    check(row, tmp_path)


UNTOUCHED = ("nothing there", "coord named")


@parametrize(
    [row for row in ROWS if row.case.startswith(UNTOUCHED) and row.function != "assign_coords"]
)
def test_bad_input__is_refused_before_anything_is_written(row: BadInput, tmp_path: Path) -> None:
    with pytest.raises(row.error):
        row.call(tmp_path)
    assert list(tmp_path.iterdir()) == []
