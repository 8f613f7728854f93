"""Appended samples and checkpoints: as if all had been saved at once, and nothing read twice."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import trakdask as td
from tests.storage.integers import (
    NAMES,
    VALUES,
    A,
    B,
    assert_rows,
    counted,
    features,
    interrupted,
    save,
)
from trakdask.provenance import as_values

WHOLE = slice(0, 60)


def fill(store: Path) -> None:
    """Hold the first samples at the first two checkpoints."""
    assert_rows(save(features(A, NAMES[:2]), store), range(40), 2)


def test_append__of_all_checkpoints_only_the_new_are_computed(store: Path) -> None:
    for n_computed in (3 + 1, 1):  # one to compare
        more, calls = counted(features(A))
        opened = save(more, store, append_dim="checkpoint")
        assert len(calls) == n_computed
        assert_rows(opened, range(40))
    assert list(as_values(opened.attrs)["checkpoints"]) == list(NAMES)
    assert td.verify(store, checksums=True).empty


def test_append__checkpoint_of_all_sets_at_once(store: Path) -> None:
    """It goes on after a stop, also where one set was saved alone, and names what is missing."""
    save(features(B, NAMES[:2]), store, append_dim="sample")
    td.drop(store, where="number == 3")
    interrupted(features(WHOLE, NAMES[2:]), store, 4, append_dim="checkpoint")
    with pytest.raises(
        td.errors.IncompleteFeaturesError,
        match=r"the samples 40:60 \(40:60\) at \['c2'\].*append_dim='checkpoint'.*all 60 samples",
    ):
        save(features(slice(60, 70), NAMES[:2]), store, append_dim="sample")
    for _ in range(2):
        given, calls = counted(features(WHOLE, NAMES[2:]))
        opened = save(given, store, append_dim="checkpoint")
        assert len(calls) < 4 + 2  # not all anew
        assert_rows(opened, [n for n in range(60) if n != 3])
    assert opened.attrs["source"] == "0:40 + 40:60"
    assert td.verify(store, checksums=True).empty


def test_save__all_sets_at_once_restore_what_was_damaged(store: Path) -> None:
    save(features(B, NAMES[:2]), store, append_dim="sample")
    for chunk in ("c.0.0.0", "c.2.0.1"):  # the second has samples of both
        (store / "feature" / chunk).unlink()
    td.verify(store, repair=True)
    assert_rows(save(features(WHOLE, NAMES[:2]), store), range(60), 2)


def test_append__soft_sums(tmp_path: Path) -> None:
    """Sums of appended samples are added; an appended checkpoint changes the weights of all."""
    options = {"estimator": td.Soft(power=0.5)}
    at_once = save(features(WHOLE), tmp_path / "g.zarr", **options)
    steps = {
        "sample": [(A, NAMES, None), (B, NAMES, "sample")],
        "checkpoint": [(WHOLE, NAMES[:2], None), (WHOLE, NAMES, "checkpoint")],
    }
    for dim, parts in steps.items():
        for rows, names, append_dim in parts:
            opened = save(
                features(rows, names), tmp_path / f"{dim}.zarr", append_dim=append_dim, **options
            )
        for name in ("gram", "loss_gradient"):
            np.testing.assert_allclose(opened[name], at_once[name], rtol=1e-5, atol=1e-5)


MISFITS = (
    (features(B, NAMES[:2]).assign_attrs(task="other"), "sample", "differ in task"),
    (features(A, NAMES[:2]).assign_attrs(autocast="bfloat16"), None, "differ in autocast"),
    (features(B, NAMES[2:]), "checkpoint", "differ in source"),
    (
        features(A).assign_attrs(checkpoints=dict.fromkeys(NAMES, "other")),
        "checkpoint",
        r"differ in checkpoints\['c0'\]: expected .*, got 'other'",
    ),
    (features(B, NAMES[:2]), None, r"differ in source.*append_dim='sample'"),
    (features(A), None, "differ in checkpoints"),
    (features(B, NAMES[:2]).drop_vars("label"), "sample", "'label'"),
    (
        features(B, NAMES[:2]).assign_coords(label=("sample", ["heavy"] * 20)),
        "sample",
        r"'label'.*number.*got.*str",
    ),
)


def test_append__what_does_not_fit_is_refused(store: Path) -> None:
    for more, append_dim, words in MISFITS:
        with pytest.raises(td.errors.StoreMismatchError, match=words):
            save(more, store, append_dim=append_dim)
    assert_rows(td.open(store), range(40), 2)
    save(features(B, NAMES[:2]), store, append_dim="sample")
    whole = features(WHOLE, NAMES[2:])
    for given, words in (
        (whole.isel(sample=slice(1, None)), r"all 60 .*'40:60'.*append_dim='checkpoint'.*per set"),
        (whole.isel(sample=slice(None, None, -1)), "'label'.*got 1 instead of 0 at sample 0"),
        (whole.isel(sample=np.r_[40:60, :40]), "'number'.*got 40 instead of 0"),
        (whole.drop_vars(["label", "number"]), "one of the coords"),
    ):
        with pytest.raises(td.errors.StoreMismatchError, match=words):
            save(given, store, append_dim="checkpoint")
    assert_rows(td.open(store), range(60), 2)


def test_append__is_resumed(store: Path) -> None:
    interrupted(features(B, NAMES[:2]), store, append_dim="sample")
    with pytest.warns(match="append_dim='sample'"):
        assert_rows(td.open(store), range(40), 2)
    xr.testing.assert_identical(
        xr.open_zarr(store).load(), xr.open_zarr(store, consolidated=False).load()
    )
    with pytest.raises(td.errors.IncompleteFeaturesError, match="append_dim='sample'"):
        save(features(slice(20, 40), NAMES[:2]), store, append_dim="sample")
    opened = save(features(B, NAMES[1::-1]), store, append_dim="sample")  # in another order
    assert_rows(opened, range(60), 2)
    assert opened.feature.chunks[0] == (16, 16, 16, 12)
    assert opened.attrs["source"] == "0:40 + 40:60"
    assert td.verify(store, checksums=True).empty


def test_append__is_given_up_for_another(store: Path) -> None:
    """Neither its blocks nor its rows in the last block are taken for parts of the other."""
    interrupted(features(B, NAMES[:2]), store, append_dim="sample")
    assert "append" in td.verify(store, repair=True).found.item()
    assert_rows(td.open(store), range(40), 2)
    opened = save(features(slice(50, 70), NAMES[:2]), store, append_dim="sample")
    np.testing.assert_array_equal(opened.feature[40:], VALUES[50:, :, :2])
    interrupted(features(A, NAMES[2:]), store, append_dim="checkpoint")
    td.verify(store, repair=True)
    assert td.open(store).sizes == opened.sizes


@pytest.mark.parametrize("rows", [A, B])
@pytest.mark.parametrize("is_whole", [False, True])
def test_append__what_was_there_is_saved_again_before_it_is_finished(
    store: Path, rows: slice, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for samples and checkpoints, also if only the commit was missing."""
    names, dim = (NAMES, "checkpoint") if rows == A else (NAMES[:2], "sample")
    if is_whole:
        monkeypatch.setattr("trakdask.saving.update_derived", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save(features(rows, names), store, append_dim=dim)
        monkeypatch.undo()
    else:
        interrupted(features(rows, names), store, append_dim=dim)
    with pytest.warns(match=f"no unfinished append.*{dim}"):
        assert_rows(save(features(A, NAMES[:2]), store), range(40), 2)
    assert_rows(save(features(rows, names), store, append_dim=dim), range(rows.stop), len(names))


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_append__other_changes_need_not_wait_for_it(store: Path) -> None:
    interrupted(features(B, NAMES[:2]), store, append_dim="sample")
    with pytest.warns(match="no unfinished append"):
        left = td.drop(store, where=lambda ds: ds.label == 1)
    assert_rows(left, range(0, 40, 2), 2)
    opened = save(features(B, NAMES[:2]), store, append_dim="sample")
    assert_rows(opened, [*range(0, 40, 2), *range(40, 60)], 2)


def test_append__selections_of_one_source_are_told_apart(tmp_path: Path) -> None:
    """Same attrs, same sizes, other samples."""
    first, second, third = (
        features(slice(i, i + 20), source="all").drop_vars(["label", "number"]) for i in (0, 20, 40)
    )
    save(first, tmp_path / "f.zarr")
    with pytest.raises(td.errors.StoreMismatchError, match="others when the samples"):
        save(second, tmp_path / "f.zarr")
    for _ in range(2):
        opened = save(second, tmp_path / "f.zarr", append_dim="sample")
        np.testing.assert_array_equal(opened.feature, VALUES[:40])
    with pytest.raises(td.errors.StoreMismatchError):
        save(third, tmp_path / "f.zarr")


def test_append__samples_that_are_there_already_are_counted(store: Path) -> None:
    """By coords that tell samples apart; those that were dropped may come again."""
    td.drop(store, where="number >= 38")
    save(features(slice(38, 60), NAMES[:2]), store, append_dim="sample")
    more = features(slice(57, 70), NAMES[:2])
    with pytest.warns(UserWarning, match=r"got 3 of 13 \(the first at 0\)"):
        save(more, store, append_dim="sample")
    first, second = (features(rows, NAMES[:2]).drop_vars("number") for rows in (A, B))
    save(first, store.with_name("unknown.zarr"))  # many have the same label
    save(second, store.with_name("unknown.zarr"), append_dim="sample")


def test_append__a_new_checkpoint_is_featurized_like_the_store(tmp_path: Path) -> None:
    """The whole of it, with a model: a set a week, then all weeks at a checkpoint at once."""
    random, model = np.random.default_rng(0), torch.nn.Linear(4, 3)
    first, second = ({n: torch.randn_like(t) for n, t in model.state_dict().items()} for _ in "ab")
    trained = functools.partial(td.Model, model, task="image_classification")
    weeks = [
        td.from_arrays(
            {"image": random.normal(size=(n, 4)).astype("f4"), "label": np.arange(n) % 3},
            coords={"week": [f"{n}-{i}" for i in range(n)]},
        )
        for n in (9, 5)
    ]
    path, everything = tmp_path / "f.zarr", xr.concat(weeks, "sample")
    store = save(td.featurize(weeks[0], trained({"a": first}), td.SJLT(8)), path)
    more = td.featurize(weeks[1], trained({"a": first}), like=store)
    store = save(more, path, append_dim="sample")
    more = td.featurize(everything, trained({"b": second}), like=store)
    opened = save(more, path, append_dim="checkpoint")
    both = td.featurize(everything, trained({"a": first, "b": second}), td.SJLT(8))
    np.testing.assert_allclose(opened.feature, both.feature, atol=1e-5)
    other = trained({"c": second}, parameters="weight")
    with pytest.raises(td.errors.StoreMismatchError, match="differ in parameters"):
        td.featurize(everything, other, like=store)
