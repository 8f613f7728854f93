from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from dask.callbacks import Callback
from hypothesis import given
from hypothesis import strategies as st

from trakdask.arrays.score import score as make_score
from trakdask.arrays.topk import TileMask, top_k


def oracle(
    s: np.ndarray, k: int, largest: bool, mask: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return a stable sort of the rankable samples, target by target."""
    values = np.full((s.shape[1], k), np.nan, np.float32)
    positions = np.full((s.shape[1], k), -1)
    allowed = ~np.isnan(s) & (True if mask is None else mask.reshape(len(s), -1))
    for t in range(s.shape[1]):
        rows = np.flatnonzero(allowed[:, t])
        key = -s[rows, t] if largest else s[rows, t]
        best = rows[np.argsort(key, kind="stable")][:k]
        values[t, : len(best)], positions[t, : len(best)] = s[best, t], best
    return values, positions


def every(step: int) -> TileMask:
    """Allow the samples whose position plus the target's is a multiple of ``step``."""
    return TileMask(lambda rows, columns: np.add.outer(rows, columns) % step == 0)


_chunkings = st.lists(st.integers(1, 7), min_size=1, max_size=12).map(tuple)
_values = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1, -1, 2, 3e38, -3e38, 1e-45, -1e-45], "f4")


@given(
    _chunkings,
    _chunkings,
    st.booleans(),
    st.integers(0, 2**32),
    st.sampled_from([None, "1d", "2d"]),
)
def test_top_k__stable_sort(
    rows: tuple[int, ...], targets: tuple[int, ...], largest: bool, seed: int, kind: str | None
) -> None:
    rng = np.random.default_rng(seed)
    n, m = sum(rows), sum(targets)
    s = rng.choice(_values, (n, m))
    mask = {"1d": rng.random(n) < 0.4, "2d": every(3)}.get(kind or "")
    dense = mask.function(range(n), range(m)) if isinstance(mask, TileMask) else mask
    k, lazy = int(rng.integers(1, n + 1)), da.from_array(s, chunks=(rows, targets))
    found = dask.compute(*top_k(lazy, k, largest=largest, mask=mask), scheduler="sync")
    for got, want in zip(found, oracle(s, k, largest, dense), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("mask", [None, np.arange(200) < 150, every(2)])
def test_top_k__no_task_returns_a_tile(mask: object) -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((n, 2, 2), dtype=np.float32) for n in (200, 60))
    tiles = make_score(*(da.from_array(a, chunks=(100, 2, 1)) for a in (x, w)), None)
    sizes = []
    with Callback(posttask=lambda key, result, *_: sizes.append(getattr(result, "nbytes", 0))):
        dask.compute(*top_k(tiles, 5, mask=mask), scheduler="sync")  # type: ignore[arg-type]
    assert max(sizes) < 100 * 60 * 4 / 2
