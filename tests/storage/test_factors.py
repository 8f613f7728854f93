"""λ and eigenvectors in stores, against dense float64 numpy and against scores without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import trakdask as td
from trakdask.testing import simulate_features

N, P, C = 120, 12, 3
WIDE = 96
FACTORS = ["gram_eigenvalues", "gram_eigenvectors", "damping"]


@pytest.fixture(autouse=True)
def keeps_all_eigenvectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this small proj_dim were a large one."""
    monkeypatch.setattr("trakdask.derived.LEAST_DIM", 0)


def shifted(n: int, seed: int, p: int = P, falling: float = 0.7) -> xr.Dataset:
    """Features with falling eigenvalues and a mean, so that they add up to something."""
    made = simulate_features(n, p, C, chunks=32, seed=seed)
    scale = xr.DataArray(np.float32(falling) ** np.arange(p, dtype="f4"), dims="proj_dim")
    return made.assign(feature=(made.feature + np.float32(0.5)) * scale)


def few(n: int, seed: int = 0) -> xr.Dataset:
    """Fewer samples than dimensions, which have that many eigenvectors."""
    return shifted(n, seed, WIDE, 0.95).assign_attrs(source=f"few {n} {seed}")


def newton_step(ds: xr.Dataset) -> xr.DataArray:
    """(K + λI)⁻¹ r of soft weights, at λ = tr(K)/n."""
    x, q = ds.feature.values.astype("f8"), ds.out_to_loss.values.astype("f8")
    k = np.einsum("spc,sqc,sc->cpq", x, x, q**0.5 * (1 - q))
    r = np.einsum("spc,s->cp", x, (q**0.5).mean(1))
    step = [
        np.linalg.solve(each + np.trace(each) / len(x) * np.eye(P), b)
        for each, b in zip(k, r, strict=True)
    ]
    return xr.DataArray(np.array(step, "f4"), dims=("checkpoint", "proj_dim"))


STEP = newton_step(shifted(N, 0).compute(scheduler="synchronous"))  # workers import this module too


def images(n: int = N, seed: int = 0, checkpoints: tuple[int, ...] = (0, 1, 2)) -> xr.Dataset:
    """Features whose outputs follow the totals of attributions, so that they can choose λ."""
    made = shifted(n, seed)
    followed = (made.feature * STEP).sum("proj_dim") + 0.3 * made.output
    made = made.assign(output=followed.astype("f4")).isel(checkpoint=list(checkpoints))
    made = made.compute(scheduler="synchronous").chunk(sample=32, checkpoint=1)
    names = [f"c{index}" for index in checkpoints]
    return made.assign_attrs(
        default_estimator="soft",
        source=f"images {n} {seed}",
        checkpoints={name: name for name in names},
        checkpoint_ids={f"c{index}": index for index in checkpoints},
    )


def save(features: xr.Dataset, path: Path, **options) -> xr.Dataset:
    return td.save(features, path, progress=False, **options)


def oracle(features: xr.Dataset, targets: xr.Dataset, lam: np.ndarray) -> np.ndarray:
    """Soft scores of power ½, in float64 without any library of attribution."""
    x, t, q = (
        array.values.astype("f8")
        for array in (features.feature, targets.feature, features.out_to_loss)
    )
    h, g = q**0.5 * (1 - q), (q**0.5).mean(1)
    per_checkpoint = []
    for c in range(x.shape[2]):
        k = (x[..., c] * h[:, [c]]).T @ x[..., c]
        per_checkpoint.append(
            x[..., c] @ np.linalg.solve(k + lam[c] * np.eye(len(k)), t[..., c].T) * g[:, None]
        )
    return np.mean(per_checkpoint, axis=0)


TARGETS = images(7, seed=3)


