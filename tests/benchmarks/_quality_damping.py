"""LDS at every λ, and the correlations that choose among them: of many checkpoints and features."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from _fits import SKETCH, a_quarter, featurized
from _machine import made_once
from _quality_tasks import Subject, members
from _quality_truth import checkpoints, ground
from numpy.typing import NDArray
from scipy.stats import rankdata

import trakdask as td

FIRST = 1_000_000  # number of the first half: the truth has the halves 0, 1, ...
N_CHECKPOINTS = 10
LEAST_WEIGHT = 1e-9  # weights are divided by
#: Which of ten checkpoints are scored together: all, and several draws of fewer.
TOGETHER = [[0], [1], [2], [0, 1, 2], [3, 4, 5], [*range(5)], [*range(5, 10)], [*range(10)]]

Row = dict[str, Any]
Floats = NDArray[np.floating]


def half_checkpoints(subject: Subject, cache: Path, n: int) -> list[Path]:
    """Train what is missing of the models of halves and return their files."""
    stem = cache / "halves" / f"{subject.name}-{subject.digest()}"
    n_train = len(subject.data()[0][0])

    def write(index: int, path: Path) -> None:
        torch.save(subject.train(members(FIRST + index, n_train), seed=100 + index), path)

    return [made_once(Path(f"{stem}-h{index}.pt"), partial(write, index)) for index in range(n)]
