"""The base class of projectors of the TRAK package."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import Enum

import torch
from torch import Tensor

__all__ = ["AbstractProjector", "Gradients", "ProjectionType", "device_of"]

Gradients = Mapping[str, Tensor] | Tensor
"""Gradients by parameter name, each (batch, *shape), or all in one tensor (batch, elements)."""


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


def device_of(grads: Mapping[str, Tensor]) -> torch.device:
    """Return the device of gradients."""
    return next(iter(grads.values())).device
