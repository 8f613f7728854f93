"""What a name, a power and the attrs of features resolve to, against a table."""

from __future__ import annotations

import dataclasses

import pytest
import xarray as xr

from trakdask.attribution import estimators
from trakdask.attribution.estimators import Weights, resolve_estimator
from trakdask.attribution.scores import group_score, score, self_influence
from trakdask.testing import simulate_features

HALF = Weights("q^0.5 (1 - q)", "q^0.5", 0.5)
QUARTER = Weights("q^0.25 (1 - q)", "q^0.25", 0.25)
PLAIN = Weights("1", "Q", None)


def features(**attrs: object) -> xr.Dataset:
    return xr.Dataset(attrs=attrs)


IMAGES = features(task="ImageClassification(10)")
TEXTS = features(task="TextClassification")
LANGUAGE = features(task="CausalLM(inputs=('input_ids',))")
REGRESSION = features(task="Regression()")


@pytest.mark.parametrize(
    ("ds", "estimator", "power", "name", "weights", "choosing", "damping"),
    [
        (IMAGES, "auto", 0.25, "soft", QUARTER, HALF, "completeness"),
        (IMAGES, "auto", 0.5, "soft", HALF, HALF, "completeness"),
        (IMAGES, "trak", 0.25, "trak", PLAIN, HALF, "completeness"),
        (IMAGES, "grad_dot", 0.25, "grad_dot", PLAIN, HALF, "completeness"),
        (IMAGES, "auto", "auto", "soft", HALF, HALF, "completeness"),
        (IMAGES, "trak", "auto", "trak", PLAIN, HALF, "completeness"),
        (TEXTS, "soft", 0.25, "soft", QUARTER, HALF, "completeness"),
        (features(), "soft", "auto", "soft", HALF, HALF, "completeness"),
        (features(), "auto", 0.25, "trak", PLAIN, HALF, "closed_form"),
        (features(), "soft", 0.25, "soft", QUARTER, HALF, "completeness"),
        (features(), "relatif", 0.25, "relatif", PLAIN, HALF, "closed_form"),
        (REGRESSION, "auto", 0.25, "trak", PLAIN, PLAIN, "trace"),
        (LANGUAGE, "auto", 0.25, "trak", PLAIN, HALF, "trace"),
        (REGRESSION, "soft", 1, "soft", PLAIN, PLAIN, "completeness"),
        (REGRESSION, "soft", "auto", "soft", PLAIN, PLAIN, "completeness"),
    ],
)
def test_resolve_estimator__table(ds, estimator, power, name, weights, choosing, damping) -> None:
    found = resolve_estimator(estimator, power, ds)
    assert dataclasses.astuple(found) == (
        name,
        dataclasses.astuple(weights),
        dataclasses.astuple(choosing),
        damping,
        power == "auto" and weights == HALF,
        name != "grad_dot",
    )


@pytest.mark.parametrize(
    ("ds", "estimator", "power", "named"),
    [
        (IMAGES, "sfot", 0.5, "'sfot'"),
        (IMAGES, None, 0.5, "None"),
        (IMAGES, "auto", 1.5, "1.5"),
        (IMAGES, "soft", True, "True"),
        (IMAGES, "soft", "0.5", "'0.5'"),
        (REGRESSION, "soft", 0.5, r"Regression\(\).*power=0.5"),
    ],
)
def test_resolve_estimator__errors_name_the_value(ds, estimator, power, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        resolve_estimator(estimator, power, ds)


def test_resolve_estimator__only_those_allowed() -> None:
    with pytest.raises(ValueError, match=r"\['auto', 'trak'\], got 'soft'"):
        resolve_estimator("soft", 0.5, IMAGES, allowed=("auto", "trak"))


@pytest.mark.parametrize("estimator", ["auto", "trak", "soft", "grad_dot"])
def test_score__resolves_its_estimator_once(
    estimator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def counting(name: str, *args, **kwargs):
        calls.append(name)
        return resolve_estimator(name, *args, **kwargs)

    monkeypatch.setattr(estimators, "resolve_estimator", counting)
    train, targets = simulate_features(60, 4, 3, chunks=16), simulate_features(60, 4, 3, seed=1)
    score(train, targets, estimator=estimator)
    group_score(train, targets, by="label", estimator=estimator)
    self_influence(train, estimator=estimator)
    assert calls == [estimator] * 3
