"""Tests of :func:`trakdask.evaluate.cross_validate`: an oracle, by a loop over checkpoints."""

from __future__ import annotations

import warnings
from itertools import permutations

import numpy as np
import pytest
import xarray as xr

import trakdask as td
from tests.attribution.float64_features import alike
from tests.attribution.test_effects import left_out
from trakdask.attribution.estimators import GradCos, GradDot

N, P, C, M = 90, 7, 5, 11


@pytest.fixture
def features() -> xr.Dataset:
    ds = td.testing.simulate_features(n_samples=N, proj_dim=P, n_checkpoints=C, chunks=32)
    ds = ds.astype(np.float64)
    return ds.assign(trained_on=td.evaluate.subsets(N, C).rename(subset="checkpoint"))


@pytest.fixture
def targets() -> xr.Dataset:
    ds = td.testing.simulate_features(n_samples=M, proj_dim=P, n_checkpoints=C, seed=1)
    return ds.astype(np.float64)


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Return the unbiased estimate, a mean over triples (Hoeffding 1948)."""
    triples = permutations(range(len(x)), 3)
    return np.mean([3 * np.sign((x[i] - x[j]) * (y[i] - y[k])) for i, j, k in triples])


@pytest.mark.parametrize(
    "estimator",
    [
        td.Trak(td.Absolute(2.0)),
        td.Soft(power=0.5, damping=td.Absolute(0.3)),
        td.Soft(power=1.0, damping=td.Absolute(0.3)),
        td.RelatIF(td.Absolute(2.0)),
        GradDot(),
        GradCos(),
        td.TracIn({f"c{i}": 0.1 * (i + 1) for i in range(C)}),
    ],
    ids=lambda estimator: estimator.name,
)
def test_grade_is_that_of_a_loop_over_checkpoints(features, targets, estimator) -> None:
    predicted, output = left_out(features, targets, estimator), targets.output.values
    expected = [spearman(*pair) for pair in zip(predicted, output, strict=True)]
    result = td.evaluate.cross_validate(features, targets, estimator)
    np.testing.assert_allclose(result.lds, expected, atol=1e-12)
    assert float(result.lds_mean) == pytest.approx(np.mean(expected))
    without = []
    for j in range(C):
        pairs = zip(np.delete(predicted, j, 1), np.delete(output, j, 1), strict=True)
        without.append(np.mean([spearman(*pair) for pair in pairs]))
    np.testing.assert_allclose(result.without, without, atol=1e-12)
    spread = np.square(np.subtract(without, np.mean(without))).sum()
    assert float(result.error) == pytest.approx(np.sqrt((C - 1) / C * spread))
    assert f"{float(result.lds_mean):.2f} ±" in result.summary


def test_several_are_compared_on_the_same_checkpoints(features, targets) -> None:
    estimators = {"trak": td.Trak(td.Absolute(1.0)), "dot": "grad_dot"}
    both = td.evaluate.cross_validate(features, targets, estimators)
    one = td.evaluate.cross_validate(features, targets, "grad_dot")
    xr.testing.assert_allclose(both.sel(estimator="dot", drop=True)[[*one]], one)
    assert both.difference.values[0] == 0
    assert float(both.difference[1]) == pytest.approx(
        float(both.lds_mean[1]) - float(both.lds_mean[0])
    )
    pairs = td.evaluate.cross_validate(
        {"a": features, "b": features.isel(sample=slice(None, None, -1))},
        {"a": targets, "b": targets},
        "grad_dot",
    )
    np.testing.assert_allclose(pairs.lds[:, 0], pairs.lds[:, 1])
    assert pairs.summary.startswith("a: these scores")
    with pytest.raises(ValueError, match="same names"):
        td.evaluate.cross_validate({"a": features}, {"b": targets})


def test_good_scores_have_a_high_grade_and_noise_none() -> None:
    """Checkpoints whose outputs are what a linear model of their halves predicts."""
    rng, n, p, c, m = np.random.default_rng(0), 400, 6, 8, 30
    phi, explained = rng.normal(size=(n, p)), rng.normal(size=(m, p))
    masks = td.evaluate.subsets(n, c).rename(subset="checkpoint").compute()
    ds = alike(phi, c).assign(trained_on=masks)
    q = ds.out_to_loss.mean("checkpoint").values
    outputs = explained @ phi.T @ (masks.values * q).T
    good = td.evaluate.cross_validate(ds, alike(explained, c, output=outputs), "grad_dot")
    assert float(good.lds_mean) > 0.9
    unrelated = alike(explained, c, output=rng.normal(size=(m, c)))
    noise = td.evaluate.cross_validate(ds, unrelated, "grad_dot")
    assert abs(float(noise.lds_mean)) < 4 * float(noise.error)


def graded_linear_model(seed: int) -> tuple[float, float, float]:
    """Return the grade of a linear model, its error, and Spearman's correlation in truth.

    Outputs are sums of scores and a noise that targets share in part. Where that is large, the
    weights of a checkpoint are small, which changes the level of all its scores.
    """
    rng, n, c, m, noise = np.random.default_rng(seed), 60, 8, 30, 0.8
    phi, explained, q = rng.random((n, 4)), rng.random((m, 4)), rng.random(n)
    masks = td.evaluate.subsets(n, c, seed=seed).rename(subset="checkpoint").compute()
    scores = q[:, None] * (phi @ explained.T)
    spread = np.sqrt(n**2 / (n - 1) * scores.var(axis=0) / 4)
    shared = rng.normal(size=c)
    luck = (0.6 * shared + 0.8 * rng.normal(size=(m, c))) * noise
    f = scores.T @ masks.transpose("sample", "checkpoint").values + spread[:, None] * luck
    ds = alike(phi, c, out_to_loss=q[:, None] * np.exp(-0.3 * shared)).assign(trained_on=masks)
    graded = td.evaluate.cross_validate(ds, alike(explained, c, output=f), "grad_dot")
    r = 1 / np.sqrt(1 + noise**2)
    return float(graded.lds_mean), float(graded.error), 6 / np.pi * np.arcsin(r / 2)


def test_grades_are_unbiased_and_within_their_errors_of_the_truth() -> None:
    grade, error, truth = np.transpose([graded_linear_model(seed) for seed in range(24)])
    spread = grade.std(ddof=1)
    assert abs((grade - truth).mean()) < 2.5 * spread / np.sqrt(len(grade))
    assert np.mean(abs(grade - truth) < 2 * error) > 0.85
    assert 0.75 < error.mean() / spread < 1.5


@pytest.mark.parametrize("rows", [17, 90])
def test_chunks_do_not_matter(features, targets, rows: int) -> None:
    expected = td.evaluate.cross_validate(features, targets, td.Trak(td.Absolute(1.0)))
    result = td.evaluate.cross_validate(
        features.chunk(sample=rows), targets.chunk(sample=4), td.Trak(td.Absolute(1.0))
    )
    xr.testing.assert_allclose(result, expected)


def test_failed_samples_are_left_out(features, targets) -> None:
    features = features.compute()
    for name in ("feature", "out_to_loss", "output"):
        features[name][dict(sample=3, checkpoint=1)] = np.nan
    predicted = left_out(features.chunk(), targets, GradDot())
    expected = [spearman(*pair) for pair in zip(predicted, targets.output.values, strict=True)]
    result = td.evaluate.cross_validate(features.chunk(), targets, GradDot())
    np.testing.assert_allclose(result.lds, expected, atol=1e-12)


def test_mistakes_say_what_to_try(features, targets) -> None:
    with pytest.raises(ValueError, match=r"trained_on.*train_on_halves"):
        td.evaluate.cross_validate(features.drop_vars("trained_on"), targets)
    with pytest.raises(ValueError, match="different samples"):
        td.evaluate.cross_validate(features.assign(trained_on=features.trained_on | True), targets)
    three = dict(checkpoint=[0, 1, 2])
    with pytest.raises(ValueError, match="4 or more checkpoints"):
        td.evaluate.cross_validate(features.isel(three), targets.isel(three))
    summed = features.assign(gram=td.gram(features))
    with pytest.raises(ValueError, match="all 90 training samples"):
        td.evaluate.cross_validate(summed.isel(sample=slice(50)), targets)


def test_store_grades_as_its_features_do(features, targets, tmp_path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opened = td.save(features, tmp_path / "f.zarr", progress=False, estimator=td.Trak())
    estimator = td.Trak(td.Absolute(1.0))
    expected = td.evaluate.cross_validate(features, targets, estimator)
    xr.testing.assert_allclose(
        td.evaluate.cross_validate(opened, targets, estimator).drop_vars("target_label"),
        expected.drop_vars("target_label"),
    )


@pytest.mark.parametrize("empty", ["features", "estimators"])
def test_cross_validate__of_an_empty_mapping_says_so(features, targets, empty: str) -> None:
    both = ({}, {}) if empty == "features" else (features, targets)
    with pytest.raises(ValueError, match="got an empty mapping; try"):
        td.evaluate.cross_validate(*both, {} if empty == "estimators" else "auto")
