"""Sums over samples that a scale in other coordinates is fitted by, and the matrices behind it.

The small matrices of the axes come from per-sample gradients alone, Σ h M Mᵀ for each axis of a
parameter, as in Shampoo. So every engine and every kind of layer works, and no layer needs a rule.
The eigenvalues are measured in the coordinates of the eigenvectors, and not multiplied from the
eigenvalues of the axes, which makes the difference between K-FAC and EK-FAC.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cache

import numpy as np
import torch
from torch import Tensor

from trakdask.models.products import wide
from trakdask.tensors import (
    Scratch,
    Shapes,
    axes_of,
    factors_of,
    float64_device,
    in_float64,
    places_of,
)

SKETCHED_COLUMNS = 16
"""Columns to which M is reduced by random signs R before M Mᵀ is added up.

If the sum of all products of elements is a Kronecker product, Σ h M C Mᵀ is the same matrix for
every C, up to a factor. So R Rᵀ in the place of the identity saves nearly all of the work.
"""

NOISE = (8 * float(np.finfo(np.float32).eps)) ** 2
"""Share of the largest mean square of a parameter's gradients below which others are rounding.

Some gradients are 0 in exact arithmetic, as of a bias of attention's keys, or in front of a
normalization: terms as large as other gradients cancel. In float32 a few units of their last digit
remain, which other batch sizes change. To divide by them would make features of them.
"""

_SHORT_AXIS = 512
"""Longest axis whose products are added up in float64.

