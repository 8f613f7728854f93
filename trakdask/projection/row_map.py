"""The map from parameter tensors to rows of the projection matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trakdask.checks import shown

ROW_ALIGNMENT = 512
"""In a random projection, a parameter tensor starts at a multiple of this many rows."""

ROW_BLOCK = 16384
"""Rows of one quantisation block. Blocks tile the global row grid from row 0."""


@dataclass(frozen=True)
class RowMap:
    """A fixed map from parameter names to rows of the projection matrix.

    Build it with :meth:`from_shapes`. The order of the names is the order in which gradients are
    streamed, and must never change for stored features.

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

        Raises
        ------
        ValueError
            If there is no parameter, a size is negative, or ``alignment`` does not divide
            the quantisation block.

        Examples
        --------
        >>> rows = RowMap.from_shapes({"weight": (3, 4), "bias": (3,)}, alignment=512)
        >>> rows.offset("bias"), rows.n_rows, rows.n_parameters
        (512, 515, 15)
        """
        _check_layout(shapes, alignment)
        offsets, row = [], 0
        for shape in shapes.values():
            row = -(-row // alignment) * alignment
            offsets.append(row)
            row += math.prod(shape)
        sizes = tuple(tuple(int(length) for length in shape) for shape in shapes.values())
        return cls(tuple(shapes), sizes, tuple(offsets), alignment)

    @cached_property
    def _position(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    def _find(self, name: str) -> int:
        try:
            return self._position[name]
        except KeyError as err:
            raise ValueError(
                f"expected one of the {len(self.names)} parameters of the row map, got {name!r}; "
                f"try one of row_map.names, which starts with {self.names[:3]}"
            ) from err

    def offset(self, name: str) -> int:
        """Return the first row of a parameter."""
        return self.offsets[self._find(name)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter."""
        return self.shapes[self._find(name)]

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

    def to_dict(self) -> dict[str, Any]:
        """Return the map as JSON-able values; :meth:`from_dict` reads it back."""
        tensors = [
            {"name": name, "shape": list(shape), "offset": offset}
            for name, shape, offset in zip(self.names, self.shapes, self.offsets, strict=True)
        ]
        return {"alignment": self.alignment, "tensors": tensors}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RowMap:
        """Read a map written by :meth:`to_dict`.

        Raises
        ------
        ValueError
            If the stored offsets do not follow from the stored shapes and alignment.

        Examples
        --------
        >>> rows = RowMap.from_shapes({"weight": (3, 4)}, alignment=1)
        >>> RowMap.from_dict(rows.to_dict()) == rows
        True
        """
        tensors = data["tensors"]
        shapes = {tensor["name"]: tensor["shape"] for tensor in tensors}
        row_map = cls.from_shapes(shapes, alignment=data["alignment"])
        stored = tuple(tensor["offset"] for tensor in tensors)
        if stored != row_map.offsets:
            raise ValueError(
                f"expected row offsets {row_map.offsets[:4]}, which follow from the stored shapes, "
                f"got {stored[:4]}; try RowMap.from_shapes(shapes, alignment={row_map.alignment}), "
                "and compute the features again"
            )
        return row_map


def _check_layout(shapes: Mapping[str, Sequence[int]], alignment: int) -> None:
    if alignment < 1 or ROW_BLOCK % alignment:
        raise ValueError(
            f"expected alignment to be a positive divisor of {ROW_BLOCK}, got {alignment}; try "
            "alignment=projector.row_alignment"
        )
    if not isinstance(shapes, Mapping):
        raise TypeError(
            f"expected a mapping of parameter names to shapes, got {shown(shapes)}; try "
            "{name: parameter.shape for name, parameter in model.named_parameters()}"
        )
    if not shapes:
        raise ValueError(
            "expected the shape of at least one parameter, got an empty mapping; try "
            "{name: parameter.shape for name, parameter in model.named_parameters()}"
        )
    for name, shape in shapes.items():
        if any(length < 0 for length in shape):
            raise ValueError(
                f"expected lengths >= 0 in the shape of parameter {name!r}, got {tuple(shape)}; "
                "try tuple(parameter.shape)"
            )
