"""Eigenvectors of gram matrices of fewer samples than dimensions, against dense solves."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest

from tests.arrays.decomposed_features import lazy
from tests.arrays.test_completeness import oracle_left_out, oracle_totals
from trakdask.arrays.damping import held_out, left_out
from trakdask.arrays.decomposition import Inverse, Spectrum, component_count, decompose
from trakdask.arrays.gram import gram_and_sum
from trakdask.arrays.spectrum import (
    closed_form_damping,
    eigenvectors,
    from_eigenvectors,
    inverse,
    leverage,
    solve,
    spectrum,
)

LABELS = ["a", "b"]
N, P = 20, 64


def few_rows() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return float32 features of fewer rows than dimensions, h (some are 0), g, and other rows.

    The last rows repeat earlier ones, so that the rank is less than the number of rows, too.
    """
    rng = np.random.default_rng(0)
    x = rng.standard_normal((N, P, 2)) * 0.8 ** np.arange(P)[:, None]
    x[-3:] = x[:3]
    h, g = rng.random((N, 2)), rng.random((N, 2))
    h[4:6] = 0  # not in K, yet in r
    return x.astype("f4"), h, g, rng.standard_normal((9, P, 2)).astype("f4")


def few_components(x: np.ndarray, h: np.ndarray, g: np.ndarray) -> da.Array:
    k, r = gram_and_sum(lazy(x), lazy(h), lazy(g))
    return spectrum(k, r, N, LABELS, n_component=N)


def test_solve__of_few_samples_equals_a_dense_solve() -> None:
    x, h, g, rows = few_rows()
    rows[4] = np.nan
    lam = np.array([0.05, 2.0])
    found = solve(inverse(few_components(x, h, g), da.from_array(lam, chunks=1)), lazy(rows, 4))
    for c in (0, 1):
        a = x[..., c].astype("f8")
        k = (a * h[:, [c]]).T @ a + lam[c] * np.eye(P)
        expected = np.linalg.solve(k, rows[..., c].astype("f8").T).T
        scale = np.nanmax(np.abs(expected))
        np.testing.assert_allclose(found[..., c].compute(), expected, rtol=1e-5, atol=2e-5 * scale)


def test_leverage__of_few_samples_equals_the_dense_quadratic_form() -> None:
    x, h, g, rows = few_rows()
    rows[4] = np.nan
    lam = np.array([0.05, 2.0])
    found = leverage(
        inverse(few_components(x, h, g), da.from_array(lam, chunks=1)), lazy(rows, 4)
    ).compute()
    for c in (0, 1):
        a = x[..., c].astype("f8")
        explicit = np.linalg.inv((a * h[:, [c]]).T @ a + lam[c] * np.eye(P))
        dense = np.einsum("sp,pq,sq->s", rows[..., c], explicit, rows[..., c])
        np.testing.assert_allclose(found[:, c], dense, rtol=1e-5)
    assert np.isnan(found[4]).all()


def test_totals__of_few_samples_equal_dense_solves() -> None:
    x, h, g, rows = few_rows()
    whole, exact = few_components(x, h, g), x.astype("f8")
    expected = oracle_totals(exact, h, g.mean(1), rows)
    scale = np.abs(expected).max(axis=0)
    error = np.abs(held_out(whole, lazy(rows)).compute() - expected)
    assert (error <= 2e-5 * scale).all()
    expected = oracle_left_out(exact, h, g.mean(1))
    scale = np.abs(expected).max(axis=0)
    error = np.abs(left_out(whole, lazy(x), lazy(h), lazy(g)).compute() - expected)
    assert (error <= 2e-5 * scale).all()


def test_eigenvectors__of_few_samples_are_the_spectrum_again() -> None:
    x, h, g, rows = few_rows()
    k, r = gram_and_sum(lazy(x), lazy(h), lazy(g))
    made = few_components(x, h, g)
    values, vectors = eigenvectors(made, P, N)
    assert (values.chunks, vectors.chunks) == (((N,), (1, 1)), ((P,), (N,), (1, 1)))
    assert values[:, 0].compute().shape == (N,)
    assert vectors[..., 0].compute().shape == (P, N)
    known = from_eigenvectors(values, vectors, r, N, LABELS)
    np.testing.assert_allclose(held_out(known, lazy(rows)), held_out(made, lazy(rows)), rtol=1e-6)
    whole = closed_form_damping(spectrum(k, None, N, LABELS), 0.03)
    np.testing.assert_allclose(closed_form_damping(known, 0.03), whole, rtol=1e-6)


def test_solve__without_damping_names_the_checkpoint_of_few_samples() -> None:
    x, h, g, rows = few_rows()
    found = solve(inverse(few_components(x, h, g), da.zeros(2, chunks=1)), lazy(rows))
    with pytest.raises(np.linalg.LinAlgError, match=r"checkpoint '[ab]' .*larger damping"):
        found.compute(scheduler="sync")


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


def test_decompose__of_zeros_and_of_too_large_a_rank() -> None:
    values, vectors = decompose(np.zeros((8, 8)), 3)
    assert not values.any()
    assert not vectors.any()
    with pytest.raises(ValueError, match=r"3 samples.*0\.62 of its trace"):
        decompose(np.eye(8), 3)


def test_component_count__fewer_only_where_it_is_faster_and_exact_enough() -> None:
    f4, f8 = np.dtype("f4"), np.dtype("f8")
    assert component_count(1200, 2048, f4) == 1200
    assert component_count(1200, 2048, f8) == 2048
    assert component_count(2000, 2048, f4) == 2048
    assert component_count(5000, 8192, f4) == 8192  # Python's lock would be held for too long


def test_inverse__one_form_for_all_and_for_few_components() -> None:
    x = np.random.default_rng(0).standard_normal((4, 10))
    k = x.T @ x
    expected = np.linalg.inv(k + 0.3 * np.eye(10))
    for n in (4, 10):
        values, vectors = decompose(k, n)
        found: Inverse = Spectrum(values, vectors, values, values, 1.0, "a").inverse(0.3)
        dense = (vectors * found.along[:, 0]) @ vectors.T + found.rest * np.eye(10)
        np.testing.assert_allclose(dense, expected, rtol=1e-9, atol=1e-9)
