"""The base of projectors with CUDA kernels, which are checked before they are first used."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from trakdask.errors import KernelError
from trakdask.projection.acceleration import on_gpu
from trakdask.projection.cuda.launch import Kernels, kernels_for
from trakdask.projection.protocol import ROW_BLOCK, Projector

_PROOF_ROWS = 2 * ROW_BLOCK + 300  # two whole blocks, processed together, and a short one
_PROOF_WIDTH = 77

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_proven: set[Hashable] = set()
_proving = threading.Lock()


@dataclass(frozen=True)
class GpuProjector(Projector):
    """A projector with CUDA kernels, which project blocks that are on an NVIDIA GPU."""

    rounds_row_blocks: ClassVar[bool] = True

    proj_dim: int

    @abstractmethod
    def project_on_gpu(
        self, kernels: Kernels, rows: Tensor, row_offset: int, checkpoint: int, out: Tensor
    ) -> None:
        """Add the projection of consecutive row blocks to ``out``, on their GPU."""

    def project_rows(self, rows: Tensor, row_offset: int, checkpoint: int, out: Tensor) -> None:
        """Add the projection of consecutive row blocks to ``out``; see ``Projector``.

        CUDA kernels project rows that are on an NVIDIA GPU, with the same bits as a CPU. (They have
        not run on a GPU yet.)

        Raises
        ------
        ImportError
            If the rows are on a GPU and CuPy is missing.
        KernelError
            If the kernels cannot run on that GPU, or give other bits than the CPU.
        """
        if not on_gpu(rows):
            super().project_rows(rows, row_offset, checkpoint, out)
            return
        # Kernels read 16 or 32 bits, and columns that lie side by side.
        rows = rows if rows.dtype in _DTYPES else rows.float()
        rows = rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()
        kernels = kernels_for(rows.device)
        require_proven(self, kernels, rows)
        self.project_on_gpu(kernels, rows, row_offset, checkpoint, out)


def require_proven(projector: GpuProjector, kernels: Kernels, rows: Tensor) -> None:
    """Project a small tile on the GPU and on the CPU, once per process, device and kernel.

    Raises
    ------
    KernelError
        If any bit differs.
    """
    # Few columns suffice: a wrong kernel, option or compiler changes the bits of all of them.
    small = replace(projector, proj_dim=min(projector.proj_dim, _PROOF_WIDTH))
    key = (kernels.description, rows.device, rows.dtype, small)
    with _proving:
        if key in _proven:
            return
        tile = proof_tile(rows.dtype)
        expected = torch.zeros(len(tile), small.proj_dim, dtype=torch.float64)
        for row in range(0, _PROOF_ROWS, ROW_BLOCK):
            small.project_block(tile[:, row : row + ROW_BLOCK], row, 1, expected)
        on_device = torch.zeros_like(expected, device=rows.device)
        small.project_on_gpu(kernels, tile.to(rows.device), 0, 1, on_device)
        actual = on_device.cpu()
        wrong = (actual != expected) & ~(actual.isnan() & expected.isnan())
        if wrong.any():
            raise KernelError(
                f"expected the kernels of {small} to give the bits of the CPU, "
                f"got other bits in {int(wrong.sum())} of {wrong.numel()} sums for {rows.dtype} "
                f"gradients on {kernels.description}; try device='cpu', and report this message"
            )
        _proven.add(key)


def proof_tile(dtype: torch.dtype) -> Tensor:
    """Return gradients of five samples: dense, tiny, zero, not finite, and an outlier."""
    # Without a generator, because this must neither use torch's nor depend on its version.
    steps = torch.arange(5 * _PROOF_ROWS, dtype=torch.int64).view(5, -1)
    tile = ((steps * 7919 + steps * steps % 613) % 2003 - 1001).to(dtype) / 1024
    tile[1] *= torch.finfo(dtype).tiny / 8  # subnormal
    tile[2] = 0
    tile[3, 99] = torch.nan
    tile[4, -1] = 1000
    return tile
