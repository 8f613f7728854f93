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
    parts = [tuple(array[:n] for array in part) for part in scripts.ALL[name].data()]
    return dataclasses.replace(scripts.ALL[name], data=lambda: parts, epochs=3)


@pytest.mark.parametrize("name", ["diabetes", "language", "cancer", "decay", "cnn-bn", "wine"])
def test_subject__outputs_are_what_is_attributed(load: Any, name: str) -> None:
    """The truth and the features are of one f; training is a function of rows and seed."""
    subject = small(load("_fits"), name)
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
    """The committed truth of a task has its digest."""
    wider = load("_fits")
    subjects = {**wider.SUBJECTS, **wider.WIDER}
    assert len({subject.digest() for subject in subjects.values()}) == len(subjects)
    for name in wider.SUBJECTS:
        assert len(load("_quality_truth").truth(subjects[name])) > 50


def test_train__is_that_of_examples_and_leaves_samples_out_of_batches(load: Any) -> None:
    subject = small(load("_fits"), "mlp")
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
    masks, outputs = load("_quality_truth").ground(load("_fits").SUBJECTS["mlp"])
    expected = td.evaluate.lds(
        xr.DataArray(names["scores"], dims=("sample", "target")), masks, outputs
    )
    assert float(names["result"].lds_mean) == float(expected.lds_mean)
    assert (np.array(names["masks"]) == masks.values).all()


@pytest.mark.parametrize("name", ["diabetes", "language", "cnn"])
def test_leaderboard__packages_are_told_the_outputs_and_losses_of_the_task(
    load: Any, name: str
) -> None:
    subject, peers = small(load("_fits"), name), load("_leaderboard_peers")
    state = subject.train(None, 0)
    model = subject.build().eval()
    model.load_state_dict(state)
    inputs, labels = peers.data_of(subject, 1).tensors
    found = model(inputs)
    outputs, q = (values.detach() for values in peers.margins(found, labels))
    np.testing.assert_allclose(outputs, subject.outputs(state), rtol=1e-3, atol=1e-3)
    features = td.featurize(
        subject.samples(1), td.Model(subject.build, [state], subject.task), td.SJLT(8)
    )
    np.testing.assert_allclose(q, features.out_to_loss[:, 0], rtol=1e-3, atol=1e-3)
    words = inputs.shape[1] - 1 if name == "language" else 1
    mean = peers.losses(found, labels).mean() / words
    torch.testing.assert_close(
        mean, subject.loss(model, inputs, torch.tensor(subject.data()[1][1]))
    )
