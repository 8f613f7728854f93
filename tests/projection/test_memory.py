"""Sizes that cannot fit are rejected by arithmetic alone: no test here could hold the arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import trakdask as td
from trakdask.projection import ProjectionStream, Projector, RowMap
from trakdask.projection.memory import Scratch
from trakdask.testing import raise_if_dask_computes

WEIGHTS = 10**10

TOO_LARGE = [
    (td.Rademacher(2**31), 2**31),
    (td.SJLT(2**31 - 1), 2**31 - 1),
    (td.FastJL(2**31 - 512, num_sms=132), 2**31 - 512),
    (td.Kronecker(2**16 - 1, 2**16 - 1), (2**16 - 1) ** 2),
    (td.Identity(), WEIGHTS),
    (td.Mask(2**32), 2**32),
    (td.Mask(2**32, then=td.Rademacher(2**31)), 2**31),
]


@pytest.mark.parametrize(("projector", "width"), TOO_LARGE, ids=str)
def test_stream__too_large(projector: Projector, width: int) -> None:
    rows = RowMap.from_shapes({"weight": (WEIGHTS,)}, alignment=projector.row_alignment)
    bytes_of_sums = 12 * 4096 * width
    with pytest.raises(
        ValueError, match=rf"{bytes_of_sums} bytes\) for 4096 samples with {width} "
    ):
        ProjectionStream(projector, rows, 4096, 0)


@pytest.mark.parametrize(
    ("projector", "width"),
    [*TOO_LARGE[:4], (td.Mask(10, td.Rademacher(2**31)), 2**31), (td.Identity(), 10**6)],
    ids=str,
)
def test_featurize__too_large(projector: Projector, width: int) -> None:
    samples = td.from_arrays({"x": np.zeros(10**6, "f4"), "y": np.zeros(10**6, "f4")}, chunks=10**6)
    model = td.Model(torch.nn.Linear(1000, 1000, bias=False), task="regression")
    with (
        raise_if_dask_computes(),
        pytest.raises(ValueError, match=rf" 1000000 samples with {width} columns.*samples\.chunk"),
    ):
        td.featurize(samples, model, projector=projector)


def test_take__usable_after_inference_mode() -> None:
    scratch = Scratch()
    with torch.inference_mode():
        scratch.take("x", (3,), torch.float32)
    assert scratch.take("x", (2,), torch.float32).zero_().tolist() == [0, 0]
