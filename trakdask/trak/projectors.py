"""Projectors of the TRAK package: from flat per-sample gradients to a few columns.

Matrices have the same entries as in the original: unscaled, drawn by torch from the same seeds.
Unlike in the original, they stay in memory between batches if they fit.
"""

from __future__ import annotations

import math
from typing import Any

import psutil
import torch
from distributed.system import MEMORY_LIMIT
from torch import Tensor

from trakdask.trak.cuda_projectors import ChunkedCudaProjector, CudaProjector
from trakdask.trak.projector_base import AbstractProjector, Gradients, ProjectionType, device_of
from trakdask.trak.stream_projector import StreamProjector
from trakdask.trak.tensors import vectorize

__all__ = [
    "AbstractProjector",
    "BasicProjector",
    "BasicSingleBlockProjector",
    "ChunkedCudaProjector",
    "CudaProjector",
    "NoOpProjector",
    "ProjectionType",
    "StreamProjector",
]

_SHARE_OF_MEMORY = 0.5
_BLOCKS_PER_CHECKPOINT = 100


class NoOpProjector(AbstractProjector):
    """Return the gradients as they are, flattened to (batch, grad_dim).

    All arguments are optional and have no effect. Gradients stay on their device; the original
    moves them to ``device``, so its ``NoOpProjector()`` fails on a machine without CUDA.
    """

    def __init__(
        self,
        grad_dim: int = 0,
        proj_dim: int = 0,
        seed: int = 0,
        proj_type: str | ProjectionType = "na",
        device: str | torch.device = "cuda",
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(grad_dim, proj_dim, seed, proj_type, device)

    def project(self, grads: Gradients, model_id: int) -> Tensor:
        """Return the gradients as one tensor."""
        return grads if isinstance(grads, Tensor) else vectorize(grads, device=device_of(grads))

    def free_memory(self) -> None:
        """Do nothing."""


class BasicSingleBlockProjector(AbstractProjector):
    """Multiply with one matrix of shape (grad_dim, proj_dim), which stays in memory.

    Parameters
    ----------
    grad_dim, proj_dim, seed, proj_type, device
        As in :class:`AbstractProjector`. The generator's seed is ``seed + 10_000 * model_id``, so
        seed 10,000 with model id 0 gives the matrix of seed 0 with model id 1; use seeds below
        10,000. (This is as in the original, so that scores agree.)
    dtype
        Dtype of the matrix and the result.
    model_id
        Model id whose matrix is drawn first.

    Raises
    ------
    KeyError
        If ``proj_type`` is neither ``"normal"`` nor ``"rademacher"``.
    """

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int,
        proj_type: ProjectionType,
        device: str | torch.device,
        dtype: torch.dtype = torch.float32,
        model_id: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(grad_dim, proj_dim, seed, proj_type, device)
        self.model_id = model_id
        self.dtype = dtype
        self.generator = torch.Generator(device=self.device)
        self.proj_matrix_available = False
        self.generate_sketch_matrix()

    def free_memory(self) -> None:
        """Release the matrix."""
        self.proj_matrix_available = False
        vars(self).pop("proj_matrix", None)

    def generate_sketch_matrix(self) -> None:
        """Draw ``proj_matrix`` of the current model id."""
        self.generator.manual_seed(int(self.seed + 10_000 * self.model_id))
        self.proj_matrix = torch.empty(
            self.grad_dim, self.proj_dim, dtype=self.dtype, device=self.device
        )
        _fill(self.proj_matrix, self.proj_type, self.generator)
        self.proj_matrix_available = True

    def project(self, grads: Gradients, model_id: int) -> Tensor:
        """Return the projection, (batch, proj_dim), in the dtype of the matrix."""
        flat = _flat(grads, self)
        if model_id != self.model_id or not self.proj_matrix_available:
            self.model_id = model_id
            self.generate_sketch_matrix()
        dtype = self.proj_matrix.dtype
        return (_operand(flat, dtype) @ _operand(self.proj_matrix, dtype)).to(self.dtype)


class BasicProjector(AbstractProjector):
    """Multiply with a matrix that is drawn in blocks of columns, each from a seed of its own.

    Parameters
    ----------
    grad_dim, proj_dim, seed, proj_type, device, dtype, model_id
        As in :class:`BasicSingleBlockProjector`, except that block b of columns has the seed
        ``seed + 1000 * b + 100_000 * model_id``, so seeds that differ by 1000 share matrices.
    block_size
        Columns of a block. The matrix depends on it.

    Notes
    -----
    Blocks stay in memory between batches, as many as fit in half of the memory that is available
    when the first batch is projected (all of them take 4 * grad_dim * proj_dim bytes in float32).
    The others are drawn again for every batch, as all blocks are in the original.

    From block 100 on, the seeds differ from the original's, in which block 100 of a model id equals
    block 0 of the next. ``TRAKer`` raises an error if such a matrix would continue a run of the
    original.

    With ``dtype=torch.float16``, the matrix is drawn in float16, as in the original; on a CPU,
    gradients are then multiplied in float32 and the result is rounded.
    """

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int,
        proj_type: ProjectionType,
        device: torch.device | str,
        block_size: int = 100,
        dtype: torch.dtype = torch.float32,
        model_id: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(grad_dim, proj_dim, seed, proj_type, device)
        self.block_size = min(self.proj_dim, block_size)
        self.num_blocks = math.ceil(self.proj_dim / self.block_size)
        self.dtype = dtype
        self.model_id = model_id
        self.generator = torch.Generator(device=self.device)
        self._cached: dict[int, Tensor] = {}
        self._budget = 0
        self.get_generator_states()
        self.generate_sketch_matrix(self.generator_states[0])

    def free_memory(self) -> None:
        """Release all blocks."""
        self._cached.clear()
        self.proj_matrix_available = False
        vars(self).pop("proj_matrix", None)

    def get_generator_states(self) -> None:
        """Set ``seeds`` and ``generator_states``, one per block, to those of the model id."""
        self._cached.clear()
        self.jl_size = self.grad_dim * self.block_size
        self.seeds = [
            int(self.seed + _seed_of_block(block) + 100_000 * self.model_id)
            for block in range(self.num_blocks)
        ]
        self.generator_states = [
            self.generator.manual_seed(seed).get_state() for seed in self.seeds
        ]

    def generate_sketch_matrix(self, generator_state: Tensor) -> None:
        """Draw ``proj_matrix``, (grad_dim, block_size), from one of ``generator_states``."""
        self.generator.set_state(generator_state)
        self.proj_matrix = torch.empty(
            self.grad_dim, self.block_size, dtype=self.dtype, device=self.device
        )
        _fill(self.proj_matrix, self.proj_type, self.generator)
        self.proj_matrix_available = True

    def project(self, grads: Gradients, model_id: int) -> Tensor:
        """Return the projection, (batch, proj_dim), in the dtype of the matrix."""
        flat = _flat(grads, self)
        if model_id != self.model_id:
            self.model_id = model_id
            self.get_generator_states()
        flat = _operand(flat, self.dtype)
        sketch = torch.empty(len(flat), self.proj_dim, dtype=self.dtype, device=flat.device)
        for block in range(self.num_blocks):
            into = sketch[:, block * self.block_size : (block + 1) * self.block_size]
            into.copy_(flat @ self._block(block)[:, : into.shape[1]])
        return sketch

    def _block(self, block: int) -> Tensor:
        """Return the columns of a block, in the dtype in which they are multiplied."""
        if block in self._cached:
            return self._cached[block]
        self.generate_sketch_matrix(self.generator_states[block])
        drawn = _operand(self.proj_matrix, self.dtype)
        if not self._cached:
            self._budget = _cache_bytes(drawn.device)
        if (len(self._cached) + 1) * drawn.nbytes <= self._budget:
            self._cached[block] = drawn
        return drawn


def _seed_of_block(block: int) -> int:
    """Return the number added to the seed for a block; from block 100 on it is our own."""
    hundreds, rest = divmod(block, _BLOCKS_PER_CHECKPOINT)
    # torch's generators on a CPU use the lower 32 bits of a seed.
    return 1000 * rest + (2**31 + hundreds if hundreds else 0)


def _fill(matrix: Tensor, proj_type: str | ProjectionType, generator: torch.Generator) -> None:
    if proj_type == ProjectionType.normal:
        matrix.normal_(generator=generator)
    elif proj_type == ProjectionType.rademacher:
        matrix.bernoulli_(p=0.5, generator=generator).mul_(2).sub_(1)
    else:
        raise KeyError(
            f"expected proj_type 'normal' or 'rademacher', got {proj_type!r}; "
            "try proj_type=ProjectionType.normal"
        )


def _flat(grads: Gradients, projector: AbstractProjector) -> Tensor:
    """Return gradients as one tensor, and check its shape."""
    flat = grads if isinstance(grads, Tensor) else vectorize(grads, device=projector.device)
    if flat.shape[1:] != (projector.grad_dim,):
        raise ValueError(
            f"expected gradients of shape (batch, {projector.grad_dim}), got {tuple(flat.shape)}; "
            f"try {type(projector).__name__}(grad_dim={math.prod(flat.shape[1:])}, ...)"
        )
    return flat.detach()


def _operand(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix in a dtype, or in float32 if a CPU would multiply in half precision."""
    narrow = dtype.itemsize < 4 and matrix.device.type == "cpu"
    return matrix.to(torch.float32 if narrow else dtype)


def _cache_bytes(device: torch.device) -> int:
    """Return how many bytes of matrices may stay on a device between batches."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = psutil.virtual_memory().available
        free = min(free, MEMORY_LIMIT - psutil.Process().memory_info().rss)
    return int(_SHARE_OF_MEMORY * free)
