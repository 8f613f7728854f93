"""Matrices that are stored beside features are used for what they were reduced from, only."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
import xarray as xr

import trakdask as td
from trakdask.attribution.matrices import matrices, weight_data
from trakdask.attribution.options import gather_options
from trakdask.storage.mapping import MappedChunks
from trakdask.testing import simulate_features
from trakdask.variables import lazy_features

SOFT = {"estimator": "soft", "damping": "completeness"}


def scores(features: xr.Dataset, targets: xr.Dataset, **options) -> np.ndarray:
    """Scores, without a word on simulated outputs, which follow nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return td.score(features, targets, **options).compute(scheduler="sync").values


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The chunks of ``feature`` that are read from stores, in order."""
    chunks: list[str] = []
    read_file = MappedChunks.read_file

    def counting(self: MappedChunks, path: str):
        folder, _, name = path.rpartition("/c.")
        if folder.endswith("/feature"):
            chunks.append(name)
        return read_file(self, path)

    monkeypatch.setattr(MappedChunks, "read_file", counting)
    return chunks


def save(features: xr.Dataset, path: Path, **options) -> xr.Dataset:
    return td.save(features, path, progress=False, **options)


MADE = simulate_features(200, 6, 3, chunks=64)
TARGETS = simulate_features(60, 6, 3, seed=1)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the matrices of the estimator "soft", which no test changes."""
    path = tmp_path_factory.mktemp("kept") / "soft.zarr"
    save(MADE, path, estimator="soft")
    return path


def reduced(opened: xr.Dataset) -> xr.Dataset:
    return opened.drop_vars(["gram", "loss_gradient"])


def test_save__soft_keeps_matrices_by_definition(tmp_path: Path) -> None:
    opened = save(MADE, tmp_path / "f.zarr", estimator="soft", power=0.25)
    x, q = (opened[name].values.astype("f8") for name in ("feature", "out_to_loss"))
    gram = np.einsum("npc,nqc,nc->pqc", x, x, q**0.25 * (1 - q))
    np.testing.assert_allclose(opened.gram, gram, rtol=1e-5, atol=1e-4)
    loss_gradient = np.einsum("npc,n->pc", x, (q**0.25).mean(1))
    np.testing.assert_allclose(opened.loss_gradient, loss_gradient, rtol=1e-5, atol=1e-4)
    assert opened.gram.attrs["gram_weights"] == "q^0.25 (1 - q)"
    assert opened.gram.attrs["samples"] == 200


