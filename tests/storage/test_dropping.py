"""Dropped samples are gone from what opens, and from the sums, as if they had never been."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

import trakdask as td
from tests.storage.integers import NAMES, VALUES, A, B, assert_rows, features, gram, save
from trakdask.attribution.grams import stored
from trakdask.storage import changes
from trakdask.storage.group import Group
from trakdask.variables import DERIVED

LEFT = range(5, 40)


SECRET = "xyzzy"
"""What must not be found in any file once its samples are erased."""


def secret(rows: slice = A, names: Sequence[str] = NAMES[:2]) -> xr.Dataset:
    """Return features with a coord of each kind, masks, and reasons of failures."""
    plain = features(rows, names)
    number, shape = plain.number.values, (len(plain.number), len(names))
    texts = np.array([f"{SECRET}-{n}" for n in number], np.dtypes.StringDType())
    return plain.assign_coords(
        who=("sample", texts),
        day=("sample", number.astype("M8[D]").astype("M8[ns]")),
        weight=("sample", number / 3),
        flag=("sample", number % 2 == 0),
        error=(("sample", "checkpoint"), np.broadcast_to(texts[:, None], shape)),
        trained_on=(("sample", "checkpoint"), np.zeros(shape, bool)),
    )


def fill(store: Path) -> None:
    """Hold 40 samples; the first five are dropped."""
    save(features(A, NAMES[:2]), store)
    opened = td.drop(store, where=lambda ds: ds.number < 5)
    assert_rows(opened, LEFT, 2)
    assert stored(opened, "gram", {"gram_weights": "1"}) is not None
    shown = td.open(store, dropped=True)
    np.testing.assert_array_equal(shown.feature, VALUES[:40, :, :2])
    np.testing.assert_array_equal(shown.dropped, np.arange(40) < 5)
    assert "gram" not in shown
    assert td.verify(store, checksums=True).empty


def test_drop__by_a_condition(store: Path) -> None:
    assert_rows(td.drop(store, where="number == 7 or number > 35"), [5, 6, *range(8, 36)], 2)
    assert_rows(td.drop(store, where="sample < 2"), range(8, 36), 2)  # positions of what is left


def test_drop__rows_that_are_not_finite(tmp_path: Path) -> None:
    bad = features(A)
    bad["feature"] = bad.feature.where(bad.number != 7, np.inf)  # NaN would be a failed sample
    assert not np.isfinite(save(bad, tmp_path / "f.zarr").gram).any()
    left = [n for n in range(40) if n != 7]
    assert_rows(td.drop(tmp_path / "f.zarr", where=lambda ds: ds.number == 7), left)


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


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("secrets") / "f.zarr"
    save(secret(), store)
    return store


ERASED = [0, 1, 7, 39]


def erase(store: Path) -> xr.Dataset:
    """Erase what was dropped before, and more; the numbers of those that are dropped now."""
    return td.drop(store, where=lambda ds: ds.number.isin(ERASED), erase=True)


def assert_erased(store: Path) -> None:
    """Require that nothing is left of the samples, in what is shown and in the files."""
    for ds in (td.open(store, dropped=True), xr.open_zarr(store)):
        gone = ds.isel(sample=ERASED).compute()
        names = [name for name in gone.variables if "sample" in gone[name].dims]
        values = {str(name): {str(x) for x in gone[name].values.ravel()} for name in names}
        assert {"feature", "feature_norm", "output", "number", "who", "day"} <= values.keys()
        assert set().union(*values.values()) <= {"nan", "NaT", "", "0", "False", "True"}, values
    assert {path.name for path in (store / "who").iterdir()} <= {"zarr.json", "c", "c.0"}
    assert len([*(store / "who").rglob("c*")]) == len([*(store / "day").rglob("c*")]) <= 2
    assert td.verify(store, checksums=True).empty


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_erase__leaves_nothing_and_changes_no_other_sample(tmp_path: Path, dtype: Any) -> None:
    store = tmp_path / "f.zarr"
    save(secret(), store, dtype=dtype)
    td.drop(store, where="number < 2")
    expected = td.open(store).drop_vars(DERIVED, errors="ignore").compute()
    expected = expected.isel(sample=~expected.number.isin(ERASED).values)
    for call in (erase, lambda store: td.drop(store, erase=True)):
        erased = call(store)
        xr.testing.assert_equal(erased.drop_vars(DERIVED, errors="ignore"), expected)
        np.testing.assert_array_equal(erased.gram, gram(expected.feature.values))
        assert_erased(store)


def test_erase__later_calls_bring_nothing_back(secrets: Path, tmp_path: Path) -> None:
    """Neither a checkpoint nor a repair nor the same features again, nor more samples."""
    store = shutil.copytree(secrets, tmp_path / "f.zarr")
    left = [n for n in range(40) if n not in ERASED]
    erase(store)
    assert_rows(save(secret(names=NAMES[2:]), store, append_dim="checkpoint"), left)
    assert_rows(save(secret(names=NAMES), store), left)
    (store / "feature" / "c.0.0.2").unlink()
    td.verify(store, repair=True)
    assert_rows(save(secret(names=NAMES), store), left)
    assert_rows(save(secret(B, NAMES), store, append_dim="sample"), [*left, *range(40, 60)])
    assert_erased(store)


def test_erase__waits_for_an_unfinished_append(store: Path) -> None:
    save(features(B, NAMES[:2]), store, append_dim="sample")
    with pytest.warns(match="no unfinished append"):
        save(features(A, NAMES[2:]), store, append_dim="checkpoint")
    with pytest.raises(td.errors.IncompleteFeaturesError, match=r"40:60.*append_dim='checkpoint'"):
        erase(store)
    with pytest.warns(match="no unfinished append"):
        shown = td.open(store, dropped=True)
    np.testing.assert_array_equal(shown.feature[:40], VALUES[:40, :, :2])


class Killed(BaseException):
    pass


@pytest.mark.parametrize("step", ["_erase_rows", "commit", "sweep"])
def test_erase__goes_on_where_it_was_stopped(
    secrets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Whatever is stopped, in the first call of a step or in the last, others are as they were."""
    place: Any = changes if hasattr(changes, step) else Group
    for which in (1, 2):
        store = shutil.copytree(secrets, tmp_path / f"{which}.zarr")
        real, calls = getattr(place, step), []

        def stopping(*args: Any, real: Any = real, calls: Any = calls, n: int = which) -> None:
            calls.append(1)
            if len(calls) == n:
                raise Killed
            real(*args)

        with monkeypatch.context() as patched:
            patched.setattr(place, step, stopping)
            try:
                erase(store)
            except Killed:
                assert len(calls) >= which  # other threads may have gone on
        shown = td.open(store)
        assert_rows(shown, shown.number.values, 2)
        assert_rows(erase(store), [n for n in range(40) if n not in ERASED], 2)
        assert_erased(store)
