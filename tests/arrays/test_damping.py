"""λ: totals against dense solves, each row left out by a loop, and the choice by a loop."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import dask.array as da
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.arrays.decomposed_features import LABELS, data, decomposed, lazy
from tests.waiting import wait_until
from trakdask.arrays.damping import (
    CURVE,
    GRID,
    choose,
    curve,
    held_out,
    left_out,
)
from trakdask.arrays.gram import closed_form, gram_and_sum, mean_trace
from trakdask.arrays.solve import eigenvectors, spectrum
from trakdask.testing import raise_if_dask_computes


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


def oracle_choice(values: list[float], m: int) -> float:
    """The largest at most ½(1 - max²)/√m below the best; or 1, if that is as good."""
    best, chosen = max(values), 0.0
    for rho, value in zip(GRID, values, strict=True):
        if value >= best - (1 - best**2) / m**0.5 / 2:
            chosen = rho
    z = [np.log((1 + r) / (1 - r)) / 2 if abs(r) < 1 else np.sign(r) * np.inf for r in values]
    is_as_good = best == values[8] or max(z) - z[8] <= 0.25
    return min(chosen, 1) if is_as_good else chosen


def made(values: list[float] | np.ndarray, m: int = 100) -> da.Array:
    return da.from_array(np.array([(values, m)], CURVE))


def bump(peak: float, at: int, width: float = 1.0) -> np.ndarray:
    return peak - width * (np.arange(17) - at) ** 2 / 100


@pytest.mark.parametrize("weighted", [True, False])
def test_left_out__dense_solves_without_each_row(weighted: bool) -> None:
    x, h, g, _ = data(12)
    h = h if weighted else np.ones_like(h)
    with raise_if_dask_computes():
        whole = decomposed(x, h if weighted else None, g)
        found = left_out(whole, lazy(x), lazy(h) if weighted else None, lazy(g))
    np.testing.assert_allclose(found, oracle_left_out(x, h, g.mean(1)), rtol=1e-9)


def test_curve__pearson_of_means_over_checkpoints() -> None:
    rng = np.random.default_rng(0)
    totals, outputs = rng.standard_normal((30, 17, 3)), rng.standard_normal((30, 3))
    totals[4, 3, 1] = outputs[9, 2] = np.nan
    with raise_if_dask_computes():
        found = curve(da.from_array(totals, chunks=(8, 17, 1)), da.from_array(outputs, chunks=5))
    good = np.delete(np.arange(30), [4, 9])
    expected = [
        np.corrcoef(totals[good, i].mean(1), outputs[good].mean(1))[0, 1] for i in range(17)
    ]
    np.testing.assert_allclose(found["correlation"][0], expected, rtol=1e-12)
    assert found["n_rows"].compute() == 28


@given(st.lists(st.floats(-1, 1), min_size=17, max_size=17), st.integers(50, 10_000))
def test_choose__largest_within_one_standard_error(values: list[float], m: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = choose({"targets": made(values, m)}).compute(scheduler="sync")
    if max(values) < 0.4:
        assert np.isnan(found["relative"])
        assert found["candidate"] == 1
    else:
        assert found["relative"] == oracle_choice(values, m)
        assert found["candidate"] == 0
        assert found["peak"] == max(values)
    np.testing.assert_array_equal(found["correlation"][0], values)


@pytest.mark.slow
def test_choose__warns_the_client_of_a_worker(process_client: object) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        choose({"targets": made(bump(0.2, 8))}).compute()
        wait_until(lambda: any("0.20" in str(w.message) for w in caught), "the worker's warning")


def test_rules__of_the_matrix_alone() -> None:
    k = np.random.default_rng(0).standard_normal((9, 5, 2))
    k = np.einsum("spc,sqc->pqc", k, k)
    matrices = np.moveaxis(k, 2, 0)
    with raise_if_dask_computes():
        trace, closed = mean_trace(lazy(k, 5), 10, LABELS), closed_form(lazy(k, 5), 0.03, LABELS)
    np.testing.assert_allclose(trace, [np.trace(m) / 10 for m in matrices])
    np.testing.assert_allclose(closed, [0.03 * np.trace(m @ m) / np.trace(m) for m in matrices])
    k[..., 1] = np.nan
    assert np.isnan(closed_form(lazy(k, 5), 0.03, LABELS).compute()).tolist() == [False, True]
    k[..., 1] = 0
    for rule in (mean_trace(lazy(k, 5), 4, LABELS), closed_form(lazy(k, 5), 0.03, LABELS)):
        with pytest.raises(ValueError, match="checkpoint 'b'"):
            rule.compute(scheduler="sync")


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