def test_score__kept_matrices_give_the_same_scores_and_spare_the_features(
    kept: Path, read: list[str]
) -> None:
    opened = td.open(kept)
    np.testing.assert_array_equal(
        scores(opened, TARGETS, **SOFT), scores(reduced(opened), TARGETS, **SOFT)
    )
    row = opened.isel(sample=[5])
    read.clear()
    scores(row, TARGETS, **SOFT)
    assert sorted(read) == ["0.0.0", "0.0.1", "0.0.2"]
    np.testing.assert_allclose(
        scores(row, TARGETS, estimator="soft", damping=0.1),
        scores(opened, TARGETS, estimator="soft", damping=0.1)[5:6],
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
def test_score__kept_matrices_are_never_used_for_anything_else(kept: Path, change, options) -> None:
    saved = td.open(kept)
    opened = saved.assign(gram=saved.gram * np.nan, loss_gradient=saved.loss_gradient * np.nan)
    opened.gram.attrs.update(saved.gram.attrs)
    opened.loss_gradient.attrs.update(saved.loss_gradient.attrs)
    changed = change(opened)
    targets = TARGETS.isel(proj_dim=slice(changed.sizes["proj_dim"]))
    if "weights" in options:
        h = xr.DataArray(np.linspace(0, 1, changed.sizes["sample"]), dims="sample")
        options = {**options, "weights": h}
    assert np.isfinite(scores(changed, targets, **options)).all()
    if changed is not opened:
        assert np.isfinite(scores(changed, targets, **SOFT)).all()
        return
    with pytest.raises(ValueError, match="not finite"):
        scores(changed, targets, **SOFT)


def test_score__loss_gradient_pools_checkpoints_so_a_selection_reduces_it(kept: Path) -> None:
    opened = td.open(kept)
    some = [ds.isel(checkpoint=[0, 2]) for ds in (opened, reduced(opened), TARGETS)]
    np.testing.assert_allclose(
        scores(some[0], some[2], **SOFT), scores(some[1], some[2], **SOFT), rtol=1e-5
    )
    rows = some[0].isel(sample=slice(60))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = td.damping(rows, estimator="soft").compute()
    # Simulated outputs follow nothing, so λ is the closed form: that of all samples.
    closed_form = td.damping(some[0], damping="closed_form", estimator="soft").damping
    np.testing.assert_allclose(chosen.damping, closed_form)


def test_save__soft_resumes_and_names_what_differs(tmp_path: Path) -> None:
    opened = save(MADE, tmp_path / "soft.zarr", estimator="soft")
    again = save(MADE, tmp_path / "soft.zarr", estimator="soft")
    xr.testing.assert_identical(*(ds.assign_attrs(saved=None) for ds in (again, opened)))
    with pytest.raises(td.StoreMismatchError, match=r"expected .*'1' .*weights 'q\^0.5"):
        save(MADE, tmp_path / "soft.zarr")
    with pytest.raises(td.StoreMismatchError, match=r"expected .*'q\^0.25 \(1 - q\)'"):
        save(MADE, tmp_path / "soft.zarr", estimator="soft", power=0.25)
    save(MADE, tmp_path / "soft.zarr", gram=False)


def test_open__store_of_before_has_the_gram_matrix_of_trak(tmp_path: Path, read: list[str]) -> None:
    """Such a store says nothing of its matrix."""
    opened = save(MADE, tmp_path / "f.zarr")
    origin = {"reduced_from": opened.gram.attrs["reduced_from"]}  # open writes this itself
    bare = opened.assign(gram=opened.gram.drop_attrs().assign_attrs(origin))
    assert "gram_weights" not in bare.gram.attrs
    few = [ds.isel(sample=[0, 1]) for ds in (opened, bare)]
    np.testing.assert_array_equal(*(scores(ds, TARGETS) for ds in few))
    read.clear()
    scores(bare.isel(sample=[0]), TARGETS)
    assert len(read) == 3
    np.testing.assert_allclose(
        scores(bare, TARGETS, **SOFT), scores(MADE, TARGETS, **SOFT), rtol=1e-4, atol=1e-6
    )


TRAK = {"estimator": "trak", "damping": 0.03}
ORDER = np.random.default_rng(0).permutation(200)
REVERSED = [5, 4, 3, 2, 1, 0]


def targets_for(change: object) -> xr.Dataset:
    """Targets with proj_dim in the order of the features, or nothing could be scored."""
    is_reversed = change in (CHANGES["columns of feature reversed"], rows_and_columns)
    return TARGETS.isel(proj_dim=REVERSED) if is_reversed else TARGETS


def rows_and_columns(ds: xr.Dataset) -> xr.Dataset:
    return ds.isel(sample=[3, 7], proj_dim=REVERSED).assign(gram=ds.gram)


def halved(features: xr.Dataset) -> xr.Dataset:
    return features.assign(out_to_loss=features.out_to_loss * 0.5)


CHANGES = {
    "scaled": lambda ds: ds.assign(feature=ds.feature * 3),
    "scaled in place": lambda ds: ds.assign(feature=ds.feature.copy(data=3 * ds.feature.data)),
    "scaled then rechunked": lambda ds: ds.assign(feature=ds.feature * 3).chunk(sample=50),
    "in half precision": lambda ds: ds.assign(feature=ds.feature.astype("f2").astype("f4") + 1),
    "some rows zero": lambda ds: ds.assign(feature=ds.feature.where(ds.label == 0, 0.0)),
    "columns of feature reversed": lambda ds: ds.assign(feature=ds.feature[:, REVERSED]),
    "checkpoints of feature swapped": lambda ds: ds.assign(
        feature=ds.feature.copy(data=ds.feature.data[:, :, [1, 0, 2]])
    ),
    "other features": lambda ds: ds.assign(feature=simulate_features(200, 6, 3, seed=9).feature),
}
CHANGES_OF_Q = {
    "halved": halved,
    "of numpy": lambda ds: ds.assign(
        out_to_loss=(("sample", "checkpoint"), np.full((200, 3), 0.2))
    ),
    "shuffled": lambda ds: ds.assign(out_to_loss=ds.out_to_loss[ORDER]),
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], xr.Dataset]:
    """Open stores by kind and estimator, each of which is written once."""

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


