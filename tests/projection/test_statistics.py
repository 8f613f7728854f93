"""Do random matrices behave as the theory of projections says, and products of features as `cost`?

Each check turns a property into a score that is about normal, with variance 1, if the entries are
what they claim to be; seeds are fixed, so scores are the same in each run. With LIMIT = 5 and about
a thousand scores, perfect generators fail with a probability of 1e-3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from trakdask.projection import SJLT, Kronecker, Mask, Projector, Rademacher, RowMap, project

Matrix = npt.NDArray[np.float64]
Scores = dict[str, float]

LIMIT = 5.0
P, N_ROWS = 1024, 2048
TINY = 1e-6  # features are float32
LAGS = (1, 2, 32, 64, 128)


def features(
    projector: Projector, flat: Tensor, checkpoint: int = 0, shape: tuple[int, ...] | None = None
) -> Tensor:
    row_map = RowMap.from_shapes({"flat": shape or flat.shape[1:]}, alignment=512)
    return project(projector, {"flat": flat}, row_map, checkpoint).double()


# -------------------------------------------------------------------------- entries of the matrices


def z_of_sum(products: Matrix) -> float:
    """Score a sum of uncorrelated numbers of mean 0 by their own size."""
    norm = float(np.sqrt((products**2).sum()))
    return float(products.sum()) / norm if norm else 0.0


def z_of_mean(numbers: Matrix, expected: float) -> float:
    """Score the mean of independent numbers; where they do not vary it has to be exact."""
    error = numbers.std() / len(numbers) ** 0.5 + TINY * max(abs(expected), 1)
    return float((numbers.mean() - expected) / error)


def z_of_correlation(a: Matrix, b: Matrix) -> float:
    """Score the correlation of numbers of mean 0, some of which may be large and rare."""
    norm = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float((a * b).sum()) * a.size**0.5 / norm if norm else 0.0


def same_entry_scores(a: Matrix, b: Matrix, what: str) -> Scores:
    """Score that neither signs nor sizes of entries at the same place are related."""
    sizes = [m**2 - (m**2).mean() for m in (a, b)]
    sizes = [np.where(abs(size) > TINY, size, 0) for size in sizes]
    return {f"signs, {what}": z_of_sum(a * b), f"sizes, {what}": z_of_correlation(*sizes)}


def unit_columns(a: Matrix) -> Matrix:
    norms = np.linalg.norm(a, axis=0)
    return a[:, norms > 0] / norms[norms > 0]


# Projectors by rows; the shape of the one parameter; kurtosis of an entry, and
# variance of the product of two entries of one row, where entries have mean 0 and variance 1.
KINDS: dict[str, tuple[Callable[[int], Projector], bool | None, float, float]] = {
    "rademacher": (lambda n: Rademacher(P), None, 1, 1),
    "sjlt, 1": (lambda n: SJLT(P, 1), None, P, 0),
    "sjlt, 4": (lambda n: SJLT(P, 4), None, P / 4 + 3 * 3 / 4, 3 / 4),
    "grass": (lambda n: Mask(n // 4, SJLT(P, 4)), None, P + 9, 3),
    # A factor of width 1 is one sign: the matrix is the other factor.
    "kronecker left": (lambda n: Kronecker(P, 1), True, 1, 1),
    "kronecker right": (lambda n: Kronecker(1, P), False, 1, 1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_matrix__is_what_its_law_says(kind: str) -> None:
    make, is_left, kurtosis, pair = KINDS[kind]
    shape = (N_ROWS,) if is_left is None else (N_ROWS, 1) if is_left else (1, N_ROWS)
    # In units in which an entry has variance 1.
    a = features(make(N_ROWS), torch.eye(N_ROWS), 0, shape).numpy() * P**0.5
    units = unit_columns(a)
    columns = pairs(units.T @ units)
    scores = {
        "mean": z_of_sum(a),
        "second moment": z_of_mean((a**2).mean(1), 1),
        "fourth moment": z_of_mean((a**4).mean(1), kurtosis),
        "column norms": z_of_mean(((a**2).mean(0) - 1) ** 2, (kurtosis - 1) / len(a)),
        "pairs of columns": z_of_mean(columns**2 * len(a), pair),
        "column neighbours": z_of_sum(a[:, 1:] * a[:, :-1]),
        "four corners": z_of_sum(a[1:, 1:] * a[1:, :-1] * a[:-1, 1:] * a[:-1, :-1]),
    }
    for lag in LAGS:
        scores |= same_entry_scores(a[lag:], a[:-lag], f"{lag} rows apart")
    if kurtosis < 4:
        # The largest of n correlations of signs exceeds t with probability below 2 n exp(-t² / 2).
        excess = (columns**2).max() * len(a) - 2 * np.log(columns.size)
        scores["largest of all pairs of columns"] = float(np.sqrt(max(excess, 0)))
    assert {name: score for name, score in scores.items() if not abs(score) < LIMIT} == {}


# ------------------------------------------------- products of features, and products of gradients


def product_errors(
    projector: Projector, vectors: Tensor, n_checkpoints: int = 1, shape: tuple[int, ...] = ()
) -> Matrix:
    """Return (checkpoint, i, j): the error of the product of vectors i and j."""
    exact, errors = vectors.double() @ vectors.double().T, []
    for checkpoint in range(n_checkpoints):
        found = features(projector, vectors, checkpoint, shape or None)
        errors.append((found @ found.T - exact).numpy())
    return np.stack(errors)


def pairs(square: Matrix) -> Matrix:
    """Return what is above the diagonal, as (..., pair)."""
    return square[..., *np.triu_indices(square.shape[-1], 1)]


def diagonals(square: Matrix) -> Matrix:
    return np.einsum("...ii->...i", square)


def root_mean_square(errors: Matrix) -> float:
    return float((errors**2).mean() ** 0.5)


@cache
def unit_vectors(family: str) -> Tensor:
    rng, shape = np.random.default_rng(7), (128, 16384)
    vectors = torch.from_numpy(rng.standard_normal(shape)).float()
    if family == "sparse":
        vectors *= torch.from_numpy(rng.random(shape) < 1e-3)
    return vectors / vectors.norm(dim=1, keepdim=True)


ACCURATE = [*(Rademacher(P, arithmetic=f"int8x{n}") for n in (1, 2, 3)), SJLT(P, 1), SJLT(P, 4)]
MASKS = [Mask(4096, then) if then else Mask(4096) for then in (None, SJLT(P), Rademacher(P))]


@pytest.mark.parametrize(
    ("projector", "family"),
    [*((p, f) for p in ACCURATE for f in ("normal", "sparse")), *((p, "normal") for p in MASKS)],
    ids=str,
)
def test_product__error_is_what_cost_says(projector: Projector, family: str) -> None:
    typical, worst = projector.cost(16384).product_error
    errors = product_errors(projector, unit_vectors(family))
    assert root_mean_square(pairs(errors)) == pytest.approx(typical, rel=0.1)
    if projector in ACCURATE and family == "normal":
        errors = product_errors(projector, unit_vectors(family), n_checkpoints=4)
        assert root_mean_square(diagonals(errors)) == pytest.approx(worst, rel=0.15)


UNBIASED = [
    *(Rademacher(64, arithmetic=f"int8x{n}") for n in (1, 2, 3)),
    *(SJLT(64, 1), SJLT(64, 4), Mask(64), Mask(128, SJLT(64, 4)), Kronecker(8, 8)),
]


@pytest.mark.parametrize("projector", UNBIASED, ids=str)
def test_product__is_right_on_average_over_checkpoints(projector: Projector) -> None:
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randn(6, 512, generator=generator) + torch.randn(512, generator=generator)
    vectors = vectors / vectors.norm(dim=1, keepdim=True)
    errors = product_errors(projector, vectors, 256, (16, 32))
    z = errors.mean(0) / (errors.std(0) / math.sqrt(len(errors)))
    assert np.abs(z).max() < LIMIT
