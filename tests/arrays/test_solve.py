"""Solving with K + λI by eigenvectors, all or few, and by Cholesky, against dense inverses."""

from __future__ import annotations

from collections.abc import Callable

import dask
import dask.array as da
import numpy as np
import pytest

from tests.arrays.decomposed_features import LABELS, data, decomposed, lazy
from trakdask.arrays.damping import held_out, left_out
from trakdask.arrays.factorization import cholesky_in_place, decompose, solve_in_place
from trakdask.arrays.gram import gram_and_sum
from trakdask.arrays.solve import cholesky, leverage, solve
from trakdask.arrays.spectra import eigenvectors, inverse, spectrum

LAM = np.array([0.5, 2.0])


def lam(*values: float) -> da.Array:
    return da.from_array(np.array(values), chunks=1)


def few_rows() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return float32 features of fewer rows than dimensions, h (some are 0), g, and other rows.

    The last rows repeat earlier ones, so that the rank is less than the number of rows, too.
    """
    x, h, g, rows = data(20, 64)
    x[-3:] = x[:3]
    h[4:6] = 0  # not in K, yet in r
    return x.astype("f4"), h, g, rows


def oracle(x: np.ndarray, h: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """(Σ h φφᵀ + λI)⁻¹ of rows, by a dense inverse in float64."""
    out = np.empty(rows.shape)
    for c in range(2):
        a = x[..., c].astype(np.float64)
        k = (a * h[:, [c]]).T @ a + LAM[c] * np.eye(a.shape[1])
        out[..., c] = rows[..., c].astype(np.float64) @ np.linalg.inv(k)
    return out


def solver(kind: str, k: da.Array, n: int) -> da.Array:
    """(K + λI)⁻¹ of n samples, by one of three ways."""
    if kind == "cholesky":
        return cholesky(k, lam(*LAM), LABELS)
    factors = eigenvectors(k, LABELS, min(n, len(k)) if kind == "few eigenvectors" else None)
    return inverse(spectrum(*factors, None, n, LABELS), lam(*LAM))


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("features", [data, few_rows])
@pytest.mark.parametrize("kind", ["eigenvectors", "few eigenvectors", "cholesky"])
def test_solve_and_leverage__dense_inverse(
    kind: str, features: Callable[[], tuple[np.ndarray, ...]], dtype: str
) -> None:
    x, h, g, rows = features()
    rows = rows.astype(dtype)
    rows[4] = np.nan  # stays alone
    k, _ = gram_and_sum(lazy(x), lazy(h), lazy(g))
    made, target = solver(kind, k, len(x)), lazy(rows, 4)
    solved, forms = solve(made, target), leverage(made, target)
    assert (solved.dtype, solved.chunks) == (rows.dtype, target.chunks)
    expected = oracle(x, h, rows)
    exact = dtype == "f8" and features is data
    rtol = 1e-9 if exact else 1e-5
    scale = np.nanmax(np.abs(expected))
    np.testing.assert_allclose(solved, expected, rtol=rtol, atol=(1e-12 if exact else 2e-5) * scale)
    np.testing.assert_allclose(forms, np.einsum("spc,spc->sc", expected, rows), rtol=rtol)


def test_spectrum__one_decomposition_per_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    x, h, g, rows = data()
    whole = decomposed(x, h, g)
    both = held_out(whole, lazy(rows)), left_out(whole, lazy(x), lazy(h), lazy(g))
    eigh, calls = np.linalg.eigh, []
    monkeypatch.setattr(np.linalg, "eigh", lambda matrix: calls.append(1) or eigh(matrix))
    many = solve(inverse(whole, lam(*LAM)), lazy(rows, 2))
    dask.compute(*both, many, scheduler="sync")
    assert len(calls) == 2


def test_singular__names_checkpoint_and_damping() -> None:
    x, h, g, rows = data()
    x[:, -1, 1] = 0
    for features in ((x, h, g, rows), few_rows()):
        k, _ = gram_and_sum(*map(lazy, features[:3]))
        n, p = features[0].shape[:2]
        few = spectrum(*eigenvectors(k, LABELS, min(n, p)), None, n, LABELS)
        for made in (cholesky(k, lam(0, 0), LABELS), inverse(few, lam(0, 0))):
            with pytest.raises(np.linalg.LinAlgError, match=r"checkpoint '[ab]' .*λ = 0"):
                solve(made, lazy(features[3])).compute(scheduler="sync")


def test_not_finite__names_checkpoint() -> None:
    x, h, g, rows = data()
    k, _ = gram_and_sum(*map(lazy, (x, h, g)))
    with pytest.raises(ValueError, match=r"got -1.0 for checkpoint 'a'"):
        solve(cholesky(k, lam(-1, 1), LABELS), lazy(rows)).compute(scheduler="sync")
    x[3, 1, 1] = np.nan
    k, _ = gram_and_sum(*map(lazy, (x, h, g)))
    for kind in ("cholesky", "eigenvectors"):
        with pytest.raises(ValueError, match=r"not finite for checkpoint 'b'"):
            solve(solver(kind, k, len(x)), lazy(rows)).compute(scheduler="sync")


@pytest.mark.parametrize("rank", [1, 5, 12])
def test_decompose__is_the_matrix_again(rank: int) -> None:
    x = np.random.default_rng(rank).standard_normal((rank, 30))
    k = x.T @ x
    values, vectors = decompose(k, 12)
    assert values.shape == (12,)
    assert (np.diff(values) >= 0).all()
    np.testing.assert_allclose((vectors * values) @ vectors.T, k, atol=1e-12 * values.max())
    np.testing.assert_allclose(values[-rank:], np.linalg.eigvalsh(k)[-rank:], rtol=1e-9)
    kept = vectors[:, values > 0]
    assert kept.shape[1] == rank
    np.testing.assert_allclose(kept.T @ kept, np.eye(rank), atol=1e-9)


@pytest.mark.parametrize("p", [1, 128, 300])
def test_in_place__numpy(p: int) -> None:
    q, _ = np.linalg.qr(np.random.default_rng(p).standard_normal((p, p)))
    a = (q * np.geomspace(1e-3, 1, p)) @ q.T  # with these eigenvalues
    found = a + np.triu(np.full((p, p), np.nan), 1)
    assert cholesky_in_place(found)
    np.testing.assert_allclose(found, np.linalg.cholesky(a), atol=1e-13)
    rows = np.random.default_rng(0).standard_normal((7, p))
    rows[2, -1] = np.inf
    expected = np.linalg.solve(a, np.delete(rows, 2, 0).T).T
    with np.errstate(invalid="ignore"):
        solve_in_place(found, rows)
    np.testing.assert_allclose(np.delete(rows, 2, 0), expected, rtol=1e-9, atol=1e-10)
    a[-1, -1] = -1e-3
    assert not cholesky_in_place(a)
