"""Projectors of the TRAK package: from flat per-sample gradients to a few columns.

``Basic*`` draw the matrices of the original: unscaled, by torch, from the same seeds. Unlike there,
a matrix stays in memory between batches if it fits. All others use projectors of trakdask.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import psutil
import torch
from distributed.system import MEMORY_LIMIT
from torch import Tensor

from trakdask.featurization.devices import free_bytes
from trakdask.projection import FastJL, Projector, RowMap, project

# The original has seeds 1000 apart for blocks and 100,000 for model ids, so that block 100 would be
# block 0 of the next id.
_BLOCKS_PER_CHECKPOINT = 100
# The batch sizes for which `fast_jl` has compiled kernels, and how many seeds the original draws
# from for the chunks of a gradient.
_KERNELS = (8, 16, 32)
_CHUNK_SEEDS = 500
_log = logging.getLogger("TRAK")


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
        # `proj_matrix` is there from the start, as in the original.
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
        # Once some are kept, all are: asked again, the kept ones would count as memory in use. A
        # single block stays in any case, as in the original.
        keeps = bool(self._kept) or self.num_blocks == 1 or _fits(n_bytes, flat.device)
        sketch = torch.empty(len(flat), self.proj_dim, dtype=self.dtype, device=flat.device)
        for block, into in enumerate(sketch.split(self.block_size, dim=1)):
            drawn = self._kept.get(block)
            if drawn is None:
                self._draw(self.generator_states[block])
                drawn = self._operand(self.proj_matrix)
            if keeps:
                self._kept[block] = drawn
            # The last block is drawn as wide as the others, because a narrower one would have other
            # numbers.
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
            # 0 and 1 become -1 and 1.
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


class CudaProjector(AbstractProjector):
    """Multiply with the matrix of the CUDA extension ``fast_jl``, by ``FastJL``.

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
    ImportError
        If ``fast_jl`` is not installed.
    ValueError
        If the device is not a CUDA device, or a number is outside its range.

    Notes
    -----
    The matrix depends on the number of multiprocessors of the GPU, and gradients are rounded to
    float16. This class has not run on a GPU yet; its calls are tested with a substitute.
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
        self.max_batch_size = max_batch_size
        # `fast_jl` divides the parameters among the multiprocessors and seeds each part on its own.
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        fast_jl = FastJL(proj_dim, int(seed), ProjectionType(proj_type).value, self.num_sms)
        self._projector = StreamProjector(fast_jl, {"all": (grad_dim,)}, device)
        self.project(torch.zeros(1, grad_dim, device=device), model_id=0)  # does it work here?

    def project(self, grads: Mapping[str, Tensor] | Tensor, model_id: int) -> Tensor:
        """Return the projection, (batch, proj_dim) float32."""
        size = max((k for k in _KERNELS if k <= self.max_batch_size), default=_KERNELS[0])
        parts = flattened(grads).split(size)
        return torch.cat([self._projector.project(part, model_id) for part in parts])


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
        Device and dtype of the chunks and of the result. Chunks are added in float32.
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

    def allocate_input(self) -> None:
        """Do nothing: the original allocates a buffer for its input here."""

    def free_memory(self) -> None:
        """Release the memory of the projectors of the chunks."""
        for projector in self.projector_per_chunk:
            projector.free_memory()

    def project(self, grads: Mapping[str, Tensor] | Tensor, model_id: int) -> Tensor:
        """Return the sum of the projections of all chunks, (batch, proj_dim)."""
        flat = flattened(grads)
        result = torch.zeros(len(flat), self.proj_dim, device=self.device)
        for rows, into in zip(flat.split(self.feat_bs), result.split(self.feat_bs), strict=True):
            chunks = rows.split(self.params_per_chunk, dim=1)
            for projector, chunk in zip(self.projector_per_chunk, chunks, strict=True):
                # A part of the columns is not contiguous, and CUDA code reads memory from its start
                # on.
                chunk = chunk.to(self.device, self.dtype).contiguous()
                into += projector.project(chunk, model_id=model_id)
        return result.to(self.dtype)


