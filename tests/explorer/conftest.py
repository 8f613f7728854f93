"""Fixtures of the explorer: questions with their answers, and an explorer in a browser."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import trakdask as td
from tests.explorer.browser import Tab, chromium, served
from tests.explorer.marked import features as marked_features
from tests.explorer.marked import samples
from tests.explorer.simulated import FEATURES, LAMBDA, TARGETS, TRAK, P
from trakdask.explorer import Explorer, Marks
from trakdask.explorer.questions import Questions


@pytest.fixture(scope="module")
def truth() -> SimpleNamespace:
    """Return scores (n, m), scores of each checkpoint (n, m, C), and self-influence in float64."""
    phi, q = (FEATURES[name].values.astype(np.float64) for name in ("feature", "out_to_loss"))
    grams = np.einsum("npc,nqc->cpq", phi, phi) + LAMBDA * np.eye(P)
    solved = np.einsum("npc,cpq->nqc", phi, np.linalg.inv(grams))
    products = np.einsum("nqc,mqc->nmc", solved, TARGETS.feature.values)
    q_mean = q.mean(axis=1)
    influence = np.einsum("nqc,nqc->nc", solved, phi).mean(axis=1) * q_mean**2
    apart = products * q_mean[:, None, None]
    return SimpleNamespace(
        phi=phi, q=q, products=products, apart=apart, scores=apart.mean(axis=-1),
        influence=influence,
    )  # fmt: skip


@pytest.fixture(scope="module")
def questions() -> Questions:
    return Questions(FEATURES, TARGETS, TRAK)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def explorer(tmp_path_factory: pytest.TempPathFactory) -> Explorer:
    folder = tmp_path_factory.mktemp("stores")
    train = td.save(marked_features(150, 0), folder / "train.zarr", progress=False)
    return td.explore(
        train, marked_features(60, 1), samples=samples(150, 0), target_samples=samples(60, 1),
        marks=Marks.beside(folder / "train.zarr"), estimator=td.Trak(damping=0.1),
    )  # fmt: skip


@pytest.fixture(scope="module")
def url(explorer: Explorer, browser: Any) -> Iterator[str]:
    with served(explorer) as url:
        yield url


@pytest.fixture
def tab(browser: Any) -> Iterator[Tab]:
    with Tab(browser) as tab:
        yield tab
