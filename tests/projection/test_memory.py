"""Sizes that cannot fit are rejected by arithmetic alone: no test here could hold the arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dask.utils import format_bytes

import trakdask as td
from trakdask.projection import ProjectionStream, Projector, RowMap
from trakdask.projection.memory import require_fit
from trakdask.testing import raise_if_dask_computes

WEIGHTS = 10**10

TOO_LARGE = [
    (td.Rademacher(2**31), 2**31),
    (td.Gaussian(2**32 - 1), 2**32 - 1),
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
    [*TOO_LARGE[:5], (td.Mask(10, td.Rademacher(2**31)), 2**31), (td.Identity(), 10**6)],
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


def test_require_fit__at_the_limit() -> None:
    require_fit(td.Identity(), 5, 7, needed=100, limit=100)
    with pytest.raises(ValueError, match=r"in 99\.0 bytes of memory, got 100\.0 bytes"):
        require_fit(td.Identity(), 5, 7, needed=100, limit=99)


@pytest.mark.parametrize("n_bytes", [2**30, 5 * 2**39, 3 * 2**52])
def test_require_fit__units_are_those_of_dask(n_bytes: int) -> None:
    number, unit = format_bytes(n_bytes).split()
    with pytest.raises(ValueError, match=rf"got {float(number):.1f} {unit}"):
        require_fit(td.Identity(), 5, 7, needed=n_bytes, limit=1)
