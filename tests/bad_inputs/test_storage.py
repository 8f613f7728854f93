"""Bad inputs of what writes, changes and reads stores, and of what writes results for others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xarray as xr
import zarr

import trakdask as td
from tests.bad_inputs.bad_input import BadInput, one_test, parametrize
from tests.bad_inputs.stores import FEATURES, file, foreign_folder, foreign_zarr, scores, store_in


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
    *[(f"{name} {value!r}", save(**{name: value}), TypeError, [name, repr(value)]) for name, value in (("progress", "no"), ("progress", None), ("retries", "two"), ("storage_options", "anon"))],
    ("integer features", save(FEATURES.astype(int)), ValueError, ["int64"]),
    ("empty path", save(store=""), ValueError, ["''"]),
    ("unknown protocol", save(store="s4://bucket/f.zarr"), ValueError, ["s4"]),
    ("foreign folder", lambda f: td.save(FEATURES, foreign_folder(f)), FileExistsError, ["notes"]),
    ("foreign zarr", lambda f: td.save(FEATURES, foreign_zarr(f)), FileExistsError, ["mine.zarr"]),
    ("an estimator without a gram matrix", save(estimator="grad_dot"), ValueError, ["GradDot()", "gram matrix"]),
    ("an estimator with a damping", save(estimator=td.Soft(damping=td.Absolute(1.0))), ValueError, ["damping='auto'", "Absolute"]),
    ("some columns of a fit", save(FEATURES.assign(wrong_classes=(("proj_dim", "proj_dim_1", "checkpoint"), np.ones((4, 4, 2)))).isel(proj_dim=[0, 2])), ValueError, ["all 4 columns", "got 2", "drop_dims"]),
    ("no samples", save(FEATURES.isel(sample=[])), ValueError, ["sample", "0"]),
    ("checkpoint twice", save(FEATURES.isel(checkpoint=[0, 0])), ValueError, ["'c0', 'c0'"]),
    ("no provenance", save(FEATURES.drop_attrs()), ValueError, ["projector"]),
    *[(f"coord named {name or 'nothing'}", named(name), ValueError, [f"'{name}'"]) for name in ("lock", "..", "", "a b", "gram")],
    ("coord of times with a zone", save(FEATURES.assign_coords(mine=("sample", pd.date_range("2024", periods=8, tz="UTC")))), TypeError, ["'mine'", "tz_localize(None)"]),
    ("coord of bytes", with_coord([b"a"] * 8), TypeError, ["'mine'", "S1"]),
    ("other task", save_again(FEATURES.assign_attrs(task="other")), td.errors.StoreMismatchError, ["task", "other"]),
    ("append with other width", save_again(FEATURES.isel(proj_dim=slice(2)).assign_attrs(source="more"), append_dim="sample"), td.errors.StoreMismatchError, ["4", "2"]),
    ("append with fewer checkpoints", save_again(FEATURES.isel(checkpoint=[0]).assign_attrs(source="more"), append_dim="sample"), td.errors.StoreMismatchError, ["c1"]),
]  # fmt: skip

OPEN = [
    *[(f"{name} a word", opened(store_in, **{name: "no"}), TypeError, [name, "'no'"]) for name in ("dropped", "load_coords", "storage_options")],
    ("features", opened(lambda _: FEATURES), TypeError, ["Dataset"]),
    ("a store of zarr", opened(lambda f: zarr.storage.LocalStore(f)), TypeError, ["LocalStore", "xr.open_zarr"]),
    ("nothing there", opened(lambda f: f / "f.zarr"), FileNotFoundError, ["f.zarr", "does not exist"]),
    ("foreign folder", opened(foreign_folder), FileNotFoundError, ["notes.txt"]),
]  # fmt: skip

VERIFY = [
    ("repair a word", verify(store_in, repair="no"), TypeError, ["repair", "'no'", "True"]),
    ("a live writer", verify(with_lock(ALIVE), repair=True), td.errors.StoreBusyError, ["process 7"]),
]  # fmt: skip

DROP = [
    ("positions", drop(along([0, 1])), ValueError, ["int64 {'sample': 2}", "sample: 6"]),
    ("too many", drop(along([True, False] * 4)), ValueError, ["{'sample': 8}", "sample: 6"]),
    ("all samples", drop(along([True] * 6)), ValueError, ["true for all 6"]),
    ("a condition on nothing there", drop("colour == 3"), ValueError, ["'colour'", "'label'"]),
    ("a function that returns nothing", drop(lambda _: None), ValueError, ["NoneType"]),
]  # fmt: skip

ASSIGN = [
    ("missing text", assign({"label": ["a", None] * 4}), ValueError, ["'label'"]),
    ("a list", assign(["label"]), TypeError, ["by name", "got list"]),
    ("coord named gram", assign({"gram": [1] * 8}), ValueError, ["'gram'"]),
]  # fmt: skip


CALIBRATE = [
    ("a store without gram matrix", lambda f: td.calibrate(without_gram(f)), ValueError, ["gram", "'feature'"]),
]  # fmt: skip


def without_gram(folder: Path) -> Path:
    td.save(FEATURES, folder / "f.zarr", estimator=None, progress=False)
    return folder / "f.zarr"


def exported(
    function: Callable[..., None], at: Any = None, data: Any = None, **options: Any
) -> Any:
    def call(folder: Path) -> None:
        function(scores() if data is None else data, at(folder) if at else folder / "s", **options)

    return call


EXPORTS = {
    function.__name__: [
        ("a page of the web", exported(function, lambda _: "http://h/s"), ValueError, ["'http://h/s'"]),
        ("path of a file", exported(function, file), NotADirectoryError, ["notes.txt"]),
    ]
    for function in (td.to_zarr, td.to_parquet)
}  # fmt: skip
EXPORTS["to_parquet"] += [
    ("features", exported(td.to_parquet, data=FEATURES), ValueError, ["proj_dim"]),
    ("a single number", lambda f: td.to_parquet(scores().mean(), f / "s"), ValueError, ["a Dataset of td.top_k", "td.to_zarr"]),
]  # fmt: skip


TABLES = {
    **EXPORTS,
    "save": SAVE,
    "open": OPEN,
    "verify": VERIFY,
    "drop": DROP,
    "assign_coords": ASSIGN,
    "calibrate": CALIBRATE,
}
ROWS = [BadInput(function, *row) for function, table in TABLES.items() for row in table]

test_bad_input = one_test(ROWS)


UNTOUCHED = ("nothing there", "coord named")


@parametrize(
    [row for row in ROWS if row.case.startswith(UNTOUCHED) and row.function != "assign_coords"]
)
def test_bad_input__is_refused_before_anything_is_written(row: BadInput, tmp_path: Path) -> None:
    with pytest.raises(row.error):
        row.call(tmp_path)
    assert list(tmp_path.iterdir()) == []
