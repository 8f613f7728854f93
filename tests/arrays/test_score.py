from __future__ import annotations

import dask
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.arrays.decomposed_features import lazy
from tests.stored_arrays import stored
from trakdask.arrays.score import score


def oracle(x: np.ndarray, w: np.ndarray, g: np.ndarray) -> np.ndarray:
    """φ_c(z)·w_c(t) times the mean of g over checkpoints, per checkpoint, in float64."""
    x, w, g = (a.astype(np.float64) for a in (x, w, g))
    return np.einsum("spc,tpc->stc", x, w) * g.mean(axis=1)[:, None, None]


def arrays(n: int = 60, m: int = 14, p: int = 8, c: int = 3) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    shapes = ((n, p, c), (m, p, c))
    return *(rng.standard_normal(s, dtype=np.float32) for s in shapes), rng.random((n, c), "f4")


_chunkings = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


@given(_chunkings, _chunkings, st.sampled_from([1, 2, 4]), st.integers(0, 2**32))
def test_score__exact_for_any_chunks(
    rows: tuple[int, ...], targets: tuple[int, ...], c: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x = rng.integers(-4, 5, (sum(rows), 5, c)).astype(np.float32)
    w = rng.integers(-4, 5, (sum(targets), 5, c)).astype(np.float32)
    g = rng.integers(0, 9, (sum(rows), c)).astype(np.float32)
    expected = oracle(x, w, g)
    lazies = lazy(x, rows), lazy(w, targets), lazy(g, 4)
    np.testing.assert_array_equal(score(*lazies).compute(scheduler="sync"), expected.mean(axis=2))
    np.testing.assert_array_equal(score(*lazies, average=False).compute(scheduler="sync"), expected)
    without = score(*lazies[:2], None).compute(scheduler="sync")
    np.testing.assert_array_equal(without, oracle(x, w, np.ones_like(g)).mean(axis=2))


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("m", [3, 14])
def test_score__same_bits_of_shared_and_of_stored_blocks(m: int, pooled: bool) -> None:
    """For few targets, the products of shared blocks are computed apart, and then added."""
    x, w, g = arrays(m=m)
    shared = score(lazy(x, 10), lazy(w, m), lazy(g), pooled=pooled)
    read = score(stored(x, (10, -1, 1)), lazy(w, m), stored(g, (10, 1)), pooled=pooled)
    np.testing.assert_array_equal(shared.compute(), read.compute())
    again = score(lazy(x, 10), lazy(w, m), lazy(g), pooled=pooled)
    first, second = dask.compute(shared, again * 1)  # which get the same blocks
    np.testing.assert_array_equal(first, second)
