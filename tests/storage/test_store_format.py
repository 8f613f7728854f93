"""A program that follows docs/reference/store_format.md, with zarr and json, reads every store."""

from __future__ import annotations

import ast
import json
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
import zarr

import trakdask as td
from tests.storage import store_reader

X = np.random.default_rng(0).normal(size=(90, 4)).astype("f4")


def features_of(rows: slice, *names: str) -> xr.Dataset:
    coords = {"label": np.arange(90)[rows] % 3}
    samples = td.from_arrays({"image": X[rows]}, coords=coords, chunks=16)
    states = {n: {"weight": torch.eye(3, 4) * ord(n) / 99, "bias": torch.zeros(3)} for n in names}
    return td.featurize(samples, td.Model(torch.nn.Linear(4, 3), states), projector=td.SJLT(8))


def save(features: xr.Dataset, store: Path, **options: object) -> None:
    td.save(features, store, progress=False, **options)


def one_part(store: Path) -> None:
    save(features_of(slice(0, 50), "a", "b"), store)


def half_precision(store: Path) -> None:
    save(features_of(slice(0, 50), "a"), store, dtype="float16")


def appended(store: Path) -> None:
    one_part(store)
    save(features_of(slice(0, 50), "c"), store, append_dim="checkpoint")
    save(features_of(slice(50, 90), "a", "b", "c"), store, append_dim="sample")


def edited(store: Path) -> None:
    appended(store)
    td.drop(store, where=lambda ds: ds.label == 1)
    td.assign_coords(store, {"label": np.arange(60)})


def edited_then_appended(store: Path) -> None:
    one_part(store)
    td.drop(store, where=lambda ds: ds.label == 1)
    td.assign_coords(store, {"label": td.open(store).label.values + 10})
    save(features_of(slice(50, 90), "a", "b"), store, append_dim="sample")


KINDS = [one_part, half_precision, appended, edited, edited_then_appended]


@pytest.mark.filterwarnings("ignore:scores are made from|outputs of")
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_store__is_read_by_what_the_page_says(make: Callable, tmp_path: Path) -> None:
    make(tmp_path / "s.zarr")
    known = td.open(tmp_path / "s.zarr").compute()
    found = store_reader.read(tmp_path / "s.zarr", "label")
    np.testing.assert_allclose(found.pop("gram"), known.gram, rtol=1e-12)
    for name, values in found.items():
        np.testing.assert_array_equal(values, known[name], err_msg=name)


def test_reader__knows_nothing_of_trakdask() -> None:
    tree = ast.parse(Path(store_reader.__file__).read_text("utf-8"))
    imports = [each for each in ast.walk(tree) if isinstance(each, ast.Import | ast.ImportFrom)]
    names = {getattr(each, "module", None) or each.names[0].name for each in imports}
    assert names == {"hashlib", "json", "zlib", "pathlib", "numpy", "zarr"}


def test_store__shows_nothing_of_an_append_that_was_cut_short(tmp_path: Path) -> None:
    appended(tmp_path / "s.zarr")
    one_part(tmp_path / "before.zarr")
    for part in ("1", "2"):
        (record, *_) = (tmp_path / "s.zarr" / "parts" / part / "records").glob("*/*/0.json")
        record.unlink()
    parts = store_reader.parts_of(tmp_path / "s.zarr")
    assert parts == [tmp_path / "s.zarr"]
    shown, before = (
        zarr.open_group(tmp_path / name, mode="r") for name in ("s.zarr", "before.zarr")
    )
    np.testing.assert_array_equal(shown["feature"][:], before["feature"][:])


@pytest.mark.parametrize("file", ["feature/c.1.0.0", "gram/c.0.0.0"])
def test_store__tells_changed_bytes(tmp_path: Path, file: str) -> None:
    one_part(tmp_path / "s.zarr")
    path = tmp_path / "s.zarr" / file
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    assert not store_reader.is_complete(tmp_path / "s.zarr")


def test_template__lists_all_arrays_and_can_restore_their_metadata(tmp_path: Path) -> None:
    one_part(tmp_path / "s.zarr")
    (template,) = (tmp_path / "s.zarr" / "records").glob("*/template.json")
    listed = json.loads(template.read_text())
    arrays = set(zarr.open_group(tmp_path / "s.zarr", mode="r").array_keys())
    assert {path.split("/")[0] for path in listed if path.count("/") == 1} - {"records"} == arrays
    for path, about in listed.items():
        data = (tmp_path / "s.zarr" / path).read_bytes()
        assert [len(data), zlib.crc32(data)] == [about["bytes"], about["checksum"]]
        if path.endswith("zarr.json"):
            assert about["content"].encode() == data
