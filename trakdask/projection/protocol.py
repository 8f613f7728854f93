"""What a projector is: a frozen value that names a linear map from gradients to features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from trakdask.projection.rows import ROW_BLOCK, RowMap

DEFINITION_VERSION = 1
"""Version of the mathematical definition; a change makes stores incomparable."""

ARITHMETIC = {"int8x1": 1, "int8x2": 2, "int8x3": 3}
"""Arithmetic -> number of 8-bit digits per gradient element."""

ROUNDING_ERROR = {"int8x1": 1.1e-2, "int8x2": 9e-5, "int8x3": 4e-7}


@dataclass(frozen=True)
class Cost:
    """What a projection takes and how far it is from the gradients themselves.

    Parameters
    ----------
    operations
        Arithmetic operations per sample and checkpoint, a multiplication and an addition being two.
    random_bits
        Bits of the random matrix, drawn once per micro-batch and checkpoint.
    buffer_bytes
        Working memory of one thread beside gradients and features, at 512 samples a micro-batch.
    rounding_error
        Relative error of the features of Gaussian gradients against exact arithmetic.
    product_error
        Standard deviation of the error of φ·φ' for two gradients of norm 1, first where they are
        spread over many rows, then in the worst case.
    """

    operations: int
    random_bits: int
    buffer_bytes: int
    rounding_error: float
    product_error: tuple[float, float]


@runtime_checkable
class Projector(Protocol):
    """A linear map from flat per-sample gradients to feature columns.

    A projector is an immutable, hashable, picklable value: all state is in its fields. A new kind
    is a frozen dataclass that inherits from this class; implementations for several devices belong
    behind ``project_block``, which chooses by ``block.device``.
    """

    takes_all_rows: ClassVar[bool] = False
    """Whether all rows are one block, which is then held as a whole."""

    @property
    def row_alignment(self) -> int:
        """Rows at which a parameter tensor may start."""

    def width(self, n_rows: int) -> int:
        """Return the number of feature columns."""

    def scale(self, n_rows: int) -> float:
        """Return the factor that the accumulated sums are multiplied by at the end."""

    def spec(self) -> dict[str, Any]:
        """Return a JSON-able value that determines the map completely, given the row map."""

    def cost(self, n_rows: int) -> Cost:
        """Return what projecting gradients of ``n_rows`` elements takes."""

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

    def project_rows(self, rows: Tensor, row_offset: int, checkpoint: int, out: Tensor) -> None:
        """Add the projection of consecutive row blocks to ``out``, in their order.

        Parameters are those of :meth:`project_block`, but for more ``rows``. One block after the
        other, unless the projector has a faster way to the same bits.
        """
        for first in range(0, rows.shape[1], ROW_BLOCK):
            block = rows[:, first : first + ROW_BLOCK]
            self.project_block(block, row_offset + first, checkpoint, out)

    def bind(self, row_map: RowMap) -> Self:
        """Return the projector for one layout of rows; itself unless it has to know the layout.

        Raises
        ------
        ValueError
            If the projector cannot serve these rows.
        """
        return self

    def selected_rows(self, checkpoint: int) -> npt.NDArray[np.int64] | None:
        """Return which rows are projected at all, ascending; None for every row.

        Selected rows are numbered anew, from 0, before they are cut into blocks.
        """
        return None


def check_integer(name: str, value: object, low: int, high: int, remedy: str) -> None:
    """Refuse what is no integer in [low, high)."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; it must be an integer. Use {remedy}.")
    if not low <= value < high:
        bound = f"2**{high.bit_length() - 1}" if high > 2**16 else str(high)
        raise ValueError(f"{name} is {value}; it must lie in [{low}, {bound}). Use {remedy}.")


def check_arithmetic(arithmetic: object) -> None:
    """Refuse what is no number of digits."""
    if arithmetic not in ARITHMETIC:
        raise ValueError(
            f"arithmetic is {arithmetic!r}; it must be one of {sorted(ARITHMETIC)}. "
            'Use arithmetic="int8x2".'
        )
