"""After every operation xarray shows the store as trakdask does; the oracle is numpy.

Features are small integers, so that sums are exact and equal to the bit however they are made.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr

import trakdask as td
from trakdask.attribution.grams import DERIVED
from trakdask.testing import simulate_features

N, P, B = 70, 6, 20
VALUES = np.random.default_rng(0).integers(-4, 5, (N, P, 2)).astype("f4")
DAYS = np.datetime64("2026-01-01", "ns") + np.arange(N) * np.timedelta64(1, "D")

pytestmark = pytest.mark.filterwarnings("ignore::trakdask.errors.UnfinishedAppendWarning")


def features(rows: slice, columns: tuple[int, ...], source: str) -> xr.Dataset:
    ds = simulate_features(N, P, 2, chunks=N).isel(sample=rows, checkpoint=list(columns))
    data = VALUES[rows][..., list(columns)]
    number, names = np.arange(N)[rows], [f"c{c}" for c in columns]
    ds = ds.assign(
        feature=(ds.feature.dims, data),
        output=(("sample", "checkpoint"), data[:, 0]),
        out_to_loss=(("sample", "checkpoint"), (4 + data[:, 1]) / 16),
        error=(("sample", "checkpoint"), np.full(data[:, 0].shape, "", np.dtypes.StringDType())),
    ).chunk(sample=B)
    return ds.assign_coords(
        number=("sample", number),
        day=("sample", DAYS[rows]),
        text=("sample", [f"é{i}" for i in number]),
        clean=("sample", number % 3 == 0),
        share=("sample", np.where(number % 4 == 0, np.nan, number / 7)),
        epoch=("checkpoint", 10 * np.array(columns)),
        checkpoint=names,
    ).assign_attrs(
        source=source,
        checkpoints={name: name for name in names},
        checkpoint_ids={name: int(name[1:]) for name in names},
    )


def save(path: Path, rows: slice, columns: tuple[int, ...], source: str, **options) -> None:
    td.save(features(rows, columns, source), path, progress=False, **options)


A, Z = slice(0, 50), slice(50, N)
OPERATIONS: dict[str, Callable[[Path], object]] = {
    "save": lambda path: save(path, A, (0,), "a"),
    "save again": lambda path: save(path, A, (0,), "a"),
    "append samples": lambda path: save(path, Z, (0,), "z", append_dim="sample"),
    "append a checkpoint, to some": lambda path: save(path, A, (1,), "a", append_dim="checkpoint"),
    "append a checkpoint": lambda path: save(path, Z, (1,), "z", append_dim="checkpoint"),
    "calibrate": td.calibrate,
    "drop": lambda path: td.drop(path, where=lambda ds: ds.number % 7 == 3),
    "assign": lambda path: td.assign_coords(
        path, {"text": np.arange(N), "new": td.open(path, dropped=True).day.values}
    ),
    "drop more": lambda path: td.drop(path, where=lambda ds: ds.number < 30),
    "verify": lambda path: td.verify(path, checksums=True, repair=True),
    "other sums": lambda path: save(path, A, (0, 1), "a", estimator="soft"),
}


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_open_zarr__shows_what_open_shows_after_every_operation(
    tmp_path: Path, dtype: str | None
) -> None:
    path = tmp_path / "f.zarr"
    for name, operation in OPERATIONS.items():
        if name.startswith(("save", "append", "other")):
            source = features(A if "samples" not in name else Z, (0,), "")
            assert source is not None
        if name == "other sums":
            # The text was assigned anew.
            ds = features(A, (0, 1), "a").drop_vars("text")
            td.save(ds, path, progress=False, estimator="soft", dtype=dtype)
        elif name.startswith(("save", "append")):
            _with_dtype(operation, path, dtype)
        else:
            operation(path)
        ours, whole, theirs = td.open(path), td.open(path, dropped=True), xr.open_zarr(path)
        xr.testing.assert_identical(
            theirs.compute(), xr.open_zarr(path, consolidated=False).compute()
        )
        if dtype:
            theirs = theirs.assign(
                feature=theirs.feature.astype("f4") * theirs["scale"].astype("f4")
            ).drop_vars("scale")
        reset = whole.reset_coords().compute()
        for variable in theirs.reset_coords().data_vars:
            known = ours if variable in DERIVED else reset
            np.testing.assert_array_equal(known[variable], theirs[variable], str(variable))
        assert {*ours.coords} | {"dropped"} == {*theirs.coords} | {"dropped"}
        shown = {*ours.variables} | {*whole.variables}
        assert shown - {*theirs.variables} <= {"dropped"}
        left = ours.number.values
        x = VALUES[left][..., : ours.sizes["checkpoint"]]
        np.testing.assert_array_equal(ours.feature, x)
        if ours.gram.attrs["gram_weights"] == "1":
            np.testing.assert_array_equal(ours.gram, np.einsum("npc,nqc->pqc", x, x))
        assert ours.gram.attrs["n_samples"] == len(left)
        assert ours.damping.attrs["n_samples"] == len(left)


def _with_dtype(operation: Callable[[Path], object], path: Path, dtype: str | None) -> None:
    original = td.save
    try:
        td.save = lambda *args, **options: original(*args, dtype=dtype, **options)
        operation(path)
    finally:
        td.save = original


def test_save__format(tmp_path: Path) -> None:
    save(tmp_path / "f.zarr", A, (0,), "a")
    group = zarr.open_group(tmp_path / "f.zarr", mode="r")
    array = group["feature"]
    assert array.metadata.zarr_format == 3
    assert array.chunks == (B, P, 1)
    assert [codec.to_dict()["name"] for codec in array.compressors] == ["crc32c"]
    assert np.isnan(array.fill_value)
    assert group.attrs["n_samples"] == 50
    assert group.attrs["sources"] == [["a", 50]]
    assert not (tmp_path / "f.zarr/lock").exists()
