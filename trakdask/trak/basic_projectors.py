"""Projectors that draw the matrices of the TRAK package: unscaled, by torch, from the same seeds.

Unlike there, a matrix stays in memory between batches if it fits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import Enum
from typing import Any

import psutil
import torch
from distributed.system import MEMORY_LIMIT
from torch import Tensor

from trakdask.featurization.devices import free_bytes

_BLOCKS_PER_CHECKPOINT = 100


class ProjectionType(str, Enum):  # noqa: UP042 (as in the original, also in its str())
    """Entries of the matrix: independent N(0, 1), or -1 and +1 with equal probability."""

    normal = "normal"
    rademacher = "rademacher"


class AbstractProjector(ABC):
    """Base class of projectors; ``TRAKer(projector=...)`` takes an instance of a subclass.

    Parameters
    ----------
    grad_dim
        Number of gradient elements per sample.
    proj_dim
        Number of columns after the projection; 0 means ``grad_dim``.
    seed
        Seed of the matrix, together with the model id.
    proj_type
        Kind of the matrix, as written to ``metadata.json``.
    device
        Device on which the matrix is drawn and multiplied.
    """

    @abstractmethod
    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int,
        proj_type: str | ProjectionType,
        device: str | torch.device,
    ) -> None:
        self.grad_dim = grad_dim
        self.proj_dim = proj_dim
        self.seed = seed
        self.proj_type = proj_type
        self.device = device

    @abstractmethod
    def project(self, grads: Tensor, model_id: int) -> Tensor:
        """Return the projection, (batch, proj_dim), of gradients with the matrix of a model id.

        ``grads`` is a dict of gradients by parameter name, or one tensor (batch, grad_dim).
        """

    def free_memory(self) -> None:  # noqa: B027 (most projectors have no matrix in memory)
        """Release the matrix; the next call of :meth:`project` draws it again."""


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

    def project(self, grads: Mapping[str, Tensor] | Tensor, model_id: int) -> Tensor:
        """Return the gradients as one tensor."""
        return flattened(grads)


class BasicProjector(AbstractProjector):
    """Multiply with a matrix that is drawn in blocks of columns, each from a seed of its own.

    Parameters
    ----------
    grad_dim, proj_dim, seed, proj_type, device
        As in :class:`AbstractProjector`. Block b of columns has the seed
        ``seed + 1000 * b + 100_000 * model_id``, so seeds that differ by 1000 share matrices.
    block_size
        Columns of a block. The matrix depends on it.
    dtype
        Dtype of the matrix and the result.
    model_id
        Model id whose matrix is drawn first.

    Raises
    ------
    ValueError
        If ``proj_type`` is neither ``"normal"`` nor ``"rademacher"``.

    Notes
    -----
    The matrix stays in memory between batches if it takes at most half of the free memory (it has
    4 * grad_dim * proj_dim bytes in float32). Otherwise each block is drawn again for every batch,
    as in the original.

    From block 100 on, the seeds differ from the original's, in which block 100 of a model id equals
    block 0 of the next.

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
        self._kept: dict[int, Tensor] = {}
        self.get_generator_states()
        self._draw(self.generator_states[0])

    def free_memory(self) -> None:
        """Release the matrix."""
        self.proj_matrix_available = False
        vars(self).pop("proj_matrix", None)
        self._kept.clear()

    def get_generator_states(self) -> None:
        """Set ``seeds`` and ``generator_states``, one per block, for the model id."""
        self.jl_size = self.grad_dim * self.block_size
        self.seeds = self._seeds()
        self.generator_states = [
            self.generator.manual_seed(seed).get_state() for seed in self.seeds
        ]

    def generate_sketch_matrix(self, generator_state: Tensor) -> None:
        """Draw ``proj_matrix``, (grad_dim, block_size), from one of ``generator_states``."""
        self._draw(generator_state)

    def project(self, grads: Mapping[str, Tensor] | Tensor, model_id: int) -> Tensor:
        """Return the projection, (batch, proj_dim), in the dtype of the matrix."""
        if model_id != self.model_id:
            self.free_memory()
            self.model_id = model_id
            self.get_generator_states()
        flat = self._operand(flattened(grads))
        n_bytes = flat.element_size() * self.jl_size * self.num_blocks
        keeps = bool(self._kept) or self.num_blocks == 1 or _fits(n_bytes, flat.device)
        sketch = torch.empty(len(flat), self.proj_dim, dtype=self.dtype, device=flat.device)
        for block, into in enumerate(sketch.split(self.block_size, dim=1)):
            drawn = self._kept.get(block)
            if drawn is None:
                self._draw(self.generator_states[block])
                drawn = self._operand(self.proj_matrix)
            if keeps:
                self._kept[block] = drawn
            into.copy_(flat @ drawn[:, : into.shape[1]])
        return sketch

    def _seeds(self) -> list[int]:
        # torch's generators on a CPU use the lower 32 bits of a seed, whose others are our own.
        first = self.seed + 100_000 * self.model_id
        numbers = (divmod(block, _BLOCKS_PER_CHECKPOINT) for block in range(self.num_blocks))
        return [int(first + 1000 * rest + (2**31 + n if n else 0)) for n, rest in numbers]

    def _draw(self, generator_state: Tensor) -> None:
        self.generator.set_state(generator_state)
        matrix = torch.empty(self.grad_dim, self.block_size, dtype=self.dtype, device=self.device)
        if ProjectionType(self.proj_type) is ProjectionType.normal:
            matrix.normal_(generator=self.generator)
        else:
            matrix.bernoulli_(p=0.5, generator=self.generator).mul_(2).sub_(1)
        self.proj_matrix = matrix
        self.proj_matrix_available = True

    def _operand(self, tensor: Tensor) -> Tensor:
        """Return a factor of the product; CPUs multiply float16 in float32, and round the sums."""
        is_narrow = self.dtype.itemsize < 4 and tensor.device.type == "cpu"
        return tensor.to(torch.float32 if is_narrow else self.dtype)


class BasicSingleBlockProjector(BasicProjector):
    """Multiply with one matrix of shape (grad_dim, proj_dim), which stays in memory.

    Parameters
    ----------
    grad_dim, proj_dim, seed, proj_type, device, dtype, model_id
        As in :class:`BasicProjector`, but the generator's seed is ``seed + 10_000 * model_id``, so
        seed 10,000 with model id 0 gives the matrix of seed 0 with model id 1; use seeds below
        10,000. (This is as in the original, so that scores agree.)
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
        super().__init__(grad_dim, proj_dim, seed, proj_type, device, proj_dim, dtype, model_id)

    def generate_sketch_matrix(self) -> None:  # type: ignore[override]
        """Draw ``proj_matrix`` of the current model id."""
        self._draw(self.generator_states[0])

    def _seeds(self) -> list[int]:
        return [int(self.seed + 10_000 * self.model_id)]


def flattened(grads: Mapping[str, Tensor] | Tensor) -> Tensor:
    """Return gradients as one tensor, (batch, elements), whose dtype can represent all of them."""
    if isinstance(grads, Tensor):
        return grads.detach()
    return torch.cat([part.detach().reshape(len(part), -1) for part in grads.values()], dim=1)


def _fits(n_bytes: int, device: torch.device) -> bool:
    """Return whether a matrix of this size may stay in memory between batches."""
    if device.type != "cpu":
        available = free_bytes(device)
    else:
        free = MEMORY_LIMIT - psutil.Process().memory_info().rss  # containers have a limit
        available = min(psutil.virtual_memory().available, free)
    return 2 * n_bytes <= available
