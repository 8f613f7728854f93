"""The dense algebra of quality_ideas.py against direct float64 solves."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

RNG = np.random.default_rng(0)
X, T = RNG.standard_normal((12, 5)), RNG.standard_normal((4, 5))
W, Q = RNG.random(12) + 0.1, RNG.standard_normal(12)


@pytest.fixture
def ideas(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("quality_ideas")


def kernel(ideas: ModuleType, x: np.ndarray, t: np.ndarray) -> object:
    return ideas.Kernel(x @ x.T, x @ t.T)


def regression(ideas: ModuleType) -> object:
    empty = np.empty(0)
    return ideas.Task("diabetes", empty, empty, empty, Q[:, None], True, empty, empty)


def test_products__equal_a_direct_solve(ideas: ModuleType) -> None:
    damped = ideas.Damped.of(kernel(ideas, X, T), W)
    k = X.T @ (W[:, None] * X)
    np.testing.assert_allclose(damped.damping, ideas.GRID * np.trace(k) / len(X), rtol=1e-12)
    for found, lam in zip(damped.products(), damped.damping, strict=True):
        expected = X @ np.linalg.solve(k + lam * np.eye(5), T.T)
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)


def test_kernel__is_that_of_changed_features(ideas: ModuleType) -> None:
    changed = {
        "centred": (kernel(ideas, X, T).centred(), X - X.mean(axis=0), T - X.mean(axis=0)),
        "scaled": (kernel(ideas, X, T).scaled(W), X * W[:, None], T),
    }
    for found, x, t in changed.values():
        np.testing.assert_allclose(found.train, x @ x.T, atol=1e-12)
        np.testing.assert_allclose(found.cross, x @ t.T, atol=1e-12)


def test_left_out__residual_of_a_ridge_regression_without_the_sample(ideas: ModuleType) -> None:
    damped = ideas.Damped.of(kernel(ideas, X, T), np.ones(12))
    found = ideas.left_out(regression(ideas), 0, damped)
    for each, lam in zip(found, damped.damping, strict=True):
        hat = X @ np.linalg.solve(X.T @ X + lam * np.eye(5), X.T)
        np.testing.assert_allclose(each, Q / (1 - np.diag(hat)), rtol=1e-9)


def test_of_halves__a_newton_step_that_removes_the_other_half(ideas: ModuleType) -> None:
    damped = ideas.Damped.of(kernel(ideas, X, T), np.ones(12))
    found = ideas.of_halves(regression(ideas), 0, kernel(ideas, X, T), damped)
    order = np.random.default_rng(0).permutation(12)
    for each, lam in zip(found, damped.damping, strict=True):
        expected = np.zeros(12)
        for here, there in ((order[:6], order[6:]), (order[6:], order[:6])):
            inverse = np.linalg.inv(X[here].T @ X[here] + lam / 2 * np.eye(5))
            residual = Q + X @ inverse @ X[there].T @ Q[there]
            residual[there] /= 1 + np.einsum("sp,pq,sq->s", X[there], inverse, X[there])
            expected += residual / 2
        np.testing.assert_allclose(each, expected, rtol=1e-9)


def test_rules__of_eigenvalues(ideas: ModuleType) -> None:
    damped = ideas.Damped.of(kernel(ideas, X, T), np.ones(12))
    chosen = ideas.by_spectrum([damped])
    k, n = X.T @ X, len(X)
    closed = 0.03 * np.trace(k @ k) / np.trace(k)
    assert chosen["0.03 tr(K²)/tr(K)"] * np.trace(k) / n == pytest.approx(closed)
    lam = chosen["0.1 n dims"] * np.trace(k) / n
    dims = np.trace(k @ np.linalg.inv(k + lam * np.eye(5)))
    assert dims == pytest.approx(0.1 * n, rel=0.1)
