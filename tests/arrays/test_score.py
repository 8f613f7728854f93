from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.arrays.decomposed_features import lazy
from trakdask.arrays.score import score


def oracle(x: np.ndarray, w: np.ndarray, g: np.ndarray) -> np.ndarray:
    """φ_c(z)·w_c(t) times the mean of g over checkpoints, per checkpoint, in float64."""
    x, w, g = (a.astype(np.float64) for a in (x, w, g))
    return np.einsum("spc,tpc->stc", x, w) * g.mean(axis=1)[:, None, None]


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
