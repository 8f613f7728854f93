"""Projectors of the TRAK package for CUDA devices, which use the extension ``fast_jl``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trakdask.projection import FastJL
from trakdask.trak.projector_base import AbstractProjector, Gradients, ProjectionType
from trakdask.trak.tensors import vectorize

__all__ = ["ChunkedCudaProjector", "CudaProjector"]

_KERNELS = (8, 16, 32)


class CudaProjector(AbstractProjector):
    """Multiply with the matrix of the CUDA extension ``fast_jl``.

    Parameters
    ----------
    grad_dim, proj_dim, seed, proj_type, device
        As in :class:`AbstractProjector`; ``proj_dim`` is a multiple of 512. The seed of a model id
        is ``seed + 10_000 * model_id``.
    max_batch_size
        Most samples per kernel launch: 8, 16 or 32. Other numbers are rounded down to one of these.
        (The original does so for 40, but fails for 24.)

    Raises
    ------
    ValueError
        If the device is not a CUDA device, or a number is outside its range.
    ModuleNotFoundError
        If ``fast_jl`` is not installed.

    Notes
    -----
    This class uses :class:`trakdask.FastJL`: the matrix depends on the number of multiprocessors of
    the GPU, and gradients are rounded to float16. It has not run on a GPU yet; its calls are tested
    with a substitute for the extension.
    """

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int,
        proj_type: ProjectionType,
        device: str | torch.device,
        max_batch_size: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(grad_dim, proj_dim, seed, proj_type, device)
        where = torch.device(device)
        if where.type != "cuda":
            raise ValueError(
                f"expected a CUDA device, got device={str(device)!r}; try BasicProjector"
            )
        if max_batch_size < _KERNELS[0]:
            raise ValueError(
                f"expected max_batch_size of 8, 16 or 32, got {max_batch_size}; "
                "try proj_max_batch_size=8"
            )
        self.max_batch_size = max_batch_size
        self.num_sms = torch.cuda.get_device_properties(where).multi_processor_count
        entries = ProjectionType(proj_type).value
        self._projector = FastJL(proj_dim, int(seed), entries, self.num_sms)
        try:
            self.project(torch.zeros(8, 1000, device=where), model_id=0)
        except ImportError as err:
            raise ModuleNotFoundError(
                f"expected the CUDA extension fast_jl, got {err}; try pip install fast_jl, or "
                "BasicProjector"
            ) from err

    def project(self, grads: Gradients, model_id: int) -> Tensor:
        """Return the projection, (batch, proj_dim) float32."""
        flat = grads if isinstance(grads, Tensor) else vectorize(grads, device=self.device)
        sums = torch.zeros(len(flat), self.proj_dim, dtype=torch.float64, device=flat.device)
        size = max(kernel for kernel in _KERNELS if kernel <= self.max_batch_size)
        for start in range(0, len(flat), size):
            rows, into = flat[start : start + size], sums[start : start + size]
            self._projector.project_block(rows, 0, int(model_id), into)
        return sums.float()

    def free_memory(self) -> None:
        """Do nothing, since the matrix is never in memory."""


class ChunkedCudaProjector:
    """Project consecutive chunks of the gradient with one projector each, and add the results.

    Parameters
    ----------
    projector_per_chunk
        Projectors of equal ``proj_dim``.
    max_chunk_size
        Elements of the largest chunk.
    params_per_chunk
        Elements of each chunk. A parameter may span several chunks.
    feat_bs
        Samples that are projected at once. A larger batch is projected in parts, whereas the
        original raises an error.
    device, dtype
        Device of the input buffer, and dtype of the result. Chunks are added in float32.
    """

    def __init__(
        self,
        projector_per_chunk: list[Any],
        max_chunk_size: int,
        params_per_chunk: list[int],
        feat_bs: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        self.projector_per_chunk = projector_per_chunk
        self.proj_dim = self.projector_per_chunk[0].proj_dim
        self.proj_type = self.projector_per_chunk[0].proj_type
        self.params_per_chunk = params_per_chunk
        self.max_chunk_size = max_chunk_size
        self.feat_bs = feat_bs
        self.device = device
        self.dtype = dtype
        self.input_allocated = False

    def allocate_input(self) -> None:
        """Allocate the buffer ``ch_input``, (feat_bs, elements of the largest chunk)."""
        if not self.input_allocated:
            size = (self.feat_bs, min(self.max_chunk_size, max(self.params_per_chunk)))
            self.ch_input = torch.zeros(size, device=self.device, dtype=self.dtype)
            self.input_allocated = True

    def free_memory(self) -> None:
        """Release the buffer, and the memory of the projectors of the chunks."""
        self.input_allocated = False
        vars(self).pop("ch_input", None)
        for projector in self.projector_per_chunk:
            projector.free_memory()

    def project(self, grads: Gradients, model_id: int) -> Tensor:
        """Return the sum of the projections of all chunks, (batch, proj_dim)."""
        tensors = [grads] if isinstance(grads, Tensor) else list(grads.values())
        flat = [tensor.detach().reshape(len(tensor), -1) for tensor in tensors]
        n_elements, expected = sum(part.shape[1] for part in flat), sum(self.params_per_chunk)
        if n_elements != expected:
            raise ValueError(
                f"expected gradients of {expected} elements in chunks of {self.params_per_chunk}, "
                f"got {n_elements}; try params_per_chunk from get_parameter_chunk_sizes"
            )
        self.allocate_input()
        rows = range(0, len(flat[0]), self.feat_bs)
        parts = [self._sum([g[i : i + self.feat_bs] for g in flat], model_id) for i in rows]
        return torch.cat(parts).to(self.dtype)

    def _sum(self, flat: Sequence[Tensor], model_id: int) -> Tensor:
        total = torch.zeros(len(flat[0]), self.proj_dim, device=self.device)
        start = 0
        for projector, size in zip(self.projector_per_chunk, self.params_per_chunk, strict=True):
            chunk = self.ch_input[: len(total), :size]
            _copy_columns(flat, start, chunk)
            total += projector.project(chunk.contiguous(), model_id=model_id)
            start += size
        return total


def _copy_columns(flat: Sequence[Tensor], start: int, into: Tensor) -> None:
    """Copy columns of adjacent tensors, from column ``start`` on."""
    position = 0
    for part in flat:
        first = max(start, position)
        last = min(start + into.shape[1], position + part.shape[1])
        if first < last:
            into[:, first - start : last - start] = part[:, first - position : last - position]
        position += part.shape[1]
