"""The front door: fits that go on after a kill, are kept by features, and do not change."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import torch
import xarray as xr
from distributed import Client, get_task_stream
from torch import nn

import trakdask as td
from trakdask import bars
from trakdask.featurization.preparation import projector_of
from trakdask.fits import fitting, keeping
from trakdask.fits.fitting import wrong_classes
from trakdask.fits.weights import weighted
from trakdask.planning.fits import sketch_of
from trakdask.projection.fitted import Fitted
from trakdask.samples.datasets import drawn

# A warning about λ, of which 64 samples of noise say little.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

RNG = np.random.default_rng(0)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def states(names: str = "ab") -> dict[str, dict[str, torch.Tensor]]:
    made = {}
    for seed, name in enumerate(names):
        torch.manual_seed(seed)
        made[name] = {n: torch.randn_like(t) for n, t in build().state_dict().items()}
    return made


SAMPLES = td.from_arrays(
    {"image": RNG.normal(size=(64, 6)).astype("f4"), "label": np.arange(64) % 3}, chunks=40
)
MODEL = td.Model(build, states(), task="image_classification")
SMALL: dict[str, Any] = {
    "proj_dim": 6,
    "curvature": True,
    "sketch": td.SJLT(24),
    "progress": False,
}


@functools.cache
def small_fit() -> Fitted:
    with dask.config.set(scheduler="threads"):
        return td.fit(SAMPLES, MODEL, **SMALL)


def test_fit__is_the_chain_of_its_steps() -> None:
    front = small_fit()
    curved = [
        weighted(
            td.fits.curvature(SAMPLES, MODEL.at_checkpoints([name]), leading=0, progress=False),
            front.steps[0].weights,
            MODEL.shapes,
            12,
        )
        for name in "ab"
    ]
    sketch = Fitted.joined(curved).then(td.SJLT(12))
    by_hand = td.fits.principal_components(SAMPLES, MODEL, 6, projector=sketch)
    assert front.steps == by_hand.steps
    one, other = (td.featurize(SAMPLES, MODEL, p).feature.compute() for p in (front, by_hand))
    products = [np.einsum("ipc,jpc->cij", x.values, x.values) for x in (one, other)]
    np.testing.assert_allclose(*products, rtol=1e-3, atol=1e-4 * products[0].max())
    for options, steps in (
        ({"curvature": False}, "SJLT(proj_dim=24, sparsity=4, seed=0), Components(proj_dim=6)"),
        ({"components": False}, "leading=3, block=1024), SJLT(proj_dim=3, sparsity=4, seed=0)"),
    ):
        assert steps in repr(td.fit(SAMPLES, MODEL, **SMALL | options))
    moments = [{n: t.abs() for n, t in state.items()} for state in states().values()]
    scaled = td.fit(SAMPLES, MODEL, moments=moments, **SMALL | {"curvature": "auto"})
    assert repr(scaled).startswith("Fitted(SecondMoments(), SJLT(proj_dim=24")


def test_fit__curvatures_are_of_few_of_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "N_CURVATURE", 16)
    fitted, few = td.fit(SAMPLES, MODEL, **SMALL), drawn(SAMPLES, 16, 16)
    alone = td.fits.curvature(few, MODEL, progress=False).arrays
    for name in ("curvature_eigenvectors", "curvature_scale"):
        np.testing.assert_allclose(fitted.arrays[name], alone[name], rtol=1e-5, atol=1e-6)
    among = wrong_classes(few, MODEL, fitted)
    np.testing.assert_allclose(fitted.arrays["wrong_classes"], among, atol=1e-6)
    assert abs(among - wrong_classes(SAMPLES, MODEL, fitted)).max() > 1e-3


@pytest.mark.parametrize("scheduler", ["threads", "client"])
def test_fit__the_bar_counts_blocks_of_all_passes_and_checkpoints(
    scheduler: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if scheduler == "client":
        request.getfixturevalue("client")
    counted, bar = [], bars._bar

    @contextmanager
    def spied(*arguments: Any) -> Iterator[Any]:
        with bar(*arguments) as (update, say):
            yield lambda done: [counted.append(done), update(done)], say

    monkeypatch.setattr(bars, "_bar", spied)
    monkeypatch.setattr(fitting, "wrong_classes", lambda *_, **__: 1 / 0)
    options = SMALL | {"progress": True, "weights": True}
    with pytest.raises(ZeroDivisionError):
        td.fit(SAMPLES, MODEL, store=tmp_path / "f.zarr", **options)
    # Of two blocks: two passes for the curvature, one for weights, all at both checkpoints; one for
    # components, at the first.
    assert counted[-1] == 14
    capsys.readouterr()
    monkeypatch.undo()
    td.fit(SAMPLES, MODEL, store=tmp_path / "f.zarr", **options)
    assert "fit" in (shown := capsys.readouterr().out)
    assert "20/20" in shown


def test_fit__runs_as_many_checkpoints_side_by_side_as_keep_workers_busy(
    monkeypatch: pytest.MonkeyPatch, process_client: Client
) -> None:
    monkeypatch.setattr(keeping, "n_slots", lambda: 8)
    curvature, together = fitting.curvature_with, []

    def spied(turning: Any, samples: xr.Dataset, model: td.Model, **options: Any) -> Fitted:
        together.append(list(model.spec()["checkpoints"]))
        return curvature(turning, samples, model, **options)

    monkeypatch.setattr(fitting, "curvature_with", spied)
    options = SMALL | {"weights": True}
    with get_task_stream(process_client) as stream:
        fitted = td.fit(SAMPLES, MODEL, **options)
    assert together == [["a", "b"]]
    tasks = {str(each["key"]).partition("-")[0] for each in stream.data}
    assert {"_principal", "_facts_at", "('eigenvectors_of"} <= tasks  # on workers, and not here
    monkeypatch.undo()
    with dask.config.set(scheduler="threads"):
        assert td.fit(SAMPLES, MODEL, **options).digests == fitted.digests


def test_fit__leaves_the_curvature_of_few_samples_out() -> None:
    images = np.random.default_rng(1).normal(size=(501, 6)).astype("f4")
    samples = td.from_arrays({"image": images, "label": np.arange(501) % 3}, chunks=256)
    options, one = SMALL | {"curvature": "auto"}, MODEL.at_checkpoints(["a"])
    for n, has_curvature in ((499, False), (500, True)):
        fitted = td.fit(samples, one, n_samples=n, **options)
        assert ("Curvature" in repr(fitted)) == has_curvature


def test_fit__has_fewer_columns_where_fewer_samples_are_fitted() -> None:
    projector = td.fit(SAMPLES, MODEL, **SMALL | {"proj_dim": 1024, "n_samples": 9})
    assert td.featurize(SAMPLES, MODEL, projector).sizes["proj_dim"] == 9


@pytest.mark.parametrize(("width", "columns"), [(9, 4096), (300, 16384), (500, 32768)])
def test_sketch__follows_the_size_of_the_model(width: int, columns: int) -> None:
    assert sketch_of({"weight": (width, width)}).proj_dim == columns


def test_fit__of_another_checkpoint_goes_on_with_the_sketch_of_the_store(tmp_path: Path) -> None:
    store, options = tmp_path / "f.zarr", SMALL | {"store": tmp_path / "f.zarr"}
    one, both = MODEL.at_checkpoints(["a"]), MODEL
    td.save(td.featurize(SAMPLES, one, td.fit(SAMPLES, one, **options)), store, progress=False)
    assert td.fit(SAMPLES, both, **options | {"sketch": "auto"}).projector == td.SJLT(12)
    with pytest.raises(td.errors.StoreMismatchError, match="sketch"):
        td.fit(SAMPLES, both, **options | {"sketch": td.SJLT(48)})


def test_fit__draws_the_same_part_of_the_samples_in_any_chunks() -> None:
    fits = [
        td.fit(samples, MODEL, n_samples=40, **SMALL)
        for samples in (SAMPLES, SAMPLES.chunk(sample=7))
    ]
    rows = np.sort(np.random.default_rng(0).permutation(64)[:40])
    whole = td.fit(SAMPLES.isel(sample=rows), MODEL, **SMALL)
    for other in (fits[1], whole):
        np.testing.assert_allclose(
            other.arrays["principal_shares"], fits[0].arrays["principal_shares"], rtol=1e-3
        )


def test_fit__goes_on_where_it_was_killed(tmp_path: Path, monkeypatch: Any) -> None:
    store, fitted_to = tmp_path / "train.zarr", []
    curvature = fitting.curvature_with

    def dying(turning: Any, samples: xr.Dataset, model: td.Model, **options: Any) -> Any:
        names = list(model.spec()["checkpoints"])
        if names == ["b"] and not fitted_to.count("b"):
            fitted_to.append("b")
            raise KeyboardInterrupt
        fitted_to.extend(names)
        return curvature(turning, samples, model, **options)

    monkeypatch.setattr(fitting, "curvature_with", dying)
    with pytest.raises(KeyboardInterrupt):
        td.fit(SAMPLES, MODEL, store=store, **SMALL)
    projector = td.fit(SAMPLES, MODEL, store=store, **SMALL)
    assert fitted_to == ["a", "b", "b"]
    (kept, other) = sorted((tmp_path / "train.zarr.fit").glob("curvature-*"))
    (sketch, _) = sorted((tmp_path / "train.zarr.fit").glob("sketch-*"))
    again = td.fit(SAMPLES, MODEL, store=store, **SMALL)
    assert again.digests == projector.digests
    for damaged in (kept, sketch):  # these steps are fitted again
        damaged.write_bytes(damaged.read_bytes()[:-300])
    content = other.read_bytes()
    other.write_bytes(content[:200] + bytes([content[200] ^ 1]) + content[201:])
    assert td.fit(SAMPLES, MODEL, store=store, **SMALL).digests.keys() == {"a", "b"}
    assert len(fitted_to) == 5

    features = td.save(td.featurize(SAMPLES, MODEL, again), store, progress=False)
    assert not (tmp_path / "train.zarr.fit").exists()
    stored = td.fit(SAMPLES, MODEL, store=store, **SMALL)
    assert stored.digests == again.digests
    assert len(fitted_to) == 5
    more = td.Model(build, states("abc"), task="image_classification")
    longer = td.fit(SAMPLES, more, store=store, **SMALL)  # of the new checkpoint alone
    assert fitted_to[5:] == ["c"]
    assert {name: longer.digests[name] for name in "ab"} == dict(stored.digests)
    added = td.featurize(SAMPLES, more, longer)
    td.save(added, tmp_path / "train.zarr", append_dim="checkpoint", progress=False)
    like = td.featurize(SAMPLES.isel(sample=[2]), MODEL, stored)
    xr.testing.assert_allclose(like.feature, features.feature.isel(sample=[2]), atol=1e-5)
    with pytest.raises(td.errors.StoreMismatchError, match="proj_dim"):
        td.fit(SAMPLES, MODEL, **{**SMALL, "proj_dim": 5}, store=store)
    with pytest.raises(td.errors.StoreMismatchError, match="samples"):
        td.fit(SAMPLES.isel(sample=slice(9)), MODEL, **SMALL, store=store)


def test_attribute__is_the_lines_of_its_docstring(tmp_path: Path) -> None:
    test = SAMPLES.isel(sample=slice(3))
    scores = td.attribute(SAMPLES, test, MODEL, tmp_path / "one.zarr", **SMALL)
    features = td.featurize(SAMPLES, MODEL, small_fit())
    features = td.save(features, tmp_path / "other.zarr", progress=False)
    expected = td.score(features, td.featurize(test, MODEL, like=features)).compute()
    np.testing.assert_allclose(scores, expected, rtol=1e-3, atol=1e-4 * float(abs(expected).max()))
    assert [path.name for path in tmp_path.iterdir() if "fit" in path.name] == []
    again = td.attribute(SAMPLES, test, MODEL, tmp_path / "one.zarr", **SMALL)
    np.testing.assert_array_equal(again, scores)


def test_store__has_what_was_fitted_with_checksums(tmp_path: Path) -> None:
    store = tmp_path / "train.zarr"
    projector = small_fit()
    features = td.featurize(SAMPLES, MODEL, projector)
    whole = td.save(features, store, progress=False)
    again = td.featurize(SAMPLES, MODEL, like=whole)  # the bits of the process that fitted
    np.testing.assert_array_equal(again.feature, features.feature)
    plain = xr.open_zarr(store)
    for name, array in projector.arrays.items():
        np.testing.assert_array_equal(whole[name].values, array, strict=True)
        stored = np.tril(array.T).T if name == "wrong_classes" else array  # its upper triangle
        np.testing.assert_array_equal(plain[name].values, stored)
    for name in projector.arrays:
        (chunk,) = [p for p in (store / name).rglob("*") if p.name.endswith("1") and p.is_file()]
        content = chunk.read_bytes()
        for damaged, found in ((content[:-9] + b"x" + content[-8:], "Checksum"), (None, "no such")):
            chunk.unlink() if damaged is None else chunk.write_bytes(damaged)
            faults = td.verify(store, checksums=True)
            assert [path.split("/")[0] for path in faults.path] == [name]
            assert faults.checkpoint.tolist() == [1]
            assert faults.found.str.contains(found, case=False).all()
            with pytest.raises((ValueError, td.errors.IncompleteFeaturesError), match=name):
                td.featurize(SAMPLES, MODEL, like=td.open(store)).compute()
            chunk.write_bytes(content)
    td.verify(store, checksums=True, repair=True)
    chunk.write_bytes(b"")
    td.verify(store, checksums=True, repair=True)
    with pytest.raises(td.errors.IncompleteFeaturesError):
        td.open(store)
    again = td.save(features, store, progress=False)
    xr.testing.assert_identical(again.load(), whole.load().assign_attrs(again.attrs))


def test_store__grows_in_both_directions(tmp_path: Path) -> None:
    store = tmp_path / "train.zarr"
    projector = small_fit()
    first, last = (SAMPLES.isel(sample=rows) for rows in (slice(40), slice(40, None)))
    of_a = MODEL.at_checkpoints(["a"])
    opened = td.save(td.featurize(first, of_a, projector), store, progress=False)
    more = td.featurize(last, MODEL, like=opened)
    opened = td.save(more, store, append_dim="sample", progress=False)
    assert opened.sizes["checkpoint"] == 1
    with pytest.warns(match="no unfinished append"):
        td.save(
            td.featurize(first, MODEL, projector), store, append_dim="checkpoint", progress=False
        )
    opened = td.save(
        td.featurize(last, MODEL, projector), store, append_dim="checkpoint", progress=False
    )
    whole = td.featurize(SAMPLES, MODEL, projector)
    for name in ("feature", *projector.arrays):
        np.testing.assert_allclose(opened[name], whole[name], atol=1e-5, err_msg=name)
    assert not len(td.verify(store, checksums=True))
    with pytest.raises(td.errors.StoreMismatchError, match=r"fit.*like=features"):
        td.save(td.featurize(last, MODEL, td.SJLT(6)), store, append_dim="sample")


def test_fit__makes_again_what_is_no_kept_fit(
    tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store, fitted = tmp_path / "train.zarr", []
    curvature = fitting.curvature_with
    monkeypatch.setattr(
        fitting, "curvature_with", lambda *a, **k: [fitted.append(1), curvature(*a, **k)][1]
    )
    td.fit(SAMPLES, MODEL, store=store, **SMALL)
    kept, other = sorted((tmp_path / "train.zarr.fit").glob("curvature-*"))
    whole = dict(np.load(kept))
    bad = io.BytesIO()
    np.savez(bad, **whole | {"curvature_scale": 2 * whole["curvature_scale"]})
    for content in (b"", bytes(999), b"{}", other.read_bytes(), bad.getvalue()):
        kept.write_bytes(content)
        fitted.clear()
        caplog.clear()
        td.fit(SAMPLES, MODEL, store=store, **SMALL)
        assert len(fitted) == 1
        assert [record.message.count("made again") for record in caplog.records] == [1]
        np.testing.assert_array_equal(np.load(kept)["curvature_scale"], whole["curvature_scale"])


def test_fit__other_metadata_are_the_same_fit(tmp_path: Path) -> None:
    store = tmp_path / "train.zarr"
    projector = small_fit()
    td.save(td.featurize(SAMPLES, MODEL, projector), store, progress=False)
    years = SAMPLES.assign_coords(year=("sample", np.arange(64)))
    more = years.assign(unread=("sample", np.arange(64.0)))
    for samples in (years, more):
        assert td.fit(samples, MODEL, store=store, **SMALL).digests == projector.digests
    with pytest.raises(td.errors.StoreMismatchError, match="differ in samples"):
        td.fit(SAMPLES.assign(label=(SAMPLES.label + 1) % 3), MODEL, store=store, **SMALL)


@pytest.mark.parametrize("name", ["curvature_scale", "principal_components", "wrong_classes"])
def test_like__refuses_fitted_values_that_somebody_changed(name: str) -> None:
    """Also for one checkpoint alone, once for each and not for each block, and by every door."""
    features = td.featurize(SAMPLES, MODEL, small_fit())
    of_b = xr.DataArray(np.array([1, 2], features[name].dtype), dims="checkpoint")
    changed = features.assign({name: features[name] * of_b})
    for made in (
        td.featurize(SAMPLES, MODEL, like=changed),
        td.featurize(SAMPLES, MODEL, like=changed.sel(checkpoint=["b"])),
        td.featurize(SAMPLES, MODEL, projector_of(changed)),
    ):
        with pytest.raises(td.errors.StoreMismatchError, match=rf"{name}.*checkpoint 'b'"):
            made.feature.compute()
    of_a = changed.sel(checkpoint=["a"])
    xr.testing.assert_equal(
        td.featurize(SAMPLES, MODEL, like=of_a).feature, features.feature.sel(checkpoint=["a"])
    )


@pytest.mark.parametrize("columns", [slice(3), [3, 1], [1, 0, 2, 3, 4, 5]])
def test_like__needs_all_columns(columns: Any) -> None:
    features = td.featurize(SAMPLES, MODEL, small_fit())
    with pytest.raises(ValueError, match=r"all 6 columns.*isel\(proj_dim=...\) on both"):
        td.featurize(SAMPLES, MODEL, like=features.isel(proj_dim=columns))
    like = td.featurize(SAMPLES, MODEL, like=features.transpose())
    np.testing.assert_array_equal(like.feature, features.feature)


def test_like__compares_fitted_values_once(monkeypatch: Any) -> None:
    features = td.featurize(SAMPLES, MODEL, small_fit())
    compared, digest_at = [], Fitted.digest_at
    monkeypatch.setattr(
        Fitted, "digest_at", lambda self, i: [compared.append(1), digest_at(self, i)][1]
    )
    td.featurize(SAMPLES, MODEL, like=features).feature.compute(scheduler="sync")
    assert len(compared) == 2


# ------------------------------------------------------------------- stores of earlier versions


def test_fit__goes_on_in_the_dtypes_of_an_older_store(tmp_path: Path, monkeypatch: Any) -> None:
    """Features are the ones that the store had, and those of a new checkpoint can be made again."""
    store, of_a = tmp_path / "f.zarr", MODEL.at_checkpoints(["a"])
    with monkeypatch.context() as patch:  # components as halves, wrong classes in float64
        patch.setattr("trakdask.fits.components.encoded", lambda matrix: matrix.astype("f2"))
        fit = td.fit(SAMPLES, of_a, **SMALL)
    before = fit.beside({"wrong_classes": fit.arrays["wrong_classes"].astype("f8")})
    with monkeypatch.context() as patch:  # and as a whole
        patch.setattr("trakdask.storage.group._COMPRESSED", ())
        first = td.save(td.featurize(SAMPLES, of_a, before), store, progress=False).compute()
    exact = before.arrays["principal_components"].astype("f4")
    plain = Fitted(
        before.steps, {**before.arrays, "principal_components": exact}, model=before.model
    )
    np.testing.assert_array_equal(td.featurize(SAMPLES, of_a, plain).feature, first.feature)
    again = td.featurize(SAMPLES, of_a, like=td.open(store))
    np.testing.assert_array_equal(again.feature, first.feature)
    both = td.fit(SAMPLES, MODEL, store=store, **SMALL)
    assert both.digests["a"] == before.digests["a"]
    both.require_digests()
    made = td.featurize(SAMPLES, MODEL, both).compute()
    td.save(td.featurize(SAMPLES, MODEL, both), store, append_dim="checkpoint", progress=False)
    opened = td.open(store)
    assert opened.principal_components.dtype == np.float16
    assert opened.wrong_classes.dtype == np.float64
    np.testing.assert_array_equal(opened.wrong_classes, both.arrays["wrong_classes"])
    np.testing.assert_array_equal(opened.wrong_classes, xr.open_zarr(store).wrong_classes)
    np.testing.assert_array_equal(opened.feature[..., :1], first.feature)
    for features in (opened, td.featurize(SAMPLES, MODEL, like=opened)):
        np.testing.assert_array_equal(features.feature, made.feature)


def test_save__refuses_components_in_other_dtypes_than_the_store_has(tmp_path: Path) -> None:
    sketch, store = td.SJLT(24), tmp_path / "f.zarr"
    fit = td.fits.principal_components(SAMPLES, MODEL, 6, projector=sketch, progress=False)
    halves = (fit.arrays["principal_components"] / 127).astype("f2")
    older = fit.beside({"principal_components": halves}).at_checkpoints(["a"])
    of_a = MODEL.at_checkpoints(["a"])
    td.save(td.featurize(SAMPLES, of_a, older), store, progress=False)
    newer = td.featurize(SAMPLES, MODEL.at_checkpoints(["b"]), fit)
    with pytest.raises(td.errors.StoreMismatchError, match=r"\(float16\).*\['b'\].*int8.*store="):
        td.save(newer, store, append_dim="checkpoint", progress=False)
