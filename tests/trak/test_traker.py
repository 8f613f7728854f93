from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trakdask as td
from tests.trak._models import Pair, built, checkpoints, images, pair_batch, untrained
from tests.trak._runs import QUIET, N, Run, content, relative, started
from trakdask.trak import TRAKer
from trakdask.trak.modelout_functions import IterativeImageClassificationModelOutput
from trakdask.trak.projectors import NoOpProjector
from trakdask.trak.savers import ModelIDException

ROOT = Path(__file__).resolve().parents[2]


def test_projector_of_trakdask__gives_the_features_of_featurize(tmp_path: Path) -> None:
    projector = td.SJLT(proj_dim=64, seed=3)
    options = {"projector": projector, "use_half_precision": False}
    run = Run("normed", n_checkpoints=2, options=options)
    run.featurize(run.make(TRAKer, tmp_path))
    described = td.Model(
        built("normed"),
        checkpoints=dict(zip("ab", checkpoints("normed", 2), strict=True)),
        task="image_classification",
        checkpoint_ids=[0, 1],
    )
    x, y = (part.numpy() for part in images(N))
    samples = td.from_arrays({"image": x}, coords={"label": y})
    features = td.featurize(samples, described, projector=projector)
    grads = np.load(tmp_path / "1/grads.mmap")
    assert relative(grads, features.feature.values[:, :, 1]) < 1e-5


def test_refusals__name_what_was_forgotten(tmp_path: Path) -> None:
    batch, more = images(N), "Load a checkpoint using traker.load_checkpoint before featurizing"
    with pytest.raises(AssertionError, match=more):
        Run().make(TRAKer, tmp_path / "empty").featurize(batch, num_samples=N)
    with pytest.raises(ValueError, match=r"'image_classification', .* got 'img'; try task="):
        started(tmp_path / "task", task="img")
    with pytest.raises(ValueError, match=r"grad_wrt.*'1.weight'"):
        started(tmp_path / "names", grad_wrt=["0.wieght"])
    with pytest.raises(TypeError, match=r"try .*Iterative"):
        started(tmp_path / "computer", task=IterativeImageClassificationModelOutput())
    for ids, why in ((None, "not fully featurized"), ([3], "not registered")):
        with pytest.raises(ModelIDException, match=why):
            started(tmp_path / "run").finalize_features(ids)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, AssertionError),
        ({"inds": np.arange(3), "num_samples": 3}, AssertionError),
        ({"num_samples": 4}, ValueError),
        ({"num_samples": N + 1}, IndexError),
        ({"inds": np.array([0, 1, N])}, IndexError),
        ({"inds": [0, 1, -1]}, IndexError),
        ({"inds": np.array([True, False, True])}, IndexError),
    ],
)
def test_featurize__rows_that_do_not_fit(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception]
) -> None:
    traker = started(tmp_path)
    with pytest.raises(error):
        traker.featurize([part[:3] for part in images(N)], **arguments)
    assert not np.load(tmp_path / "0/_is_featurized.mmap").any()


def test_featurize__gradients_that_are_not_finite_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    traker = started(tmp_path, logging_level=logging.WARNING)
    x, y = (part[:3].clone() for part in images(N))
    x[1] = torch.nan
    traker.featurize((x, y), inds=[7, 8, 9])
    assert "samples [8]" in caplog.text


def test_init__a_machine_without_cuda(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="try device='cpu'"):
        Run(options={"device": "cuda:0"}).make(TRAKer, tmp_path)
    options = {"device": "cuda:0", "projector": NoOpProjector()}
    Run(options=options).make(TRAKer, tmp_path)  # nothing needs the device yet


def test_pairs__one_at_a_time_as_the_docs_of_the_original_do(tmp_path: Path) -> None:
    """There, Q of a single pair cannot be stored."""
    model, n = untrained(Pair), 5
    batches = [[part[i : i + 1] for part in pair_batch(n)] for i in range(n)]
    options = {"task": "clip", "train_set_size": n, "device": "cpu", "logging_level": QUIET}
    traker = TRAKer(model, save_dir=tmp_path, proj_dim=4, **options)
    traker.task.sim_batch_size = 5
    traker.load_checkpoint(model.state_dict(), model_id=0)
    traker.task.get_embeddings(model, batches, batch_size=1, embedding_dim=5)
    for batch in batches:
        traker.featurize(batch, num_samples=1)
    grads = np.load(tmp_path / "0/grads.mmap")
    assert np.isfinite(grads).all()
    assert grads.any(axis=1).all()
    assert not np.load(tmp_path / "0/out_to_loss.mmap").any()  # a single pair has no others
    traker.load_checkpoint({name: 2 * x for name, x in model.state_dict().items()}, model_id=1)
    with pytest.warns(UserWarning, match="get_embeddings") as caught:
        traker.featurize(batches[0], num_samples=1)
    assert caught[0].filename == __file__


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder in which jobs ran side by side, and what ``_killed_run.py`` has found out."""
    folder = tmp_path_factory.mktemp("disturbed")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("_killed_run.py")), str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder / "jobs", json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_killed__at_every_write_operation_and_run_again(disturbed: Any) -> None:
    _, report = disturbed
    assert {"__setitem__", "replace", "fsync", "unlink"} == set(report["operations"])
    assert report["failed"] == []


@pytest.mark.slow
def test_jobs__on_one_folder_lose_nothing(disturbed: Any, tmp_path: Path) -> None:
    folder, report = disturbed
    assert report["jobs"] == [0, 0]
    assert len(content(folder)["experiments.json"]) == 1 + 3 * 2
    scores = Run().make(TRAKer, folder, lambda_reg=0.1).finalize_scores("shared")
    expected = Run(n_checkpoints=2, options={"lambda_reg": 0.1}).whole(TRAKer, tmp_path)
    assert relative(scores, expected) < 1e-2
