"""A Kronecker product of sign matrices for each weight matrix, which is cheap but less accurate."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from trakdask.projection.integer_products import sign_bits, signed_sums, signs_of, split_digits
from trakdask.projection.memory import Scratch
from trakdask.projection.philox import (
    ROWS_PER_COUNTER,
    STREAM_KRONECKER_LEFT,
    STREAM_KRONECKER_RIGHT,
    STREAM_RADEMACHER,
)
from trakdask.projection.protocol import (
    ROUNDING_ERROR,
    ROW_ALIGNMENT,
    ROW_BLOCK,
    Cost,
    Projector,
    RowMap,
    allowed,
)
from trakdask.projection.quantize import FRACTION_BITS, quantize

# Sizes of buffers. They do not affect results, since all sums within a row block are exact.
_SAMPLE_TILE = 32
_COLUMN_TILE = 1 << 16
_SIGNS_TILE = 1 << 21
_BUFFER_BYTES = 64 * 2**20

_N_DIGITS = 2
_scratch = Scratch()


@dataclass(frozen=True)
class Kronecker(Projector):
    """Project weight matrices from both sides, and sum over the layers.

    The gradient of a parameter with two or more dimensions is a matrix G with ``shape[0]`` rows. It
    is mapped to ``L.T @ G @ R``, where L and R are matrices of random signs with ``left`` and
    ``right`` columns. Other parameters (biases, norms) are projected densely, with the entries that
    :class:`~trakdask.projection.rademacher.Rademacher` has in their rows. A feature is
    ``(left * right)**-0.5`` times the sum over all parameters; entry (a, b) of the product is in
    column ``a * right + b``.

    This is far cheaper than a dense matrix of ``left * right`` columns, but it is another
    estimator, with a larger error for gradients of low rank (see Notes). Choose it if a dense
    projection takes too long, and check the results on a small model.

    Parameters
    ----------
    left
        Columns of L, in [1, 2**16).
    right
        Columns of R, in [1, 2**16).
    seed
        Integer in [0, 2**64).

    Raises
    ------
    TypeError, ValueError
        If an argument has another type, or is out of range.

    Notes
    -----
    Definition: with a parameter's first row s in the row map, L[u, a] is the sign at row s + u and
    column a of stream 3, R[v, b] the sign at row s + v and column b of stream 4, by the formula of
    ``trakdask.projection.philox`` for the Rademacher matrix (which is stream 0).

    The columns for a smaller ``left`` are a prefix of those for a larger one, up to the factor. For
    ``right`` they are not, but if all parameters are matrices, the features for a smaller
    (left, right) are the first rows and columns of the features reshaped to (left, right).

    Variance of φ·φ' for gradients g and g' of norm 1, with ρ = g·g' and κ the sum over matrices of
    ‖G‖² ‖G'‖²: at most (1 + ρ² + κ (2 left + 2 right + 2)) / (left * right), hence at most
    (1 + 2 / left) (1 + 2 / right) - 1; a dense matrix has at most (1 + ρ²) / (left * right). Many
    layers of similar norm make κ small. For one matrix and G = d aᵀ, G' = d' a'ᵀ it is exactly
    (ρ_d² + v_d / left) (ρ_a² + v_a / right) - ρ², with ρ_d = d·d', v_d = 1 + ρ_d² - 2 Σ d_u² d'_u²
    and likewise for a. This is 1 / (left * right) for orthogonal factors, and reaches the bound for
    equal factors. The variance approaches that of a dense matrix as the ranks of G and G' exceed
    left and right; the gradient of a parameter of shape (1, n) always has rank one.

    Layers are summed and not concatenated as in LoGra, so features have left * right columns for
    every model. At the same total width, the variance is no larger for gradients that are spread
    evenly over the layers: (Σ x_l)² <= n_layers * Σ x_l², where x_l is the share of layer l in the
    squared norm. Unlike in LoGra, gradients are computed first; activations are not projected
    before the outer product.

    Exactness: gradients are rounded to 14 bits per (sample, 16384-row block); the sums of a block
    are exact, hence bitwise independent of batch, tile, tensor split and thread count.

    References
    ----------
    Choe et al. 2024, "What is Your Data Worth to GPT? LLM-Scale Data Valuation with Influence
    Functions" (LoGra).

    Examples
    --------
    >>> Kronecker(left=32, right=64).width(n_rows=10**6)
    2048
    """

    kind: ClassVar[str] = "kronecker"
    row_alignment: ClassVar[int] = ROW_ALIGNMENT
    rounds_row_blocks: ClassVar[bool] = True

    left: int = field(default=64, metadata=allowed(range(1, 2**16), 64))
    right: int = field(default=64, metadata=allowed(range(1, 2**16), 64))
    seed: int = field(default=0, metadata=allowed(range(2**64), 0))
    _row_map: RowMap | None = field(default=None, init=False, repr=False)

    def width(self, n_rows: int) -> int:
        """Return ``left * right``."""
        return self.left * self.right

    def cost(self, n_rows: int) -> Cost:
        """Return the cost of projecting gradients of ``n_rows`` elements.

        Operations and bits depend on the shapes of the parameters. Unless the projector is bound,
        they are those of one square matrix.
        """
        side = math.isqrt(n_rows)
        shapes = self._row_map.shapes if self._row_map else ((side, side),)
        return Cost(
            operations=sum(self._operations(shape) for shape in shapes),
            random_bits=sum(self._random_bits(shape) for shape in shapes),
            buffer_bytes=_BUFFER_BYTES,
            rounding_error=ROUNDING_ERROR[f"int8x{_N_DIGITS}"],
            product_error=(
                (self.left * self.right) ** -0.5,
                ((1 + 2 / self.left) * (1 + 2 / self.right) - 1) ** 0.5,
            ),
        )

    def _operations(self, shape: tuple[int, ...]) -> int:
        size = math.prod(shape)
        if len(shape) < 2 or not size:
            return 2 * _N_DIGITS * size * self.left * self.right
        n_rows, n_columns = shape[0], size // shape[0]
        right_first = _right_first(n_rows, n_columns, self.left, self.right)
        near, n_halves = (self.right, n_rows) if right_first else (self.left, n_columns)
        return 2 * _N_DIGITS * size * near + 2 * n_halves * self.left * self.right

    def _random_bits(self, shape: tuple[int, ...]) -> int:
        size = math.prod(shape)
        if len(shape) < 2 or not size:
            return size * self.left * self.right
        # L is drawn in parts, R again for every block.
        return self.left * shape[0] + self.right * (size // shape[0]) * -(-size // ROW_BLOCK)

    def bind(self, row_map: RowMap) -> Self:
        """Return the projector for the shapes of a row map."""
        bound = replace(self)
        object.__setattr__(bound, "_row_map", row_map)
        return bound

    def project_block(self, block: Tensor, row_offset: int, checkpoint: int, out: Tensor) -> None:
        """Add the projection of one row block to ``out``; see ``Projector``.

        Notes
        -----
        Cost per sample: for m x n elements of a matrix, 4 * m * n * right integer operations and
        2 * m * left * right float64 operations, or the same with the sides exchanged, whichever is
        less; for n elements of a vector, 4 * n * left * right integer operations. Working memory is
        at most about 64 MB for every batch and width. A block on another device is copied to the
        CPU and multiplied there, and the sums are copied back.
        """
        parts = list(self._parts(row_offset, row_offset + block.shape[1]))
        block, left_tile = block.cpu(), max(1, _COLUMN_TILE // self.right)
        for start in range(0, len(block), _SAMPLE_TILE):
            samples = slice(start, start + _SAMPLE_TILE)
            integers, step = quantize(block[samples], FRACTION_BITS[_N_DIGITS], _scratch)
            # Sums stay integers, held by float64, until they are multiplied with the step.
            for first in range(0, self.left, left_tile):
                tile = _Tile(self, checkpoint, first, min(left_tile, self.left - first), integers)
                for part in parts:
                    tile.add(part)
                signed = tile.sums.flatten(0, 1).mul_(step).T.to(out.device)
                columns = slice(first * self.right, first * self.right + signed.shape[1])
                out[samples, columns].add_(signed)

    def _parts(self, first: int, last: int) -> Iterator[_Part]:
        """Split the rows [first, last) of the row map by parameter, without padding."""
        assert self._row_map is not None, "bind comes first"
        offsets, shapes = self._row_map.offsets, self._row_map.shapes
        for i in range(max(0, bisect_right(offsets, first) - 1), bisect_right(offsets, last - 1)):
            size = math.prod(shapes[i])
            start, stop = max(first, offsets[i]), min(last, offsets[i] + size)
            if start < stop:
                n_columns = size // shapes[i][0] if len(shapes[i]) > 1 else None
                yield _Part(offsets[i], start - offsets[i], stop - start, start - first, n_columns)


@dataclass(frozen=True)
class _Part:
    """The elements of one parameter that lie in one row block.

    Parameters
    ----------
    offset
        First row of the parameter in the row map.
    start, size
        The elements [start, start + size) of the parameter.
    position
        Position of the first of them in the block.
    n_columns
        Columns of the parameter as a matrix; None for a vector.
    """

    offset: int
    start: int
    size: int
    position: int
    n_columns: int | None


class _Tile:
    """Exact sums of one row block, for some samples and some columns of L.

    Parameters
    ----------
    projector
        The projector, for its seed and the number of columns of R.
    checkpoint
        Checkpoint id.
    first, left
        The columns [first, first + left) of L.
    integers
        The block, shape (B, rows), int32, with magnitudes of at most 2**14.
    """

    def __init__(
        self, projector: Kronecker, checkpoint: int, first: int, left: int, integers: Tensor
    ) -> None:
        self._address = {"seed": projector.seed, "checkpoint": checkpoint}
        self._first, self._left, self._right = first, left, projector.right
        self._integers = integers
        shape = (left, projector.right, len(integers))
        self.sums = _scratch.take("sums", shape, torch.float64).zero_()

    def add(self, part: _Part) -> None:
        """Add the contribution of one parameter."""
        integers = self._integers[:, part.position : part.position + part.size]
        if part.n_columns is None:
            self._add_vector(integers, part.offset + part.start)
            return
        done = 0
        for row, n_rows, column, n_columns in _rectangles(part.start, part.size, part.n_columns):
            size = n_rows * n_columns
            matrix = integers[:, done : done + size].unflatten(1, (n_rows, n_columns))
            done += size
            for u, v in _tiles(n_rows, n_columns, self._left, self._right):
                self._add_matrix(matrix[:, u, v], part.offset + row + u.start,
                                 part.offset + column + v.start)  # fmt: skip

    def _add_vector(self, integers: Tensor, row: int) -> None:
        """Add (B, n) elements, the first of them in row ``row``, by a dense product."""
        sums, n_rows = self.sums.flatten(0, 1), integers.shape[1]
        slabs = split_digits(integers, _N_DIGITS, row)
        width = max(1, _SIGNS_TILE // (n_rows + ROWS_PER_COUNTER))
        for start in range(0, len(sums), width):
            target = sums[start : start + width]
            column = self._first * self._right + start
            address = self._address | {"stream": STREAM_RADEMACHER}
            packed = sign_bits(row, n_rows, column, len(target), **address)
            target.add_(signed_sums(packed, slabs, _N_DIGITS))

    def _add_matrix(self, matrix: Tensor, left_row: int, right_row: int) -> None:
        """Add (B, m, n) elements, the first of them in these rows of L and R."""
        n_samples, m, n = matrix.shape
        left = left_row, m, self._first, self._left
        right = right_row, n, 0, self._right
        streams = STREAM_KRONECKER_LEFT, STREAM_KRONECKER_RIGHT
        of_left, of_right = (self._address | {"stream": stream} for stream in streams)
        # The first product is one of integers, the second one of float64; both are exact. Bits are
        # valid until the next are drawn.
        if _right_first(m, n, self._left, self._right):
            slabs = split_digits(matrix, _N_DIGITS, right_row)
            half = signed_sums(sign_bits(*right, **of_right), slabs, _N_DIGITS).view(-1, m)
            signs = signs_of(sign_bits(*left, **of_left), left_row, m)
            self.sums.flatten(1).addmm_(signs, half.T)
        else:
            slabs = split_digits(matrix.mT, _N_DIGITS, left_row)
            half = signed_sums(sign_bits(*left, **of_left), slabs, _N_DIGITS)
            signs = signs_of(sign_bits(*right, **of_right), right_row, n)
            halves = half.view(-1, n_samples, n)
            self.sums.baddbmm_(signs.expand(len(halves), -1, -1), halves.mT)


def _right_first(n_rows: int, n_columns: int, left: int, right: int) -> bool:
    """Return whether multiplying with R first takes fewer operations."""
    return n_rows * right * (n_columns + left) <= n_columns * left * (n_rows + right)


def _rectangles(start: int, size: int, n_columns: int) -> Iterator[tuple[int, int, int, int]]:
    """Split consecutive elements of a matrix into the end of a row, whole rows, and a start.

    Yields (first row, rows, first column, columns).
    """
    stop = start + size
    while start < stop:
        row, column = divmod(start, n_columns)
        n_rows = 1 if column else max(1, (stop - start) // n_columns)
        width = min(n_columns - column, stop - start)
        yield row, n_rows, column, width
        start += n_rows * width


def _tiles(n_rows: int, n_columns: int, left: int, right: int) -> Iterator[tuple[slice, slice]]:
    """Split a rectangle so that the signs for a tile fit in the buffers; usually into one tile."""
    # At least 512, because the other side of a tile is padded to whole counters.
    height, width = (max(1, _SIGNS_TILE // max(512, n)) for n in (left, right))
    for u in range(0, n_rows, height):
        for v in range(0, n_columns, width):
            yield slice(u, min(u + height, n_rows)), slice(v, min(v + width, n_columns))
