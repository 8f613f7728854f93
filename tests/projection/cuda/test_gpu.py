"""Kernels on a GPU, against the CPU, bit for bit. It has not run on a GPU yet."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.projection.reference import project_blocks
from trakdask.projection import SJLT, Rademacher, RowMap
from trakdask.projection.cuda import GpuProjector
from trakdask.projection.stream import project

pytestmark = pytest.mark.gpu

WIDTHS = [1, 77, 4096]
SAMPLES = [1, 2, 3, 7, 8, 9, 31, 33, 128, 513]
ROWS = [1, 127, 16384, 16385, 2 * 16384 + 301, 5 * 16384 + 1]


def gradients(n_samples: int, n_rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n_samples * n_rows)
    rows = torch.randn(n_samples, n_rows, generator=generator)
    rows *= torch.logspace(-30, 30, n_samples)[:, None] if dtype != torch.float16 else 1
    rows[n_samples // 2] = 0
    rows[-1, n_rows // 3] = torch.nan if n_samples > 2 else 1
    return rows.to(dtype)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    found = found.cpu()
    return bool(((found == expected) | (found.isnan() & expected.isnan())).all())


def agree(projector: GpuProjector, rows: torch.Tensor, row: int = 0, checkpoint: int = 9) -> bool:
    expected = torch.full((len(rows), projector.proj_dim), 0.1, dtype=torch.float64)
    found = expected.cuda()
    project_blocks(projector, rows.cpu(), row, checkpoint, expected)
    projector.project_rows(rows.cuda(), row, checkpoint, found)
    return same(found, expected)


@pytest.mark.parametrize(
    ("n_samples", "width", "n_rows", "row"),
    [
        *((n, width, 16384 + 999, 0) for n in SAMPLES for width in WIDTHS),
        *((5, 520, n, row) for n in ROWS for row in (0, 16384 * 3, 16384 * (2**33 - 1))),
    ],
)
@pytest.mark.parametrize("kind", [Rademacher, SJLT])
def test_project_rows__shapes(
    kind: type[Any], n_samples: int, width: int, n_rows: int, row: int
) -> None:
    assert agree(kind(width), gradients(n_samples, n_rows), row)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "projector",
    [
        *(Rademacher(77, 3, f"int8x{n}") for n in (1, 2, 3)),
        *(SJLT(n, sparsity) for n in (77, 20001) for sparsity in (1, 7, 8, 64)),
    ],
    ids=str,
)
def test_project_rows__types(projector: GpuProjector, dtype: torch.dtype) -> None:
    assert agree(projector, gradients(6, 16384 + 30, dtype))


def test_project_rows__misaligned_and_strided() -> None:
    around = gradients(9, 40000).cuda()  # before it is cut: a copy would be aligned
    for projector in (Rademacher(100), SJLT(100)):
        for window in (around[:, 3:-5], around[:, ::3], around[::2, 1:20000]):
            assert agree(projector, window)


def test_project__on_another_stream() -> None:
    rows = gradients(4, 50000)[:2]
    expected = project_blocks(Rademacher(64), rows, 0, 0)
    with torch.cuda.stream(torch.cuda.Stream()):
        found = torch.zeros(2, 64, dtype=torch.float64, device="cuda")
        Rademacher(64).project_rows(rows.cuda(), 0, 0, found)
        assert same(found, expected)


def test_project__nothing_waits_for_the_device() -> None:
    flat = torch.ones(4, 60000, device="cuda")

    def both() -> None:
        for projector in (Rademacher(64), SJLT(64)):
            row_map = RowMap.from_shapes({"flat": (60000,)}, alignment=projector.row_alignment)
            project(projector, {"flat": flat}, row_map, 0)

    both()  # compiles and proves
    torch.cuda.set_sync_debug_mode("error")
    try:
        both()
    finally:
        torch.cuda.set_sync_debug_mode("default")
