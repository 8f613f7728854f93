"""Bad inputs of explore, and of marks of samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr

import trakdask as td
from tests.bad_inputs.bad_input import BadInput, one_test
from tests.bad_inputs.stores import FEATURES as STORED
from tests.bad_inputs.stores import store_in
from trakdask.explorer import Marks

FEATURES = td.testing.simulate_features(n_samples=60, proj_dim=4)
TARGETS = td.testing.simulate_features(n_samples=8, proj_dim=4)
LINEAR = torch.nn.Linear(2, 3)
MODEL, OTHER = td.Model(LINEAR), td.Model(LINEAR, parameters="weight")
OF_A_MODEL = td.featurize(
    td.from_arrays({"image": np.ones((4, 2), "f4")}, coords={"label": [0, 1, 2, 0]}),
    OTHER,
    projector=td.SJLT(proj_dim=8, seed=0),
)
IDS = np.array([f"id {i}" for i in range(60)])
SAMPLES = xr.Dataset({"x": ("sample", np.zeros(59))})


def explore(case: str, error: type[Exception], words: list[str], **changed: Any) -> BadInput:
    given = {"features": FEATURES, "targets": TARGETS, **changed}
    return BadInput("explore", case, lambda folder: td.explore(**given), error, words)


ROWS = [
    explore("targets without features", ValueError, ["'feature'", "targets"], targets=TARGETS[["output"]]),
    explore("samples are an array", TypeError, ["samples", "ndarray", "td.featurize"], samples=np.zeros(60)),
    explore("samples are others", ValueError, ["samples", "60", "59"], samples=SAMPLES),
    explore("samples in another order", ValueError, ["samples in the order", "id 0", "id 59"], features=FEATURES.assign_coords(sample=IDS), samples=xr.Dataset({"x": ("sample", np.zeros(60))}, {"sample": IDS[::-1]})),
    explore("target samples are others", ValueError, ["target_samples", "8", "59"], target_samples=SAMPLES),
    explore("model is a module", TypeError, ["model", "Linear", "td.Model"], model=torch.nn.Linear(2, 2), tokenizer=str),
    explore("model without a way to its inputs", ValueError, ["tokenizer", "preprocess"], model=MODEL),
    explore("preprocess without a model", ValueError, ["preprocess", "model=td.Model"], preprocess=np.asarray),
    explore("tokenizer is a name", TypeError, ["tokenizer", "'gpt2'"], model=MODEL, tokenizer="gpt2"),
    BadInput("explore", "a view saved to a folder", lambda folder: td.explore(FEATURES, TARGETS).save_html(folder), ValueError, ["the folder", "view.html"]),
    explore("model of other features", td.errors.StoreMismatchError, ["the model's", "parameters"], model=MODEL, preprocess=np.asarray, features=OF_A_MODEL, targets=OF_A_MODEL),
]  # fmt: skip


def mark(samples: Any, kind: Any = "remove", **texts: Any) -> Callable[[Path], object]:
    return lambda folder: Marks(folder / "m.parquet").mark(samples, kind, **texts)


def marked_by_text(folder: Path) -> Marks:
    marks = Marks.beside(store_in(folder))
    marks.mark(["a"], "remove")
    return marks


MARKS = [
    BadInput("Marks", "a folder", lambda folder: Marks(folder), ValueError, ["a file"]),
    BadInput("Marks", "no such folder", lambda folder: Marks(folder / "no" / "m.parquet"), FileNotFoundError, ["no/m.parquet"]),
    BadInput("Marks", "a label that is a number", mark([1], label=3), TypeError, ["label as text", "got 3", "label='3'"]),
    BadInput("Marks", "samples are a mask", mark([True, False]), TypeError, ["got [True, False]"]),
    BadInput("Marks", "numbers beside text", lambda folder: marked_by_text(folder).mark(7, "remove"), TypeError, ["'a'", "7"]),
    BadInput("Marks", "features of no store", lambda folder: Marks(folder / "m.parquet").ids(STORED), ValueError, ["'sample'", "8 samples"]),
    BadInput("Marks", "features of another store", lambda folder: Marks.beside(store_in(folder)).ids(STORED[{"sample": [1, 0, *range(2, 8)]}]), ValueError, ["f.zarr", "8 samples", "assign_coords"]),
]  # fmt: skip

test_bad_input = one_test([*ROWS, *MARKS])