def assert_scores(
    ds: xr.Dataset, targets: xr.Dataset, lam: np.ndarray | None = None, **options: object
) -> None:
    expected = oracle(ds, targets, ds.damping.values if lam is None else lam)
    found = td.score(ds, targets, td.Soft(**options))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def fill(store: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trakdask.derived.LEAST_DIM", 0)
        save(images(), store)


def test_save__factors_are_the_eigendecomposition(store: Path) -> None:
    ds = td.open(store).load()
    for c in range(C):
        k, v, s = (ds[name].values[..., c] for name in ("gram", FACTORS[1], FACTORS[0]))
        assert (k.dtype, v.dtype, s.dtype) == ("f4", "f4", "f8")  # p² numbers, as the features
        np.testing.assert_allclose((v * s) @ v.T, k, atol=1e-6 * np.trace(k))
        np.testing.assert_allclose(v.astype("f8").T @ v, np.eye(P), atol=1e-6)
    assert ds.gram_eigenvectors.dims == ("proj_dim", "component", "checkpoint")


@pytest.mark.parametrize("estimator", ["soft", "trak"])
def test_save__damping_is_that_of_the_function(tmp_path: Path, estimator: str) -> None:
    """Outputs choose under soft weights, whatever the gram matrix is of."""
    opened = save(images(), tmp_path / "f.zarr", estimator=estimator)
    anew = td.damping(opened.drop_vars(FACTORS), estimator).compute()
    assert str(anew.rule.values) == "completeness, training rows left out"
    np.testing.assert_allclose(opened.damping, anew.damping, rtol=1e-12)
    stored = td.damping(opened, estimator).compute()
    assert str(stored.rule.values) == opened.damping.attrs["rule"] == str(anew.rule.values)
    for name in ("damping", "relative", "curve", "peak", "threshold"):
        np.testing.assert_allclose(stored[name], anew[name], rtol=1e-6)


@pytest.mark.parametrize("damping", ["auto", "trace", 0.001, td.Absolute(0.7)])
def test_score__by_stored_factors_equals_the_float64_solve(store: Path, damping) -> None:
    opened = td.open(store)
    lam = td.damping(opened.drop_vars(FACTORS), td.Soft(damping=damping)).damping.values
    assert_scores(opened, TARGETS, lam, damping=damping)
    own = td.self_influence(opened, td.Soft(damping=damping)).values
    without = td.self_influence(opened.drop_vars(FACTORS), td.Soft(damping=damping))
    np.testing.assert_allclose(own, without, rtol=2e-6)  # products in float32, as the features


def test_store__of_matrices_in_double_precision_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As earlier versions wrote them, as a whole; an append of samples makes others."""
    path = tmp_path / "f.zarr"
    with monkeypatch.context() as patch:
        patch.setattr("trakdask.derived._dtype", lambda *_: np.dtype("f8"))
        patch.setattr("trakdask.storage.group._COMPRESSED", ())
        first = save(images(checkpoints=(0, 1)), path).compute()
    assert first.gram.dtype == np.float64
    after = save(images(checkpoints=(2,)), path, append_dim="checkpoint")
    for name in ("gram", "gram_eigenvectors"):
        np.testing.assert_array_equal(after[name][..., :2], first[name])
        assert after[name].dtype == np.float64
    np.testing.assert_array_equal(xr.open_zarr(path).gram, after.gram)
    assert td.verify(path, checksums=True).empty
    assert_scores(after, TARGETS)
    more = save(images(40, seed=1), path, append_dim="sample")
    assert not np.tril(xr.open_zarr(path).gram.values[..., 0], -1).any()
    assert (more.gram.dtype, more.gram_eigenvectors.dtype) == ("f4", "f4")
    assert_scores(more, TARGETS)


def test_store__of_few_columns_keeps_no_eigenvectors(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has some loses them with the next change; scores need none."""
    before = td.open(store)
    scores, chosen = td.score(before, TARGETS).compute(), before.damping.values
    monkeypatch.setattr("trakdask.derived.LEAST_DIM", P)
    opened = save(images(), store)
    assert {*FACTORS} & {*opened} == {"damping"}
    np.testing.assert_array_equal(opened.damping, chosen)
    atol = 1e-6 * float(abs(scores).max())
    np.testing.assert_allclose(td.score(opened, TARGETS), scores, rtol=1e-5, atol=atol)
    opened = save(images(40, seed=1), store, append_dim="sample")
    lam = td.damping(opened.drop_vars("damping")).damping.values
    np.testing.assert_allclose(opened.damping, lam, rtol=1e-12)
    assert_scores(opened, TARGETS)
    assert_scores(td.drop(store, where="label == 1"), TARGETS)


@pytest.mark.parametrize("change", ["drop", "append"])
def test_open__before_a_change_says_to_open_again(store: Path, change: str) -> None:
    opened = td.open(store)
    old_rows = opened.feature.values
    if change == "drop":
        td.drop(store, where=lambda ds: ds.label == 1)
    else:
        td.save(images(seed=5).assign_attrs(source="more"), store, append_dim="sample")
    np.testing.assert_array_equal(opened.feature, old_rows)
    with pytest.raises(td.errors.IncompleteFeaturesError, match=r"td\.open\(store\)"):
        td.score(opened, TARGETS).compute()
    td.score(td.open(store), TARGETS).compute()


def test_calibrate__held_out_samples(store: Path) -> None:
    before = td.open(store)
    held_out = images(60, seed=9)
    held_out = held_out.assign(output=held_out.output + 3 * held_out.feature.sum("proj_dim"))
    chosen = td.calibrate(store, held_out)
    assert chosen.damping.attrs["rule"] == "completeness, calibration set"
    xr.testing.assert_identical(save(images(), store).damping, chosen.damping)  # nothing to do
    expected = td.damping(before.drop_vars(FACTORS), calibrate=held_out).damping
    np.testing.assert_allclose(chosen.damping, expected, rtol=1e-12)
    again = td.calibrate(store)
    np.testing.assert_allclose(
        again.damping, td.damping(again.drop_vars(FACTORS)).damping, rtol=1e-12
    )
    assert not np.allclose(again.damping, expected)


CHANGES: dict[str, Callable[[xr.Dataset], xr.Dataset]] = {
    "checkpoints": lambda ds: ds.isel(checkpoint=[2, 0]),
    "proj_dim": lambda ds: ds.isel(proj_dim=slice(6)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore::UserWarning")  # few checkpoints, outputs in another order
def test_score__factors_are_never_those_of_other_arrays(store: Path, change: str) -> None:
    changed = CHANGES[change](td.open(store))
    targets = TARGETS.isel(proj_dim=slice(changed.sizes["proj_dim"]))
    targets = targets.sel(checkpoint=changed.checkpoint)
    found = td.score(changed, targets).compute()
    expected = td.score(changed.drop_vars(FACTORS), targets).compute()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * float(abs(expected).max()))


@pytest.mark.filterwarnings("ignore:outputs of the training rows", "ignore:λ")
@pytest.mark.parametrize("damping", ["auto", "completeness", 0.01, td.Absolute(0.02)])
def test_score__by_few_eigenvectors_equals_the_float64_solve(tmp_path: Path, damping) -> None:
    saved, estimator = (
        save(few(60), tmp_path / "f.zarr", estimator="soft"),
        td.Soft(damping=damping),
    )
    assert saved.sizes["component"] == 60
    lam = td.damping(saved, estimator).damping.values
    np.testing.assert_allclose(lam, td.damping(few(60), estimator).damping, rtol=1e-6)
    for ds in (saved, saved.compute()):
        assert_scores(ds, few(7, seed=3), lam, damping=damping)
    some = td.score(saved.isel(sample=[5, 9]), few(7, seed=3), estimator)
    np.testing.assert_allclose(
        some, oracle(saved, few(7, seed=3), lam)[[5, 9]], rtol=1e-3, atol=1e-4
    )


@pytest.mark.filterwarnings("ignore:outputs of the training rows", "ignore:λ")
def test_save__append_and_drop_renew_few_eigenvectors(tmp_path: Path) -> None:
    path = tmp_path / "f.zarr"
    save(few(48), path, estimator="soft")
    for n, seed, n_vectors in ((16, 1, 64), (48, 2, WIDE)):
        after = save(few(n, seed), path, append_dim="sample", estimator="soft")
        assert after.sizes["component"] == n_vectors
        chosen = td.damping(after.drop_vars(FACTORS), "soft").damping
        np.testing.assert_allclose(after.damping, chosen, rtol=1e-6)
        assert_scores(after, few(7, seed=3))
    left = td.drop(path, where=lambda ds: ds.label % 2 == 1)
    assert left.sizes["component"] == left.sizes["sample"] < WIDE
    assert_scores(left, few(7, seed=3))


def test_damping__stored_choice_warns_as_the_choice_did(tmp_path: Path) -> None:
    saved = save(images().assign(output=(images().output * 1e3) % 1), tmp_path / "f.zarr")
    assert saved.damping.attrs["rule"] == "tr(K)/n"
    with pytest.warns(UserWarning, match="training rows left out"):
        td.damping(saved)
