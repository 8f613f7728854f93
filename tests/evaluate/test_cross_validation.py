"""Tests of :func:`trakdask.evaluate.cross_validate`: an oracle, by a loop over checkpoints."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import xarray as xr

import trakdask as td
from tests.attribution.test_effects import ESTIMATORS, left_out

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


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda estimator: estimator.name)
def test_grade_is_that_of_a_loop_over_checkpoints(features, targets, estimator) -> None:
    if estimator.pooled:  # a sample that failed at one checkpoint is left out
        features = features.compute()
        for name in ("feature", "out_to_loss", "output"):
            features[name][{"sample": 3, "checkpoint": 1}] = np.nan
        features = features.chunk(sample=32)
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


@pytest.mark.parametrize("rows", [17, 90])
def test_chunks_do_not_matter(features, targets, rows: int) -> None:
    expected = td.evaluate.cross_validate(features, targets, td.Trak(td.Absolute(1.0)))
    result = td.evaluate.cross_validate(
        features.chunk(sample=rows), targets.chunk(sample=4), td.Trak(td.Absolute(1.0))
    )
    xr.testing.assert_allclose(result, expected)


def test_mistakes_say_what_to_try(features, targets) -> None:
    everything = features.assign(trained_on=features.trained_on | True)
    three, fifty = {"checkpoint": [0, 1, 2]}, {"sample": slice(50)}
    for *given, words in (
        (features.drop_vars("trained_on"), targets, r"trained_on.*train_on_halves"),
        (everything, targets, "different samples"),
        (features.isel(three), targets.isel(three), "4 or more checkpoints"),
        (features.assign(gram=td.gram(features)).isel(fifty), targets, "all 90 training samples"),
        ({"a": features}, {"b": targets}, "same names"),
        ({}, {}, "got an empty mapping; try"),
        (features, targets, {}, "got an empty mapping; try"),
    ):
        with pytest.raises(ValueError, match=words):
            td.evaluate.cross_validate(*given)