class StreamProjector(AbstractProjector):
    """Multiply with the scaled matrix of a trakdask projector, such as ``td.SJLT``.

    Parameters
    ----------
    projector
        The projector; ``TRAKer(projector=td.SJLT(...))`` wraps it in this class.
    shapes
        Shape of each parameter, in the order of the gradients.
    device
        Device of the gradients.

    Notes
    -----
    The result equals the features of :func:`trakdask.featurize` for the checkpoint id ``model_id``.
    It is not divided by the square root of the number of parameters, because the matrix is scaled.
    """

    def __init__(
        self,
        projector: Projector,
        shapes: Mapping[str, Sequence[int]],
        device: str | torch.device = "cpu",
    ) -> None:
        self.row_map = RowMap.from_shapes(shapes, alignment=projector.row_alignment)
        self.projector = projector
        spec = projector.spec()
        super().__init__(
            grad_dim=self.row_map.n_parameters,
            proj_dim=projector.width(self.row_map.n_rows),
            seed=spec.get("seed", 0),
            proj_type=f"trakdask {spec['kind']}",
            device=device,
        )

    def project(self, grads: Mapping[str, Tensor] | Tensor, model_id: int) -> Tensor:
        """Return the projection, (batch, proj_dim) float32."""
        if isinstance(grads, Tensor):
            # Flat gradients are in the order of the model's parameters, as the shapes are.
            names = self.row_map.names
            parts = grads.split([self.row_map.size(name) for name in names], dim=1)
            grads = dict(zip(names, parts, strict=True))
        return project(self.projector, grads, self.row_map, int(model_id))


def default_projector(
    sizes: Sequence[int],
    proj_dim: int,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    max_batch_size: int,
) -> AbstractProjector | ChunkedCudaProjector:
    """Return a normal matrix on a CPU, ±1 on other devices, with ``fast_jl`` if it works.

    Parameters
    ----------
    sizes
        Elements of each parameter that is differentiated.
    proj_dim, seed, dtype, device, max_batch_size
        As for the projectors.
    """
    kind = ProjectionType.normal if device.type == "cpu" else ProjectionType.rademacher
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError(
                f"expected a CUDA device for device={str(device)!r}, got a machine without one; "
                "try device='cpu'"
            )
        # `fast_jl` indexes a batch of gradients by 32 bits.
        most, chunks = chunk_sizes(sizes, max_batch_size)
        seeds = [seed] if len(chunks) == 1 else chunk_seeds(seed, len(chunks))
        try:
            parts = [
                CudaProjector(size, proj_dim, chunk_seed, kind, device, max_batch_size)
                for size, chunk_seed in zip(chunks, seeds, strict=True)
            ]
        # It is not installed, does not run on this GPU, lacks a kernel, or cannot make so many
        # columns.
        except (ImportError, RuntimeError, AttributeError, ValueError) as err:
            _log.error("Could not use CudaProjector.\nReason: %s", err)
            _log.error("Defaulting to BasicProjector.")
        else:
            if len(parts) == 1:
                return parts[0]
            _log.info("Using ChunkedCudaProjector with chunks of sizes %s", chunks)
            return ChunkedCudaProjector(list(parts), most, chunks, max_batch_size, device, dtype)
    _log.info("Using BasicProjector with %s entries", kind.value)
    return BasicProjector(sum(sizes), proj_dim, seed, kind, device, dtype=dtype)


def chunk_seeds(seed: int, n_chunks: int) -> list[int]:
    """Return the original's seed of each chunk, but no seed twice.

    The original draws from 500 numbers, so that chunks may share a matrix.
    """
    seeds: list[int] = []
    for drawn in np.random.default_rng(seed).integers(0, _CHUNK_SEEDS, size=n_chunks).tolist():
        # Larger than any that is drawn, so that no seed but a repeated one changes.
        while drawn in seeds:
            drawn += _CHUNK_SEEDS
        seeds.append(drawn)
    return seeds


def chunk_sizes(sizes: Sequence[int], batch_size: int) -> tuple[int, list[int]]:
    """Return what ``utils.get_parameter_chunk_sizes`` does, for parameters of these sizes."""
    most, chunks, current = int(np.iinfo(np.uint32).max) // batch_size, [], 0
    for size in sizes:
        if current and current + size >= most:
            chunks.append(current)
            current = 0
        whole, rest = divmod(size, most)  # a size of at least `most` finds the chunk empty
        chunks += [most] * whole
        current += rest
    return most, [*chunks, current] if current else chunks


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
