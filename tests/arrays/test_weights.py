from __future__ import annotations

import dask.array as da
import numpy as np
import pytest

from tests.laziness import raise_if_dask_computes
from trakdask.arrays.weights import row_norms, soft_gram_weights, soft_loss_weights, squared_norm

Q = np.array([[0.0, 1.0], [0.25, 0.5], [1e-30, 1 - 1e-12]])


def lazy(q: np.ndarray) -> da.Array:
    return da.from_array(q, chunks=(2, 1))


def oracle(q: float, a: float) -> tuple[float, float]:
    """One number at a time; Python's 0.0 ** 0 is 1, as a = 0 says."""
    return q**a, q**a * (1 - q)


@pytest.mark.parametrize("power", [0, 0.5, 1])
def test_soft_weights__by_definition(power: float) -> None:
    with raise_if_dask_computes():
        g, h = soft_loss_weights(lazy(Q), power), soft_gram_weights(lazy(Q), power)
    expected = np.array([[oracle(float(q), power) for q in row] for row in Q])
    np.testing.assert_allclose(g, expected[..., 0], rtol=1e-15)
    np.testing.assert_allclose(h, expected[..., 1], rtol=1e-15)


def test_squared_norm__against_numpy() -> None:
    x = np.random.default_rng(0).standard_normal((5, 4, 2)).astype(np.float32)
    x[3, :, 1] = 0
    feature = da.from_array(x, chunks=(2, -1, 1))
    with raise_if_dask_computes():
        squared = squared_norm(feature)
    norm = np.linalg.norm(x.astype(np.float64), axis=1)
    np.testing.assert_allclose(squared, norm**2, rtol=1e-12)


@pytest.mark.parametrize("p", [1, 7, 64, 4097])
def test_row_norms__bits_of_a_row_do_not_depend_on_the_others(p: int) -> None:
    x = np.random.default_rng(0).standard_normal((200, p, 1)).astype("f4")
    x[3] = np.nan
    found = row_norms(x)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, (x.astype("f8") ** 2).sum(axis=1), rtol=1e-12)
    np.testing.assert_array_equal(np.concatenate([row_norms(row[None]) for row in x]), found)
    np.testing.assert_array_equal(row_norms(x[70:]), found[70:])