In float32 the eigenvectors of eigenvalues that are far below the largest turn with the batch size.
For longer axes the products would take too much of a fit's time.
"""

_COLUMNS = 65536
"""Columns of gradients that are squared at a time: with fewer, calls of torch take longer."""

_scratch = Scratch()


class Sums:
    """A sink that adds up something over the gradients of a micro-batch, and keeps no rows.

    Parameters
    ----------
    shapes
        The selected parameters.
    weights
        h of each sample, (n,), on the device of the gradients.
    total
        The total, to which the sums are added once all gradients are there: a micro-batch that
        runs out of memory is divided and starts again.
    """

    def __init__(self, shapes: Shapes, weights: Tensor, total: np.ndarray) -> None:
        self._shapes, self._weights, self._total = shapes, weights, total
        device = float64_device(weights.device)
        self._sums = torch.zeros(total.shape, dtype=torch.float64, device=device)

    def result(self) -> Tensor:
        """Add the sums to the total, and return rows without columns."""
        self._total += self._sums.numpy(force=True)
        return torch.empty(len(self._weights), 0)


class AxisProducts(Sums):
    """Adds up Σ h M Mᵀ, the small matrix of every axis, (entry,)."""

    def __init__(self, shapes: Shapes, weights: Tensor, total: np.ndarray) -> None:
        super().__init__(shapes, weights, total)
        self._factors: dict[str, list[tuple[int, slice]]] = {name: [] for name in shapes}
        for name, axis, _, place in factors_of(shapes):
            self._factors[name].append((axis, place))
        self._whole: dict[str, Tensor] = {}

    def __call__(self, name: str, gradient: Tensor, first: int | None = None, /) -> None:
        """Add the gradients of a parameter, (n, numel), or a slice of them."""
        shape = len(gradient), math.prod(self._shapes[name])
        if first is not None:
            # 1. The products take whole gradients. A copy, because the next slice overwrites this.
            stop, like = first + gradient.shape[1], (gradient.dtype, gradient.device)
            if first == 0:
                self._whole[name] = _scratch.take_out("whole", math.prod(shape), *like)
            whole = self._whole[name][: math.prod(shape)].view(shape)
            whole[:, first:stop] = gradient
            if stop < shape[1]:
                return
            gradient = whole
        value = wide(gradient).reshape(len(gradient), *axes_of(self._shapes[name]))
        roots = self._weights.sqrt().to(value)[:, None]
        for axis, place in self._factors[name]:
            # 2. M of each sample, with this axis first: a view, unless it is between two others.
            matrices = value.movedim(axis + 1, 1)
            if axis == value.ndim - 2:
                matrices = value.flatten(1, -2).mT
            elif axis > 0:
                moved = _scratch.take("moved", matrices.shape, value.dtype, value.device)
                matrices = moved.copy_(matrices)
            matrices = matrices.flatten(2)
            # 3. Few columns of it are as good, and only these get the weight.
            if matrices.shape[2] > SKETCHED_COLUMNS:
                matrices = matrices @ signs(matrices.shape[2]).to(matrices)
            rows = (matrices.movedim(1, 0) * roots).flatten(1)
            if len(rows) <= _SHORT_AXIS:
                rows = in_float64(rows)
            self._sums[place] += in_float64((rows @ rows.T).flatten())
        if name in self._whole:
            _scratch.put_back("whole", self._whole.pop(name))


class SquaredCoordinates(Sums):
    """Adds up Σ h g² of every coordinate, (coordinate,), the eigenvalues times n."""

    def __call__(self, name: str, gradient: Tensor, first: int | None = None, /) -> None:
        """Add the rotated gradients of a parameter, (n, numel), or a slice of them."""
        start = places_of(self._shapes)[name].start + (first or 0)
        # Squares of some columns at a time stay in the cache, and take no new memory.
        for columns in gradient.float().split(_COLUMNS, 1):
            squares = self._weights @ columns.square()
            self._sums[start : start + len(squares)] += in_float64(squares)
            start += len(squares)


@cache
def signs(n_rows: int) -> Tensor:
    """Return the random signs that reduce matrices, (n_rows, 16), the same in every process.

    Models have few lengths of matrices, and to draw the signs takes longer than to use them once.
    """
    draws = np.random.RandomState(0).randint(0, 2, (n_rows, SKETCHED_COLUMNS))
    return torch.from_numpy(2.0 * draws - 1).float()


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
        vectors[place] = signed(columns).reshape(sums[place].shape)
    return vectors


def signed(columns: np.ndarray) -> np.ndarray:
    """Return eigenvectors, each with a sign that does not depend on rounding.

    Examples
    --------
    >>> signed(np.array([[-3.0, 4.0], [4.0, 3.0]])).tolist()
    [[3.0, 4.0], [-4.0, 3.0]]
    """
    # A fixed direction, which hardly any eigenvector is perpendicular to.
    direction = np.random.RandomState(0).standard_normal(len(columns))
    return columns * np.where(direction @ columns < 0, -1, 1).astype(columns.dtype)


def rounding_of(squares: np.ndarray, shapes: Shapes) -> dict[str, float]:
    """Return the mean square of each parameter's gradients that may be nothing but rounding.

    The terms that cancel are as large as gradients of the same module, whose size may be far from
    that of other modules, or, of a parameter alone in its module, as any others.

    Examples
    --------
    >>> rounding_of(np.array([4.0, 1.0]), {"0.weight": (1,), "0.bias": (1,)})
    {'0.weight': 3.6...e-12, '0.bias': 3.6...e-12}
    """
    means = {name: float(squares[place].mean()) for name, place in places_of(shapes).items()}
    modules: dict[str, list[float]] = defaultdict(list)
    for name, mean in means.items():
        modules[name.rpartition(".")[0]].append(mean)
    least = NOISE / 64 * max(means.values())
    return {name: max(least, NOISE * max(modules[name.rpartition(".")[0]])) for name in means}


def scale_of(eigenvalues: np.ndarray, shapes: Shapes, damping: float) -> np.ndarray:
    """Return 1/√(Λ + δ Λ̄), with the mean Λ̄ over each parameter; 0 where that is rounding.

    Examples
    --------
    >>> shapes = {"weight": (2,), "bias": (1,)}
    >>> scale_of(np.array([1.0, 7.0, 1e-14]), shapes, damping=2.0).tolist()
    [0.333..., 0.258..., 0.0]
    """
    damped, least = np.zeros_like(eigenvalues), rounding_of(eigenvalues, shapes)
    for name, place in places_of(shapes).items():
        values = eigenvalues[place]
        if values.mean() > least[name]:
            sums = values + damping * values.mean()
            damped[place] = np.where(sums > NOISE * values.max(), sums, 0)
    roots = np.sqrt(np.where(damped > 0, damped, np.inf))
    return (1 / roots).astype(np.float32)


def leading_coordinates(lengths: np.ndarray, n_leading: int) -> np.ndarray:
    """Return the numbers of the coordinates in which scaled gradients are longest, sorted.

    Examples
    --------
    >>> leading_coordinates(np.array([9.0, 4.0, 2.0, 5.0]), 2).tolist()
    [0, 3]
    """
    return np.sort(np.argsort(-lengths, kind="stable")[:n_leading]).astype(np.int64)
