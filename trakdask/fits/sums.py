"""Sums over samples that a scale in other coordinates is fitted by, and the matrices behind it.

The small matrices of the axes come from per-sample gradients alone, Σ h M Mᵀ for each axis of a
parameter, as in Shampoo. So every engine and every kind of layer works, and no layer needs a rule.
The eigenvalues are measured in the coordinates of the eigenvectors, and not multiplied from the
eigenvalues of the axes, which makes the difference between K-FAC and EK-FAC.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from trakdask.models.products import wide
from trakdask.tensors import Shapes, axes_of, factors_of, places_of

SKETCHED_COLUMNS = 16
"""Columns to which M is reduced by random signs R before M Mᵀ is added up.

If the sum of all products of elements is a Kronecker product, Σ h M C Mᵀ is the same matrix for
every C, up to a factor. So R Rᵀ in the place of the identity saves nearly all of the work.
"""


class Sums:
    """A sink that adds up something over the gradients of a micro-batch, and keeps no rows.

    Parameters
    ----------
    shapes
        The selected parameters.
    weights
        h of each sample, (n,).
    total
        The total, to which the sums are added once all gradients are there: a micro-batch that
        runs out of memory is divided and starts again.
    """

    def __init__(self, shapes: Shapes, weights: Tensor, total: np.ndarray) -> None:
        self._shapes, self._weights, self._total = shapes, weights, total
        self._sums = np.zeros_like(total)

    def result(self) -> Tensor:
        """Add the sums to the total, and return rows without columns."""
        self._total += self._sums
        return torch.empty(len(self._weights), 0)


class AxisProducts(Sums):
    """Adds up Σ h M Mᵀ, the small matrix of every axis, (entry,)."""

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
    """Adds up Σ h g² of every coordinate, (coordinate,), the eigenvalues times n."""

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


def scale_of(eigenvalues: np.ndarray, shapes: Shapes, damping: float) -> np.ndarray:
    """Return 1/√(Λ + δ Λ̄), with the mean Λ̄ over each parameter; 0 where that is 0.

    Examples
    --------
    >>> scale_of(np.array([1.0, 7.0, 0.0]), {"weight": (2,), "bias": (1,)}, damping=2.0).tolist()
    [0.333..., 0.258..., 0.0]
    """
    damped = np.empty_like(eigenvalues)
    for place in places_of(shapes).values():
        damped[place] = eigenvalues[place] + damping * eigenvalues[place].mean()
    # A parameter without any gradient adds nothing, whatever it is multiplied by.
    roots = np.sqrt(np.where(damped > 0, damped, np.inf))
    scale: np.ndarray = (1 / roots).astype(np.float32)
    return scale


def leading_coordinates(eigenvalues: np.ndarray, scale: np.ndarray, n_leading: int) -> np.ndarray:
    """Return the numbers of the coordinates in which scaled gradients are largest, sorted.

    Examples
    --------
    >>> leading_coordinates(np.array([1.0, 4.0, 2.0]), np.array([3.0, 1.0, 1.0]), 2).tolist()
    [0, 1]
    """
    order = np.argsort(-(eigenvalues * scale.astype(np.float64) ** 2), kind="stable")
    return np.sort(order[:n_leading]).astype(np.int64)
