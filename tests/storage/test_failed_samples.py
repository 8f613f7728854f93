"""Samples that failed, in a store: reasons are joined like features, and NaN reaches no sum."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import trakdask as td
from tests.laziness import raise_if_dask_computes
from tests.storage.integers import NAMES, A, B, features, gram, save

DIMS = ("sample", "checkpoint")
FAILED = [(3, 0), (3, 1), (17, 2), (39, 1), (45, 0), (45, 1), (45, 2), (50, 2)]
"""Sample and checkpoint."""
ERROR = np.full((70, 3), "", np.dtypes.StringDType())
for at in FAILED:
    ERROR[at] = f"why {at}"
WHOLE = features(slice(0, 60)).compute(scheduler="synchronous")  # on workers too
WHOLE = WHOLE.where(xr.DataArray(ERROR[:60] == "", dims=DIMS)).assign(error=(DIMS, ERROR[:60]))


def part(rows: slice, names: tuple[str, ...] = NAMES) -> xr.Dataset:
    """Return lazy features of some rows and checkpoints; some samples failed."""
    columns = [NAMES.index(name) for name in names]
    error = xr.DataArray(ERROR[rows][:, columns], dims=DIMS).chunk(sample=16, checkpoint=1)
    made = features(rows, names)
    failed = made.map(lambda array: array.where(error == ""))
    return failed.assign(error=error).assign_attrs(made.attrs)


def assert_as(opened: xr.Dataset, expected: xr.Dataset) -> None:
    for name in ("feature", "output", "out_to_loss", "error"):
        np.testing.assert_array_equal(opened[name], expected[name])
    assert opened.error.chunks is None  # so that it can select
    with raise_if_dask_computes():
        assert (opened.error != "").sum() == (expected.error != "").sum()
    np.testing.assert_array_equal(opened.gram, gram(expected.feature.fillna(0).values))


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_open__errors_of_appended_samples_and_checkpoints(
    dtype: str | None, tmp_path: Path
) -> None:
    store, two = tmp_path / "f.zarr", NAMES[:2]
    opened = save(part(A, two), store, dtype=dtype)
    assert_as(opened, WHOLE.isel(sample=A, checkpoint=slice(2)))
    opened = save(part(B, two), store, append_dim="sample", dtype=dtype)
    assert_as(opened, WHOLE.isel(checkpoint=slice(2)))
    with pytest.warns(match="no unfinished append"):
        opened = save(part(B), store, append_dim="checkpoint", dtype=dtype)
    assert_as(opened, WHOLE.isel(checkpoint=slice(2)))
    assert_as(save(part(A), store, append_dim="checkpoint", dtype=dtype), WHOLE)
    assert td.verify(store, checksums=True).empty


def test_open__only_what_was_appended_failed(tmp_path: Path) -> None:
    """None of the first; whoever records no errors has none."""
    opened = save(features(slice(20, 36)), tmp_path / "f.zarr")
    assert "error" not in opened
    opened = save(part(B), tmp_path / "f.zarr", append_dim="sample")
    assert_as(opened, WHOLE.isel(sample=[*range(20, 36), *range(40, 60)]))


def test_drop__with_failures_among_what_goes_and_what_stays(tmp_path: Path) -> None:
    store = tmp_path / "f.zarr"
    save(part(A), store)
    save(part(B), store, append_dim="sample")
    gone = np.isin(np.arange(60), [1, 2, 3, 39])
    opened = td.drop(store, where=xr.DataArray(gone, dims="sample"))
    assert_as(opened, WHOLE.isel(sample=~gone))
    np.testing.assert_array_equal(td.open(store, dropped=True).error, WHOLE.error)
    opened = td.drop(store, where=lambda ds: (ds.error != "").any("checkpoint"))
    assert_as(opened, WHOLE.isel(sample=(WHOLE.error == "").all("checkpoint").values & ~gone))
    assert td.verify(store, checksums=True).empty


def test_drop__soft_sums_with_failures(tmp_path: Path) -> None:
    """The sums after a drop are the sums over the rest."""
    save(part(A), tmp_path / "f.zarr", estimator="soft")
    opened = td.drop(tmp_path / "f.zarr", where=xr.DataArray(np.arange(40) < 5, dims="sample"))
    rest = save(part(slice(5, 40)), tmp_path / "rest.zarr", estimator="soft")
    for name in ("gram", "loss_gradient"):
        assert np.isfinite(rest[name]).all()
        np.testing.assert_allclose(opened[name], rest[name], rtol=1e-6, atol=1e-5)


def test_save__a_block_that_did_not_fail_this_time_has_no_errors(tmp_path: Path) -> None:
    """The blocks that took the place of lost ones."""
    store = tmp_path / "f.zarr"
    save(part(A), store)
    (store / "out_to_loss/c/0/1").unlink()
    td.verify(store, repair=True)
    opened = save(part(A).drop_vars("error"), store)
    expected = ERROR[:40].copy()
    expected[:, 1] = ""
    np.testing.assert_array_equal(opened.error, expected)


def test_verify__finds_damaged_errors_and_mends_them(tmp_path: Path) -> None:
    store = tmp_path / "f.zarr"
    save(part(A), store)
    (chunk, *_) = sorted(store.glob("error/c/*/*"))
    chunk.write_bytes(chunk.read_bytes()[:-1])
    found = td.verify(store, checksums=True, repair=True)
    assert list(found.path) == [str(chunk.relative_to(store))]
    assert_as(save(part(A), store), WHOLE.isel(sample=A))
