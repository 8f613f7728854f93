"""Turn gradients into the coordinates of the loss's curvature, and scale them there.

A gradient of a linear layer is a matrix, and the sum of the products of such matrices over samples
is close to a Kronecker product of one small matrix per axis. Its eigenvectors are therefore those
of the small matrices, which takes a few hundred columns where the curvature itself would have as
many as there are parameters. The eigenvalues are measured in their coordinates, not multiplied
from those of the factors, which is what makes the difference between K-FAC and EK-FAC.

The small matrices come from per-sample gradients alone, Σ h M Mᵀ for each axis of a parameter, as
in Shampoo. So every engine and every kind of layer works, and no layer needs a rule.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trakdask.models.rules import wide

Shapes = Mapping[str, tuple[int, ...]]

LONGEST_AXIS = 4096
"""A longer axis, such as that of a vocabulary, keeps its coordinates: eigenvectors cost d³."""

SKETCHED_COLUMNS = 16
"""Columns to which M is reduced by random signs R before M Mᵀ is added up.

If the curvature is a Kronecker product, Σ h M C Mᵀ is the same matrix for every C, up to a factor.
So R Rᵀ in the place of the identity saves nearly all of the work.
"""

DAMPING_PRIOR = 10**0.5
"""The usual λ in units of tr(K)/n, where 1 is that of plain features: the gram matrix is flatter.

tests/benchmarks/halves.py compares it with others.
"""

MOST_LEADING = 2**15
"""Leading coordinates that are recorded, and so the largest number that features can keep."""


def axes_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the lengths of a parameter's axes: of a kernel, out, in, and all places together.

    Examples
    --------
    >>> axes_of((32, 16, 3, 3)), axes_of((10, 64)), axes_of((10,))
    ((32, 16, 9), (10, 64), (10,))
    """
    return (*shape[:2], math.prod(shape[2:])) if len(shape) > 2 else shape


def factors_of(shapes: Shapes) -> Iterator[tuple[str, int, int, slice]]:
    """Return, for every axis with eigenvectors, its parameter, number, length and place.

    The place is that of its matrix, row by row, among the matrices of all axes. Biases and other
    vectors have none: the matrix of their only axis would be their whole curvature.
    """
    start = 0
    for name, shape in shapes.items():
        lengths = axes_of(shape)
        for axis, length in enumerate(lengths):
            if len(lengths) > 1 and 1 < length <= LONGEST_AXIS:
                yield name, axis, length, slice(start, start + length**2)
                start += length**2


def places_of(shapes: Shapes) -> dict[str, slice]:
    """Return the place of every parameter among the elements of all."""
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()]).tolist()
    starts = [0, *ends[:-1]]
    return {name: slice(*ends) for name, *ends in zip(shapes, starts, ends, strict=True)}


@dataclass(frozen=True, eq=False)
class Curvature:
    """The coordinates of one checkpoint, and what gradients are multiplied by there.

    Parameters
    ----------
    eigenvectors
        (entry,) float32: a matrix per axis with eigenvectors as columns, in the order of
        :func:`factors_of`.
    scale
        (coordinate,) float32: the inverse root of the damped eigenvalue.
    leading
        (rank,) int64: the coordinates with most of the scaled curvature, the largest first.
    """

    eigenvectors: np.ndarray
    scale: np.ndarray
    leading: np.ndarray

    @cached_property
    def digest(self) -> str:
        """Identifies the values: features are comparable only in the same coordinates."""
        content = hashlib.sha256()
        for array in (self.eigenvectors, self.scale, self.leading):
            content.update(array.tobytes())
        return content.hexdigest()


@dataclass(frozen=True, eq=False)
class Components:
    """The principal components of projected gradients at one checkpoint.

    Parameters
    ----------
    matrix
        (wide_dim, proj_dim) float32, orthonormal columns.
    projector
        What the gradients were projected with, as JSON values.
    """

    matrix: np.ndarray
    projector: Mapping[str, Any]

    @cached_property
    def digest(self) -> str:
        """Identifies the values."""
        return hashlib.sha256(self.matrix.tobytes()).hexdigest()


Rotations = dict[str, dict[int, Tensor]]


def rotations(eigenvectors: np.ndarray, shapes: Shapes, device: torch.device) -> Rotations:
    """Return the matrix of each axis by parameter."""
    matrices: Rotations = {name: {} for name in shapes}
    for name, axis, length, place in factors_of(shapes):
        matrix = torch.tensor(eigenvectors[place], device=device)
        matrices[name][axis] = matrix.view(length, length)
    return matrices


def rotated(gradient: Tensor, shape: tuple[int, ...], matrices: Mapping[int, Tensor]) -> Tensor:
    """Return gradients of a parameter, (n, numel), in the coordinates of its axes.

    Cost: 2 flops for each element and each column of a matrix.
    """
    value = gradient.reshape(len(gradient), *axes_of(shape))
    for axis, matrix in matrices.items():
        moved = value.movedim(axis + 1, -1) @ matrix.to(value.dtype)
        value = moved.movedim(-1, axis + 1)
    return value.reshape(len(gradient), -1)


