"""Projectors of the TRAK package: from flat per-sample gradients to few columns.

Matrices are those of the original, entry by entry: unscaled, drawn by torch from the same seeds.
What is new is that they are kept between batches as long as they fit in memory.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import psutil
import torch
from distributed.system import MEMORY_LIMIT
from torch import Tensor

from trakdask.projection import FastJL, Projector, ProjectionStream, RowMap
from trakdask.trak.utils import vectorize

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

Gradients = Mapping[str, Tensor] | Tensor

_SHARE_OF_MEMORY = 0.5
_BLOCKS_PER_CHECKPOINT = 100
_KERNELS = (8, 16, 32)


class ProjectionType(str, Enum):
    """Entries of the matrix: independent N(0, 1), or -1 and +1 with equal probability."""

    normal = "normal"
    rademacher = "rademacher"


class AbstractProjector(ABC):
    """What ``TRAKer(projector=...)`` takes: an instance of a subclass.

    Parameters
    ----------
    grad_dim
        Number of gradient elements per sample.
    proj_dim
        Number of columns after the projection; 0 means ``grad_dim``.
    seed
        Of the matrix, together with the model id.
    proj_type
        Kind of the matrix, which is written to ``metadata.json``.
    device
        Where the matrix is drawn and multiplied.
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

    def free_memory(self) -> None:  # noqa: B027 (most projectors hold none)
        """Release the matrix; the next call of :meth:`project` draws it again."""