@pytest.mark.parametrize("options", [TRAK, SOFT])
@pytest.mark.parametrize("change", [*CHANGES.values(), *CHANGES_OF_Q.values()])
@pytest.mark.parametrize("form", ["lazy", "loaded first", "persisted first"])
def test_score__after_a_change_matrices_are_reduced_anew(
    stores, change, options, form: str
) -> None:
    opened = stores("saved", options["estimator"])
    first = {"loaded first": opened.compute, "persisted first": opened.persist}.get(form)
    changed = change(first(scheduler="sync") if first else opened)
    targets = targets_for(change)
    expected = scores(
        changed.drop_vars(["gram", "loss_gradient"], errors="ignore"), targets, **options
    )
    if form == "lazy":
        np.testing.assert_allclose(
            scores(changed, targets, **options), expected, rtol=1e-4, atol=1e-6
        )
        return
    # In memory nothing tells a change from a selection of as many rows: an error is as good.
    try:
        found = scores(changed, targets, **options)
    except ValueError as err:
        found = expected if "drop_vars(['gram', 'loss_gradient']" in str(err) else str(err)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


SELECTIONS = {
    "rows": lambda ds: ds.isel(sample=[3, 150, 7]),
    "rows twice": lambda ds: ds.isel(sample=[3, 3, 150, 7]).isel(sample=slice(1, 4)),
    "mask": lambda ds: ds.isel(sample=(ds.label == 1).values),
    "sorted": lambda ds: ds.sortby("label"),
    "rechunked": lambda ds: ds.isel(sample=slice(100)).chunk(sample=20),
    "rechunked as a whole": lambda ds: ds.chunk(sample=32),
    "concatenated": lambda ds: xr.concat(
        [ds.isel(sample=slice(150, 160)), ds.isel(sample=[4])], "sample", data_vars="minimal"
    ),
    "persisted before": lambda ds: ds.persist(scheduler="sync").isel(sample=[3, 150]),
    "with more coords": lambda ds: ds.assign_coords(x=("sample", np.arange(200))).isel(sample=[2]),
    "of checkpoints": lambda ds: ds.isel(checkpoint=[2, 0], sample=slice(5)),
    "of one checkpoint": lambda ds: ds.sel(checkpoint=["c1"]).isel(sample=slice(5)),
    "bootstrap": lambda ds: ds.isel(sample=np.random.default_rng(0).integers(200, size=200)),
    "gram loaded": lambda ds: ds.isel(sample=slice(5)).assign(gram=ds.gram.compute()),
}


@pytest.fixture(scope="module")
def numbers(stores) -> Callable[[str, str], tuple[xr.Dataset, np.ndarray, np.ndarray]]:
    """Return features, and in float64 their values and the weights of their gram matrix."""

    @functools.cache
    def read(kind: str, estimator: str) -> tuple[xr.Dataset, np.ndarray, np.ndarray]:
        by_gram = MADE.assign(gram=td.gram(MADE).persist(scheduler="sync"))
        opened = by_gram if kind == "made by gram" else stores(kind, estimator)
        q = opened.out_to_loss.values.astype("f8")
        h = q**0.5 * (1 - q) if estimator == "soft" else np.ones_like(q)
        return opened, opened.feature.values.astype("f8"), h

    return read


