"""Samples that failed, in a store: reasons are joined like features, and NaN reaches no sum.

The oracle is what was given to save, in numpy; features are small integers, so that sums are exact
and equal to the bit however they are cut.
"""

from __future__ import annotations

from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest
import xarray as xr

import trakdask as td
from trakdask.testing import raise_if_dask_computes, simulate_features

NAMES = ("c0", "c1", "c2")
TEXT = np.dtypes.StringDType()
FAILED = [(3, 0), (3, 1), (17, 2), (39, 1), (45, 0), (45, 1), (45, 2), (50, 2)]
"""Sample and checkpoint."""


def whole() -> xr.Dataset:
    ds = simulate_features(n_samples=60, proj_dim=6, n_checkpoints=3, chunks=16)
    ds = ds.compute(scheduler="synchronous")  # at import, on workers too
    ds["feature"][:] = np.random.default_rng(0).integers(-4, 5, ds.feature.shape)
    error = np.full((60, 3), "", TEXT)
    for at in FAILED:
        error[at] = f"why {at}"
    ds = ds.where(xr.DataArray(error == "", dims=("sample", "checkpoint")))
    return ds.assign(error=(("sample", "checkpoint"), error))


WHOLE = whole()


def part(rows: slice, checkpoints: tuple[str, ...], source: str) -> xr.Dataset:
    """Return lazy features of some rows and checkpoints, as featurize would make them."""
    ds = WHOLE.isel(sample=rows, checkpoint=[NAMES.index(name) for name in checkpoints])
    name = "feature-" + dask.base.tokenize(source, checkpoints)
    feature = da.from_array(ds.feature.values, chunks=(16, -1, 1), name=name)
    others = {
        name: (("sample", "checkpoint"), da.from_array(ds[name].values, chunks=(16, 1)))
        for name in ("output", "out_to_loss", "error")
    }
    attrs = {
        "source": source,
        "checkpoints": {name: name for name in checkpoints},
        "checkpoint_ids": {name: NAMES.index(name) for name in checkpoints},
    }
    data = {"feature": (("sample", "proj_dim", "checkpoint"), feature), **others}
    return ds.assign(data).assign_attrs(attrs)


A, B = slice(0, 40), slice(40, 60)


def save(features: xr.Dataset, store: Path, **options: object) -> xr.Dataset:
    return td.save(features, store, progress=False, **options)


def assert_as(opened: xr.Dataset, expected: xr.Dataset) -> None:
    for name in ("feature", "output", "out_to_loss", "error"):
        np.testing.assert_array_equal(opened[name], expected[name])
    assert opened.error.chunks is None
    x = expected.feature.fillna(0).values.astype("f8")
    np.testing.assert_array_equal(opened.gram, np.einsum("npc,nqc->pqc", x, x))
    g = expected.out_to_loss.mean("checkpoint", skipna=False)
    assert g.isnull().sum() == (expected.error != "").any("checkpoint").sum()


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_open__errors_of_appended_samples_and_checkpoints(
    dtype: str | None, tmp_path: Path
) -> None:
    store = tmp_path / "f.zarr"
    opened = save(part(A, NAMES[:2], "a"), store, dtype=dtype)
    assert_as(opened, WHOLE.isel(sample=A, checkpoint=slice(2)))
    opened = save(part(B, NAMES[:2], "b"), store, append_dim="sample", dtype=dtype)
    assert_as(opened, WHOLE.isel(checkpoint=slice(2)))
    with pytest.warns(td.errors.UnfinishedAppendWarning):
        opened = save(part(B, NAMES, "b"), store, append_dim="checkpoint", dtype=dtype)
    assert_as(opened, WHOLE.isel(checkpoint=slice(2)))
    opened = save(part(A, NAMES, "a"), store, append_dim="checkpoint", dtype=dtype)
    assert_as(opened, WHOLE)
    assert td.verify(store, checksums=True).empty