class NoOpProjector(AbstractProjector):
    """Return the gradients as they are, flattened to (batch, grad_dim).

    All arguments are optional and change nothing. Gradients stay on their device; the original
    moves them to ``device``, so that ``NoOpProjector()`` fails there on a machine without CUDA.
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
        return grads if isinstance(grads, Tensor) else vectorize(grads, device=_device_of(grads))

    def free_memory(self) -> None:
        """Do nothing."""


class BasicSingleBlockProjector(AbstractProjector):
    """Multiply with one matrix of shape (grad_dim, proj_dim), which is held in memory.

    Parameters
    ----------
    grad_dim, proj_dim, seed, proj_type, device
        As in :class:`AbstractProjector`. The generator's seed is ``seed + 10_000 * model_id``, so
        that seed 10,000 with model id 0 gives the matrix of seed 0 with model id 1: use seeds below
        10,000. (It must stay, since scores would not agree with the original's otherwise.)
    dtype
        Of the matrix and the result.
    model_id
        Whose matrix is drawn first.

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
        self.generator.manual_seed(self.seed + 10_000 * self.model_id)
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
        return _times(flat, self.proj_matrix).to(self.dtype)


class BasicProjector(AbstractProjector):
    """Multiply with a matrix that is drawn in blocks of columns, each from a seed of its own.

    Parameters
    ----------
    grad_dim, proj_dim, seed, proj_type, device, dtype, model_id
        As in :class:`BasicSingleBlockProjector`, but for the seeds: block b of columns has
        ``seed + 1000 * b + 100_000 * model_id``, so seeds that differ by 1000 share matrices.
    block_size
        Columns of a block. The matrix depends on it.

    Notes
    -----
    Blocks are kept between batches, as many as fit in half of the memory that is available when the
    first batch is projected: with float32, 4 * grad_dim * proj_dim bytes for all. The others are
    drawn again for every batch, as the original does with all of them.

    A matrix of more than 100 blocks has seeds of its own from block 100 on, since the original's
    block 100 of a model id is block 0 of the next. ``TRAKer`` refuses to continue a run of the
    original with such a matrix.

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
        self._budget = 0
        self.get_generator_states()
        self.generate_sketch_matrix(self.generator_states[0])

    def free_memory(self) -> None:
        """Release all blocks."""
        self._kept.clear()
        self.proj_matrix_available = False
        vars(self).pop("proj_matrix", None)

    def get_generator_states(self) -> None:
        """Set ``seeds`` and ``generator_states``, one per block, to those of the model id."""
        self._kept.clear()
        self.jl_size = self.grad_dim * self.block_size
        self.seeds = [
            self.seed + _seed_of_block(block) + 100_000 * self.model_id
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
        if block in self._kept:
            return self._kept[block]
        self.generate_sketch_matrix(self.generator_states[block])
        drawn = _operand(self.proj_matrix, self.dtype)
        if not self._kept:
            self._budget = _spare_bytes(drawn.device)
        if (len(self._kept) + 1) * drawn.nbytes <= self._budget:
            self._kept[block] = drawn
        return drawn


class CudaProjector(AbstractProjector):
    """Multiply with the matrix of the CUDA extension ``fast_jl``.

    Parameters
    ----------
    grad_dim, proj_dim, seed, proj_type, device
        As in :class:`AbstractProjector`; ``proj_dim`` is a multiple of 512. The seed of a model id
        is ``seed + 10_000 * model_id``.
    max_batch_size
        Samples that a kernel may take: 8, 16 or 32. Another number means the next smaller one, as
        40 does in the original too, where 24 fails.

    Raises
    ------
    ValueError
        If the device is not a CUDA device, or a number is outside its range.
    ModuleNotFoundError
        If ``fast_jl`` is not installed.

    Notes
    -----
    See :class:`trakdask.FastJL`, which does the work: the matrix depends on the number of
    multiprocessors of the GPU, and gradients are rounded to float16. This class has not been run on
    a GPU yet; its calls are tested with a stand-in for the extension.
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
                f"expected a CUDA device, got device={str(device)!r}; try BasicProjector there"
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
        """Do nothing: the matrix is never held."""


class ChunkedCudaProjector:
    """Project consecutive chunks of the gradient elements by one projector each, and add up.

    Parameters
    ----------
    projector_per_chunk
        Projectors of equal ``proj_dim``.
    max_chunk_size
        Elements of the largest chunk.
    params_per_chunk
        Elements of each chunk. A parameter may lie in several chunks.
    feat_bs
        Samples that are projected at once. A larger batch is projected in parts; the original
        raises an error.
    device, dtype
        Of the input buffer; of the result. Chunks are added in float32.
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
        """Make the buffer ``ch_input``, (feat_bs, elements of the largest chunk)."""
        if not self.input_allocated:
            size = (self.feat_bs, min(self.max_chunk_size, max(self.params_per_chunk)))
            self.ch_input = torch.zeros(size, device=self.device, dtype=self.dtype)
            self.input_allocated = True

    def free_memory(self) -> None:
        """Release the buffer, and what the projectors of the chunks hold."""
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


class StreamProjector(AbstractProjector):
    """Multiply with the matrix of a trakdask projector, such as ``td.SJLT``, scaled as there.

    Parameters
    ----------
    projector
        The projector; ``TRAKer(projector=td.SJLT(...))`` wraps it by itself.
    shapes
        Shape of each parameter, in the order of the gradients.
    device
        Device of the gradients.

    Notes
    -----
    The result is what :func:`trakdask.featurize` computes for checkpoint id ``model_id``, without
    the division by the square root of the number of parameters: the matrix is scaled already.
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

    def project(self, grads: Gradients, model_id: int) -> Tensor:
        """Return the projection, (batch, proj_dim) float32."""
        names = self.row_map.names
        if isinstance(grads, Tensor):
            parts = grads.split([self.row_map.size(name) for name in names], dim=1)
            grads = dict(zip(names, parts, strict=True))
        device = _device_of(grads)
        stream = ProjectionStream(
            self.projector, self.row_map, len(grads[names[0]]), int(model_id), device
        )
        for name in names:
            stream.add(name, grads[name])
        return stream.result()


def _seed_of_block(block: int) -> int:
    """Return what a block adds to the seed; from block 100 on not what the original adds."""
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
    """Return gradients as one tensor on the projector's device, checked."""
    flat = grads if isinstance(grads, Tensor) else vectorize(grads, device=projector.device)
    if flat.shape[1:] != (projector.grad_dim,):
        raise ValueError(
            f"expected gradients of shape (batch, {projector.grad_dim}), got {tuple(flat.shape)}; "
            f"try {type(projector).__name__}(grad_dim={math.prod(flat.shape[1:])}, ...)"
        )
    return flat.detach()


def _operand(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix in a dtype, or, where a CPU would multiply in half precision, in float32."""
    narrow = dtype.itemsize < 4 and matrix.device.type == "cpu"
    return matrix.to(torch.float32 if narrow else dtype)


def _times(flat: Tensor, matrix: Tensor) -> Tensor:
    return _operand(flat, matrix.dtype) @ _operand(matrix, matrix.dtype)


def _spare_bytes(device: torch.device) -> int:
    """Return how many bytes of matrices may be kept on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = psutil.virtual_memory().available
        free = min(free, MEMORY_LIMIT - psutil.Process().memory_info().rss)
    return int(_SHARE_OF_MEMORY * free)


def _copy_columns(flat: Sequence[Tensor], start: int, into: Tensor) -> None:
    """Copy columns from ``start`` on of tensors that lie side by side."""
    position = 0
    for part in flat:
        first = max(start, position)
        last = min(start + into.shape[1], position + part.shape[1])
        if first < last:
            into[:, first - start : last - start] = part[:, first - position : last - position]
        position += part.shape[1]


def _device_of(grads: Mapping[str, Tensor]) -> torch.device:
    return next(iter(grads.values())).device
