"""Projectors of the TRAK package: from flat per-sample gradients to a few columns.

``Basic*`` draw the matrices of the original; all others use projectors of trakdask.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trakdask.projection import FastJL, Projector, RowMap, project
from trakdask.trak.basic_projectors import (
    AbstractProjector,
    BasicProjector,
    ProjectionType,
    flattened,
)
from trakdask.trak.basic_projectors import BasicSingleBlockProjector as BasicSingleBlockProjector
from trakdask.trak.basic_projectors import NoOpProjector as NoOpProjector

_KERNELS = (8, 16, 32)
_CHUNK_SEEDS = 500
_log = logging.getLogger("TRAK")


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
        most, chunks = chunk_sizes(sizes, max_batch_size)
        seeds = [seed] if len(chunks) == 1 else chunk_seeds(seed, len(chunks))
        try:
            parts = [
                CudaProjector(size, proj_dim, chunk_seed, kind, device, max_batch_size)
                for size, chunk_seed in zip(chunks, seeds, strict=True)
            ]
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
