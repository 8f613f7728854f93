"""One eigendecomposition per checkpoint against dense solves."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest

from tests.arrays.decomposed_features import LABELS, data, decomposed, lazy
from trakdask.arrays.completeness import GRID, held_out, left_out
from trakdask.arrays.gram import gram_and_sum
from trakdask.arrays.spectrum import mean_trace, solve, spectrum


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
    found = mean_trace(lazy(k, 5), 10).compute()
    np.testing.assert_allclose(found, [np.trace(k[..., c]) / 10 for c in (0, 1)])


def test_mean_trace__is_summed_in_float64() -> None:
    k = np.diag(np.array([2**24, 1, 1], "f4"))[:, :, None]
    assert mean_trace(lazy(k, 3), 1).compute().tolist() == [2**24 + 2]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_solve__equals_a_dense_solve(dtype: type) -> None:
    x, h, g, rows = data()
    rows[4] = np.nan
    damping = np.array([0.5, 2.0])
    parts = gram_and_sum(lazy(x), lazy(h), lazy(g[:, :1].repeat(2, 1)))
    target = lazy(rows.astype(dtype), 4)
    found = solve(spectrum(*parts, len(x), LABELS), da.from_array(damping), target)
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
    found = solve(spectrum(*parts, len(x), LABELS), da.zeros(2), lazy(rows))
    with pytest.raises(np.linalg.LinAlgError, match=r"checkpoint 'b' .*λ = 0.*larger damping"):
        found.compute(scheduler="sync")
