"""Gradients, outputs and projections of a device are those of the CPU, by every engine."""

from __future__ import annotations

from functools import cache

import dask
import numpy as np
import pytest
import torch
import xarray as xr

import trakdask as td
from tests.devices.cases import CASES, case
from trakdask.projection import Projector, RowMap
from trakdask.projection.stream import project

pytestmark = [
    # vmap runs the rows of an LSTM one after the other where it has no rule for them.
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
]


def features(name: str, device: str, n_checkpoints: int = 1, **options: object) -> xr.Dataset:
    samples, model = case(name, n_checkpoints)
    options = {"projector": td.Identity(), "batch_size": 2, **options}
    return td.featurize(samples, model, device=device, **options).compute()


@cache
def by_loop(name: str) -> xr.Dataset:
    """Return features of a CPU, by a backward pass for each sample."""
    return features(name, "cpu", gradients="loop")


def require_close(found: xr.Dataset, expected: xr.Dataset, rtol: float = 1e-5) -> None:
    for name in ("feature", "output", "out_to_loss"):
        one, other = found[name].values, expected[name].values
        assert np.linalg.norm(one - other) <= rtol * np.linalg.norm(other), name


@pytest.mark.parametrize("engine", ["hooks", "vmap", "loop"])
@pytest.mark.parametrize("name", CASES)
def test_features__are_those_of_the_cpu(name: str, engine: str, device: str) -> None:
    if (name, engine) == ("DistilBERT", "vmap"):
        pytest.skip("this model looks at values of its mask, which vmap cannot")
    require_close(features(name, device, gradients=engine), by_loop(name))


@pytest.mark.parametrize("engine", ["hooks", "vmap", "loop"])
@pytest.mark.parametrize("name", ["convolutions", "LSTM"])
def test_features__need_no_float64_on_the_device(name: str, engine: str, no_float64: str) -> None:
    require_close(features(name, no_float64, gradients=engine), by_loop(name))


@pytest.mark.parametrize(("dtype", "rtol"), [("float64", 1e-6), ("bfloat16", 3e-2)])
@pytest.mark.parametrize("name", ["convolutions", "transformer"])
def test_features__of_another_precision(name: str, dtype: str, rtol: float, device: str) -> None:
    require_close(features(name, device, dtype=dtype), features(name, "cpu", dtype=dtype), rtol)


def test_features__of_autocast_say_so(device: str) -> None:
    with torch.autocast(device, dtype=torch.bfloat16):
        lower = features("perceptron", device)
    assert lower.attrs["autocast"] == "bfloat16"
    exact = by_loop("perceptron")
    assert not np.array_equal(lower.feature, exact.feature)
    require_close(lower, exact, 3e-2)


PROJECTORS = [
    *(td.SJLT(64), td.SJLT(96, sparsity=16), td.Mask(500), td.Mask(900, then=td.SJLT(32))),
    *(td.Rademacher(64, arithmetic=f"int8x{n}") for n in (1, 2, 3)),
    td.Identity(),
]


def require_same_bits(projector: Projector, device: str) -> None:
    shapes = {"a": (70, 200), "b": (200,), "c": (16, 8, 3, 3)}
    rows = RowMap.from_shapes(shapes, alignment=projector.row_alignment)
    draw = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(5, *rows.shape(name), generator=draw) for name in rows.names}
    tensors["a"][1], tensors["b"][2, 3], tensors["c"][3] = 1e-41, torch.nan, 0
    found = project(projector, {name: t.to(device) for name, t in tensors.items()}, rows, 3)
    expected = project(projector, tensors, rows, 3)
    assert found.device.type == device
    assert torch.equal(found.cpu().view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("projector", PROJECTORS, ids=str)
def test_projections__have_the_bits_of_the_cpu(projector: Projector, device: str) -> None:
    require_same_bits(projector, device)


@pytest.mark.parametrize("projector", PROJECTORS, ids=str)
def test_projections__need_no_float64_on_the_device(projector: Projector, no_float64: str) -> None:
    require_same_bits(projector, no_float64)


@pytest.mark.parametrize("n_threads", [2, 4])
def test_features__of_threads_that_share_a_device(n_threads: int, device: str) -> None:
    """Two checkpoints and two chunks make four tasks, which do not disturb each other."""
    options = {"n_checkpoints": 2, "projector": td.SJLT(64)}
    with dask.config.set(scheduler="sync"):
        alone = features("convolutions", device, **options)
    with dask.config.set(scheduler="threads", num_workers=n_threads):
        together = features("convolutions", device, **options)
    np.testing.assert_array_equal(together.feature, alone.feature)
