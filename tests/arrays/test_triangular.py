from __future__ import annotations

import numpy as np
import pytest

from trakdask.arrays.triangular import cholesky_in_place, solve_in_place


def definite(p: int, condition: float = 1e3) -> np.ndarray:
    """A symmetric matrix with known eigenvalues between 1 / condition and 1."""
    q, _ = np.linalg.qr(np.random.default_rng(p).standard_normal((p, p)))
    return (q * np.geomspace(1 / condition, 1, p)) @ q.T


@pytest.mark.parametrize("p", [1, 2, 127, 128, 129, 300])
def test_cholesky_in_place__numpy(p: int) -> None:
    a = definite(p)
    found = a + np.triu(np.full((p, p), np.nan), 1)
    assert cholesky_in_place(found)
    np.testing.assert_allclose(found, np.linalg.cholesky(a), atol=1e-13)


@pytest.mark.parametrize("bad", [0, 127, 128, 299])
def test_cholesky_in_place__indefinite(bad: int) -> None:
    a = definite(300)
    a[bad, bad] = -1e-3
    assert not cholesky_in_place(a)


@pytest.mark.parametrize("p", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("order", ["C", "F"])
def test_solve_in_place__dense_solve(p: int, order: str) -> None:
    a = definite(p)
    rows = np.random.default_rng(0).standard_normal((7, p))
    found = rows.copy()
    lower = np.asarray(np.linalg.cholesky(a), order=order)  # type: ignore[call-overload]
    solve_in_place(lower, found)
    np.testing.assert_allclose(found, np.linalg.solve(a, rows.T).T, rtol=1e-9, atol=1e-10)


def test_solve_in_place__no_rows_and_bad_rows() -> None:
    lower = np.linalg.cholesky(definite(200))
    solve_in_place(lower, np.empty((0, 200)))
    rows = np.random.default_rng(0).standard_normal((5, 200))
    clean, rows[2, 150] = rows.copy(), np.inf
    with np.errstate(invalid="ignore"):
        solve_in_place(lower, rows)
    solve_in_place(lower, clean)
    assert np.isnan(rows[2]).any()
    np.testing.assert_allclose(np.delete(rows, 2, 0), np.delete(clean, 2, 0), rtol=1e-12)
