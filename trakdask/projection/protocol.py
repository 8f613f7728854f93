"""The base of all projectors, their cost, and their specs.

A projector is a frozen value that defines a linear map from gradients to features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from torch import Tensor

from trakdask.checks import require_choice, require_integer, shown
from trakdask.html_tables import HtmlTable
from trakdask.projection.rows import ROW_BLOCK, RowMap

DEFINITION_VERSION = 1
"""Version of the mathematical definition; stores of different versions cannot be compared."""

ARITHMETIC = {"int8x1": 1, "int8x2": 2, "int8x3": 3}
"""Number of 8-bit digits per gradient element, by arithmetic."""

ROUNDING_ERROR = {"int8x1": 1.1e-2, "int8x2": 9e-5, "int8x3": 4e-7}
"""Relative error of the features of Gaussian gradients, by arithmetic."""

_KINDS: dict[str, type[Projector]] = {}  # class of projectors, by the kind in a spec


def allowed(values: range | tuple[str, ...], example: object) -> Mapping[str, Any]:
    """Return the metadata of a dataclass field with the values that it may have.

    ``example`` is the value that error messages suggest.
    """
    return {"allowed": values, "example": example}


@dataclass(frozen=True)
class Cost:
    """The cost of a projection, and the error of feature products as gradient products.

    Parameters
    ----------
    operations
        Arithmetic operations per sample and checkpoint; a multiplication and an addition count as
        two.
    random_bits
        Bits of the random matrix, drawn once per micro-batch and checkpoint.
    buffer_bytes
        Working memory of one thread, in addition to gradients and features, for micro-batches of
        512 samples.
    rounding_error
        Relative error of the features of Gaussian gradients against exact arithmetic.
    product_error
        Standard deviation of the error of φ·φ' for two gradients of norm 1: first for gradients
        that are spread over many rows, then in the worst case.
    """

    operations: int
    random_bits: int
    buffer_bytes: int
    rounding_error: float
    product_error: tuple[float, float]


@dataclass(frozen=True)
class Projector(HtmlTable, ABC):
    """A linear map from flat per-sample gradients to feature columns.

    A projector is an immutable, hashable, picklable value: all state is in its fields. A new kind
    is a frozen dataclass that inherits from this class, sets ``kind``, and declares with
    ``allowed`` which values its fields take; the checks and the spec follow from that.
    Implementations for several devices belong behind ``project_block``, which chooses by
    ``block.device``.
    """

    kind: ClassVar[str]
    """Name of the kind in stored specs; it must never change."""

    row_alignment: ClassVar[int] = 1
    """A parameter tensor starts at a multiple of this many rows."""

    rounds_row_blocks: ClassVar[bool] = False
    """Whether gradients are rounded in blocks of 16384 rows, a number that the spec then has."""

    takes_all_rows: ClassVar[bool] = False
    """Whether all rows form a single block, which must then fit in memory."""

    def __init_subclass__(cls) -> None:
        if "kind" in vars(cls):
            _KINDS[cls.kind] = cls

    def __post_init__(self) -> None:
        for field in fields(self):
            name, limits = field.name, field.metadata.get("allowed")
            value, remedy = getattr(self, name), f"try {name}={field.metadata.get('example')!r}"
            if isinstance(limits, range):
                # NumPy's integers become Python's: a spec is JSON.
                value = require_integer(name, value, limits.start, limits.stop, remedy=remedy)
                object.__setattr__(self, name, value)
            elif limits:
                require_choice(name, value, limits, remedy=remedy)

    def width(self, n_rows: int) -> int:
        """Return the number of feature columns: ``proj_dim``, for kinds that have this field."""
        return self.proj_dim  # type: ignore[attr-defined]

    def scale(self, n_rows: int) -> float:
        """Return the factor that makes feature products estimate gradient products.

        The accumulated sums are multiplied by it at the end. By default it suits a matrix of
        signs: one over the square root of the number of columns.
        """
        return float(self.width(n_rows) ** -0.5)

    def spec(self) -> dict[str, Any]:
        """Return a JSON-able value that determines the map completely, given the row map.

        It contains the kind, the fields under their own names, and the layout of rows.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.init}
        return {
            "kind": self.kind,
            **{k: v.spec() if isinstance(v, Projector) else v for k, v in values.items()},
            "row_alignment": self.row_alignment,
            # The size of a block is part of what features are, where rounding depends on it.
            **({"row_block": ROW_BLOCK} if self.rounds_row_blocks else {}),
            "definition": DEFINITION_VERSION,
        }

    @abstractmethod
    def cost(self, n_rows: int) -> Cost:
        """Return the cost of projecting gradients of ``n_rows`` elements."""

    def _product_error(self) -> tuple[float, float]:
        """Return the product error for independent random entries with a kurtosis of at most 3."""
        width = self.width(0)
        return width**-0.5, (2 / width) ** 0.5

    @abstractmethod
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
            Shape (B, width), float64, on the same device, or on the CPU if that has no float64;
            changed in place. A sample whose gradient is not finite gets a row of NaN.
        """

    def sample_tile(self) -> int | None:
        """Return how many samples :meth:`project_block` is fastest for on a CPU.

        ``out`` then best has the strides (1, tile): the sums of a column lie side by side. None if
        it is fastest for all samples at once, each with adjacent columns.
        """
        return None

    def project_rows(self, rows: Tensor, row_offset: int, checkpoint: int, out: Tensor) -> None:
        """Add the projection of consecutive row blocks to ``out``, in their order.

        The parameters are as in :meth:`project_block`, except that ``rows`` may span several
        blocks. Blocks are projected one after the other unless the projector has a faster way to
        the same bits.
        """
        for first in range(0, rows.shape[1], ROW_BLOCK):
            block = rows[:, first : first + ROW_BLOCK]
            self.project_block(block, row_offset + first, checkpoint, out)

    def bind(self, row_map: RowMap) -> Self:
        """Return the projector for one layout of rows; itself unless it depends on the layout.

        Raises
        ------
        ValueError
            If the projector cannot serve these rows.
        """
        return self

    def selected_rows(self, checkpoint: int) -> npt.NDArray[np.int64] | None:
        """Return the rows that are projected, ascending; None for all rows.

        Selected rows are renumbered from 0 before they are split into blocks.
        """
        return None

    def back_project(self, row_map: RowMap, checkpoint: int, vectors: Tensor) -> Tensor:
        """Multiply the matrix from the other side: return P w for some vectors w.

        For every gradient g, ``project(g) @ w`` is ``g @ back_project(w)``, up to the rounding of
        the features. So whoever wants nothing but products with a few known vectors projects these
        back once, and never projects a gradient.

        Parameters
        ----------
        row_map
            Rows of the parameters.
        checkpoint
            Checkpoint id in [0, 2**32).
        vectors
            Shape (m, width), float, on the CPU.

        Returns
        -------
        Shape (m, n_rows), float32, with the scale of the features; rows of padding have no meaning.

        Raises
        ------
        ValueError
            If the matrix of the projector cannot be multiplied from this side.

        Notes
        -----
        Exactness: the matrix is the one that gradients are multiplied with; products are summed in
        float32. Cost: m multiplications and additions for every nonzero entry of the matrix, and
        its random bits, which are drawn once for all vectors.

        Examples
        --------
        >>> import torch
        >>> from trakdask.projection import Identity
        >>> rows = RowMap.from_shapes({"weight": (2, 3)}, alignment=1)
        >>> Identity().back_project(rows, 0, torch.ones(1, 6)).shape
        torch.Size([1, 6])
        """
        self.require_back_projection()
        scaled = vectors.double() * self.scale(row_map.n_rows)
        return self.multiply_vectors(row_map, checkpoint, scaled.float())

    def multiply_vectors(self, row_map: RowMap, checkpoint: int, vectors: Tensor) -> Tensor:
        """Return the product with the matrix before it is scaled; see :meth:`back_project`."""
        raise NotImplementedError

    def require_back_projection(self) -> None:
        """Check that the matrix can be multiplied from both sides, or raise a ValueError."""
        if type(self).multiply_vectors is Projector.multiply_vectors:
            raise ValueError(
                "expected features of a projector whose matrix can be multiplied from both sides, "
                f"got {type(self).__name__}; try td.SJLT, or another projector that has one"
            )


def from_spec(spec: Mapping[str, Any]) -> Projector:
    """Rebuild the projector that a spec describes.

    Parameters
    ----------
    spec
        The result of ``Projector.spec``, also after a round trip through JSON.

    Returns
    -------
    The projector, not bound to a row map.

    Raises
    ------
    ValueError
        If the kind is unknown, the matrix was defined in another version, or the spec differs from
        the spec of the projector rebuilt from it.
    TypeError
        If the spec is not a mapping, or a field has another type.

    Examples
    --------
    >>> from trakdask.projection import Identity
    >>> from_spec(Identity().spec())
    Identity()
    """
    remedy = "try the version named in attrs['trakdask_version'], or featurize again"
    require_choice("kind of the projector's spec", spec.get("kind"), sorted(_KINDS), remedy=remedy)
    kind = _KINDS[spec["kind"]]
    # Fields that a spec lacks are None, and others are compared below: either is a spec of another
    # version.
    values = {field.name: spec.get(field.name) for field in fields(kind) if field.init}
    inner = {name: from_spec(v) for name, v in values.items() if isinstance(v, Mapping)}
    projector = kind(**values | inner)
    rebuilt = projector.spec()
    for name in (*rebuilt, *spec):
        if rebuilt.get(name) != spec.get(name):
            raise ValueError(
                f"expected {name}={rebuilt.get(name)!r} in the spec of the {kind.kind} projector, "
                f"got {shown(spec.get(name))}; {remedy}"
            )
    return projector


def require_block_fits(projector: Projector, n_rows: int, n_samples: int, limit: float) -> None:
    """Reject a block of samples whose features cannot fit in ``limit`` bytes.

    This counts the float32 features of the block, the sums of a micro-batch of one sample (float64,
    and float32 as a result), and the buffers of the projector.

    Raises
    ------
    ValueError
        If they cannot fit; the message says how many bytes they would take.
    """
    # The buffers of a projector that takes all rows grow with the micro-batch, which can shrink.
    buffers = 0 if projector.takes_all_rows else projector.cost(n_rows).buffer_bytes
    width = projector.width(n_rows)
    needed = 4 * n_samples * width + (8 + 4) * width + buffers
    if needed > limit:
        raise ValueError(
            f"expected features that fit in {limit / 2**30:.1f} GiB of memory, got "
            f"{needed / 2**30:.1f} GiB ({needed} bytes) for {n_samples} samples with {width} "
            f"columns each, by {projector}; try td.SJLT(proj_dim=2048), or fewer samples per "
            "block: samples.chunk(sample=...)"
        )