@pytest.mark.parametrize("change", SELECTIONS.values(), ids=SELECTIONS)
@pytest.mark.parametrize(
    ("estimator", "kind"),
    [
        *itertools.product(["trak", "soft"], ["saved", "float16", "appended", "dropped"]),
        ("trak", "made by gram"),
    ],
)
def test_score__lazy_selections_keep_the_matrices_of_all(
    numbers, change, estimator, kind: str
) -> None:
    """Against an oracle in float64, with the gram matrix of all samples."""
    opened, x, h = numbers(kind, estimator)
    part = change(opened)
    lam, picked = td.Absolute(2.0), [list("012").index(name[1]) for name in part.checkpoint.values]
    values, q = (part[name].values.astype("f8") for name in ("feature", "out_to_loss"))
    g = (q**0.5 if estimator == "soft" else q).mean(1)
    expected = 0
    for i, c in enumerate(picked):
        k = np.einsum("np,nq,n->pq", x[..., c], x[..., c], h[:, c]) + 2.0 * np.eye(6)
        solved = np.linalg.solve(k, TARGETS.feature.values[..., c].T)
        expected = expected + values[..., i] @ solved
    targets = TARGETS.isel(checkpoint=picked)
    found = scores(part, targets, estimator=estimator, damping=lam)
    np.testing.assert_allclose(found, expected / len(picked) * g[:, None], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["saved", "float16", "appended", "dropped"])
@pytest.mark.parametrize("load", ["load", "persist", "compute", "load and rechunk"])
@pytest.mark.parametrize("estimator", ["trak", "soft"])
def test_score__whole_in_memory_keeps_the_matrices(
    stores, kind: str, load: str, estimator: str
) -> None:
    opened = stores(kind, estimator)
    options = {"estimator": estimator, "damping": td.Absolute(1.0)}
    expected = scores(opened, TARGETS, **options)
    held = getattr(opened, load.split()[0])(scheduler="sync")
    if load == "load and rechunk":
        held = held.chunk(sample=50)
    # Only the kept matrix has this in a corner that the diagonal does not show.
    held["gram"] = held.gram.copy(data=da.asarray(held.gram.data) + 0)
    held.gram.data[0, 1] = held.gram.data[1, 0] = 30.0
    changed = scores(held, TARGETS, **options)
    assert np.abs(changed - expected).max() > 1e-3


