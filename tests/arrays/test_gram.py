from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.arrays.decomposed_features import lazy
from tests.stored_arrays import stored
from trakdask.arrays.gram import gram, gram_and_sum, loss_gradient


def oracle(x: np.ndarray, h: np.ndarray) -> np.ndarray:
    """Σ_z h(z) φ(z) φ(z)ᵀ of each checkpoint, in float64."""
    x, h = x.astype(np.float64), h.astype(np.float64)
    return np.einsum("sc,spc,sqc->pqc", h, x, x)


def gaussian(n: int, p: int, c: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(0).standard_normal((n, p, c)).astype(dtype)


@st.composite
def integer_features(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """Small integers as float32, weights with exact roots, and a chunking of the samples."""
    rows = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=12)))
    p, c = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    x = rng.integers(-4, 5, (sum(rows), p, c)).astype(np.float32)
    return x, rng.integers(0, 4, (sum(rows), c)).astype(np.float32) ** 2, rows


@given(integer_features(), st.integers(0, 2))
def test_gram__exact_for_any_chunks(
    features: tuple[np.ndarray, np.ndarray, tuple[int, ...]], kind: int
) -> None:
    x, h, rows = features
    together = da.from_array(x, chunks=(rows, -1, -1))  # several checkpoints in a chunk
    feature = (lazy(x, rows), stored(x, (rows, -1, 1)), together)[kind]
    plain = gram(feature).compute(scheduler="sync")
    np.testing.assert_array_equal(plain, oracle(x, np.ones_like(h)))
    weighted = gram(feature, lazy(h, 7)).compute(scheduler="sync")
    np.testing.assert_array_equal(weighted, oracle(x, h))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_gram__float_inputs(dtype: str) -> None:
    x = gaussian(3000, 8, 2, dtype)
    h = np.random.default_rng(1).random((3000, 2))
    expected = oracle(x, h)
    lazy_gram, lazy_sum = gram_and_sum(lazy(x, 100), lazy(h, 100), lazy(h, 100))
    found, total = dask.compute(lazy_gram, lazy_sum)
    tolerance = 1e-11 if dtype == "float64" else 1e-4
    dense = np.einsum("spc,s->pc", x.astype("f8"), h.mean(1))
    np.testing.assert_allclose(total, dense, rtol=tolerance, atol=tolerance)
    assert found.dtype == np.float64
    assert np.abs(found - expected).max() < 1e-6 * np.abs(expected).max()
    np.testing.assert_array_equal(found, found.transpose(1, 0, 2))


def test_gram__rows_of_nan_are_left_out() -> None:
    x = np.random.default_rng(0).integers(-3, 4, (100, 4, 2)).astype("f4")
    h, g = np.random.default_rng(1).integers(1, 4, (2, 100, 2)).astype("f8") ** 2
    without = x.copy()
    without[[3, 50, 51], :, 1] = 0
    x[[3, 50, 51], :, 1] = h[[3, 50, 51], 1] = g[[3, 50, 51], 1] = np.nan
    expected = gram(lazy(without)).compute()
    np.testing.assert_array_equal(gram(lazy(x)).compute(), expected)
    weights, sum_weights = (da.from_array(w, chunks=(10, 1)) for w in (h, g))
    matrix, total = da.compute(*gram_and_sum(lazy(x), weights, sum_weights))
    known = np.where(np.isnan(h), 0, h)
    np.testing.assert_array_equal(matrix, np.einsum("spc,sc,sqc->pqc", without, known, without))
    mean = np.nan_to_num(g.mean(axis=1))  # of no use at either checkpoint, where one is missing
    np.testing.assert_array_equal(total, np.einsum("s,spc->pc", mean, without))
    np.testing.assert_array_equal(loss_gradient(lazy(x), sum_weights), total)
