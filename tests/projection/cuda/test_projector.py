"""The choice by device, and the proof before the first block, on emulated kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.projection.cuda.emulator import COMPILER, EmulatedKernels
from trakdask.errors import KernelError
from trakdask.projection import SJLT, Identity, Mask, Rademacher, RowMap
from trakdask.projection import protocol as protocol_of_projectors
from trakdask.projection import stream as stream_of_blocks
from trakdask.projection.cuda import projector as on_device
from trakdask.projection.cuda.launch import Kernels, Launch
from trakdask.projection.stream import ProjectionStream, project

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")

SHAPES = {"a": (7, 5000), "b": (3,), "c": (2 * 16384 + 77,), "d": (100, 9)}


class WrongKernels(EmulatedKernels):
    """A GPU that forgets the second of two blocks that go at once."""

    description = "a broken GPU"

    def launch(self, launch: Launch) -> None:
        if launch.name.startswith("combine"):
            arguments = [*launch.arguments[:3], np.int32(1), *launch.arguments[4:]]
            launch = replace(launch, arguments=arguments)
        super().launch(launch)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> EmulatedKernels:
    """Take tensors of the CPU for those of a GPU whose kernels are emulated."""
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


def test_stream__neighbouring_blocks_go_at_once(kernels: EmulatedKernels) -> None:
    row_map = RowMap.from_shapes({"flat": (100 + 5 * 16384,)}, alignment=512)
    rows = torch.ones(2, row_map.n_rows)
    project(Rademacher(8), {"flat": rows}, row_map, 0)  # proves
    stream = ProjectionStream(Rademacher(8), row_map, 2, 0)
    for first, last, expected in (
        (0, 100, 0),  # waits
        (100, 4 * 16384 + 5, 2),  # the rest of block 0, then 1 to 3
        (4 * 16384 + 5, 5 * 16384, 1),
        (5 * 16384, 5 * 16384 + 100, 1),  # the last, and short
    ):
        kernels.launched.clear()
        stream.add("flat", rows[:, first:last], first)
        assert kernels.launched.count("quantize_float32_2") == expected
    assert torch.equal(stream.result(), project(Rademacher(8), {"flat": rows}, row_map, 0))


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


def test_require_proven__once_for_each_kernel(kernels: EmulatedKernels) -> None:
    out = torch.zeros(1, 8, dtype=torch.float64)
    counts = []
    blocks = [torch.ones(1, 5), torch.ones(1, 5), torch.ones(1, 5).half()]
    for block in blocks:
        kernels.launched.clear()
        Rademacher(8).project_rows(block, 0, 0, out)
        counts.append(len(kernels.launched))
    assert counts[1] == 3  # one digit product: quantised, drawn, combined
    assert counts[0] == counts[2] > counts[1]
