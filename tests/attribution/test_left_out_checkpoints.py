"""λ that is chosen by checkpoints left out: against a loop, and when it stays as it is."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from scipy.stats import rankdata

import trakdask as td
from trakdask.arrays.damping import GRID

N, P, C = 80, 6, 5


@pytest.fixture(scope="module")
def features() -> xr.Dataset:
    """Features of a classifier, whose outputs follow its halves, but for noise."""
    ds = td.testing.simulate_features(n_samples=N, proj_dim=P, n_checkpoints=C, chunks=30)
    rng = np.random.default_rng(5)
    masks = td.evaluate.subsets(N, C).rename(subset="checkpoint").compute()
    ds = ds.astype(np.float64).compute()
    phi, q = ds.feature.values, rng.uniform(0.05, 0.95, (N, C))
    f = np.einsum("tpc,zpc,cz->tc", phi, phi, masks.values * q.T) + rng.normal(size=(N, C))
    ds["out_to_loss"], ds["output"] = ds.out_to_loss.copy(data=q), ds.output.copy(data=f)
    return ds.assign(trained_on=masks).assign_attrs(default_estimator="soft").chunk(sample=30)


def grades_by_a_loop(features: xr.Dataset, power: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean correlation for every ρ, and without each checkpoint, (checkpoint, ρ)."""
    phi, q, f = (features[n].values for n in ("feature", "out_to_loss", "output"))
    knows = features.trained_on.transpose("sample", "checkpoint").values.astype(float)
    g, h = q**power, q**power * (1 - q)
    found = np.zeros((len(GRID), N, C))
    for i, rho in enumerate(GRID):
        for j in range(C):
            others = [c for c in range(C) if c != j]
            product = 0
            for c in others:
                gram = (h[:, c, None] * phi[:, :, c]).T @ phi[:, :, c]
                damped = gram + rho * np.trace(gram) / N * np.eye(P)
                product = product + phi[:, :, c] @ np.linalg.solve(damped, phi[:, :, c].T)
            scores = product / len(others) * g[:, others].mean(axis=1)[:, None]
            found[i, :, j] = (knows[:, j] - knows.mean(axis=1)) @ scores

    def mean(kept: list[int]) -> np.ndarray:
        ranks = [rankdata(x[..., kept], axis=-1) for x in (found, f)]
        p, t = (x - x.mean(axis=-1, keepdims=True) for x in ranks)
        norms = np.linalg.norm(p, axis=-1) * np.linalg.norm(t, axis=-1)
        return ((p * t).sum(axis=-1) / norms).mean(axis=-1)

    without = [mean([c for c in range(C) if c != j]) for j in range(C)]
    return mean([*range(C)]), np.array(without)


def test_grades_and_choice_are_those_of_a_loop(features) -> None:
    grades, without = grades_by_a_loop(features, 0.5)
    start = float(td.damping(features, td.Soft(damping="completeness")).relative)
    chosen = td.damping(features).compute()
    np.testing.assert_allclose(chosen.grade, grades, atol=1e-10)
    near = [i for i, rho in enumerate(GRID) if abs(np.log10(rho / start)) < 1.001]
    best, at = max(near, key=lambda i: grades[i]), int(np.abs(np.log(GRID / start)).argmin())
    gains = without[:, best] - without[:, at]
    error = np.sqrt((C - 1) / C * np.square(gains - gains.mean()).sum())
    is_better = grades[best] - grades[at] > error
    assert is_better, "else the test shows nothing"
    assert float(chosen.relative) == pytest.approx(GRID[best])
    assert str(chosen.rule.values) == "cross-validation"
    unit = td.damping(features, td.Soft(damping="trace")).damping
    xr.testing.assert_allclose(chosen.damping, unit * GRID[best])


@pytest.mark.filterwarnings("ignore:outputs of the training rows")
def test_few_checkpoints_or_unknown_or_equal_subsets_are_chosen_for_as_before(features) -> None:
    four = features.isel(checkpoint=slice(4))
    same = features.assign(trained_on=features.trained_on | True)
    for ds in (four, same, features.drop_vars("trained_on")):
        expected = td.damping(ds, td.Soft(damping="completeness")).compute()
        xr.testing.assert_allclose(td.damping(ds).compute(), expected)
        assert not np.isfinite(expected.grade).any()


def test_held_out_samples_choose_where_they_are_given(features) -> None:
    held_out = features.drop_vars("trained_on").isel(sample=slice(60))
    own, given = td.damping(features), td.damping(features, calibrate=held_out)
    assert not np.allclose(own.grade, given.grade)


@pytest.mark.parametrize("estimator", ["trak", "relatif", td.Trak(damping="cross_validation")])
def test_other_estimators_are_chosen_for_by_their_own_weights(features, estimator) -> None:
    chosen = td.damping(features, estimator).compute()
    grades, _ = grades_by_a_loop(features.assign(out_to_loss=features.out_to_loss), 0.5)
    assert np.isfinite(chosen.grade).all()
    assert not np.allclose(chosen.grade, grades)
    td.score(features, features.isel(sample=slice(3)), estimator).compute()
