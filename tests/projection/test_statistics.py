"""Products of features have the errors that ``cost`` names, and are right on average."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from trakdask.projection import SJLT, Mask, Projector, Rademacher, RowMap, project

Matrix = npt.NDArray[np.float64]

LIMIT = 5.0  # of scores that are about normal with variance 1; seeds are fixed
P = 1024


def product_errors(
    projector: Projector, vectors: Tensor, n_checkpoints: int = 1, shape: tuple[int, ...] = ()
) -> Matrix:
    """Return (checkpoint, i, j): the error of the product of vectors i and j."""
    exact, errors = vectors.double() @ vectors.double().T, []
    row_map = RowMap.from_shapes({"flat": shape or vectors.shape[1:]}, alignment=512)
    for checkpoint in range(n_checkpoints):
        found = project(projector, {"flat": vectors}, row_map, checkpoint).double()
        errors.append((found @ found.T - exact).numpy())
    return np.stack(errors)


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
    [*((p, "normal") for p in (*ACCURATE, *MASKS)), *((p, "sparse") for p in ACCURATE[1::3])],
    ids=str,
)
def test_product__error_is_what_cost_says(projector: Projector, family: str) -> None:
    typical, worst = projector.cost(16384).product_error
    n_checkpoints = 4 if projector in ACCURATE and family == "normal" else 1
    errors = product_errors(projector, unit_vectors(family), n_checkpoints)
    pairs = errors[0][np.triu_indices(errors.shape[-1], 1)]
    assert root_mean_square(pairs) == pytest.approx(typical, rel=0.1)
    if n_checkpoints > 1:
        diagonals = np.einsum("...ii->...i", errors)
        assert root_mean_square(diagonals) == pytest.approx(worst, rel=0.15)


UNBIASED = [
    *(Rademacher(64, arithmetic=f"int8x{n}") for n in (1, 2, 3)),
    *(SJLT(64, 1), SJLT(64, 4), Mask(64), Mask(128, SJLT(64, 4))),
]


@pytest.mark.parametrize("projector", UNBIASED, ids=str)
def test_product__is_right_on_average_over_checkpoints(projector: Projector) -> None:
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randn(6, 512, generator=generator) + torch.randn(512, generator=generator)
    vectors = vectors / vectors.norm(dim=1, keepdim=True)
    errors = product_errors(projector, vectors, 256, (16, 32))
    z = errors.mean(0) / (errors.std(0) / math.sqrt(len(errors)))
    assert np.abs(z).max() < LIMIT
