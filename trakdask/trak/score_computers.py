"""From projected gradients to scores: the Gram matrix, its inverse, and the final product.

The TRAK package defines the interface, and :class:`BasicScoreComputer` returns the same numbers,
with two corrections: float16 gradients are summed in float32 (the original's sums overflow beyond
65504, and it rounds λ below 6e-8 to 0), and a Gram matrix that is singular in float32 is logged.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod

import torch
from torch import Tensor


class AbstractScoreComputer(ABC):
    """Base class of score computers; ``TRAKer(score_computer=...)`` takes a subclass.

    As in the original, ``TRAKer`` also passes it ``logging_level`` and ``lambda_reg``.

    Parameters
    ----------
    dtype
        Dtype of features: ``torch.float16`` or ``torch.float32``.
    device
        Device on which matrices are multiplied.
    """

    @abstractmethod
    def __init__(self, dtype: torch.dtype, device: torch.device | str) -> None:
        self.dtype = dtype
        self.device = device

    @abstractmethod
    def get_xtx(self, grads: Tensor) -> Tensor:
        """Return the Gram matrix GᵀG, (p, p), of projected gradients G, (n, p)."""

    @abstractmethod
    def get_x_xtx_inv(self, grads: Tensor, xtx: Tensor) -> Tensor:
        """Return the features G (GᵀG)⁻¹, (n, p), from G and the result of :meth:`get_xtx`."""

    @abstractmethod
    def get_scores(self, features: Tensor, target_grads: Tensor, accumulator: Tensor) -> None:
        """Add ``features @ target_grads.T`` to ``accumulator``, (n, m), in host memory."""


class BasicScoreComputer(AbstractScoreComputer):
    """Features G (GᵀG + λI)⁻¹ divided by the mean absolute entry of that inverse.

    Parameters
    ----------
    dtype, device
        As in :class:`AbstractScoreComputer`.
    CUDA_MAX_DIM_SIZE
        Rows of a block.
    logging_level
        Level of the logger ``ScoreComputer``.
    lambda_reg
        λ, in the units of the Gram matrix.

    Notes
    -----
    Because of the division, scores scale with the square of a checkpoint's gradients, so
    checkpoints have different weights in a mean over several. The division is part of the scores of
    the TRAK package; :func:`trakdask.score` omits it.
    """

    _divides = True

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device | str,
        CUDA_MAX_DIM_SIZE: int = 20_000,
        logging_level: int = logging.INFO,
        lambda_reg: float = 0.0,
    ) -> None:
        super().__init__(dtype, device)
        self.CUDA_MAX_DIM_SIZE = CUDA_MAX_DIM_SIZE
        self.logger = logging.getLogger("ScoreComputer")
        self.logger.setLevel(logging_level)
        self.lambda_reg = lambda_reg

    def get_xtx(self, grads: Tensor) -> Tensor:
        """Return the Gram matrix, (p, p), summed in float32 whatever the dtype of ``grads``."""
        self.proj_dim = grads.shape[1]
        # Sums of float16 products would be infinite beyond 65504, and lose digits long before.
        total = torch.zeros(self.proj_dim, self.proj_dim, device=self.device)
        for block in grads.split(self.CUDA_MAX_DIM_SIZE):
            rows = block.to(self.device, torch.float32)
            total += rows.T @ rows
        return total

    def get_x_xtx_inv(self, grads: Tensor, xtx: Tensor) -> Tensor:
        """Return the features, (n, p), in the dtype of the computer and on its device."""
        # λ is added in float32: in float16, one below 6e-8 is 0.
        damped = xtx.float() + self.lambda_reg * torch.eye(len(xtx), device=xtx.device)
        inverted = torch.linalg.inv(damped)
        # In the 1-norm, the largest sum of a column: singular values would cost more than the
        # inverse.
        condition = torch.linalg.matrix_norm(damped, 1) * torch.linalg.matrix_norm(inverted, 1)
        if condition > 1 / torch.finfo(torch.float32).eps:  # whatever the number of samples
            self.logger.warning(
                "the Gram matrix of %d samples and %d columns is singular in float32 (condition "
                "number %.0e), so that its inverse is not determined; try a larger lambda_reg than "
                "%s, or a smaller proj_dim",
                *(len(grads), len(damped), condition, self.lambda_reg),
            )
        if self._divides:
            inverted /= inverted.abs().mean()
        # Block by block, because gradients of all samples may fit on the device in float16 only.
        result = torch.empty(len(grads), len(inverted), dtype=self.dtype, device=self.device)
        blocks = (m.split(self.CUDA_MAX_DIM_SIZE) for m in (grads, result))
        for block, into in zip(*blocks, strict=True):
            into.copy_(block.to(self.device, torch.float32) @ inverted)
        return result

    def get_scores(self, features: Tensor, target_grads: Tensor, accumulator: Tensor) -> None:
        """Add ``features @ target_grads.T`` to ``accumulator``."""
        self.logger.debug("scores of %d samples, %d targets", len(features), len(target_grads))
        blocks = (m.split(self.CUDA_MAX_DIM_SIZE) for m in (features, accumulator))
        for block, into in zip(*blocks, strict=True):  # a float32 copy of all may not fit
            into += product(block, target_grads).cpu()


class BasicSingleBlockScoreComputer(BasicScoreComputer):
    """The plain formula in single matrix products, for small data.

    The inverse is not divided by its mean absolute entry, so scores differ from the ones of
    :class:`BasicScoreComputer` by one factor per checkpoint, as in the original. (The original's
    class cannot be instantiated, and has no λ.)

    Parameters
    ----------
    dtype, device, logging_level, lambda_reg
        As in :class:`BasicScoreComputer`.
    """

    _divides = False

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device | str,
        logging_level: int = logging.INFO,
        lambda_reg: float = 0.0,
    ) -> None:
        # More rows than any data have: one block.
        super().__init__(dtype, device, 2**62, logging_level, lambda_reg)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right.T``; float16 on a CPU is multiplied in float32."""
    # torch sums float16 on CPUs in float16, which overflows, and takes many times as long.
    if left.device.type == "cpu" and left.dtype.itemsize <= 2:
        left, right = left.float(), right.float()
    return left @ right.T
