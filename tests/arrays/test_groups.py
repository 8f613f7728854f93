from __future__ import annotations

import dask
import dask.array as da
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from tests.arrays.decomposed_features import lazy
from tests.stored_arrays import StoredArray, stored
from trakdask.arrays.groups import weighted_sums


def oracle(x: np.ndarray, g: np.ndarray, codes: np.ndarray, n_groups: int) -> np.ndarray:
    """Add up sample after sample, in float64."""
    out = np.zeros((n_groups, *x.shape[1:]))
    for z, group in enumerate(codes):
        if group >= 0:
            out[group] += g[z].astype(np.float64).mean() * x[z].astype(np.float64)
    return out


def arrays(n: int = 95, c: int = 2) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, 6, c), dtype=np.float32)
    return x, rng.random((n, c), dtype=np.float32), rng.integers(-1, 4, n)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12).map(tuple),
    st.integers(1, 5),
    st.integers(0, 2**32),
    st.booleans(),
    st.booleans(),
)
def test_weighted_sums__exact_for_any_chunks(
    rows: tuple[int, ...], n_groups: int, seed: int, is_stored: bool, by_code: bool
) -> None:
    rng = np.random.default_rng(seed)
    n = sum(rows)
    x = rng.integers(-4, 5, (n, 3, 2)).astype(np.float32)
    g = rng.integers(0, 9, (n, 2)).astype(np.float32)
    codes = rng.integers(-1, n_groups, n)
    weight, expected = lazy(g.astype("f8"), 4), oracle(x, g, codes, n_groups)
    everything = oracle(x, g, 0 * codes, 1)[0]
    folds = da.stack([weight.mean(1), 2 * weight.mean(1)], axis=1)
    members = sparse.csr_array(codes[:, None] == np.arange(n_groups), dtype=np.float32)
    feature = stored(x, (rows, -1, 1)) if is_stored else lazy(x, rows)
    of_groups = codes if by_code else members
    found = dask.compute(
        weighted_sums(feature, folds, of_groups, n_groups),
        weighted_sums(feature, weight.mean(1), of_groups, n_groups),
        weighted_sums(feature, folds),
        scheduler="sync",
    )
    np.testing.assert_array_equal(found[0], np.stack([expected, 2 * expected], axis=1))
    np.testing.assert_array_equal(found[1], expected)
    np.testing.assert_array_equal(found[2], [everything, 2 * everything])


def test_weighted_sums__gradients_that_failed_are_left_out_of_their_checkpoint() -> None:
    """Also where the weight of the sample is a number."""
    x, g, codes = arrays()
    codes[:3] = 1
    x[[0, 2], :, 1] = np.nan
    known = oracle(np.nan_to_num(x), g, codes, 4)
    found = weighted_sums(lazy(x), lazy(g.astype("f8")).mean(1), codes, 4).compute()
    np.testing.assert_allclose(found.reshape(known.shape), known, rtol=1e-5, atol=1e-5)


def test_weighted_sums__blocks_without_a_group_are_not_read() -> None:
    x, g, codes = arrays(90)
    codes[:20] = codes[30:] = -1
    codes[25] = 0
    source, weights = StoredArray(x), lazy(g.astype("f8")).mean(1)
    feature = stored(source, (10, -1, 1))
    found = weighted_sums(feature, weights, codes, 4).compute(scheduler="sync")
    np.testing.assert_allclose(found, oracle(x, g, codes, 4), atol=1e-5)
    assert len(source.reads) == 2  # of the third block, at each checkpoint
    nothing = weighted_sums(feature, weights, np.full(90, -1), 4)
    assert nothing.chunks == ((4,), (6,), (1, 1))
    assert not nothing.compute().any()
    assert len(source.reads) == 2
