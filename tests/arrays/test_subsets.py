from __future__ import annotations

import weakref

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trakdask.arrays import subsets


def test_random_subsets__equal_sizes_and_any_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    few = subsets.random_subsets(50, 7, 20, seed=3)
    monkeypatch.setattr(subsets, "_BYTES_PER_BLOCK", 100)  # two rows per block
    many = subsets.random_subsets(50, 30, 20, seed=3)
    assert many.numblocks == (15, 1)
    assert (many.compute().sum(axis=1) == 20).all()
    np.testing.assert_array_equal(many[:7].compute(), few.compute())
    assert len(np.unique(many.compute(), axis=0)) == 30
    assert (subsets.random_subsets(50, 7, 20, seed=4).compute() != few.compute()).any()


@given(st.integers(1, 7), st.integers(3, 9), st.integers(1, 5))
def test_subset_sums__exact_for_any_chunks(rows: int, samples: int, targets: int) -> None:
    rng = np.random.default_rng(0)
    masks = rng.random((6, 20)) < 0.5
    values = rng.integers(-9, 10, (20, 4, 2)).astype(np.float32)
    found = subsets.subset_sums(
        da.from_array(masks, chunks=(rows, 20)),
        da.from_array(values, chunks=(samples, targets, 1)),
    )
    assert found.dtype == np.float64
    expected = np.einsum("ns,stc->ntc", masks, values)
    np.testing.assert_array_equal(found.compute(scheduler="sync"), expected)


def test_subset_sums__never_holds_the_scores() -> None:
    """Blocks of scores that are alive at once, on one thread: far fewer than the 40 there are."""
    alive: set[int] = set()
    most = 0

    def block(block_id: tuple[int, int]) -> np.ndarray:
        nonlocal most
        scores = np.ones((5, 3), np.float32)
        alive.add(block_id[0])
        weakref.finalize(scores, alive.remove, block_id[0])
        most = max(most, len(alive))
        return scores

    chunks = ((5,) * 40, (3,))
    scores = da.map_blocks(block, chunks=chunks, dtype="f4", meta=np.empty((0, 0), "f4"))
    masks = da.ones((4, 200), dtype=bool, chunks=-1)
    with dask.config.set(scheduler="sync"):
        assert (subsets.subset_sums(masks, scores).compute() == 200).all()
    assert 1 <= most <= 4
