"""The choice by device, and the proof before the first block, on emulated kernels."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.projection.cuda.emulator import COMPILER, EmulatedKernels
from trakdask.errors import KernelError
from trakdask.projection import SJLT, Identity, Mask, Rademacher, RowMap
from trakdask.projection import protocol as protocol_of_projectors
from trakdask.projection import stream as stream_of_blocks
from trakdask.projection.cuda import Kernels, launch
from trakdask.projection.cuda import products as on_device
from trakdask.projection.stream import project

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")

SHAPES = {"a": (7, 5000), "b": (3,), "c": (2 * 16384 + 77,), "d": (100, 9)}


class WrongKernels(EmulatedKernels):
    """A GPU that forgets the second of two blocks that go at once."""

    description = "a broken GPU"

    def launch(self, name: str, grid: Any, threads: int, arguments: Any, *rest: Any) -> None:
        if name.startswith("combine"):
            arguments = [*arguments[:3], np.int32(1), *arguments[4:]]
        super().launch(name, grid, threads, arguments, *rest)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> EmulatedKernels:
    """Take tensors of the CPU for tensors of a GPU whose kernels are emulated."""
    emulated = EmulatedKernels()
    pretend(monkeypatch, emulated)
    return emulated


def pretend(monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> None:
    monkeypatch.setattr(on_device, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(stream_of_blocks, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(on_device, "kernels_for", lambda device: kernels)
    monkeypatch.setattr(on_device, "_proven", set())


def gradients(n_samples: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(n_samples, *shape, generator=generator) for name, shape in SHAPES.items()
    }


PROJECTORS = [
    Rademacher(33, seed=2),
    SJLT(50, seed=9),
    Mask(20000, then=SJLT(64)),
    Mask(17000, then=Rademacher(64)),
    Mask(3000),
    Identity(),
]


@pytest.mark.parametrize("projector", PROJECTORS, ids=str)
def test_stream__same_bits_as_on_a_cpu(
    projector: protocol_of_projectors.Projector, monkeypatch: pytest.MonkeyPatch
) -> None:
    row_map = RowMap.from_shapes(SHAPES, alignment=projector.row_alignment)
    expected = project(projector, gradients(), row_map, 5)
    kernels = EmulatedKernels()
    pretend(monkeypatch, kernels)
    assert torch.equal(project(projector, gradients(), row_map, 5), expected)
    uses_kernels = not isinstance(getattr(projector, "then", projector), Identity)
    assert bool(kernels.launched) == uses_kernels


@pytest.mark.parametrize("projector", [Rademacher(8), SJLT(8)], ids=str)
def test_require_proven__other_bits_name_the_device(
    projector: Rademacher | SJLT, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, WrongKernels())
    out = torch.zeros(1, 8, dtype=torch.float64)
    kind = type(projector).__name__
    message = rf"kernels of {kind}\(.*other bits .*of 40 sums.*a broken GPU"
    with pytest.raises(KernelError, match=message):
        projector.project_rows(torch.ones(1, 5), 0, 0, out)
    assert not out.any()
    assert not on_device._proven


@pytest.mark.parametrize(("version", "extra"), [("13.0", "cuda"), ("12.8", "cuda12")])
def test_missing__cupy(version: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_cupy", launch._cupy.__wrapped__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setitem(sys.modules, "cupy", None)
    message = launch.missing()
    assert message
    assert message.startswith("expected CuPy")
    assert f"pip install 'trakdask[{extra}]'" in message