def test_open__errors_are_no_dask_array(tmp_path: Path) -> None:
    save(part(A, NAMES, "a"), tmp_path / "f.zarr")
    save(part(B, NAMES, "b"), tmp_path / "f.zarr", append_dim="sample")
    opened = td.open(tmp_path / "f.zarr")
    with raise_if_dask_computes():
        assert (opened.error != "").sum() == len(FAILED)


def test_open__only_what_was_appended_failed(tmp_path: Path) -> None:
    rows = slice(20, 36)  # of which none failed
    opened = save(part(rows, NAMES, "a"), tmp_path / "f.zarr")
    assert (opened.error == "").all()
    opened = save(part(B, NAMES, "b"), tmp_path / "f.zarr", append_dim="sample")
    assert_as(opened, WHOLE.isel(sample=[*range(20, 36), *range(40, 60)]))


@pytest.mark.parametrize("appended", [False, True])
def test_drop__with_failures_among_what_goes_and_what_stays(appended: bool, tmp_path: Path) -> None:
    store, expected = tmp_path / "f.zarr", WHOLE.isel(sample=A)
    save(part(A, NAMES, "a"), store)
    if appended:
        save(part(B, NAMES, "b"), store, append_dim="sample")
        expected = WHOLE
    gone = np.isin(np.arange(expected.sizes["sample"]), [1, 2, 3, 39])
    opened = td.drop(store, where=xr.DataArray(gone, dims="sample"))
    assert_as(opened, expected.isel(sample=~gone))
    marked = td.open(store, dropped=True)
    np.testing.assert_array_equal(marked.error, expected.error)
    opened = td.drop(store, where=lambda ds: (ds.error != "").any("checkpoint"))
    good = (expected.error == "").all("checkpoint").values & ~gone
    assert opened.sizes["sample"] == good.sum()
    assert (opened.error == "").all()
    x = expected.feature[good].values.astype("f8")
    np.testing.assert_array_equal(opened.gram, np.einsum("npc,nqc->pqc", x, x))
    assert td.verify(store, checksums=True).empty


def test_drop__soft_sums_with_failures(tmp_path: Path) -> None:
    """What is kept after a drop is what would be kept of the rest."""
    store = tmp_path / "f.zarr"
    save(part(A, NAMES, "a"), store, estimator="soft")
    opened = td.drop(store, where=xr.DataArray(np.arange(40) < 5, dims="sample"))
    rest = save(part(slice(5, 40), NAMES, "rest"), tmp_path / "rest.zarr", estimator="soft")
    for name in ("gram", "loss_gradient"):
        assert np.isfinite(rest[name]).all()
        np.testing.assert_allclose(opened[name], rest[name], rtol=1e-6, atol=1e-5)


def test_save__a_block_that_did_not_fail_this_time_has_no_errors(tmp_path: Path) -> None:
    """An attempt that recorded errors was killed before its last chunk."""
    store, features = tmp_path / "f.zarr", part(A, NAMES, "a")
    save(features, store)
    for chunk in store.glob("out_to_loss/c.*.1"):
        chunk.unlink()
    fine = features.drop_vars("error")
    opened = save(fine, store)
    expected = WHOLE.error.values[:40].copy()
    expected[:, 1] = ""
    np.testing.assert_array_equal(opened.error, expected)


def test_verify__finds_damaged_errors_and_mends_them(tmp_path: Path) -> None:
    store, features = tmp_path / "f.zarr", part(A, NAMES, "a")
    save(features, store)
    assert td.verify(store, checksums=True).empty
    (chunk, *_) = sorted(store.glob("error/c.*.*"))
    chunk.write_bytes(chunk.read_bytes()[:-1])
    found = td.verify(store, checksums=True, repair=True)
    assert list(found.path) == [str(chunk.relative_to(store))]
    assert_as(save(features, store), WHOLE.isel(sample=A))
