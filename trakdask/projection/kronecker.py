"""A Kronecker product of sign matrices for each weight matrix, which is cheap but less accurate."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from trakdask.projection.fixed_point import (
    FRACTION_BITS,
    multiply_signs,
    quantize,
    sign_bits,
    signed_sums,
    signs,
    split_digits,
)
from trakdask.projection.philox import (
    ROWS_PER_COUNTER,
    STREAM_KRONECKER_LEFT,
    STREAM_KRONECKER_RIGHT,
    STREAM_RADEMACHER,
)
from trakdask.projection.protocol import ROUNDING_ERROR, Cost, Projector, allowed
from trakdask.projection.rows import ROW_ALIGNMENT, ROW_BLOCK, RowMap
from trakdask.tensors import Scratch

# Sizes of buffers. They do not affect results, since all sums within a row block are exact.
_SAMPLE_TILE = 32
_SIGNS_TILE = 1 << 21
_BUFFER_BYTES = 48 * 2**20

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
    equal factors. The variance approaches the one of a dense matrix as the ranks of G and G'
    exceed left and right; the gradient of a parameter of shape (1, n) always has rank one.

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
        they are counted for one square matrix.
        """
        side = math.isqrt(n_rows)
        shapes = self._row_map.shapes if self._row_map else ((side, side),)
        operations, random_bits = map(sum, zip(*map(self._work, shapes), strict=True))
        return Cost(
            operations=operations,
            random_bits=random_bits,
            buffer_bytes=_BUFFER_BYTES + 8 * _SAMPLE_TILE * self.left * self.right,
            rounding_error=ROUNDING_ERROR[f"int8x{_N_DIGITS}"],
            product_error=(
                (self.left * self.right) ** -0.5,
                ((1 + 2 / self.left) * (1 + 2 / self.right) - 1) ** 0.5,
            ),
        )

    def _work(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return operations and random bits for a parameter."""
        size, width = math.prod(shape), self.left * self.right
        if len(shape) < 2 or not size:
            return 2 * _N_DIGITS * size * width, size * width
        n_rows, n_columns = shape[0], size // shape[0]
        right_first = self._right_first(n_rows, n_columns)
        near, n_halves = (self.right, n_rows) if right_first else (self.left, n_columns)
        # L is drawn in parts, R again for every block.
        random_bits = self.left * n_rows + self.right * n_columns * -(-size // ROW_BLOCK)
        return 2 * _N_DIGITS * size * near + 2 * n_halves * width, random_bits

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
        at most about 48 MB and 256 bytes per column, for every batch. A block on another device is
        copied to the CPU and multiplied there, and the sums are copied back.
        """
        parts = list(self._parts(row_offset, row_offset + block.shape[1]))
        block = block.cpu()
        for start in range(0, len(block), _SAMPLE_TILE):
            samples = slice(start, start + _SAMPLE_TILE)
            integers, step = quantize(block[samples], FRACTION_BITS[_N_DIGITS])
            # Sums stay integers, held by float64, until they are multiplied with the step.
            shape = (self.left, self.right, len(integers))
            sums = _scratch.take("sums", shape, torch.float64).zero_()
            for columns, parameter, first, n_columns in parts:
                part = integers[:, columns]
                if n_columns is None:
                    self._add_vector(sums.flatten(0, 1), part, parameter + first, checkpoint)
                else:
                    self._add_elements(sums, part, parameter, first, n_columns, checkpoint)
            out[samples].add_(sums.flatten(0, 1).mul_(step).T.to(out.device))

    def _parts(self, first: int, last: int) -> Iterator[tuple[slice, int, int, int | None]]:
        """Split the rows [first, last) of the row map by parameter, without padding.

        Yields the place of a part among these rows, the first row of its parameter, its first
        element, and the columns of the parameter as a matrix, or None for a vector.
        """
        assert self._row_map is not None, "bind comes first"
        offsets, shapes = self._row_map.offsets, self._row_map.shapes
        for i in range(max(0, bisect_right(offsets, first) - 1), bisect_right(offsets, last - 1)):
            size = math.prod(shapes[i])
            start, stop = max(first, offsets[i]), min(last, offsets[i] + size)
            if start < stop:
                n_columns = size // shapes[i][0] if len(shapes[i]) > 1 else None
                yield slice(start - first, stop - first), offsets[i], start - offsets[i], n_columns

    def _add_vector(self, sums: Tensor, integers: Tensor, row: int, checkpoint: int) -> None:
        """Add (B, n) elements, the first of them in row ``row``, by a dense product."""
        n_rows = integers.shape[1]
        slabs = split_digits(integers, _N_DIGITS, row)
        width = max(1, _SIGNS_TILE // (n_rows + ROWS_PER_COUNTER))
        for column in range(0, len(sums), width):
            target = sums[column : column + width]
            address = self._at(checkpoint, STREAM_RADEMACHER)
            packed = sign_bits(row, n_rows, column, len(target), **address)
            target.add_(signed_sums(packed, slabs, _N_DIGITS))

    def _add_elements(
        self,
        sums: Tensor,
        integers: Tensor,
        parameter: int,
        first: int,
        n_columns: int,
        checkpoint: int,
    ) -> None:
        """Add consecutive elements of a matrix, (B, n), one rectangle of it after the other."""
        done = 0
        for row, m, column, n in _rectangles(first, integers.shape[1], n_columns):
            matrix = integers[:, done : done + m * n].unflatten(1, (m, n))
            done += m * n
            # Tiles whose signs fit in the buffers, usually one; at least 512 rows of the other
            # factor count, because a tile is padded to whole counters.
            height, width = (max(1, _SIGNS_TILE // max(512, k)) for k in (self.left, self.right))
            for u in range(0, m, height):
                for v in range(0, n, width):
                    tile = matrix[:, u : u + height, v : v + width]
                    self._add_matrix(
                        sums, tile, parameter + row + u, parameter + column + v, checkpoint
                    )

    def _add_matrix(
        self, sums: Tensor, matrix: Tensor, left_row: int, right_row: int, checkpoint: int
    ) -> None:
        """Add (B, m, n) elements, the first of them in these rows of L and R."""
        n_samples, m, n = matrix.shape
        left, right = (left_row, m, 0, self.left), (right_row, n, 0, self.right)
        of_left = self._at(checkpoint, STREAM_KRONECKER_LEFT)
        of_right = self._at(checkpoint, STREAM_KRONECKER_RIGHT)
        # The first product is one of integers, the second one of float64; both are exact.
        if self._right_first(m, n):
            slabs = split_digits(matrix, _N_DIGITS, right_row)
            half = signed_sums(sign_bits(*right, **of_right), slabs, _N_DIGITS).view(-1, m)
            sums.flatten(1).addmm_(signs(*left, **of_left), half.T)
        else:
            slabs = split_digits(matrix.mT, _N_DIGITS, left_row)
            half = signed_sums(sign_bits(*left, **of_left), slabs, _N_DIGITS)
            halves = half.view(-1, n_samples, n)
            sums.baddbmm_(signs(*right, **of_right).expand(len(halves), -1, -1), halves.mT)

    def _right_first(self, n_rows: int, n_columns: int) -> bool:
        """Return whether multiplying with R first takes fewer operations."""
        with_right = n_rows * self.right * (n_columns + self.left)
        return with_right <= n_columns * self.left * (n_rows + self.right)

    def _at(self, checkpoint: int, stream: int) -> dict[str, int]:
        return {"seed": self.seed, "checkpoint": checkpoint, "stream": stream}

    def multiply_vectors(self, row_map: RowMap, checkpoint: int, vectors: Tensor) -> Tensor:
        """Return the product with the matrix from the other side; see ``Projector``."""
        out = vectors.new_zeros(len(vectors), row_map.n_rows)
        core = vectors.unflatten(1, (self.left, self.right))
        for offset, shape in zip(row_map.offsets, row_map.shapes, strict=True):
            size = math.prod(shape)
            if len(shape) < 2 or not size:
                address = self._at(checkpoint, STREAM_RADEMACHER)
                values = multiply_signs(vectors, offset, size, **address)
            else:
                of_left = self._at(checkpoint, STREAM_KRONECKER_LEFT)
                of_right = self._at(checkpoint, STREAM_KRONECKER_RIGHT)
                left = signs(offset, shape[0], 0, self.left, **of_left).float()
                right = signs(offset, size // shape[0], 0, self.right, **of_right).float()
                values = (left.T @ core @ right).flatten(1)
            out[:, offset : offset + size] = values
        return out


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
