"""Plain numpy blocks and dask arrays: the arithmetic of attribution, without labels."""

from trakdask.arrays import gram, groups, intervals, ranks, score, solve, subsets, topk

__all__ = ["gram", "groups", "intervals", "ranks", "score", "solve", "subsets", "topk"]
