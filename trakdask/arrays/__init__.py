"""Plain numpy blocks and dask arrays: the arithmetic of attribution, without labels."""

from trakdask.arrays import gram, groups, score, solve, topk

__all__ = ["gram", "groups", "score", "solve", "topk"]
