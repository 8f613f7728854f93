from __future__ import annotations

import weakref

import dask
import dask.array as da
import numpy as np

from trakdask.arrays import subsets


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
