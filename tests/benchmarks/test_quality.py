"""The quality benchmark: tasks are pure functions, and the script runs end to end when small."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import trakdask as td


@pytest.fixture
def quality(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script with one task that takes no time, and a place of its own for its truth."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    module = importlib.import_module("quality")
    monkeypatch.setitem(module.SUBJECTS, "tiny", tiny())
    monkeypatch.setattr(importlib.import_module("_quality_truth"), "TRUTH", tmp_path / "truth")
    return module


def tiny() -> object:
    tasks = importlib.import_module("_quality_tasks")

    def data() -> object:
        (images, labels), (target_images, target_labels) = tasks.digits()
        return (images[:60], labels[:60]), (target_images[:55], target_labels[:55])

    return tasks.Subject("tiny", tasks.perceptron((64, 4, 10)), data, 2, 12)


def test_subject__training_is_a_function_of_rows_and_seed(quality: ModuleType) -> None:
    subject = quality.SUBJECTS["tiny"]
    members = importlib.import_module("_quality_tasks").members
    mask = members(3, 60)
    assert mask.sum() == 30
    assert (mask == members(3, 60)).all()
    assert (mask != members(4, 60)).any()
    first, again, other = (subject.train(mask, seed) for seed in (5, 5, 6))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["1.weight"], other["1.weight"])
    margin = subject.outputs(first)
    assert margin.shape == (55,)
    assert np.isfinite(margin).all()


def test_subject__digest_names_data_and_settings(quality: ModuleType) -> None:
    subjects = dict(quality.SUBJECTS)
    digests = {subject.digest() for subject in subjects.values()}
    assert len(digests) == len(subjects)
    assert subjects["tiny"].digest() == tiny().digest()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["diabetes", "surface", "language", "cancer"])
def test_subject__outputs_are_what_is_attributed(quality: ModuleType, name: str) -> None:
    """The truth and the features are of one f; training is a function of rows and seed."""
    parts = [tuple(array[:40] for array in part) for part in quality.SUBJECTS[name].data()]
    subject = dataclasses.replace(quality.SUBJECTS[name], data=lambda: parts, epochs=3)
    half = importlib.import_module("_quality_tasks").members(0, 40)
    state = subject.train(half, seed=1)
    model = td.Model(subject.build, [state], task=subject.task)
    features = td.featurize(subject.samples(1), model, projector=td.SJLT(8))
    expected = features.output[:, 0].compute(scheduler="synchronous")
    np.testing.assert_allclose(subject.outputs(state), expected, rtol=1e-3, atol=1e-4)
    again = subject.train(half, seed=1)
    assert all(torch.equal(state[key], again[key]) for key in state)


@pytest.mark.slow
def test_main__every_stage(
    quality: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--tasks", "tiny", "--cache", str(tmp_path / "cache"), "--checkpoints", "1", "2"]
    options += ["--proj-dims", "8", "256", "--peer-checkpoints", "1", "--resamples", "5"]
    with pytest.raises(ValueError, match=r"holds nothing.*--stage train --tasks tiny"):
        quality.main(options)
    quality.main([*options, "--stage", "train"])
    capsys.readouterr()
    quality.main([*options, "--out", str(tmp_path / "out.json")])
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "out.json").read_text())
    assert {row["estimator"] for row in result["rows"]} == set(quality.ESTIMATORS)
    assert all(-1 <= row["at"]["auto"]["lds"] <= row["at"]["best"]["lds"] for row in result["rows"])
    quality.main(["--from-results", str(tmp_path / "out.json")])
    assert capsys.readouterr().out == printed


def test_compact__scores_stay(quality: ModuleType) -> None:
    train = td.testing.simulate_features(n_samples=20, proj_dim=64)
    targets = td.testing.simulate_features(n_samples=9, proj_dim=64, seed=1)
    smaller = importlib.import_module("_quality_scores").compact(train, targets)
    assert smaller[0].sizes["proj_dim"] == 29
    found, wanted = td.score(*smaller), td.score(train, targets)
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5 * float(abs(wanted).max()))
