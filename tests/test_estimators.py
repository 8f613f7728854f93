"""Matrices that are kept beside features: what they are, and that they serve for nothing else."""

from __future__ import annotations

import warnings
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
import xarray as xr

import trakdask as td
from trakdask.testing import simulate_features

SOFT = {"estimator": "soft", "damping": "completeness"}


def scores(features: xr.Dataset, targets: xr.Dataset, **options) -> np.ndarray:
    """Scores, without a word on simulated outputs, which follow nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return td.score(features, targets, **options).compute(scheduler="sync").values


def counted(features: xr.Dataset) -> tuple[xr.Dataset, list[tuple[int, ...]]]:
    """The same features, whose blocks say when they are read."""
    read: list[tuple[int, ...]] = []

    def count(block: np.ndarray, block_id: tuple[int, ...]) -> np.ndarray:
        read.append(block_id)
        return block

    data = features.feature.data
    data = da.map_blocks(count, data, dtype=data.dtype, meta=data._meta)
    return features.assign(feature=features.feature.copy(data=data)), read


def save(features: xr.Dataset, path: Path, **options) -> xr.Dataset:
    return td.save(features, path, progress=False, **options)


def kept_and_reduced(tmp_path: Path, **options) -> tuple[xr.Dataset, xr.Dataset, xr.Dataset]:
    made = simulate_features(200, 6, 3, chunks=32)
    targets = simulate_features(60, 6, 3, seed=1)
    opened = save(made, tmp_path / "soft.zarr", estimator="soft", **options)
    return opened, opened.drop_vars(["gram", "loss_gradient"]), targets


def test_save__soft_keeps_matrices_by_definition(tmp_path: Path) -> None:
    opened, _, _ = kept_and_reduced(tmp_path, power=0.25)
    x, q = (opened[name].values.astype("f8") for name in ("feature", "out_to_loss"))
    gram = np.einsum("npc,nqc,nc->pqc", x, x, q**0.25 * (1 - q))
    np.testing.assert_allclose(opened.gram, gram, rtol=1e-5, atol=1e-4)
    loss_gradient = np.einsum("npc,n->pc", x, (q**0.25).mean(1))
    np.testing.assert_allclose(opened.loss_gradient, loss_gradient, rtol=1e-5, atol=1e-4)
    assert opened.gram.attrs["gram_weights"] == "q^0.25 (1 - q)"
    assert opened.gram.attrs["samples"] == 200


def test_score__kept_matrices_give_the_same_scores_and_spare_the_features(tmp_path: Path) -> None:
    opened, reduced, targets = kept_and_reduced(tmp_path)
    np.testing.assert_array_equal(scores(opened, targets, **SOFT), scores(reduced, targets, **SOFT))
    row, read = counted(opened)
    row = row.isel(sample=[5])
    scores(row, targets, **SOFT)
    assert sorted(read) == [(0, 0, 0), (0, 0, 1), (0, 0, 2)]
    np.testing.assert_allclose(
        scores(row, targets, estimator="soft", damping=0.1),
        scores(opened, targets, estimator="soft", damping=0.1)[5:6],
        rtol=1e-5,
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda ds: ds,  # with another estimator, power or weights
        lambda ds: ds.isel(proj_dim=slice(4)),
        lambda ds: ds.assign_attrs(source="other"),
        lambda ds: xr.concat([ds, ds], "sample", data_vars="minimal"),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        {"estimator": "trak"},
        {"estimator": "soft", "power": 0.75, "damping": 0.03},
        {"estimator": "soft", "damping": 0.03, "weights": "given"},
    ],
)
def test_score__kept_matrices_are_never_used_for_anything_else(
    tmp_path: Path, change, options
) -> None:
    opened, _, targets = kept_and_reduced(tmp_path)
    opened = opened.assign(gram=opened.gram * np.nan, loss_gradient=opened.loss_gradient * np.nan)
    opened.gram.attrs.update(td.open(tmp_path / "soft.zarr").gram.attrs)
    opened.loss_gradient.attrs.update(td.open(tmp_path / "soft.zarr").loss_gradient.attrs)
    changed = change(opened)
    targets = targets.isel(proj_dim=slice(changed.sizes["proj_dim"]))
    if "weights" in options:
        h = xr.DataArray(np.linspace(0, 1, changed.sizes["sample"]), dims="sample")
        options = {**options, "weights": h}
    assert np.isfinite(scores(changed, targets, **options)).all()
    if changed is not opened:
        assert np.isfinite(scores(changed, targets, **SOFT)).all()
        return
    with pytest.raises(ValueError, match="not finite"):
        scores(changed, targets, **SOFT)


def test_score__loss_gradient_pools_checkpoints_so_a_selection_reduces_it(tmp_path: Path) -> None:
    opened, reduced, targets = kept_and_reduced(tmp_path)
    some = [ds.isel(checkpoint=[0, 2]) for ds in (opened, reduced, targets)]
    np.testing.assert_allclose(
        scores(some[0], some[2], **SOFT), scores(some[1], some[2], **SOFT), rtol=1e-5
    )
    rows = some[0].isel(sample=slice(60))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = td.damping(rows, some[2], estimator="soft").compute()
    # Simulated outputs follow nothing, so λ is the closed form: that of all samples.
    closed_form = td.damping(some[0], damping="closed_form", estimator="soft").damping
    np.testing.assert_allclose(chosen.damping, closed_form)


def test_save__soft_resumes_and_names_what_differs(tmp_path: Path) -> None:
    made = simulate_features(200, 6, 3, chunks=32)
    opened, _, _ = kept_and_reduced(tmp_path)
    again = save(made, tmp_path / "soft.zarr", estimator="soft")
    xr.testing.assert_identical(*(ds.assign_attrs(saved=None) for ds in (again, opened)))
    with pytest.raises(td.StoreMismatchError, match=r"expected .*'1' .*weights 'q\^0.5"):
        save(made, tmp_path / "soft.zarr")
    with pytest.raises(td.StoreMismatchError, match=r"expected .*'q\^0.25 \(1 - q\)'"):
        save(made, tmp_path / "soft.zarr", estimator="soft", power=0.25)
    save(made, tmp_path / "soft.zarr", gram=False)


def test_open__store_of_before_has_the_gram_matrix_of_trak(tmp_path: Path) -> None:
    made = simulate_features(200, 6, 3, chunks=32)
    opened = save(made, tmp_path / "f.zarr")
    bare = opened.assign(gram=opened.gram.drop_attrs())
    targets = simulate_features(60, 6, 3, seed=1)
    few = [ds.isel(sample=[0, 1]) for ds in (opened, bare)]
    np.testing.assert_array_equal(*(scores(ds, targets) for ds in few))
    row, read = counted(bare)
    scores(row.isel(sample=[0]), targets)
    assert len(read) == 3
    np.testing.assert_allclose(
        scores(bare, targets, **SOFT), scores(made, targets, **SOFT), rtol=1e-4, atol=1e-6
    )
