"""How far products of features are from products of gradients, against the theory of each kind."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from trakdask.projection import (
    SJLT,
    Identity,
    Kronecker,
    Mask,
    Projector,
    Rademacher,
    RowMap,
    project,
)

Matrix = npt.NDArray[np.float64]

P, N_ROWS = 1024, 16384
FAMILIES = ("normal", "heavy tails", "sparse")


# ----------------------------------------------------------- the oracle: products of the gradients


def product_errors(
    projector: Projector,
    vectors: Tensor,
    n_checkpoints: int = 1,
    shape: tuple[int, ...] | None = None,
) -> Matrix:
    """Return (checkpoint, i, j): the error of the product of vectors i and j."""
    row_map = RowMap.from_shapes({"flat": shape or vectors.shape[1:]}, alignment=512)
    exact, errors = vectors.double() @ vectors.double().T, []
    for checkpoint in range(n_checkpoints):
        found = project(projector, {"flat": vectors}, row_map, checkpoint).double()
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
    rng, shape = np.random.default_rng(7), (128, N_ROWS)
    draws = {
        "normal": lambda: rng.standard_normal(shape),
        "heavy tails": lambda: rng.standard_t(2.5, shape),
        "sparse": lambda: (rng.random(shape) < 1e-3) * rng.standard_normal(shape),
    }
    vectors = torch.from_numpy(draws[family]()).float()
    return vectors / vectors.norm(dim=1, keepdim=True)


# --------------------------------------------------------------- kinds that suit every gradient

ACCURATE = [
    *(Rademacher(P, arithmetic=arithmetic) for arithmetic in ("int8x1", "int8x2", "int8x3")),
    SJLT(P, 1),
    SJLT(P, 4),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("projector", ACCURATE, ids=repr)
def test_product__error_is_what_cost_says(projector: Projector, family: str) -> None:
    typical, _ = projector.cost(N_ROWS).product_error
    errors = pairs(product_errors(projector, unit_vectors(family)))
    assert root_mean_square(errors) == pytest.approx(typical, rel=0.1)


@pytest.mark.parametrize("projector", ACCURATE, ids=repr)
def test_product__error_of_norms_is_the_worst_case(projector: Projector) -> None:
    _, worst = projector.cost(N_ROWS).product_error
    errors = product_errors(projector, unit_vectors("normal"), n_checkpoints=4)
    norms = diagonals(errors)
    assert root_mean_square(norms) == pytest.approx(worst, rel=0.15)


def test_product__one_nonzero_per_row_has_tails_on_sparse_gradients() -> None:
    kurtosis = {}
    for projector in (Rademacher(P), SJLT(P, 1), SJLT(P, 4)):
        squares = pairs(product_errors(projector, unit_vectors("sparse"), n_checkpoints=8)) ** 2
        kurtosis[projector] = (squares**2).mean() / squares.mean() ** 2
    assert kurtosis[Rademacher(P)] == pytest.approx(3, rel=0.1)
    assert kurtosis[SJLT(P, 1)] > 20
    assert kurtosis[SJLT(P, 4)] < 6


# ---------------------------------------------------------------------------------------- masks


def mask_variance(products: Matrix, keep: int) -> Matrix:
    """Return the variance of a sum of products over ``keep`` rows, scaled up; rows last."""
    n = products.shape[-1]
    spread = (products**2).sum(-1) - products.sum(-1) ** 2 / n
    return n * (n - keep) / (keep * (n - 1)) * spread


@pytest.mark.parametrize(
    "projector", [Mask(N_ROWS // 4), Mask(N_ROWS // 4, SJLT(P)), Mask(N_ROWS // 4, Rademacher(P))],
    ids=repr,
)  # fmt: skip
def test_mask__error_on_spread_gradients_is_what_cost_says(projector: Mask) -> None:
    typical, _ = projector.cost(N_ROWS).product_error
    errors = pairs(product_errors(projector, unit_vectors("normal")))
    assert root_mean_square(errors) == pytest.approx(typical, rel=0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_mask__error_of_norms_is_large_where_few_rows_count(family: str) -> None:
    vectors, keep = unit_vectors(family), N_ROWS // 4
    errors = diagonals(product_errors(Mask(keep), vectors, n_checkpoints=8))
    theory = mask_variance(vectors.double().numpy() ** 2, keep).mean() ** 0.5
    assert root_mean_square(errors) == pytest.approx(theory, rel=0.1)
    assert (theory > 0.2) == (family != "normal")


def test_mask__error_on_one_row_is_the_worst_case() -> None:
    projector = Mask(256)
    errors = diagonals(product_errors(projector, torch.eye(1024)))
    assert root_mean_square(errors) == pytest.approx(projector.cost(1024).product_error[1])


def test_identity__has_no_error() -> None:
    errors = product_errors(Identity(), unit_vectors("normal"))
    assert np.abs(errors).max() < 1e-12


# -------------------------------------------------------------------------- Kronecker products

SIDE = 24
KRONECKER = Kronecker(8, 8)


def kronecker_variance(g: Matrix, h: Matrix) -> float:
    """Return the variance of the product of features of two matrices, for random signs.

    L L' / left is the identity plus errors of variance 1 / left, one for each pair of rows i < j;
    likewise R R' for each pair of columns u < v. The products of two errors are the third term.
    """
    i, j = u, v = np.triu_indices(SIDE, 1)
    rows, columns = g @ h.T, g.T @ h
    both = sum(g[a][:, c] * h[b][:, d] for a, b in ((i, j), (j, i)) for c, d in ((u, v), (v, u)))
    return float(
        ((rows + rows.T)[i, j] ** 2).sum() / KRONECKER.left
        + ((columns + columns.T)[u, v] ** 2).sum() / KRONECKER.right
        + (both**2).sum() / (KRONECKER.left * KRONECKER.right)
    )


def unit_matrices(side: int, rank: int, *, common_left: bool = False) -> Tensor:
    """Return matrices of one rank; with a common left factor, their columns span one space."""
    left, right = torch.randn(2, 10, rank, side, generator=torch.Generator().manual_seed(rank))
    left = left[:1].expand_as(left) if common_left else left
    matrices = left.mT @ right
    return matrices / matrices.flatten(1).norm(dim=1)[:, None, None]


@pytest.mark.parametrize("common_left", [False, True])
@pytest.mark.parametrize("rank", [1, 3, SIDE])
def test_kronecker__error_is_that_of_the_theory(rank: int, common_left: bool) -> None:
    matrices = unit_matrices(SIDE, rank, common_left=common_left)
    errors = product_errors(KRONECKER, matrices.flatten(1), 400, shape=(SIDE, SIDE))
    exact = matrices.double().numpy()
    theory = np.array([[kronecker_variance(g, h) for h in exact] for g in exact])
    for part in (pairs, diagonals):
        expected = part(theory).mean() ** 0.5
        assert root_mean_square(part(errors)) == pytest.approx(expected, rel=0.1)


def test_kronecker__full_rank_is_near_a_dense_projection_and_rank_one_is_not() -> None:
    projector = Kronecker(32, 32)
    typical, worst = projector.cost(N_ROWS).product_error
    shape = (128, 128)
    full = product_errors(projector, unit_vectors("normal"), 4, shape)
    assert typical < root_mean_square(pairs(full)) < 1.3 * typical
    assert root_mean_square(diagonals(full)) < 0.2 * worst
    one = product_errors(projector, unit_matrices(128, rank=1).flatten(1), 100, shape)
    assert root_mean_square(diagonals(one)) == pytest.approx(worst, rel=0.1)
    # What two gradients share on the left is no help: the error is that of `right` columns.
    common = unit_matrices(128, rank=1, common_left=True).flatten(1)
    errors = pairs(product_errors(projector, common, 100, shape))
    assert root_mean_square(errors) == pytest.approx(32**-0.5, rel=0.1)


# ------------------------------------------------------------------------------ all on average

UNBIASED = {
    "rademacher": Rademacher(64),
    "rademacher, 1 digit": Rademacher(64, arithmetic="int8x1"),
    "rademacher, 3 digits": Rademacher(64, arithmetic="int8x3"),
    "sjlt, 1": SJLT(64, 1),
    "sjlt, 4": SJLT(64, 4),
    "mask": Mask(64),
    "grass": Mask(128, SJLT(64, 4)),
    "kronecker": Kronecker(8, 8),
    "kronecker of a vector": Kronecker(8, 8),
}


@pytest.mark.parametrize("kind", UNBIASED)
def test_product__is_right_on_average_over_checkpoints(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randn(6, 512, generator=generator) + torch.randn(512, generator=generator)
    vectors = vectors / vectors.norm(dim=1, keepdim=True)
    shape = (512,) if "vector" in kind else (16, 32)
    errors = product_errors(UNBIASED[kind], vectors, 256, shape)
    z = errors.mean(0) / (errors.std(0) / math.sqrt(len(errors)))
    assert np.abs(z).max() < 5
