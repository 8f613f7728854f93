"""Every kernel, run on this machine thread by thread, against numpy and the projectors of the CPU.

What cannot be seen so: memory and timing of a GPU, and its compiler.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.projection.cuda.emulator import COMPILER, EmulatedKernels
from tests.projection.reference import project_blocks
from trakdask.projection import SJLT, Rademacher, fixed_point
from trakdask.projection.cuda import GpuProjector, products
from trakdask.projection.cuda.launch import FAMILIES

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FAR = 16384 * (2**33 - 1)  # rows above it have another high word


def gradients(n_samples: int, n_rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return gradients of very different sizes, some of them zero, tiny or not finite."""
    generator = torch.Generator().manual_seed(n_samples * n_rows)
    rows = torch.randn(n_samples, n_rows, generator=generator, dtype=torch.float64)
    largest = torch.finfo(dtype).max
    sizes = [1, torch.finfo(dtype).tiny / 64, 0, largest / 8, 1e-3, 30]
    rows *= torch.tensor(sizes, dtype=torch.float64).repeat(n_samples)[:n_samples, None]
    rows = rows.clamp(-largest, largest).to(dtype)
    if n_samples > 4:
        rows[4, n_rows // 2] = torch.nan if n_rows % 2 else -torch.inf
    return rows


def equal_bits(found: Tensor, expected: Tensor) -> bool:
    """Compare as integers, so that -0 is not 0; any NaN is like any other."""
    nan = found.isnan() & expected.isnan()
    return bool(((found.view(torch.int64) == expected.view(torch.int64)) | nan).all())


def require_bits_of_cpu(
    projector: GpuProjector,
    rows: Tensor,
    row: int = 0,
    checkpoint: int = 7,
    kernels: EmulatedKernels | None = None,
) -> None:
    """Project by the kernels, and block by block on the CPU; nothing beside the sums may change.

    Gradients are a window: what lies around them would be seen, as would a misaligned read.
    """
    around = torch.full((len(rows), rows.shape[1] + 5), torch.inf, dtype=rows.dtype)
    around[:, 3:-2] = rows
    shape = len(rows), projector.proj_dim + 9
    found, expected = (torch.full(shape, 0.1, dtype=torch.float64) for _ in range(2))
    window = slice(4, -5)
    kernels = kernels or EmulatedKernels()
    projector.project_on_gpu(kernels, around[:, 3:-2], row, checkpoint, found[:, window])
    project_blocks(projector, rows, row, checkpoint, expected[:, window])
    assert equal_bits(found, expected)


@pytest.fixture(autouse=True)
def _strict_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse products that torch, or cuBLAS, refuses on a GPU."""

    def multiply(digits: Tensor, bits: Tensor, out: Tensor) -> None:
        (m, k), n = digits.shape, len(bits)
        assert m > 16
        assert k % 8 == n % 8 == 0
        for operand in (digits, bits, out):  # the one layout that products of all GPUs take
            assert operand.is_contiguous()
            assert not operand.data_ptr() % 16
        fixed_point.int8_matmul(digits, bits, out)

    monkeypatch.setattr(products, "int8_matmul", multiply)


# ---------------------------------------------------------------------------------- the whole path

PROJECTORS: list[GpuProjector] = [
    Rademacher(77, seed=2**64 - 1),
    Rademacher(1, arithmetic="int8x3"),
    Rademacher(520, arithmetic="int8x1", seed=5),
    SJLT(77, seed=3),
    SJLT(1, sparsity=7),
    SJLT(1, sparsity=64),
    SJLT(4096, sparsity=1),
    SJLT(20001, sparsity=5),
    SJLT(9000, sparsity=9),
]


@pytest.mark.parametrize("projector", PROJECTORS, ids=str)
@pytest.mark.parametrize(
    ("n_samples", "n_rows", "row", "reverse"),
    [(1, 1, 0, False), (6, 130, FAR, True), (5, 16384 + 301, 16384 * 3, False)],
)
def test_project_on_gpu__has_the_bits_of_the_cpu(
    projector: GpuProjector, n_samples: int, n_rows: int, row: int, reverse: bool
) -> None:
    rows = gradients(n_samples, n_rows)
    require_bits_of_cpu(projector, rows, row, 2**32 - 1, EmulatedKernels(reverse=reverse))


@pytest.mark.parametrize("projector", [Rademacher(5), SJLT(5)], ids=str)
def test_project_on_gpu__samples_far_apart(projector: GpuProjector, tmp_path: Path) -> None:
    # As in the gradients of 2**31 parameters; of the file, only what is written takes room.
    stride = 2**31 + 1000
    whole = np.memmap(tmp_path / "rows", np.float16, "w+", shape=(3 * stride,))
    sums = np.memmap(tmp_path / "sums", np.float64, "w+", shape=(2 * stride + 5,))
    rows = torch.from_numpy(whole).view(3, stride)[:, -300:]
    found = torch.from_numpy(sums).as_strided((3, 5), (stride, 1))
    rows.copy_(gradients(3, 300, torch.float16))
    projector.project_on_gpu(EmulatedKernels(), rows, 0, 0, found)
    assert equal_bits(found.contiguous(), project_blocks(projector, rows.contiguous(), 0, 0))


@settings(max_examples=15)
@given(data=st.data())
def test_project_on_gpu__any_shape_and_type(data: st.DataObject) -> None:
    draw: Any = data.draw
    width, arithmetic = draw(st.integers(1, 300)), draw(st.sampled_from(["int8x1", "int8x3"]))
    seed, sparsity = draw(st.integers(0, 2**64 - 1)), draw(st.integers(1, 12))
    projector = draw(
        st.sampled_from([Rademacher(width, seed, arithmetic), SJLT(width, sparsity, seed)])
    )
    n_samples, n_rows = draw(st.integers(1, 40)), draw(st.integers(1, 700))
    rows = gradients(n_samples, n_rows, draw(st.sampled_from(DTYPES)))
    row, checkpoint = 16384 * draw(st.integers(0, 2**33 - 1)), draw(st.integers(0, 2**32 - 1))
    kernels = EmulatedKernels(reverse=draw(st.booleans()))
    require_bits_of_cpu(projector, rows, row, checkpoint, kernels)


@pytest.mark.parametrize("projector", [Rademacher(300), SJLT(300)], ids=str)
@pytest.mark.parametrize(("cache_bytes", "run_bytes"), [(1, 2**19), (2**30, 1)])
def test_project_on_gpu__tiles_and_runs_are_invisible(
    projector: GpuProjector, cache_bytes: int, run_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_RUN_BYTES", run_bytes)
    rows = gradients(4, 3 * 16384 + 5)
    require_bits_of_cpu(projector, rows, kernels=EmulatedKernels(cache_bytes))


def test_project_on_gpu__exact_where_sums_are_the_largest_and_for_many_samples() -> None:
    for many in (Rademacher(77), SJLT(77)):
        require_bits_of_cpu(many, gradients(513, 131))
    rows = torch.full((2, 16384), 1 - 2.0**-24)
    for projector in (SJLT(1, sparsity=7), SJLT(1, sparsity=8), Rademacher(1, 3, "int8x3")):
        require_bits_of_cpu(projector, rows)


@given(n_rows=st.integers(1, 10**6), block_bytes=st.integers(1, 2**28))
def test_runs__are_the_blocks_of_the_grid_in_order(n_rows: int, block_bytes: int) -> None:
    runs = list(products.runs(n_rows, block_bytes))
    starts = [run.first + i * run.n_rows for run in runs for i in range(run.n_blocks)]
    assert starts == list(range(0, n_rows, 16384))
    assert runs[-1].stop == n_rows
    for run in runs:
        assert run.n_blocks == 1 or run.n_blocks * block_bytes <= 2**26
        assert run.n_blocks < 2**16  # the longest grid
        assert run.n_rows <= run.depth < run.n_rows + 128


def test_families__every_kernel_was_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = EmulatedKernels()
    for dtype in DTYPES:
        rows = gradients(2, 40, dtype)
        for projector in (
            *(Rademacher(8, arithmetic=f"int8x{n}") for n in (1, 2, 3)),
            *(SJLT(8, sparsity=sparsity) for sparsity in (1, 8)),
        ):
            require_bits_of_cpu(projector, rows, kernels=kernels)
    assert set(kernels.launched) == {name for names in FAMILIES.values() for name in names}
