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
from trakdask.projection.acceleration import on_gpu, timed
from trakdask.projection.cuda.launch import Kernels, Launch, kernels_for
from trakdask.projection.protocol import Projector
from trakdask.projection.row_map import ROW_BLOCK

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
    def project_on_cpu(self, block: Tensor, row_offset: int, checkpoint: int, out: Tensor) -> None:
        """Add the projection of one row block to ``out``, both on the CPU."""

    @abstractmethod
    def project_on_gpu(
        self, kernels: Kernels, rows: Tensor, row_offset: int, checkpoint: int, out: Tensor
    ) -> None:
        """Add the projection of consecutive row blocks to ``out``, on their GPU."""

    def project_block(self, block: Tensor, row_offset: int, checkpoint: int, out: Tensor) -> None:
        """Add the projection of one row block to ``out``; see :class:`Projector`.

        Notes
        -----
        CUDA kernels project a block that is on an NVIDIA GPU, with the same bits as a CPU. (They
        have not run on a GPU yet.) A block on any other device is copied to the CPU and multiplied
        there, and the sums are copied back.
        """
        if on_gpu(block):
            self.project_rows(block, row_offset, checkpoint, out)
        elif block.device.type == "cpu":
            with timed():
                self.project_on_cpu(block, row_offset, checkpoint, out)
        else:
            sums = torch.zeros(out.shape, dtype=torch.float64)
            with timed():
                self.project_on_cpu(block.cpu(), row_offset, checkpoint, sums)
            out += sums.to(out.device)

    def project_rows(self, rows: Tensor, row_offset: int, checkpoint: int, out: Tensor) -> None:
        """Add the projection of consecutive row blocks to ``out``; see :class:`Projector`.

        Raises
        ------
        ImportError
            If the rows are on a GPU and CuPy is missing.
        KernelError
            If the kernels cannot run on that GPU, or give other bits than the CPU.
        ValueError
            If ``out`` is not a float64 tensor of the right shape on the same device.
        """
        if not on_gpu(rows):
            super().project_rows(rows, row_offset, checkpoint, out)
            return
        self._check_out(rows, out)
        if not rows.numel():
            return
        kernels = kernels_for(rows.device)
        rows = readable(rows)
        require_proven(self, kernels, rows)
        self.project_on_gpu(kernels, rows, row_offset, checkpoint, out)

    def _check_out(self, rows: Tensor, out: Tensor) -> None:
        """Reject an ``out`` that kernels, which only get its address, would write outside of."""
        expected = (len(rows), self.proj_dim), torch.float64, rows.device
        actual = tuple(out.shape), out.dtype, out.device
        if actual != expected or out.stride(1) != 1 != out.shape[1]:
            raise ValueError(
                f"expected out to be {expected} with adjacent columns, got {actual} with strides "
                f"{out.stride()}; try torch.zeros(len(rows), proj_dim, dtype=torch.float64, "
                "device=rows.device)"
            )


def readable(rows: Tensor) -> Tensor:
    """Return gradients in a form that kernels can read: 16 or 32 bits, with adjacent columns."""
    if rows.dtype not in _DTYPES:
        rows = rows.float()
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def require_proven(projector: GpuProjector, kernels: Kernels, rows: Tensor) -> None:
    """Project a small tile on the GPU and on the CPU, once per process, device and kernel.

    Raises
    ------
    KernelError
        If any bit differs.
    """
    small = replace(projector, proj_dim=min(projector.proj_dim, _PROOF_WIDTH))
    key = (kernels.description, rows.device, rows.dtype, small)
    with _proving:
        if key in _proven:
            return
        tile = proof_tile(rows.dtype)
        expected = torch.zeros(len(tile), small.proj_dim, dtype=torch.float64)
        for row in range(0, _PROOF_ROWS, ROW_BLOCK):
            small.project_on_cpu(tile[:, row : row + ROW_BLOCK], row, 1, expected)
        on_device = torch.zeros_like(expected, device=rows.device)
        recording = _RecordingKernels(kernels)
        small.project_on_gpu(recording, tile.to(rows.device), 0, 1, on_device)
        actual = on_device.cpu()
        wrong = (actual != expected) & ~(actual.isnan() & expected.isnan())
        if wrong.any():
            raise KernelError(
                f"expected the kernels {recording.names} of {small} to give the bits of the CPU, "
                f"got other bits in {int(wrong.sum())} of {wrong.numel()} sums for {rows.dtype} "
                f"gradients on {kernels.description}; try device='cpu', and report this message"
            )
        _proven.add(key)


class _RecordingKernels:
    """Kernels that record the names of those that are started."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.description, self.cache_bytes = kernels.description, kernels.cache_bytes
        self.names: list[str] = []

    def launch(self, launch: Launch) -> None:
        if launch.name not in self.names:
            self.names.append(launch.name)
        self._kernels.launch(launch)


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
