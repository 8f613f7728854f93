"""Models without each group, on least squares: what a group changes is known in closed form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from scipy import stats

import trakdask as td

RNG = np.random.default_rng(0)
N, M, P, C = 80, 9, 3, 5
X, X_TARGET = RNG.standard_normal((N, P)), RNG.standard_normal((M, P))
Y = X @ [1.0, -2.0, 0.5] + RNG.standard_normal(N)
NAMES = np.array(["Ada", "Bo", "Cy", "Di", "Ed", "Fay"])
author = RNG.choice(NAMES, N, p=[0.3, 0.25, 0.2, 0.1, 0.1, 0.05])
THETA = np.linalg.lstsq(X, Y)[0]
leave_group_out = td.evaluate.leave_group_out


def train(positions: np.ndarray, seed: int) -> np.ndarray:
    return X_TARGET @ np.linalg.lstsq(X[positions], Y[positions])[0]


def noisy(positions: np.ndarray, seed: int) -> np.ndarray:
    return train(positions, seed) + 0.02 * np.random.default_rng(seed).standard_normal(M)


def closed_form() -> np.ndarray:
    """θ - θ₋g = (XᵀX)⁻¹ X_gᵀ (1 - X_g (XᵀX)⁻¹ X_gᵀ)⁻¹ r_g, (group, target)."""
    inverse, effects = np.linalg.inv(X.T @ X), []
    for name in NAMES:
        x, residual = X[author == name], (Y - X @ THETA)[author == name]
        leverage = x @ inverse @ x.T
        change = inverse @ x.T @ np.linalg.solve(np.eye(len(x)) - leverage, residual)
        effects.append(X_TARGET @ change)
    return np.array(effects)


effect = closed_form()


def features_of(x: np.ndarray, residual: np.ndarray, **coords: np.ndarray) -> xr.Dataset:
    """Return features of five checkpoints that differ by a little noise."""
    rng = np.random.default_rng(len(x))
    noise = 1 + 0.1 * rng.standard_normal((len(x), 1, C))
    q = np.repeat(residual[:, None], C, axis=1)
    return td.from_features(x[:, :, None] * noise, "columns of X", out_to_loss=q, coords=coords)


FEATURES = features_of(X, Y - X @ THETA, author=author)
TARGETS = features_of(X_TARGET, np.ones(M))
TRAK = td.Trak(damping=td.Absolute(1e-6))
GROUPS = FEATURES.author
SUMS = td.group_score(FEATURES, TARGETS, TRAK, by="author").compute(scheduler="sync")
BOUNDED = td.group_score(FEATURES, TARGETS, TRAK, by="author", level=0.9).compute(scheduler="sync")


def test_leave_group_out__effects_are_those_of_the_closed_form() -> None:
    found = leave_group_out(train, SUMS, GROUPS, seeds=2, resamples=20).compute()
    assert found.author.values.tolist() == NAMES.tolist()
    assert found.effect.dims == ("author", "target")
    np.testing.assert_allclose(found.effect, effect, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(found.effect_error, 0, atol=1e-12)
    expected = [stats.spearmanr(SUMS[:, t], effect[:, t]).statistic for t in range(M)]
    np.testing.assert_allclose(found.lds, expected, atol=1e-12)
    assert float(found.lds_mean) == pytest.approx(np.mean(expected))
    assert float(found.lds_mean) > 0.9  # scores are the first order of the closed form
    assert "coverage" not in found
    slope = np.polynomial.polynomial.polyfit(SUMS.values.ravel(), effect.ravel(), [1])[1]
    assert float(found.scale) == pytest.approx(slope)
    assert 1 < float(found.scale) < 1.5  # a group hides part of its own effect


def test_leave_group_out__counts_the_effects_between_bounds() -> None:
    found = leave_group_out(train, BOUNDED, GROUPS, seeds=1, resamples=20).compute()
    low, high = (float(found.scale) * BOUNDED[name].values for name in ("lower", "upper"))
    covered = (low <= effect) & (effect <= high)
    np.testing.assert_allclose(found.coverage, covered.mean(0))
    assert float(found.coverage_mean) == pytest.approx(covered.mean())
    assert 0.1 < covered.mean() < 0.9
    assert found.effect_error.isnull().all()
    around = xr.full_like(SUMS, 1e-9)
    exact = SUMS.copy(data=effect / 2)
    exact = xr.Dataset({"score": exact, "lower": exact - around, "upper": exact + around})
    found = leave_group_out(train, exact, GROUPS, seeds=1, resamples=20).compute()
    assert float(found.coverage_mean) == float(found.lds_mean) == 1
    assert float(found.scale) == pytest.approx(2)
    near = {"mean_lower": effect - 0.1, "mean_upper": effect + 0.1}  # which are not scaled
    bounded = {"effect": 2 * effect, "lower": 9 + effect, "upper": 9 + effect, **near}
    sums = xr.Dataset({name: SUMS.copy(data=values) for name, values in bounded.items()})
    found = leave_group_out(train, sums, GROUPS, seeds=1, resamples=20).compute()
    assert float(found.coverage_mean) == 1
    assert float(found.scale) == pytest.approx(0.5)


def test_leave_group_out__errors_are_those_of_the_seeds() -> None:
    found = leave_group_out(noisy, SUMS, GROUPS, seeds=4, resamples=20).compute()
    without = [FEATURES.author != name for name in NAMES]
    masks = xr.concat([xr.ones_like(GROUPS, bool), *without], "subset")
    outputs = td.evaluate.retrain(noisy, masks, M, seeds=4).compute()
    squared = outputs.var("seed", ddof=1) / 4
    error = np.sqrt(squared[1:] + squared[0])
    np.testing.assert_allclose(found.effect_error, error, rtol=1e-9)
    assert 0.01 < float(found.effect_error.mean()) < 0.03
    expected = td.evaluate.lds(
        -SUMS.sel(author=author).drop_vars("author").rename(author="sample")
        / xr.DataArray([np.sum(author == name) for name in author], dims="sample"),
        ~masks[1:].reset_coords(drop=True), outputs[1:], resamples=20,
    )  # fmt: skip
    for name in ("lds", "lds_mean", "interval", "ceiling", "draws"):
        np.testing.assert_allclose(found[name], expected[name], atol=1e-9, err_msg=name)


def test_leave_group_out__a_mapping_and_some_groups_only(tmp_path: Path) -> None:
    some = SUMS.sel(author=["Fay", "Ada", "Cy"])
    several = {"trak": some, "minus": -some}
    options = {"seeds": 1, "resamples": 20, "store": tmp_path, "tag": "x", "progress": False}
    found = leave_group_out(train, several, GROUPS, **options)
    assert len([*tmp_path.glob("models/*.npy")]) == 1 + 3
    assert found.author.values.tolist() == ["Fay", "Ada", "Cy"]
    np.testing.assert_allclose(found.effect, effect[[5, 0, 2]], rtol=1e-8)
    assert found.lds.dims == ("target", "estimator")
    np.testing.assert_allclose(found.lds[:, 1], -found.lds[:, 0])
    assert found.scale[1] == -found.scale[0]
    assert td.plots.lds(found) is not None


def test_leave_group_out__a_failed_target_has_no_correlation() -> None:
    broken = BOUNDED.copy(deep=True)
    for name in ("score", "lower", "upper"):
        broken[name][:, 2] = np.nan
    found = leave_group_out(train, broken, GROUPS, seeds=1, resamples=20).compute()
    whole = leave_group_out(train, BOUNDED, GROUPS, seeds=1, resamples=20).compute()
    rest = np.arange(M) != 2
    np.testing.assert_allclose(found["lds"][rest], whole["lds"][rest])
    assert np.isnan(found.lds[2])
    assert np.isnan(found.coverage).values.tolist() == (~rest).tolist()
    of_rest = BOUNDED.isel(target=rest)
    without = leave_group_out(
        lambda *how: train(*how)[rest], of_rest, GROUPS, seeds=1, resamples=20
    ).compute()
    np.testing.assert_allclose(found.scale, without.scale)
    np.testing.assert_allclose(found.coverage_mean, without.coverage_mean)


def test_leave_group_out__samples_without_a_group_are_always_trained_on() -> None:
    some = np.where(author == "Ed", None, author)
    groups = xr.DataArray(some, dims="sample", name="author")
    features = FEATURES.assign_coords(author=("sample", some))
    sums = td.group_score(features, TARGETS, TRAK, by="author")
    found = leave_group_out(train, sums, groups, seeds=1, resamples=20).compute()
    np.testing.assert_allclose(found.effect, effect[[0, 1, 2, 3, 5]], rtol=1e-8)
