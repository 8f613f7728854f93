"""Projectors: frozen values that name a linear map from gradients to features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from trakdask.projection.rademacher import accumulate_rademacher
from trakdask.projection.rows import ROW_ALIGNMENT, ROW_BLOCK

DEFINITION_VERSION = 1
"""Version of the mathematical definition; a change makes stores incomparable."""
_ARITHMETIC = {"int8x1": 1, "int8x2": 2, "int8x3": 3}


@runtime_checkable
class Projector(Protocol):
    """A linear map from flat per-sample gradients to feature columns.

    A projector is an immutable, hashable, picklable value: all state is in its fields. A new kind
    is a new frozen class with these members; implementations for several devices belong behind
    ``project_block``, which chooses by ``block.device``.
    """

    @property
    def row_alignment(self) -> int:
        """Rows at which a parameter tensor may start."""

    def width(self, n_rows: int) -> int:
        """Return the number of feature columns."""

    def scale(self, n_rows: int) -> float:
        """Return the factor that the accumulated sums are multiplied by at the end."""

    def spec(self) -> dict[str, Any]:
        """Return a JSON-able value that determines the map completely."""

    def project_block(self, block: Tensor, row_offset: int, checkpoint: int, out: Tensor) -> None:
        """Add the projection of one row block to ``out``.

        Parameters
        ----------
        block
            Shape (B, rows), any float dtype: one block of the global grid of 16384 rows; only the
            last block of a row map may be short.
        row_offset
            First row of the block, a multiple of 16384.
        checkpoint
            Checkpoint id in [0, 2**32).
        out
            Shape (B, width), float64, on the same device, changed in place. A sample whose gradient
            is not finite gets a row of NaN.
        """


@dataclass(frozen=True)
class Rademacher:
    """Project with a dense matrix of random signs.

    The matrix P has entries +1 and -1 that are a pure function of (seed, checkpoint, row, column);
    a feature is ``proj_dim**-0.5 * P.T @ gradient``. A smaller ``proj_dim`` is a prefix of a
    larger one, up to that factor.

    Parameters
    ----------
    proj_dim
        Number of feature columns, in [1, 2**32).
    seed
        Integer in [0, 2**64).
    arithmetic
        8-bit digits per gradient element: ``"int8x1"`` (fast), ``"int8x2"`` (default) or
        ``"int8x3"`` (as accurate as float32 input). More digits cost proportionally more.

    Raises
    ------
    TypeError, ValueError
        If an argument is not of its kind, or outside its range.

    Notes
    -----
    Exactness: products are sums of integers, hence bitwise independent of batch, tile and thread
    count; the rounding of the gradients to digits is the only error.

    References
    ----------
    Achlioptas 2003, "Database-friendly random projections". Park et al. 2023, "TRAK", step 2.

    Examples
    --------
    >>> Rademacher(proj_dim=512).width(n_rows=10**6)
    512
    """

    proj_dim: int = 2048
    seed: int = 0
    arithmetic: str = "int8x2"

    row_alignment: ClassVar[int] = ROW_ALIGNMENT

    def __post_init__(self) -> None:
        check_integer("proj_dim", self.proj_dim, 1, 2**32, "proj_dim=2048")
        check_integer("seed", self.seed, 0, 2**64, "seed=0")
        if self.arithmetic not in _ARITHMETIC:
            raise ValueError(
                f"arithmetic is {self.arithmetic!r}; it must be one of {sorted(_ARITHMETIC)}. "
                'Use arithmetic="int8x2".'
            )

    def width(self, n_rows: int) -> int:
        """Return ``proj_dim``."""
        return self.proj_dim

    def scale(self, n_rows: int) -> float:
        """Return ``proj_dim**-0.5``, which makes feature products estimate gradient products."""
        return float(self.proj_dim**-0.5)

    def spec(self) -> dict[str, Any]:
        """Return a JSON-able value that determines the map completely."""
        return {
            "kind": "rademacher",
            "proj_dim": self.proj_dim,
            "seed": self.seed,
            "arithmetic": self.arithmetic,
            "row_alignment": self.row_alignment,
            "row_block": ROW_BLOCK,
            "definition": DEFINITION_VERSION,
        }

    def project_block(self, block: Tensor, row_offset: int, checkpoint: int, out: Tensor) -> None:
        """Add the projection of one row block to ``out``; see :class:`Projector`.

        Notes
        -----
        Cost: see :func:`~trakdask.projection.rademacher.accumulate_rademacher`.
        A block on another device is copied to the CPU, multiplied there, and the sums copied back.
        """
        on_cpu = block.device.type == "cpu"
        target = out if on_cpu else torch.zeros(out.shape, dtype=torch.float64)
        accumulate_rademacher(
            block.cpu(),
            row_offset,
            seed=self.seed,
            checkpoint=checkpoint,
            n_digits=_ARITHMETIC[self.arithmetic],
            out=target,
        )
        if not on_cpu:
            out += target.to(out.device)


@dataclass(frozen=True)
class Identity:
    """Keep the whole gradient, for small models and exact answers: columns are rows of the map."""

    row_alignment: ClassVar[int] = 1

    def width(self, n_rows: int) -> int:
        """Return ``n_rows``."""
        return n_rows

    def scale(self, n_rows: int) -> float:
        """Return 1."""
        return 1.0

    def spec(self) -> dict[str, Any]:
        """Return a JSON-able value that determines the map completely."""
        return {
            "kind": "identity",
            "row_alignment": self.row_alignment,
            "definition": DEFINITION_VERSION,
        }

    def project_block(self, block: Tensor, row_offset: int, checkpoint: int, out: Tensor) -> None:
        """Add one row block to its own columns of ``out``; see :class:`Projector`."""
        out[:, row_offset : row_offset + block.shape[1]].add_(block)
        out[~torch.isfinite(block).all(1)] = torch.nan


def check_integer(name: str, value: object, low: int, high: int, remedy: str) -> None:
    """Refuse what is no integer in [low, high)."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; it must be an integer. Use {remedy}.")
    if not low <= value < high:
        bound = f"2**{high.bit_length() - 1}"
        raise ValueError(f"{name} is {value}; it must lie in [{low}, {bound}). Use {remedy}.")
