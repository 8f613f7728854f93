"""Do the random matrices behave like the matrices that the theory of projections speaks of?

Matrices are what users get: projections of unit vectors. Every check turns a property into a score
that is about normal, with variance 1, if the entries are what they claim to be; seeds are fixed, so
scores are the same in each run. With LIMIT = 5 and about a thousand scores, perfect generators fail
with a probability of 1e-3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from trakdask.projection import (
    SJLT,
    Kronecker,
    Mask,
    Projector,
    Rademacher,
    RowMap,
    project,
)

Matrix = npt.NDArray[np.float64]
Scores = dict[str, float]

LIMIT = 5.0
P, N_ROWS, N_FEW_ROWS = 1024, 4096, 2048
TINY = 1e-6  # features are float32
LAGS = (1, 2, 32, 64, 128)


# ------------------------------------------------------------- the oracle: scores of a numpy matrix


@dataclass(frozen=True)
class Law:
    """What the entries of a matrix are, where they have mean 0 and variance 1.

    ``pair`` is the variance of the product of two entries of one row; ``row_norm`` that of a
    squared row norm over the width.
    """

    kurtosis: float
    pair: float
    row_norm: float

    @property
    def is_dense(self) -> bool:
        return self.kurtosis < 4


def z_of_sum(products: Matrix) -> float:
    """Score a sum of uncorrelated numbers of mean 0 by their own size."""
    norm = float(np.sqrt((products**2).sum()))
    return float(products.sum()) / norm if norm else 0.0


def z_of_mean(samples: Matrix, expected: float) -> float:
    """Score the mean of independent numbers; where they do not vary it has to be exact."""
    error = samples.std() / len(samples) ** 0.5 + TINY * max(abs(expected), 1)
    return float((samples.mean() - expected) / error)


def moment_scores(a: Matrix, law: Law) -> Scores:
    row_norms, column_norms = (a**2).mean(1), (a**2).mean(0)
    return {
        "mean": z_of_sum(a),
        "second moment": z_of_mean(row_norms, 1),
        "fourth moment": z_of_mean((a**2 * a**2).mean(1), law.kurtosis),
        "row norms": z_of_mean((row_norms - 1) ** 2, law.row_norm),
        "column norms": z_of_mean((column_norms - 1) ** 2, (law.kurtosis - 1) / len(a)),
    }


def correlation_scores(a: Matrix, variance: float, law: Law, b: Matrix | None = None) -> Scores:
    """Score the correlations of all pairs of columns, of one matrix or of two.

    For signs, the largest of n correlations exceeds t with a probability below 2 n exp(-t² / 2):
    the score is the z of one correlation with that probability. Sums of a few large entries, as in
    sparse matrices, have no such bound.
    """
    if b is None:
        all_pairs = unit_columns(a).T @ unit_columns(a)
        pairs = all_pairs[np.triu_indices(len(all_pairs), 1)]
    else:
        pairs = (unit_columns(a).T @ unit_columns(b)).ravel()
    squares = pairs**2 * len(a)
    scores = {"mean square": z_of_mean(squares, variance)}
    if law.is_dense:
        excess = squares.max() - 2 * np.log(squares.size)
        scores["largest"] = float(np.sqrt(max(excess, 0)))
    return scores


def unit_columns(a: Matrix) -> Matrix:
    norms = np.linalg.norm(a, axis=0)
    return a[:, norms > 0] / norms[norms > 0]


def z_of_correlation(a: Matrix, b: Matrix) -> float:
    """Score the correlation of numbers of mean 0, some of which may be large and rare."""
    norm = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float((a * b).sum()) * a.size**0.5 / norm


def same_entry_scores(a: Matrix, b: Matrix) -> Scores:
    """Score that neither signs nor sizes of entries at the same place are related."""
    scores = {"signs": z_of_sum(a * b)}
    sizes = [m**2 - (m**2).mean() for m in (a, b)]
    if min(size.max() for size in sizes) > TINY:
        scores["sizes"] = z_of_correlation(*sizes)
    return scores


def lag_scores(a: Matrix) -> Scores:
    scores = {"column neighbours": z_of_sum(a[:, 1:] * a[:, :-1])}
    scores["four corners"] = z_of_sum(a[1:, 1:] * a[1:, :-1] * a[:-1, 1:] * a[:-1, :-1])
    for lag in LAGS:
        found = same_entry_scores(a[lag:], a[:-lag])
        scores |= {f"{name}, {lag} rows apart": score for name, score in found.items()}
    return scores


def pair_scores(a: Matrix, b: Matrix, law: Law) -> Scores:
    """Score that two matrices are independent."""
    return same_entry_scores(a, b) | correlation_scores(a, 1.0, law, b)


# ------------------------------------------------------------------------------ what users get


@dataclass(frozen=True)
class Kind:
    """A projector for a number of columns, rows and a seed; the law of its matrix.

    The rows are one parameter, of ``shape(n_rows)``; other rows can stand before it if ``has_far``.
    """

    make: Callable[[int, int, int], Projector]
    law: Law
    shape: Callable[[int], tuple[int, ...]] = lambda n_rows: (n_rows,)
    has_far: bool = True


def sjlt_law(sparsity: int, selected: float = 1) -> Law:
    """Return the law of SJLT after a mask that keeps a part of the rows."""
    kurtosis = P / sparsity + 3 * (1 - 1 / sparsity)
    row_norm = 2 * (1 - 1 / sparsity) / P
    pair = 1 - 1 / sparsity
    return Law(kurtosis / selected, pair / selected, (1 + row_norm) / selected - 1)


SIGNS = Law(kurtosis=1, pair=1, row_norm=0)
NORMAL = Law(kurtosis=3, pair=1, row_norm=2 / P)

KINDS = {
    "rademacher": Kind(lambda p, n, seed: Rademacher(p, seed), SIGNS),
    "sjlt, 1": Kind(lambda p, n, seed: SJLT(p, 1, seed), sjlt_law(1)),
    "sjlt, 4": Kind(lambda p, n, seed: SJLT(p, 4, seed), sjlt_law(4)),
    "grass": Kind(
        lambda p, n, seed: Mask(n // 4, SJLT(p, 4, seed), seed), sjlt_law(4, 1 / 4), has_far=False
    ),
    # A factor of width 1 is one sign: the matrix is the other factor.
    "kronecker left": Kind(lambda p, n, seed: Kronecker(p, 1, seed), SIGNS, lambda n: (n, 1)),
    "kronecker right": Kind(lambda p, n, seed: Kronecker(1, p, seed), SIGNS, lambda n: (1, n)),
}


def features(
    projector: Projector,
    flat: Tensor,
    checkpoint: int = 0,
    shape: tuple[int, ...] | None = None,
) -> Tensor:
    row_map = RowMap.from_shapes({"flat": shape or flat.shape[1:]}, alignment=512)
    return project(projector, {"flat": flat}, row_map, checkpoint).double()


@lru_cache(maxsize=2)
def matrix(name: str, n_rows: int, *, seed: int = 0, checkpoint: int = 0, row: int = 0) -> Matrix:
    """Return rows of a matrix, (n_rows, P), in units in which an entry has variance 1."""
    kind, eye = KINDS[name], torch.eye(n_rows)
    projector, shape = kind.make(P, n_rows, seed), kind.shape(n_rows)
    if row:
        row_map = RowMap.from_shapes({"before": (row,), "flat": shape}, alignment=512)
        found = torch.zeros(n_rows, P, dtype=torch.float64)
        projector.bind(row_map).project_block(eye, row, checkpoint, found)
        found *= projector.scale(row_map.n_rows)
    else:
        found = features(projector, eye, checkpoint, shape)
    return found.numpy() * P**0.5


def require_small(scores: Scores) -> None:
    bad = {name: score for name, score in scores.items() if not abs(score) < LIMIT}
    assert not bad


def require_law(a: Matrix, law: Law) -> None:
    require_small(moment_scores(a, law))
    require_small(lag_scores(a))
    require_small(correlation_scores(a, law.pair, law))
    require_small(correlation_scores(a[:P].T, 1, law))


@pytest.mark.parametrize("kind", KINDS)
def test_matrix__is_what_its_law_says(kind: str) -> None:
    require_law(matrix(kind, N_ROWS), KINDS[kind].law)


OTHERS = [
    *({"checkpoint": checkpoint} for checkpoint in (1, 2**31)),
    *({"seed": seed} for seed in (1, 2**32)),
    # From 2**32, 2**36 or 2**39 on, a row number needs the high counter word.
    *({"row": row} for row in (2**14, 2**32, 2**36, 2**39)),
]


@pytest.mark.parametrize(
    ("kind", "other"),
    [
        (kind, other)
        for kind in KINDS
        for other in OTHERS
        if KINDS[kind].has_far or "row" not in other
    ],
    ids=str,
)
def test_matrix__others_are_independent(kind: str, other: dict[str, int]) -> None:
    first, second, law = matrix(kind, P), matrix(kind, P, **other), KINDS[kind].law
    require_small(pair_scores(first, second, law))
    require_small(pair_scores(first.T, second.T, law))
    require_small(moment_scores(second, law))


def test_matrix__factors_of_kronecker_are_independent() -> None:
    left, right = matrix("kronecker left", P), matrix("kronecker right", P)
    require_small(pair_scores(left, right, SIGNS))


def test_matrix__kronecker_is_the_product_of_its_factors() -> None:
    left, right = (
        features(Kronecker(*width), torch.eye(48), shape=shape) * 8**0.5
        for width, shape in (((8, 1), (48, 1)), ((1, 8), (1, 48)))
    )
    found = features(Kronecker(8, 8), torch.eye(48 * 48), shape=(48, 48)) * 8
    # Both factors carry the first sign of the other one.
    expected = torch.kron(left, right) * found[0, 0]
    torch.testing.assert_close(found, expected, rtol=TINY, atol=0)


@pytest.mark.parametrize("arithmetic", ["int8x1", "int8x3"])
def test_matrix__arithmetic_does_not_change_it(arithmetic: str) -> None:
    eye = torch.eye(300)
    found = features(Rademacher(P, arithmetic=arithmetic), eye)
    assert torch.equal(found, features(Rademacher(P), eye))


# --------------------------------------------------------------------- rows that a mask keeps


def kept(checkpoint: int = 0, seed: int = 0) -> Matrix:
    """Return which of 2**18 rows are kept, as numbers of mean 0."""
    row_map = RowMap.from_shapes({"flat": (2**18,)}, alignment=1)
    rows = Mask(2**16, seed=seed).bind(row_map).selected_rows(checkpoint)
    found = np.full(2**18, -0.25)
    found[rows] += 1
    return found


def test_mask__matrix_has_one_entry_per_column() -> None:
    found = features(Mask(64), torch.eye(500)).numpy()
    row_map = RowMap.from_shapes({"flat": (500,)}, alignment=1)
    assert ((found > 0).sum(0) == 1).all()
    assert np.flatnonzero(found.any(1)).tolist() == Mask(64).bind(row_map).selected_rows(0).tolist()
    np.testing.assert_allclose(found.max(0), (500 / 64) ** 0.5, rtol=TINY)


def test_mask__rows_are_kept_independently() -> None:
    mask = kept()
    assert mask.sum() == 0
    scores = {f"lag {lag}": z_of_correlation(mask[lag:], mask[:-lag]) for lag in (*LAGS, 2**16)}
    scores["odd rows"] = z_of_sum(mask[::2] - mask[1::2])
    scores["slope"] = z_of_correlation(mask, np.linspace(-1, 1, len(mask)))
    scores["blocks"] = z_of_mean(mask.reshape(4096, 64).sum(1) ** 2, 64 * 3 / 16)
    scores |= {f"checkpoint {c}": z_of_correlation(mask, kept(c)) for c in (1, 2**31)}
    scores |= {f"seed {seed}": z_of_correlation(mask, kept(seed=seed)) for seed in (1, 2**32)}
    require_small(scores)


def test_mask__order_of_columns_is_random() -> None:
    rows = torch.arange(20_000.0)[None]
    found = features(Mask(5000), rows).numpy()[0]
    require_small({"slope": z_of_correlation(found - found.mean(), np.linspace(-1, 1, 5000))})
