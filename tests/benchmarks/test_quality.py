"""The quality benchmarks: tasks are pure functions, and the dense algebra is that of loops."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import trakdask as td

RNG = np.random.default_rng(0)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a script, whose modules import each other by name."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module


def small(scripts: ModuleType, name: str, n: int = 40) -> Any:
    """Return a task with few samples and little training."""
    parts = [tuple(array[:n] for array in part) for part in scripts.ALL[name].data()]
    return dataclasses.replace(scripts.ALL[name], data=lambda: parts, epochs=3)


@pytest.mark.parametrize("name", ["diabetes", "language", "cancer", "decay", "cnn-bn", "wine"])
def test_subject__outputs_are_what_is_attributed(load: Any, name: str) -> None:
    """The truth and the features are of one f; training is a function of rows and seed."""
    subject = small(load("quality_wider"), name)
    half = load("_quality_tasks").members(0, 40)
    assert half.sum() == 20
    state, again, other = (subject.train(half, seed) for seed in (1, 1, 2))
    assert all(torch.equal(state[key], again[key]) for key in state)
    assert not all(torch.equal(state[key], other[key]) for key in state)
    model = td.Model(subject.build, [state], task=subject.task)
    features = td.featurize(subject.samples(1), model, projector=td.SJLT(8))
    expected = features.output[:, 0].compute(scheduler="synchronous")
    np.testing.assert_allclose(subject.outputs(state), expected, rtol=1e-3, atol=1e-3)


def test_subject__digests_name_data_and_settings(load: Any) -> None:
    """The committed truth of a task is that of its digest."""
    wider = load("quality_wider")
    subjects = {**wider.SUBJECTS, **wider.WIDER}
    assert len({subject.digest() for subject in subjects.values()}) == len(subjects)
    for name in wider.SUBJECTS:
        assert len(load("_quality_truth").truth(subjects[name])) > 50
    removal = load("removal")
    for name, removed in itertools.product(removal.N_SEEDS, removal.REMOVED):
        stored = np.load(removal.file_of(subjects[name], removed))
        assert stored["digest"] == subjects[name].digest()
        assert stored["outputs"].shape[:2] == (removal.N_SUBSETS, removal.N_SEEDS[name])


@pytest.mark.parametrize("name", ["mlp", "language"])
def test_train_without__nothing_left_out_is_the_usual_training(load: Any, name: str) -> None:
    subject, every = small(load("quality_wider"), name), np.ones(40, bool)
    train, usual = load("removal").train_without, subject.train(None, 5)
    found, other = train(subject, every, 5), train(subject, np.arange(40) != 3, 5)
    assert all(torch.equal(found[key], usual[key]) for key in usual)
    assert not all(torch.equal(other[key], usual[key]) for key in usual)


def test_subject__trajectory_ends_with_what_training_returns(load: Any) -> None:
    subject = small(load("quality_wider"), "decay", 60)
    states, last = subject.trajectory(0, 3), subject.train(None, 0)
    every = [{k: t.clone() for k, t in m.state_dict().items()} for m in subject.steps(None, 0)]
    assert len(every) == 3  # an epoch is one batch
    assert len(states) == 2  # two of the three wanted are the same step
    for state, expected in zip(states, every[1:], strict=True):
        assert all(torch.equal(state[key], expected[key]) for key in expected)
    assert all(torch.equal(states[-1][key], last[key]) for key in last)


def test_compact__scores_stay(load: Any) -> None:
    train = td.testing.simulate_features(n_samples=20, proj_dim=64)
    targets = td.testing.simulate_features(n_samples=9, proj_dim=64, seed=1)
    smaller = load("_quality_scores").compact(train, targets)
    assert smaller[0].sizes["proj_dim"] == 29
    found, wanted = td.score(*smaller), td.score(train, targets)
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5 * float(abs(wanted).max()))


def test_products__equal_a_direct_solve(load: Any) -> None:
    ideas, measured = load("quality_ideas"), load("_quality_measured")
    x, t, q = RNG.standard_normal((2, 12, 5)), RNG.standard_normal((2, 4, 5)), RNG.random((12, 2))
    task = ideas.Task("tiny", x, t, q, False, q, q)
    for power in (None, 0.5):
        h = np.ones_like(q) if power is None else q**power * (1 - q)
        for c, found in enumerate(measured.products(task, power, [0, 1], 5)):
            k = (x[c] * h[:, [c]]).T @ x[c]
            for rho, products in zip(ideas.GRID, found, strict=True):
                lam = rho * np.trace(k) / 12
                expected = x[c] @ np.linalg.solve(k + lam * np.eye(5), t[c].T)
                np.testing.assert_allclose(products, expected, rtol=1e-3, atol=1e-5)


def test_shrunk__by_a_loop(load: Any) -> None:
    products = list(RNG.standard_normal((4, 1, 5, 3)))
    found = load("quality_ideas").shrunk(products)
    for z, t in np.ndindex(5, 3):
        x = [each[0, z, t] for each in products]
        m, v = np.mean(x), np.var(x, ddof=1) / 4
        assert found[0, z, t] == pytest.approx(m**3 / (m**2 + v))


def test_rules__of_eigenvalues(load: Any) -> None:
    ideas, x = load("quality_ideas"), RNG.standard_normal((12, 5))
    damped = ideas.Damped.of(ideas.Kernel(x @ x.T, x @ x[:4].T), np.ones(12))
    chosen = ideas.by_spectrum([damped])
    k = x.T @ x
    closed = 0.03 * np.trace(k @ k) / np.trace(k)
    assert chosen["0.03 tr(K²)/tr(K)"] * np.trace(k) / 12 == pytest.approx(closed)
    lam = chosen["0.1 n dims"] * np.trace(k) / 12
    dims = np.trace(k @ np.linalg.inv(k + lam * np.eye(5)))
    assert dims == pytest.approx(0.1 * 12, rel=0.1)