@pytest.mark.parametrize("estimator", ["trak", "soft"])
@pytest.mark.parametrize(
    "change",
    [
        lambda ds: ds.isel(sample=[3, 7]).compute(scheduler="sync"),
        lambda ds: ds.isel(sample=[3, 7]).persist(scheduler="sync"),
        lambda ds: ds.compute(scheduler="sync").isel(sample=slice(5)),
        lambda ds: ds.compute(scheduler="sync").isel(sample=np.arange(200) // 2),
        lambda ds: ds.where(ds.label == 1, drop=True).assign(gram=ds.gram),
        lambda ds: ds.assign(feature=ds.feature * 3).isel(sample=[3, 7]),
        rows_and_columns,
        lambda ds: ds.assign(gram=ds.gram.drop_attrs() * 2),
    ],
)
def test_score__what_cannot_be_known_is_refused(stores, change, estimator: str) -> None:
    changed, targets = change(stores("saved", estimator)), targets_for(change)
    if estimator == "soft" and "gram_weights" not in changed.gram.attrs:
        return  # a matrix without attrs is that of TRAK, and used for nothing else
    message = r"features\.isel\(sample=\.\.\.\) before loading, or features\.drop_vars\("
    with pytest.raises(ValueError, match=message):
        td.score(changed, targets, estimator=estimator, damping=0.03)
    with pytest.raises(ValueError, match=message):
        td.self_influence(changed, estimator=estimator, damping=0.03)
    td.score(changed, targets, estimator="grad_dot").compute(scheduler="sync")
    alone = changed.drop_vars(["gram", "loss_gradient"], errors="ignore")
    td.score(alone, targets, estimator=estimator, damping=0.03).compute(scheduler="sync")


def test_gram__names_the_arrays_that_it_is_reduced_from() -> None:
    assert td.gram(MADE).attrs["reduced_from"] == {
        name: MADE[name].data.name for name in ("feature", "out_to_loss")
    }
    assert td.gram(MADE.compute(scheduler="sync")).attrs["reduced_from"] == {}


WEIGHTED = simulate_features(10, 4, 2, chunks=4)
H = xr.DataArray(np.arange(10.0), dims="sample")


def test_weight_data__in_the_chunks_of_the_features() -> None:
    found = weight_data(WEIGHTED, H)
    assert found.chunks == ((4, 4, 2), (1, 1))
    np.testing.assert_array_equal(found, np.stack([np.arange(10.0)] * 2, axis=1))


@pytest.mark.parametrize("bad", [np.nan, -1.0, np.inf])
def test_weight_data__names_the_sample(bad: float) -> None:
    with pytest.raises(ValueError, match=f"got {bad} at sample 3"):
        weight_data(WEIGHTED, H.where(H != 3, bad))


def sums(x: np.ndarray, h: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """K and r of (sample, proj_dim, checkpoint) features, in float64."""
    x = x.astype("f8")
    return np.einsum("npc,nqc,nc->pqc", x, x, h), np.einsum("npc,n->pc", x, g.mean(1))


def test_matrices__of_rows_and_checkpoints_are_sums_over_the_same_rows(stores) -> None:
    """The stored r pools other checkpoints, and the stored K is of more rows than an r of these."""
    part = lazy_features(stores("saved", "soft").isel(sample=slice(60), checkpoint=[0, 2]))
    options = gather_options(part, "soft", 0.5, "completeness", None, None)
    chosen_by = matrices(part, options).choosing
    q = part.out_to_loss.values.astype("f8")
    k, r = sums(part.feature.values, q**0.5 * (1 - q), q**0.5)
    assert chosen_by.n_samples == 60
    np.testing.assert_allclose(chosen_by.gram.compute(scheduler="sync"), k, rtol=1e-4, atol=1e-3)
    found = chosen_by.loss_gradient.compute(scheduler="sync")
    np.testing.assert_allclose(found, r, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("estimator", ["trak", "soft"])
def test_matrices__given_weights_are_not_those_of_the_stored_matrix(stores, estimator) -> None:
    opened = lazy_features(stores("saved", estimator))
    h = xr.DataArray(np.linspace(0, 2, 200), dims="sample")
    found = matrices(opened, gather_options(opened, estimator, 0.5, 0.03, None, h))
    weights = np.stack([h.values] * 3, axis=1)
    k, _ = sums(opened.feature.values, weights, weights)
    np.testing.assert_allclose(found.gram.compute(scheduler="sync"), k, rtol=1e-4, atol=1e-3)


def test_matrices__given_weights_do_not_choose_the_damping_of_trak() -> None:
    """It is chosen under soft weights, whatever the weights of the gram matrix are."""
    options = gather_options(WEIGHTED, "trak", 0.5, "completeness", None, H)
    found = matrices(WEIGHTED, options)
    q = WEIGHTED.out_to_loss.values.astype("f8")
    x, h = WEIGHTED.feature.values, np.stack([np.arange(10.0)] * 2, axis=1)
    k, r = sums(x, q**0.5 * (1 - q), q**0.5)
    np.testing.assert_allclose(found.gram, sums(x, h, q)[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found.choosing.gram, k, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found.choosing.loss_gradient, r, rtol=1e-4, atol=1e-4)
    soft = matrices(WEIGHTED, gather_options(WEIGHTED, "soft", 0.5, "completeness", None, H))
    np.testing.assert_allclose(soft.choosing.gram, sums(x, h, q)[0], rtol=1e-4, atol=1e-4)
