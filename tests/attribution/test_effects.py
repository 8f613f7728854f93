"""Effects of groups against a loop over left-out checkpoints in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from distributed import Client
from scipy import stats

import trakdask as td
from trakdask.attribution.estimators import GradCos, GradDot
from trakdask.errors import forget_warnings

N, P, C, M = 90, 7, 5, 24
SOURCE = np.random.default_rng(1).choice(["a", "b", "c", "d"], N, p=[0.1, 0.2, 0.3, 0.4])
SOURCE = SOURCE.astype(object)
SOURCE[SOURCE == "d"] = None
LEVEL = 0.8
RATES = {f"c{i}": 0.1 * (i + 1) for i in range(C)}


def simulated(n: int, seed: int, chunks: int) -> xr.Dataset:
    made = td.testing.simulate_features(n, P, C, seed=seed).astype(np.float64).compute()
    return made.assign_attrs(loss_kind="cross-entropy").chunk(sample=chunks)


def training(chunks: int = 32) -> xr.Dataset:
    masks = td.evaluate.subsets(N, C).rename(subset="checkpoint")
    made = simulated(N, 0, chunks).assign(trained_on=masks)
    return made.assign_coords(source=("sample", SOURCE))


def targets(follow: str, estimator: td.Estimator, chunks: int = 10) -> xr.Dataset:
    """Targets whose outputs follow sums of scores, of all samples or of those of checkpoints."""
    made = simulated(M, 1, chunks)
    scores = td.score(training().compute(), made.compute(), estimator).values
    noise = np.random.default_rng(0).standard_normal((M, C)) * scores.std()
    halves = scores.T @ training().trained_on.transpose("sample", "checkpoint").values
    halves -= halves.mean(axis=1, keepdims=True)
    level = 5 * scores.sum(axis=0)[:, None] if follow == "all" else 0
    level = level + (0 if follow == "little" else 3)
    made["output"] = ("sample", "checkpoint"), 7 * halves + noise + level
    return made.chunk(sample=chunks)


def left_out(X: xr.Dataset, T: xr.Dataset, estimator: td.Estimator) -> np.ndarray:
    """Predict each checkpoint by the public scores of the others, with K and λ as they are."""
    X, T = X.compute(), T.compute()  # one block is many times faster
    knows = X.trained_on.transpose("sample", "checkpoint").values.astype(float)
    predicted = np.zeros((T.sizes["sample"], C))
    for j, name in enumerate(X.checkpoint.values):
        others = [c for c in X.checkpoint.values if c != name]
        one = estimator
        if isinstance(one, td.TracIn):  # a sum over some checkpoints, as a sum over all of them
            one = td.TracIn({c: RATES[c] * C / (C - 1) for c in others})
        scores = td.score(X.sel(checkpoint=others), T.sel(checkpoint=others), one)
        share = knows[:, j] - knows.mean(axis=1)
        predicted[:, j] = np.nansum(share[:, None] * scores.values, axis=0)
    return predicted


def slopes(predicted: np.ndarray, f: np.ndarray, total: np.ndarray) -> tuple[float, float]:
    """Return the slope over left-out checkpoints, and that of effects on models of all data."""
    p, f = predicted.ravel(), f.ravel()
    target = np.repeat(np.arange(M), C)
    design = np.column_stack([p, target[:, None] == np.arange(M)])
    slope = max(np.linalg.lstsq(design, f, rcond=None)[0][0], 0)
    mean = f.reshape(M, C).mean(1)
    follows = np.corrcoef(mean, total)[0, 1] >= 0.5
    half = (mean @ total) / (total @ total) / 2
    if f.mean() < 1:  # margins of models that have hardly learned
        return slope, slope
    return slope, min(max(half, 0.3 * slope), slope) if follows else 0.75 * slope


def bounds(effect: np.ndarray, error: Any, part: np.ndarray, f: np.ndarray) -> dict[str, Any]:
    t, added = stats.t.ppf((1 + LEVEL) / 2, C - 1), (30 if f.mean() < 1 else 3) * part
    one, many = (t * np.sqrt(error**2 * (own + added) + (0.3 * effect) ** 2) for own in (1.0, 0.1))
    names = ("lower", "upper", "mean_lower", "mean_upper")
    return dict(zip(names, (effect - one, effect + one, effect - many, effect + many), strict=True))


def by_hand(
    X: xr.Dataset, T: xr.Dataset, estimator: td.Estimator
) -> tuple[dict[str, np.ndarray], Any]:
    """Return effects with bounds, and what shares and metrics are made of."""
    X, T = X.compute(), T.compute()
    scores, f = td.score(X, T, estimator).values, T.output.values
    predicted, total = left_out(X, T, estimator), scores.sum(0)
    slope, scale = slopes(predicted, f, total)
    rest = f - slope * predicted
    rest -= rest.mean(1, keepdims=True)
    own = (rest**2).sum(1) / (C - 1)
    sums = np.stack([scores[name == SOURCE].sum(0) for name in "abc"])
    part = np.array([(name == SOURCE).mean() for name in "abc"])[:, None]
    effect = scale * sums
    found = {"effect": effect, **bounds(effect, np.sqrt((own + own.mean()) / 2), part, f)}
    return found, (sums, scale, slope, predicted, rest, part, total)


ESTIMATORS = [
    td.Trak(td.Absolute(2.0)),
    td.Soft(power=0.5, damping=td.Absolute(0.3)),
    td.RelatIF(td.Absolute(2.0)),
    GradDot(),
    GradCos(),
    td.TracIn(RATES),
]


@pytest.mark.filterwarnings("ignore:.* of the samples")
@pytest.mark.parametrize(
    ("estimator", "follow"),
    [*((each, "all") for each in ESTIMATORS), (ESTIMATORS[1], "halves"), (ESTIMATORS[0], "little")],
    ids=lambda given: getattr(given, "name", given),
)
def test_effects_are_those_of_a_loop_over_checkpoints(estimator, follow: str) -> None:
    X, T = training(), targets(follow, estimator)
    expected, _ = by_hand(X, T, estimator)
    found = td.group_score(X, T, estimator, by="source", effect=True, level=LEVEL)
    assert found.effect.dims == ("source", "target")
    assert found.attrs["units"] == "output"
    assert found.attrs["sign"] == "positive: lower without the group"
    assert found.attrs["level"] == LEVEL
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-6, atol=1e-9)
    alone = td.group_score(X, T, estimator, by="source", effect=True)
    assert alone.name == "effect"
    np.testing.assert_allclose(alone, expected["effect"], rtol=1e-6, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.* of the samples")
@pytest.mark.parametrize("follow", ["all", "halves", "little"])
def test_effects_on_a_metric_are_plugged_in(follow: str) -> None:
    X, T = training(), targets(follow, ESTIMATORS[1])
    _, (sums, scale, slope, predicted, _, part, _) = by_hand(X, T, ESTIMATORS[1])
    f = T.output.values

    def accuracy(outputs: np.ndarray) -> np.ndarray:
        return (1 / (1 + np.exp(-outputs))).mean(0)

    effect = [accuracy(f).mean() - accuracy(f - scale * one[:, None]).mean() for one in sums]
    fitted = f.mean(1, keepdims=True) + slope * (predicted - predicted.mean(1, keepdims=True))
    error = (accuracy(f) - accuracy(fitted)).std(ddof=1)
    effect = np.array(effect)[:, None]
    options = {"by": "source", "metric": "accuracy", "effect": True, "level": LEVEL}
    found = td.group_score(X, T, ESTIMATORS[1], **options)
    assert found.target_combination.values.tolist() == ["accuracy"]
    assert found.attrs["units"] == "accuracy"
    for name, values in {"effect": effect, **bounds(effect, error, part, f)}.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-6, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.* of the samples")
def test_effects_do_not_depend_on_chunks_and_failed_targets() -> None:
    estimator = ESTIMATORS[1]
    options = {"estimator": estimator, "by": ["source", "label"], "effect": True, "level": 0.5}
    T = targets("all", estimator)
    one = td.group_score(training(), T, **options).compute()
    for chunks in (N, 11):
        other = td.group_score(training(chunks), targets("all", estimator, M), **options)
        xr.testing.assert_allclose(other.drop_attrs(), one.drop_attrs(), rtol=1e-9)
    failed = T.compute().copy(deep=True)
    failed.feature[3], failed.output[3] = np.nan, np.nan
    rest = T.isel(sample=np.delete(np.arange(M), 3))
    found = td.group_score(training(), failed, **options).drop_isel(target=3)
    np.testing.assert_allclose(found.upper, td.group_score(training(), rest, **options).upper)


def test_effects_of_large_groups_warn() -> None:
    X = training().assign_coords(half=("sample", np.arange(N) % 2))
    for options in ({}, {"level": 0.9}):
        with pytest.warns(UserWarning, match="2 of 2 groups have more than 30% of the samples"):
            td.group_score(X, targets("all", ESTIMATORS[0]), by="half", effect=True, **options)


def test_effects_of_groups_with_all_samples_of_a_class_warn() -> None:
    X = training().assign_attrs(label="animal")
    source, others = X.source.values, np.random.default_rng(0).choice(["cat", "dog"], N)
    animal = np.where(source == "b", "yak", others)
    parts = xr.DataArray(
        [(source == "a") | (source == "b"), source == "c"], {"one": ["ab", "c"]}, ("one", "sample")
    )
    T, options = targets("all", ESTIMATORS[0]), {"effect": True, "level": 0.9}
    for by in ("source", parts.astype(float)):
        with pytest.warns(UserWarning, match=r"all samples of \['yak'\] are in one group"):
            td.group_score(X.assign_coords(animal=("sample", animal)), T, by=by, **options)
    one_elsewhere = animal.copy()
    one_elsewhere[np.flatnonzero(source == "c")[0]] = "yak"
    missing = np.where(animal == "yak", None, animal)
    for values in (one_elsewhere, missing):
        td.group_score(X.assign_coords(animal=("sample", values)), T, by="source", **options)


def test_effects_warn_where_models_of_halves_have_hardly_learned() -> None:
    forget_warnings()
    T = targets("little", ESTIMATORS[0])
    lazy = td.group_score(training(), T, ESTIMATORS[0], by="source", effect=True)
    with pytest.warns(UserWarning, match=r"hardly learned: the mean margin .* is -?0\.\d+"):
        lazy.compute()
    regression = T.assign_attrs(loss_kind="squared error")  # outputs are no margins
    td.group_score(training(), regression, ESTIMATORS[0], by="source", effect=True).compute()


def test_effects_are_those_of_a_store_that_grew(tmp_path: Path, process_client: Client) -> None:
    """Appended, with rows dropped, on workers; and of float16."""
    store, options = tmp_path / "f.zarr", {"by": "source", "effect": True, "level": 0.9}
    T, rows = targets("all", ESTIMATORS[1]), np.arange(N)
    X = training().assign_coords(row=("sample", rows), source=("sample", rows % 6))
    for part in (X[{"sample": slice(0, 64)}], X[{"sample": slice(64, None)}]):
        stored = td.save(part, store, append_dim="sample", progress=False)
    whole = td.group_score(X, T, ESTIMATORS[1], **options).compute(scheduler="sync")
    xr.testing.assert_allclose(
        td.group_score(stored, T, ESTIMATORS[1], **options).compute().drop_attrs(),
        whole.drop_attrs(),
    )
    half = stored.assign(feature=stored.feature.astype(np.float16))
    rounded = td.group_score(half, T, ESTIMATORS[1], **options).compute()
    np.testing.assert_allclose(rounded.effect, whole.effect, rtol=0.02, atol=0.02)
    td.drop(store, where="row >= 80")
    rest = td.group_score(X[{"sample": slice(0, 80)}], T, ESTIMATORS[1], **options).compute()
    found = td.group_score(td.open(store), T, ESTIMATORS[1], **options).compute()
    xr.testing.assert_allclose(found.drop_attrs(), rest.drop_attrs())
