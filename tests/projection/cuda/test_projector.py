"""The choice by device, and the proof before the first block, on emulated kernels."""

from __future__ import annotations

import re
import sys
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.projection.cuda.emulator import COMPILER, EmulatedKernels
from tests.projection.reference import project_blocks
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
    monkeypatch.setattr(on_device, "_proven", {})


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
def test_kernels_that_work__other_bits_leave_it_to_torch_and_say_why(
    projector: Rademacher | SJLT, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = WrongKernels()
    pretend(monkeypatch, broken)
    rows, found = torch.ones(1, 40000), torch.zeros(1, 8, dtype=torch.float64)
    expected = project_blocks(projector, rows, 0, 0)
    for _ in range(2):
        found.zero_()
        projector.project_rows(rows, 0, 0, found)
        assert torch.equal(found, expected)
        broken.launched.clear()
    kind = type(projector).__name__
    message = rf"by torch.*kernels of {kind}\(.*other bits .*of 40 sums.*a broken GPU"
    (record,) = caplog.records  # once
    assert re.search(message, record.getMessage())


@pytest.mark.parametrize("error", [ImportError("no CuPy"), KernelError("NVRTC knows no sm_70")])
def test_kernels_that_work__none_for_this_gpu(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(device: torch.device) -> Kernels:
        raise error

    pretend(monkeypatch, EmulatedKernels())
    monkeypatch.setattr(on_device, "kernels_for", fail)
    for dtype in (torch.float32, torch.float16):
        assert on_device.kernels_that_work(SJLT(8), torch.ones(1, 5, dtype=dtype)) is None
    (record,) = caplog.records
    assert str(error) in record.getMessage()


def test_multiply__where_the_gpu_has_no_int8_product(
    kernels: EmulatedKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul")

    rows = gradients()["c"]
    found, expected = torch.zeros(2, 4, 33, dtype=torch.float64)
    Rademacher(33).project_rows(rows, 0, 0, expected)
    monkeypatch.setattr(on_device, "int8_matmul", fail)
    Rademacher(33).project_rows(rows, 0, 0, found)
    assert torch.equal(found, expected)
    assert expected.any()


def test_kernels_for__no_nvidia_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch.kernels_for(torch.device("mps")) is None
    monkeypatch.setattr(torch.version, "cuda", None)  # as on AMD's
    assert launch.kernels_for(torch.device("cuda")) is None


@pytest.mark.parametrize(
    ("why", "error"),
    [
        ("CUDA_ERROR_OUT_OF_MEMORY: out of memory", torch.OutOfMemoryError),
        ("CUDA_ERROR_INVALID_VALUE: invalid argument", KernelError),
    ],
)
def test_launch__out_of_memory_is_an_error_that_halves_micro_batches(
    why: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise RuntimeError(why)

    kernels = object.__new__(Kernels)
    kernels._cupy, kernels._index, kernels.description = MagicMock(), 0, "a GPU"
    kernels._cupy.cuda.driver.CUDADriverError = RuntimeError
    monkeypatch.setattr(torch.cuda, "current_stream", MagicMock())
    monkeypatch.setattr(kernels, "_function", fail)
    with pytest.raises(error, match="combine_int32"):
        kernels.launch("combine_int32", (1, 1), 32, [])


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
