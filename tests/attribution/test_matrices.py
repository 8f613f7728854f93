"""Matrices that are stored beside features are used for what they were reduced from, only."""

from __future__ import annotations

import functools
import itertools
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import trakdask as td
from trakdask.attribution.estimators import KINDS
from trakdask.testing import simulate_features

SOFT, TRAK = td.Soft(damping="completeness"), td.Trak(damping=0.03)


def scores(features: xr.Dataset, targets: xr.Dataset, estimator) -> np.ndarray:
    """Scores, without a word on simulated outputs, which follow nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return td.score(features, targets, estimator).compute(scheduler="sync").values


def save(features: xr.Dataset, path: Path, **options) -> xr.Dataset:
    return td.save(features, path, progress=False, **options)


MADE = simulate_features(200, 6, 3, chunks=64)
TARGETS = simulate_features(60, 6, 3, seed=1)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], xr.Dataset]:
    """Open stores by kind and estimator; each is written once."""

    @functools.cache
    def written(kind: str, estimator: str) -> Path:
        path = tmp_path_factory.mktemp(f"{kind}-{estimator}") / "f.zarr"
        if kind in ("saved", "float16"):
            save(MADE, path, estimator=estimator, dtype="float16" if kind == "float16" else None)
            return path
        rest = simulate_features(50 if kind == "appended" else 90, 6, 3, chunks=64, seed=5)
        save(simulate_features(150, 6, 3, chunks=64), path, estimator=estimator)
        opened = save(rest, path, estimator=estimator, append_dim="sample")
        if kind == "dropped":
            td.drop(path, where=xr.DataArray(np.arange(240) >= 200, dims="sample"))
        assert opened.sizes["sample"] >= 200
        return path

    return lambda kind, estimator: td.open(written(kind, estimator))


def reduced(opened: xr.Dataset) -> xr.Dataset:
    return opened.drop_vars(["gram", "loss_gradient"])


def test_score__kept_matrices_give_the_same_scores_and_spare_the_features(
    tmp_path: Path,
) -> None:
    opened = save(MADE, tmp_path / "f.zarr", estimator="soft")
    expected = scores(opened, TARGETS, SOFT)
    anew, largest = scores(reduced(opened), TARGETS, SOFT), np.abs(expected).max()
    np.testing.assert_allclose(anew, expected, atol=1e-6 * largest)  # matrices in float32
    chunks = [path for path in (tmp_path / "f.zarr" / "feature").rglob("c*") if path.is_file()]
    others = [path for path in chunks if not re.search(r"c[./]0[./]\d[./]\d$", str(path))]
    assert len(others) == 9
    for path in others:
        path.unlink()
    row = td.open(tmp_path / "f.zarr").isel(sample=[5])
    np.testing.assert_allclose(scores(row, TARGETS, SOFT), expected[5:6], rtol=1e-5)


@pytest.mark.parametrize(
    "estimator", [TRAK, td.Soft(power=0.75, damping=0.03)], ids=["trak", "power"]
)
def test_score__kept_matrices_are_never_used_for_anything_else(stores, estimator) -> None:
    saved = stores("saved", "soft").drop_vars("damping")
    opened = saved.assign(gram=saved.gram * np.nan, loss_gradient=saved.loss_gradient * np.nan)
    opened.gram.attrs.update(saved.gram.attrs)
    opened.loss_gradient.attrs.update(saved.loss_gradient.attrs)
    with pytest.raises(ValueError, match="not finite"):
        scores(opened, TARGETS, SOFT)
    few = {"proj_dim": slice(4)}
    assert np.isfinite(scores(opened.isel(few), TARGETS.isel(few), SOFT)).all()
    for columns in ({}, few):
        found = scores(opened.isel(columns), TARGETS.isel(columns), estimator)
        expected = scores(MADE.isel(columns), TARGETS.isel(columns), estimator)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


CHANGES = {
    "scaled a little": lambda ds: ds.assign(feature=ds.feature * 1.001),
    "some rows zero": lambda ds: ds.assign(feature=ds.feature.where(ds.label == 0, 0.0)),
    "checkpoints swapped": lambda ds: ds.assign(
        feature=ds.feature.copy(data=ds.feature.data[:, :, [1, 0, 2]])
    ),
}


FORMS = {
    "lazy": lambda ds: ds,
    "loaded": lambda ds: ds.compute(scheduler="sync"),
    "persisted": lambda ds: ds.persist(scheduler="sync"),
}


@pytest.mark.parametrize(
    ("change", "form", "estimator"),
    [
        *itertools.product(CHANGES, ["lazy"], [SOFT]),
        *itertools.product(["some rows zero"], FORMS, [TRAK]),
    ],
)
def test_score__changed_features_are_refused(stores, estimator, change, form) -> None:
    changed = CHANGES[change](FORMS[form](stores("saved", estimator.name)))
    for rows in (changed, changed.isel(sample=slice(5, 9))):
        with pytest.raises(ValueError, match=r"'feature_norm'.*drop_vars"):
            scores(rows, TARGETS, estimator)


TRANSPOSED: dict[str, Callable[[xr.Dataset, xr.Dataset], object]] = {
    "score": lambda ds, targets: td.score(ds, targets, SOFT),
    "scores of each checkpoint": lambda ds, targets: td.score(ds, targets, average=False),
    "self_influence": lambda ds, _: td.self_influence(ds, estimator="soft"),
    "gram": lambda ds, _: td.gram(ds),
    "damping": lambda ds, _: td.damping(ds, estimator="soft").damping,
    "calibrate": lambda ds, targets: td.damping(ds, estimator="soft", calibrate=targets).damping,
    "combine": lambda _, targets: td.combine(targets, by="label").feature,
    "group_score": lambda ds, targets: td.group_score(ds, targets, by="label"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", TRANSPOSED.values(), ids=TRANSPOSED)
def test_score__the_order_of_dimensions_does_not_matter(stores, function) -> None:
    opened = stores("saved", "soft")
    dims = ("checkpoint", "proj_dim_1", "proj_dim", "sample", "component")
    turned = (ds.transpose(*dims, missing_dims="ignore") for ds in (opened, TARGETS))
    xr.testing.assert_allclose(function(*turned), function(opened, TARGETS))


SELECTIONS = {
    "rows": lambda ds: ds.isel(sample=[3, 150, 7]),
    "mask": lambda ds: ds.isel(sample=(ds.label == 1).values),
    "rechunked": lambda ds: ds.isel(sample=slice(100)).chunk(sample=20),
    "concatenated": lambda ds: xr.concat(
        [ds.isel(sample=slice(150, 160)), ds.isel(sample=[4])], "sample", data_vars="minimal"
    ),
    "persisted before": lambda ds: ds.persist(scheduler="sync").isel(sample=[3, 150]),
    "loaded": lambda ds: ds.isel(sample=[3, 7]).compute(scheduler="sync"),
    "one row many times": lambda ds: ds.isel(sample=np.zeros(200, int)),
    "of checkpoints": lambda ds: ds.isel(checkpoint=[2, 0], sample=slice(5)),
}


@pytest.mark.parametrize(
    ("estimator", "kind", "change"),
    [
        *itertools.product(["soft"], ["saved"], SELECTIONS),
        *itertools.product(["trak"], ["appended", "made by gram"], ["rows", "of checkpoints"]),
        *itertools.product(["soft"], ["float16", "dropped"], ["rechunked", "loaded"]),
    ],
)
def test_score__lazy_selections_keep_the_matrices_of_all(
    stores, estimator: str, kind: str, change: str
) -> None:
    """Against an oracle in float64, with the gram matrix of all samples."""
    by_gram = MADE.assign(gram=td.gram(MADE).persist(scheduler="sync"))
    opened = by_gram if kind == "made by gram" else stores(kind, estimator)
    x, q = (opened[name].values.astype("f8") for name in ("feature", "out_to_loss"))
    h = q**0.5 * (1 - q) if estimator == "soft" else np.ones_like(q)
    part = SELECTIONS[change](opened)
    lam, picked = td.Absolute(2.0), [list("012").index(name[1]) for name in part.checkpoint.values]
    values, q = (part[name].values.astype("f8") for name in ("feature", "out_to_loss"))
    g = (q**0.5 if estimator == "soft" else q).mean(1)
    expected = 0
    for i, c in enumerate(picked):
        k = np.einsum("np,nq,n->pq", x[..., c], x[..., c], h[:, c]) + 2.0 * np.eye(6)
        solved = np.linalg.solve(k, TARGETS.feature.values[..., c].T)
        expected = expected + values[..., i] @ solved
    targets = TARGETS.isel(checkpoint=picked)
    found = scores(part, targets, KINDS[estimator](damping=lam))
    np.testing.assert_allclose(found, expected / len(picked) * g[:, None], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda ds: ds.where(ds.label == 1, drop=True), td.Trak),
        (lambda ds: xr.concat([ds, ds], "sample", data_vars="all"), td.Soft),
        (lambda ds: xr.concat([ds, ds], "sample", data_vars="minimal"), td.Soft),  # too many rows
    ],
)
def test_score__other_selections_are_refused(stores, change, kind) -> None:
    changed = change(stores("saved", kind.name))
    for call in (td.self_influence, lambda ds, each: td.score(ds, TARGETS, each), td.damping):
        with pytest.raises(ValueError, match=r"isel\(sample=.*drop_vars"):
            call(changed, kind(damping=0.03))
    td.score(changed, TARGETS, estimator="grad_dot").compute(scheduler="sync")


def test_score__of_a_selection_without_its_matrix_is_under_that_of_the_selection(stores) -> None:
    rows = np.arange(200) % 3 == 0
    dropped = stores("saved", "trak").isel(sample=rows).drop_vars("gram")
    found, expected = (scores(ds, TARGETS, TRAK) for ds in (dropped, MADE.isel(sample=rows)))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert np.abs(found - scores(MADE, TARGETS, TRAK)[rows]).max() > 1e-3
