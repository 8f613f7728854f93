"""The quality benchmarks: tasks are pure functions, and the committed truth is theirs."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

import trakdask as td
from trakdask import examples


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a script, whose modules import each other by name."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module


def small(scripts: ModuleType, name: str, n: int = 40) -> Any:
    """Return a task with few samples and little training."""
    parts = [tuple(array[:n] for array in part) for part in scripts.SUBJECTS[name].data()]
    return dataclasses.replace(scripts.SUBJECTS[name], data=lambda: parts, epochs=3)


@pytest.mark.parametrize("name", ["diabetes", "language", "cancer", "resnet"])
def test_subject__outputs_are_what_is_attributed(load: Any, name: str) -> None:
    """The truth and the features are of one f; training is a function of rows and seed."""
    tasks = load("_quality_tasks")
    subject, half = small(tasks, name), tasks.members(0, 40)
    assert half.sum() == 20
    state, again, other = (subject.train(half, seed) for seed in (1, 1, 2))
    assert all(torch.equal(state[key], again[key]) for key in state)
    assert not all(torch.equal(state[key], other[key]) for key in state)
    model = td.Model(subject.build, [state], task=subject.task)
    features = td.featurize(subject.samples(1), model, projector=td.SJLT(8))
    expected = features.output[:, 0].compute(scheduler="synchronous")
    np.testing.assert_allclose(subject.outputs(state), expected, rtol=1e-3, atol=1e-3)


def test_subject__digests_name_data_and_settings(load: Any) -> None:
    """The committed truth of a task has its digest."""
    subjects = load("_quality_tasks").SUBJECTS
    assert len({subject.digest() for subject in subjects.values()}) == len(subjects)
    for subject in subjects.values():
        assert len(load("_quality_truth").truth(subject)) > 50


def test_train__is_that_of_examples_and_leaves_samples_out_of_batches(load: Any) -> None:
    subject = small(load("_quality_tasks"), "mlp")
    images, labels = subject.data()[0]
    settings = {"epochs": 3, "batch_size": subject.batch_size, "lr": subject.lr}
    usual = examples.train_classifier(subject.build, images, labels, seed=5, **settings)
    found = subject.train(None, 5)
    other = subject.train(None, 5, left_in=np.arange(40) != 3)
    assert all(torch.equal(found[key], usual[key]) for key in usual)
    assert not all(torch.equal(other[key], usual[key]) for key in usual)


def test_page__scores_a_method_from_elsewhere(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The code of the page needs nothing but the committed files, and has the same halves."""
    root = Path(__file__).parents[2]
    page = (root / "docs" / "evidence" / "leaderboard.md").read_text("utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(root)
    np.save(tmp_path / "scores.npy", np.random.default_rng(0).standard_normal((1000, 150)))
    names: dict[str, Any] = {}
    monkeypatch.setattr(td.evaluate, "lds", functools.partial(td.evaluate.lds, resamples=1))
    exec(code.replace("scores.npy", str(tmp_path / "scores.npy")), names)
    masks, outputs = load("_quality_truth").ground(load("_quality_tasks").SUBJECTS["mlp"])
    expected = td.evaluate.lds(
        xr.DataArray(names["scores"], dims=("sample", "target")), masks, outputs
    )
    assert float(names["result"].lds_mean) == float(expected.lds_mean)
    assert (np.array(names["masks"]) == masks.values).all()
