"""The wider tasks of the quality benchmark, and its arithmetic against plain loops."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import torch

import trakdask as td

NAMES = ("sgd", "decay", "smoothed", "imbalanced", "overlapping", "strokes", "mlp-bn", "cnn-bn",
         "wide", "deep", "deep-bn", "deep-cnn", "normalised", "wine")  # fmt: skip


@pytest.fixture
def wider(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("quality_wider")


def small(wider: ModuleType, name: str) -> object:
    """Return a task with few samples and little training."""
    parts = [tuple(array[:60] for array in part) for part in wider.ALL[name].data()]
    return dataclasses.replace(
        wider.ALL[name], name="tiny", data=lambda: parts, epochs=3, n_subsets=12
    )


@pytest.mark.parametrize("name", NAMES)
def test_subject__outputs_are_what_is_attributed(wider: ModuleType, name: str) -> None:
    subject = small(wider, name)
    half = importlib.import_module("_quality_tasks").members(0, 60)
    state, again, other = (subject.train(half, seed) for seed in (1, 1, 2))
    assert all(torch.equal(state[key], again[key]) for key in state)
    assert not all(torch.equal(state[key], other[key]) for key in state)
    model = td.Model(subject.build, [state], task=subject.task)
    features = td.featurize(subject.samples(1), model, projector=td.SJLT(8))
    expected = features.output[:, 0].compute(scheduler="synchronous")
    np.testing.assert_allclose(subject.outputs(state), expected, rtol=1e-3, atol=1e-3)


def test_subject__trajectory_ends_with_what_training_returns(wider: ModuleType) -> None:
    subject = small(wider, "decay")
    states, last = subject.trajectory(0, 3), subject.train(None, 0)
    every = [{k: t.clone() for k, t in m.state_dict().items()} for m in subject.steps(None, 0)]
    assert len(every) == 3  # an epoch is one batch
    assert len(states) == 2  # two of the three wanted are the same step
    for state, expected in zip(states, every[1:], strict=True):
        assert all(torch.equal(state[key], expected[key]) for key in expected)
    assert all(torch.equal(states[-1][key], last[key]) for key in last)


def test_subject__settings_name_the_task(wider: ModuleType) -> None:
    digests = {name: subject.digest() for name, subject in wider.ALL.items()}
    assert len(set(digests.values())) == len(digests)


def test_subject__smoothing_and_momentum_are_those_of_torch(wider: ModuleType) -> None:
    logits, labels = torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([0])
    log_p = logits.log_softmax(1)[0]
    expected = -(0.9 * log_p[0] + 0.1 * log_p.mean())
    assert small(wider, "smoothed").loss(logits, labels) == pytest.approx(float(expected))
    model = torch.nn.Linear(2, 2)
    kinds = {"sgd": torch.optim.SGD, "plain": torch.optim.AdamW}
    for name, kind in kinds.items():
        optimizer, _ = small(wider, name)._optimizer(model, 60)
        assert type(optimizer) is kind


def test_shrunk__and_weights_by_loops(wider: ModuleType) -> None:
    ideas, measured = (importlib.import_module(n) for n in ("quality_ideas", "_quality_measured"))
    rng = np.random.default_rng(0)
    products = list(rng.standard_normal((4, 1, 5, 3)))
    found = ideas.shrunk(products)
    for z in range(5):
        for t in range(3):
            x = [each[0, z, t] for each in products]
            m = sum(x) / 4
            v = sum((each - m) ** 2 for each in x) / 3 / 4
            assert found[0, z, t] == pytest.approx(m**3 / (m**2 + v))
    x, t, q = rng.standard_normal((2, 12, 5)), rng.standard_normal((2, 4, 5)), rng.random((12, 2))
    task = ideas.Task("tiny", x, t, q, q, False, q, q)
    for power in (None, 0.5):
        h = np.ones_like(q) if power is None else q**power * (1 - q)
        for c, each in enumerate(measured.products(task, power, [0, 1], 5)):
            k = sum(h[z, c] * np.outer(x[c, z], x[c, z]) for z in range(12))
            lam = ideas.GRID[3] * np.trace(k) / 12
            expected = x[c] @ np.linalg.solve(k + lam * np.eye(5), t[c].T)
            np.testing.assert_allclose(each[3], expected, rtol=1e-3, atol=1e-5)
        g = [(q[z, 0] ** (power or 1) + q[z, 1] ** (power or 1)) / 2 for z in range(12)]
        np.testing.assert_allclose(measured.loss_weights(task, power, [0, 1]), g)


def test_losses__of_rules_by_hand(wider: ModuleType) -> None:
    names = pd.Index(["resnet", "a"], name="task")
    found = pd.DataFrame(
        {"trak": [0.5, 0.1], "soft": [0.4, 0.3], "Gauss-Newton": [0.45, 0.2],
         "soft, with Q": [0.42, 0.22], "default": [0.41, 0.29],
         "totals of soft": [0.9, 0.9], "totals of Gauss-Newton": [0.88, 0.5]}, index=names,
    )  # fmt: skip
    spreads = {"spread of Q": [2.0, 0.5], "spread of f": [0.5, 2.0], "deviation": [0.5, 2.0]}
    about = pd.DataFrame(spreads, index=names)
    best = pd.DataFrame({"trak": [0.6, 0.2], "soft": [0.45, 0.35]}, index=names)
    lost = wider.losses(wider.rules(found, about), best)
    by_hand = {
        "default": [0.19, 0.06],
        "soft, always": [0.2, 0.05],
        "soft, with Q if deviation < 1.2": [0.18, 0.05],
        "trak if BatchNorm": [0.1, 0.05],
        "trak if spread of Q < 1.0": [0.2, 0.25],
        "Gauss-Newton, always": [0.15, 0.15],
        "trak if totals fall by < 0.05": [0.1, 0.05],
    }
    for name, each in by_hand.items():
        assert lost.loc[name, "mean"] == pytest.approx(np.mean(each))
        assert lost.loc[name, "most"] == pytest.approx(max(each))
    assert lost.loc["trak if spread of Q < 1.0", "in"] == "a"
    assert lost.loc["soft, always", "below trak"] == pytest.approx(0.2)


def test_ramp__of_two_tasks_by_hand(wider: ModuleType) -> None:
    powers = {"Q^0": 0.1, "Q^0.25": 0.2, "Q^0.5": [0.3, 0.4], "Q^0.75": 0.35, "Q^1": [0.5, 0.2]}
    frame = pd.DataFrame({"deviation": [1.1, 3.0], **powers, "trak": [0.45, 0.5]}, index=["a", "b"])
    found = wider.ramp(frame, 0.8, 1.4)  # a: 0.75, so 0.35; b: 0.5, so 0.4
    assert (found["mean"], found["most"]) == (pytest.approx(0.125), pytest.approx(0.15))
    assert found["in"] == "a"
    assert found["below trak"] == pytest.approx(0.1)
