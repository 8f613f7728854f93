"""Bad inputs of explore."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr

import trakdask as td
from tests.bad_inputs.bad_input import BadInput, check, parametrize

FEATURES = td.testing.simulate_features(n_samples=60, proj_dim=4)
TARGETS = td.testing.simulate_features(n_samples=8, proj_dim=4)
LINEAR = torch.nn.Linear(2, 3)
MODEL, OTHER = td.Model(LINEAR), td.Model(LINEAR, parameters="weight")
OF_A_MODEL = td.featurize(
    td.from_arrays({"image": np.ones((4, 2), "f4")}, coords={"label": [0, 1, 2, 0]}),
    OTHER,
    projector=td.SJLT(proj_dim=8, seed=0),
)
SAMPLES = xr.Dataset({"x": ("sample", np.zeros(59))})


def explore(case: str, error: type[Exception], words: list[str], **changed: Any) -> BadInput:
    given = {"features": FEATURES, "targets": TARGETS, **changed}
    return BadInput("explore", case, lambda folder: td.explore(**given), error, words)


ROWS = [
    explore("features are a path", TypeError, ["features", "'train.zarr'", "td.open"], features="train.zarr"),
    explore("targets are none", TypeError, ["targets", "None", "td.open"], targets=None),
    explore("features without outputs", ValueError, ["'output'", "features", "try"], features=FEATURES.drop_vars("output")),
    explore("targets without features", ValueError, ["'feature'", "targets"], targets=TARGETS[["output"]]),
    explore("another projector", td.errors.StoreMismatchError, ["projector"], targets=td.testing.simulate_features(8, 5)),
    explore("samples are an array", TypeError, ["samples", "ndarray", "td.featurize"], samples=np.zeros(60)),
    explore("samples are others", ValueError, ["60", "59", "same order"], samples=SAMPLES),
    explore("samples without samples", ValueError, ["{'row': 3}"], samples=xr.Dataset({"x": ("row", [1, 2, 3])})),
    explore("target samples are others", ValueError, ["target_samples", "8", "59"], target_samples=SAMPLES),
    explore("no such estimator", ValueError, ["'best'", "'soft'"], estimator="best"),
    explore("estimator of another spelling", ValueError, ["'Soft'", "'soft'"], estimator="Soft"),
    explore("learning rates of other checkpoints", ValueError, ["'c0'", "'a'"], estimator=td.TracIn({"a": 0.1})),
    explore("text is no function", TypeError, ["text", "'gpt2'", "tokenizer.decode"], text="gpt2"),
    explore("model is a module", TypeError, ["model", "Linear", "td.Model"], model=torch.nn.Linear(2, 2), tokenizer=str),
    explore("model without a way to its inputs", ValueError, ["tokenizer", "preprocess"], model=MODEL),
    explore("preprocess without a model", ValueError, ["preprocess", "model=td.Model"], preprocess=np.asarray),
    explore("tokenizer is a name", TypeError, ["tokenizer", "'gpt2'"], model=MODEL, tokenizer="gpt2"),
    explore("model of other features", td.errors.StoreMismatchError, ["the model's", "parameters"], model=MODEL, preprocess=np.asarray, features=OF_A_MODEL, targets=OF_A_MODEL),
    explore("marks are a number", TypeError, ["got 3", "try"], marks=3),
]  # fmt: skip


@parametrize(ROWS)
def test_explore__bad_input(row: BadInput, tmp_path: Path) -> None:
    check(row, tmp_path)
