"""Rows of the projection matrix: the place of each parameter, and the grid of blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

ROW_ALIGNMENT = 512
"""In a random projection, a parameter tensor starts at a multiple of this many rows."""

ROW_BLOCK = 16384
"""Rows of one quantisation block. Blocks tile the global row grid from row 0."""


@dataclass(frozen=True)
class RowMap:
    """A fixed map from parameter names to rows of the projection matrix.

    Build it with :meth:`from_shapes`, for at least one parameter. The order of the names must never
    change for stored features.

    Parameters
    ----------
    names
        Parameter names, in row order.
    shapes
        Shape of each parameter.
    offsets
        First row of each parameter, a multiple of ``alignment``.
    alignment
        A parameter starts at a multiple of this many rows.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    alignment: int

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, Sequence[int]], *, alignment: int) -> RowMap:
        """Assign consecutive rows to parameters, each starting at the next aligned row.

        Parameters
        ----------
        shapes
            Shape of each parameter by name, in the order of the rows.
        alignment
            The projector's ``row_alignment``.

        Returns
        -------
        The map, which is the same for the same shapes in the same order.

        Examples
        --------
        >>> rows = RowMap.from_shapes({"weight": (3, 4), "bias": (3,)}, alignment=512)
        >>> rows.offset("bias"), rows.n_rows, rows.n_parameters
        (512, 515, 15)
        """
        offsets, row = [], 0
        for shape in shapes.values():
            # Up to the next multiple. What lies between is padding, which is 0 in every gradient.
            row = -(-row // alignment) * alignment
            offsets.append(row)
            row += math.prod(shape)
        sizes = tuple(tuple(int(length) for length in shape) for shape in shapes.values())
        return cls(tuple(shapes), sizes, tuple(offsets), alignment)

    @cached_property
    def _position(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    def offset(self, name: str) -> int:
        """Return the first row of a parameter."""
        return self.offsets[self._position[name]]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter."""
        return self.shapes[self._position[name]]

    def size(self, name: str) -> int:
        """Return the number of elements of a parameter."""
        return math.prod(self.shape(name))

    @property
    def n_rows(self) -> int:
        """Number of rows up to the last element of the last parameter."""
        return self.offsets[-1] + math.prod(self.shapes[-1])

    @property
    def n_parameters(self) -> int:
        """Number of elements of all parameters, without padding."""
        return sum(math.prod(shape) for shape in self.shapes)