def factors_by_name(
    curvature: Curvature, shapes: Shapes, device: torch.device
) -> dict[str, Tensor]:
    """Return what the gradient of each parameter is multiplied by in its coordinates, (numel,)."""
    scale = torch.tensor(curvature.scale, device=device)
    return {name: scale[place] for name, place in places_of(shapes).items()}


class Sums:
    """A sink that adds up something over the gradients of a micro-batch, and keeps no rows.

    Parameters
    ----------
    shapes
        The selected parameters.
    weights
        h of each sample, (n,).
    total
        What the sums are added to once all gradients are there: a micro-batch that runs out of
        memory is divided and starts again.
    """

    def __init__(self, shapes: Shapes, weights: Tensor, total: np.ndarray) -> None:
        self._shapes, self._weights, self._total = shapes, weights, total
        self._sums = np.zeros_like(total)

    def result(self) -> Tensor:
        """Add the sums to the total, and return rows without columns."""
        self._total += self._sums
        return torch.empty(len(self._weights), 0)


class AxisProducts(Sums):
    """Adds up Σ h M Mᵀ of every axis, (entry,), the small matrices of the curvature."""

    def __init__(self, shapes: Shapes, weights: Tensor, total: np.ndarray) -> None:
        super().__init__(shapes, weights, total)
        self._factors: dict[str, list[tuple[int, slice]]] = {name: [] for name in shapes}
        for name, axis, _, place in factors_of(shapes):
            self._factors[name].append((axis, place))
        self._slices: dict[str, list[Tensor]] = {name: [] for name in shapes}

    def __call__(self, name: str, gradient: Tensor, first: int | None = None, /) -> None:
        """Add the gradients of a parameter, (n, numel), or a slice of them."""
        if first is not None:
            # The products take whole gradients. A copy, because the next slice overwrites this one.
            self._slices[name].append(gradient.clone())
            if first + gradient.shape[1] < math.prod(self._shapes[name]):
                return
            gradient = torch.cat(self._slices.pop(name), 1)
        value = wide(gradient).reshape(len(gradient), *axes_of(self._shapes[name]))
        weighted = value * self._weights.sqrt().to(value).view(-1, *[1] * (value.ndim - 1))
        for axis, place in self._factors[name]:
            matrices = weighted.movedim(axis + 1, 1).flatten(2)
            if matrices.shape[2] > SKETCHED_COLUMNS:
                matrices = matrices @ signs(matrices.shape[2]).to(matrices)
            rows = matrices.movedim(1, 0).flatten(1)
            self._sums[place] += (rows @ rows.T).flatten().double().numpy(force=True)


class SquaredCoordinates(Sums):
    """Adds up Σ h g² of every coordinate, (coordinate,), the eigenvalues of the curvature."""

    def __call__(self, name: str, gradient: Tensor, first: int | None = None, /) -> None:
        """Add the rotated gradients of a parameter, (n, numel), or a slice of them."""
        start = places_of(self._shapes)[name].start + (first or 0)
        squares = self._weights.to(gradient.device) @ gradient.float().square()
        self._sums[start : start + len(squares)] += squares.double().numpy(force=True)


def signs(n_rows: int) -> Tensor:
    """Return the random signs that reduce matrices, (n_rows, 16), the same in every process."""
    draws = np.random.RandomState(0).randint(0, 2, (n_rows, SKETCHED_COLUMNS))
    return torch.from_numpy(2.0 * draws - 1)


def eigenvectors_of(sums: np.ndarray, shapes: Shapes) -> np.ndarray:
    """Return the eigenvectors of the matrix of every axis, (entry, ...) float32.

    Examples
    --------
    >>> sums = np.array([1.0, 0, 0, 4, 9, 0, 0, 16])
    >>> eigenvectors_of(sums, {"weight": (2, 2)}).tolist()
    [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0]
    """
    vectors = np.empty(sums.shape, np.float32)
    for _, _, length, place in factors_of(shapes):
        _, columns = np.linalg.eigh(sums[place].reshape(length, length))
        vectors[place] = columns.reshape(sums[place].shape)
    return vectors


def scaling(eigenvalues: np.ndarray, shapes: Shapes, damping: float) -> np.ndarray:
    """Return 1/√(Λ + δ Λ̄), with the mean Λ̄ over each parameter; 0 where that is 0.

    Examples
    --------
    >>> scaling(np.array([1.0, 7.0, 0.0]), {"weight": (2,), "bias": (1,)}, damping=2.0).tolist()
    [0.333..., 0.258..., 0.0]
    """
    damped = np.empty_like(eigenvalues)
    for place in places_of(shapes).values():
        damped[place] = eigenvalues[place] + damping * eigenvalues[place].mean()
    # A parameter without any gradient adds nothing, whatever it is multiplied by.
    roots = np.sqrt(np.where(damped > 0, damped, np.inf))
    scale: np.ndarray = (1 / roots).astype(np.float32)
    return scale


def leading_coordinates(eigenvalues: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return the coordinates in which scaled gradients are largest, in descending order.

    Examples
    --------
    >>> leading_coordinates(np.array([1.0, 4.0, 2.0]), np.array([3.0, 1.0, 1.0])).tolist()
    [0, 1, 2]
    """
    order = np.argsort(-(eigenvalues * scale.astype(np.float64) ** 2), kind="stable")
    return order[:MOST_LEADING].astype(np.int64)
