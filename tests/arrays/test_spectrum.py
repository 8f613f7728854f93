"""One eigendecomposition per checkpoint against dense solves."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest

from tests.arrays.decomposed_features import LABELS, data, decomposed, lazy
from trakdask.arrays.damping import GRID, held_out, left_out, loss_gradient
from trakdask.arrays.gram import gram_and_sum
from trakdask.arrays.solve import closed_form_damping as closed_form_of_matrix
from trakdask.arrays.spectrum import (
    closed_form_damping,
    eigenvectors,
    from_eigenvectors,
    inverse,
    leverage,
    mean_trace,
    solve,
    spectrum,
)


def test_spectrum__one_decomposition_per_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    x, h, g, rows = data()
    whole = decomposed(x, h, g)
    both = held_out(whole, lazy(rows)), left_out(whole, lazy(x), lazy(h), lazy(g))
    eigh, calls = np.linalg.eigh, []
    monkeypatch.setattr(np.linalg, "eigh", lambda matrix: calls.append(1) or eigh(matrix))
    dask.compute(*both, scheduler="sync")
    assert len(calls) == 2


def test_spectrum__eigenvalues_that_rounding_made_negative_count_as_zero() -> None:
    k = np.diag([1.0, -1e-9])[:, :, None]
    whole = spectrum(lazy(k, 2), da.ones((2, 1), chunks=(2, 1)), 10**9, ["a"])
    found = held_out(whole, lazy(np.eye(2)[:, :, None])).compute()
    np.testing.assert_allclose(found[1, :, 0], 1 / (GRID * 1e-9), rtol=1e-6)


def test_spectrum__not_finite_names_checkpoint() -> None:
    x, h, g, rows = data()
    x[3, 1, 1] = np.nan
    with pytest.raises(ValueError, match=r"not finite for checkpoint 'b'"):
        held_out(decomposed(x, h, g), lazy(rows)).compute(scheduler="sync")


def test_mean_trace__trace_by_samples() -> None:
    k = np.random.default_rng(0).random((5, 5, 2))
    found = mean_trace(lazy(k, 5), 10, LABELS).compute()
    np.testing.assert_allclose(found, [np.trace(k[..., c]) / 10 for c in (0, 1)])


def test_mean_trace__is_summed_in_float64() -> None:
    k = np.diag(np.array([2**24, 1, 1], "f4"))[:, :, None]
    assert mean_trace(lazy(k, 3), 1, LABELS).compute().tolist() == [2**24 + 2]


def test_mean_trace__of_zeros_names_the_checkpoint() -> None:
    k = np.stack([np.eye(3), np.zeros((3, 3))], axis=2)
    with pytest.raises(ValueError, match=f"positive trace, got 0 at checkpoint '{LABELS[1]}'"):
        mean_trace(lazy(k, 3), 4, LABELS).compute(scheduler="sync")


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_solve__equals_a_dense_solve(dtype: type) -> None:
    x, h, g, rows = data()
    rows[4] = np.nan
    damping = np.array([0.5, 2.0])
    parts = gram_and_sum(lazy(x), lazy(h), lazy(g[:, :1].repeat(2, 1)))
    target = lazy(rows.astype(dtype), 4)
    found = solve(inverse(spectrum(*parts, len(x), LABELS), da.from_array(damping)), target)
    assert found.dtype == dtype
    assert found.chunks == target.chunks
    expected = np.empty_like(rows)
    for c in range(2):
        k = (x[..., c] * h[:, [c]]).T @ x[..., c] + damping[c] * np.eye(x.shape[1])
        expected[..., c] = np.linalg.solve(k, rows[..., c].T).T
    tolerance = 1e-10 if dtype is np.float64 else 1e-5
    np.testing.assert_allclose(found.compute(), expected, rtol=tolerance, atol=tolerance)


def test_solve__singular_names_the_checkpoint() -> None:
    x, h, g, rows = data()
    x[:, -1, 1] = 0
    parts = gram_and_sum(lazy(x), lazy(h), lazy(g[:, :1].repeat(2, 1)))
    found = solve(inverse(spectrum(*parts, len(x), LABELS), da.zeros(2)), lazy(rows))
    with pytest.raises(np.linalg.LinAlgError, match=r"checkpoint 'b' .*λ = 0.*larger damping"):
        found.compute(scheduler="sync")


def matrices() -> tuple[da.Array, da.Array, np.ndarray, np.ndarray]:
    x, h, g, rows = data()
    return (*gram_and_sum(lazy(x), lazy(h), lazy(g)), x, rows)


def test_from_eigenvectors__is_the_spectrum_again() -> None:
    k, r, x, rows = matrices()
    values, vectors = eigenvectors(spectrum(k, None, len(x), LABELS), 6)
    assert (values.chunks, vectors.chunks) == (((6,), (1, 1)), ((6,), (6,), (1, 1)))
    known, made = from_eigenvectors(values, vectors, r, len(x), LABELS), spectrum(k, r, 40, LABELS)
    np.testing.assert_allclose(held_out(known, lazy(rows)), held_out(made, lazy(rows)), rtol=1e-10)
    lam = da.from_array(np.array([0.5, 2.0]), chunks=1)
    without_r = from_eigenvectors(values, vectors, None, len(x), LABELS)
    found = solve(inverse(without_r, lam), lazy(rows)).compute()
    for c in (0, 1):
        dense = np.linalg.solve(k[..., c].compute() + lam[c].compute() * np.eye(6), rows[..., c].T)
        np.testing.assert_allclose(found[..., c], dense.T, rtol=1e-9, atol=1e-12)
    with pytest.raises(np.linalg.LinAlgError, match="checkpoint 'b'"):
        solve(
            inverse(without_r, da.from_array(np.array([1.0, -1.0]), chunks=1)), lazy(rows)
        ).compute()


def test_leverage__equals_the_dense_quadratic_form() -> None:
    k, _, x, rows = matrices()
    rows[4] = np.nan
    lam = np.array([0.5, 2.0])
    whole = spectrum(k, None, len(x), LABELS)
    found = leverage(inverse(whole, da.from_array(lam, chunks=1)), lazy(rows, 4)).compute()
    for c in (0, 1):
        explicit = np.linalg.inv(k[..., c].compute() + lam[c] * np.eye(6))
        dense = np.einsum("sp,pq,sq->s", rows[..., c], explicit, rows[..., c])
        np.testing.assert_allclose(found[:, c], dense, rtol=1e-9)
    assert np.isnan(found[4]).all()


def test_closed_form_damping__is_that_of_the_matrix() -> None:
    k, _, x, _ = matrices()
    found = closed_form_damping(spectrum(k, None, len(x), LABELS), 0.03)
    np.testing.assert_allclose(found, closed_form_of_matrix(k, 0.03), rtol=1e-12)
    zero = spectrum(da.zeros((2, 2, 1), chunks=(2, 2, 1)), None, 4, ["b"])
    with pytest.raises(ValueError, match="got 0 at checkpoint 'b'"):
        closed_form_damping(zero, 0.03).compute()


def test_loss_gradient__equals_the_sum_beside_the_matrix() -> None:
    x, h, g, _ = data()
    x[3, :, 1], g[5, 0] = np.nan, np.nan  # failed at one checkpoint
    _, expected = gram_and_sum(lazy(x), lazy(h), lazy(g))
    found = loss_gradient(lazy(x), lazy(g))
    assert found.chunks == ((6,), (1, 1))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
