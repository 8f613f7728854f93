"""Plain numpy blocks and dask arrays: the arithmetic of attribution, without labels."""

from trakdask.arrays import (
    completeness,
    gram,
    groups,
    intervals,
    lineage,
    ranks,
    score,
    solve,
    subsets,
    topk,
    totals,
    weights,
)

__all__ = [
    "completeness",
    "gram",
    "groups",
    "intervals",
    "lineage",
    "ranks",
    "score",
    "solve",
    "subsets",
    "topk",
    "totals",
    "weights",
]
