"""λ: totals against dense solves, each row left out by a loop, and the choice by a loop."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import dask.array as da
import numpy as np
import pytest

from tests.arrays.decomposed_features import LABELS, data, decomposed, lazy
from tests.waiting import wait_until
from trakdask.arrays.damping import GRID, choose, chosen, held_out, left_out
from trakdask.arrays.gram import gram_and_sum
from trakdask.arrays.spectra import eigenvectors, spectrum


def oracle_totals(
    x: np.ndarray, h: np.ndarray, g: np.ndarray, rows: np.ndarray, grid: Sequence[float] = GRID
) -> np.ndarray:
    """φ(t)ᵀ (K + λI)⁻¹ r by dense solves, (row, ρ, checkpoint); h (n, C), g (n,)."""
    totals = np.empty((len(rows), len(grid), x.shape[2]))
    for c in range(x.shape[2]):
        k, r = (x[..., c] * h[:, [c]]).T @ x[..., c], g @ x[..., c]
        for i, rho in enumerate(grid):
            system = k + rho * np.trace(k) / len(x) * np.eye(len(k))
            totals[:, i, c] = rows[..., c] @ np.linalg.solve(system, r)
    return totals


def oracle_left_out(
    x: np.ndarray, h: np.ndarray, g: np.ndarray, grid: Sequence[float] = GRID
) -> np.ndarray:
    """Each row in turn: its weights set to 0, at the λ of the whole."""
    totals = np.empty((len(x), len(grid), x.shape[2]))
    for c in range(x.shape[2]):
        trace = np.trace((x[..., c] * h[:, [c]]).T @ x[..., c])
        for z in range(len(x)):
            others = np.delete(np.arange(len(x)), z)
            a = x[others, :, c]
            k, r = (a * h[others, c][:, None]).T @ a, g[others] @ a
            for i, rho in enumerate(grid):
                system = k + rho * trace / len(x) * np.eye(len(k))
                totals[z, i, c] = x[z, :, c] @ np.linalg.solve(system, r)
    return totals


def oracle_choice(values: Sequence[float]) -> float:
    """The ρ ≥ 1 whose correlation exceeds the one at ρ = 1 by most, beyond what it has to."""
    z = np.arctanh(values) - np.where(GRID > 1, 0.2, 0)  # of few samples
    return float(GRID[GRID >= 1][z[GRID >= 1].argmax()])


OPTIONS = {"samples": "targets", "otherwise": "tr(K)/n"}
OPTIONS |= {"prior": 1.0, "is_whole": False, "n_samples": 1000}


def choice(values: Sequence[float], m: int = 1000, n: int = 1, **options: Any) -> float:
    """Return the ρ that a curve chooses, NaN if the totals do not follow the outputs."""
    return float(chosen(np.asarray(values), m, n, **OPTIONS | options)["relative"][0])


def rising(at_prior: float, peak: float, prior: float = 1.0) -> np.ndarray:
    """A curve with its peak at ρ = 31.6."""
    points = np.log([0.01, prior, 10**1.5, 1000])
    return np.interp(np.log(GRID), points, [-0.5, at_prior, peak, -0.5])


@pytest.mark.parametrize("weighted", [True, False])
def test_left_out__dense_solves_without_each_row(weighted: bool) -> None:
    x, h, g, _ = data(12)
    h = h if weighted else np.ones_like(h)
    whole = decomposed(x, h if weighted else None, g)
    found = left_out(whole, lazy(x), lazy(h) if weighted else None, lazy(g))
    np.testing.assert_allclose(found, oracle_left_out(x, h, g.mean(1)), rtol=1e-9)


SHORT, PRIOR, WHOLE = 10**1.5, 10**0.5, {"is_whole": True}
CHOICES = [
    (rising(0.80, 0.92), {}, 1),  # artanh(0.92) - artanh(0.80) = 0.49, as halves of the data have
    (rising(0.76, 0.89, PRIOR), {"prior": PRIOR}, PRIOR),
    (rising(0.94, 0.99), {}, SHORT),
    (rising(0.94, 1.0), {}, SHORT),
    (rising(0.94, 0.99, PRIOR), {"prior": PRIOR}, SHORT),
    # A small gain is enough where the totals at the prior hardly follow the outputs,
    (rising(0.52, 0.70), {}, SHORT),
    (rising(-0.3, 0.2), {}, SHORT),
    (rising(0.60, 0.70), {}, 1),
    (rising(0.52, 0.60), {}, 1),
    # or with few training samples, however many are held out.
    (rising(0.90, 0.95), {"m": 128, "n_samples": 128}, SHORT),
    (rising(0.90, 0.95), {"m": 128}, 1),
    (rising(0.90, 0.91), {"m": 128, "n_samples": 128}, 1),
    # Of the whole curvature, by 0.2/√C.
    (rising(0.87, 0.92), WHOLE, SHORT),
    (rising(0.87, 0.90), WHOLE, 1),
    (rising(0.87, 0.89), {"n": 9, **WHOLE}, SHORT),
    # Only there, a smaller ρ, by 0.4/√C, but not by more than a decade.
    (rising(0.87, 0.97)[::-1], {"prior": 10}, 10),
    (rising(0.87, 0.99)[::-1], {"prior": 10, **WHOLE}, 1),
    (rising(0.87, 0.97, 10)[::-1], {**WHOLE}, 10**-0.5),
    (rising(0.87, 0.93, 10)[::-1], {**WHOLE}, 1),
    (np.full(21, 1.0), {}, 1),
    (np.full(21, 1.0), WHOLE, 1),
]


@pytest.mark.parametrize(("values", "options", "expected"), CHOICES)
def test_choose__another_rho_only_for_a_clear_gain(values, options, expected) -> None:
    assert choice(values, **options) == pytest.approx(expected)


def test_choose__totals_of_noise_do_not_choose() -> None:
    assert choice(np.full(21, 0.43), m=50) == 1
    for value, text in ((0.40, "by 0.40 at most"), (np.nan, "all the same")):
        with pytest.warns(UserWarning, match=text):
            assert np.isnan(choice(np.full(21, value), m=50))


def test_choose__warns_at_the_end_of_the_grid() -> None:
    with pytest.warns(UserWarning, match="hardly trained"):
        assert choice(np.linspace(-0.5, 0.9, 21)) == 1000


@pytest.mark.slow
def test_choose__warns_the_client_of_a_worker(process_client: object) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        totals = da.zeros((100, len(GRID), 1), chunks=-1)
        choose(totals, totals[:, 0], **OPTIONS).compute()
        wait_until(
            lambda: any("all the same" in str(w.message) for w in caught), "the worker's warning"
        )


def test_totals__of_fewer_samples_than_dimensions() -> None:
    x, h, g, rows = data(20, 64)
    x, h[4:6] = x.astype("f4"), 0  # some are not in K, yet in r
    k, r = gram_and_sum(lazy(x), lazy(h), lazy(g))
    few = spectrum(*eigenvectors(k, LABELS, 20), r, 20, LABELS)
    exact = x.astype("f8")
    for found, expected in (
        (held_out(few, lazy(rows)), oracle_totals(exact, h, g.mean(1), rows)),
        (left_out(few, lazy(x), lazy(h), lazy(g)), oracle_left_out(exact, h, g.mean(1))),
    ):
        assert (np.abs(found.compute() - expected) <= 2e-5 * np.abs(expected).max(axis=0)).all()
