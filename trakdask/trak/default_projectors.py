"""The projector that :class:`TRAKer` uses by default."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trakdask.trak.projectors import (
    BasicProjector,
    ChunkedCudaProjector,
    CudaProjector,
    ProjectionType,
)
from trakdask.trak.tensors import chunk_sizes

__all__ = ["DefaultProjector", "seeds_of"]

_NO_CUDA_PROJECTOR = (ImportError, RuntimeError, AttributeError, ValueError)
_CHUNK_SEEDS = 500
_log = logging.getLogger("TRAK")


@dataclass(frozen=True)
class DefaultProjector:
    """The settings that determine the default projector.

    Parameters
    ----------
    sizes
        Elements of each parameter that is differentiated.
    proj_dim, seed, dtype, device, max_batch_size
        As for the projectors.
    """

    sizes: tuple[int, ...]
    proj_dim: int
    seed: int
    dtype: torch.dtype
    device: torch.device
    max_batch_size: int

    def make(self) -> BasicProjector | CudaProjector | ChunkedCudaProjector:
        """Return a normal matrix on a CPU, ±1 on other devices, with ``fast_jl`` if it works."""
        if self.device.type == "cpu":
            _log.info("Using BasicProjector with a normal matrix, since the device is a CPU")
            return self._basic(ProjectionType.normal)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(
                f"expected a CUDA device for device={str(self.device)!r}, got a machine without "
                "one; try device='cpu'"
            )
        try:
            return self._cuda()
        except _NO_CUDA_PROJECTOR as err:
            _log.error("Could not use CudaProjector.\nReason: %s", err)
            _log.error("Defaulting to BasicProjector.")
            return self._basic(ProjectionType.rademacher)

    def _basic(self, proj_type: ProjectionType) -> BasicProjector:
        return BasicProjector(
            grad_dim=sum(self.sizes),
            proj_dim=self.proj_dim,
            seed=self.seed,
            proj_type=proj_type,
            dtype=self.dtype,
            device=self.device,
        )

    def _cuda(self) -> CudaProjector | ChunkedCudaProjector:
        most, chunks = chunk_sizes(self.sizes, self.max_batch_size)
        seeds = [self.seed] if len(chunks) == 1 else chunk_seeds(self.seed, len(chunks))
        parts = [
            CudaProjector(
                grad_dim=size,
                proj_dim=self.proj_dim,
                seed=seed,
                proj_type=ProjectionType.rademacher,
                device=self.device,
                max_batch_size=self.max_batch_size,
            )
            for size, seed in zip(chunks, seeds, strict=True)
        ]
        if len(parts) == 1:
            return parts[0]
        _log.info("Using ChunkedCudaProjector with chunks of sizes %s", chunks)
        return ChunkedCudaProjector(
            list(parts), most, chunks, self.max_batch_size, self.device, self.dtype
        )


def chunk_seeds(seed: int, n_chunks: int) -> list[int]:
    """Return the original's seed of each chunk, but no seed twice.

    The original draws from 500 numbers, so that chunks may share a matrix.
    """
    seeds: list[int] = []
    for drawn in np.random.default_rng(seed).integers(0, _CHUNK_SEEDS, size=n_chunks).tolist():
        free = (each for each in range(drawn, 10_000, _CHUNK_SEEDS) if each not in seeds)
        seeds.append(next(free))
    return seeds


def seeds_of(projector: Any) -> str:
    """Describe whether all parts of a matrix have the seeds of the original."""
    parts = getattr(projector, "projector_per_chunk", ())
    beyond = getattr(projector, "num_blocks", 1) > 100
    repaired = any(getattr(part, "seed", 0) >= _CHUNK_SEEDS for part in parts)
    return "distinct" if beyond or repaired else "as in traker"
