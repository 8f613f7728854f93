"""Plain numpy blocks and dask arrays: the arithmetic of attribution, without labels."""

from trakdask.arrays import (
    completeness,
    damping_choice,
    gram,
    groups,
    intervals,
    lineage,
    ranks,
    score,
    solve,
    spectrum,
    subsets,
    topk,
    weights,
)

__all__ = [
    "completeness",
    "damping_choice",
    "gram",
    "groups",
    "intervals",
    "lineage",
    "ranks",
    "score",
    "solve",
    "spectrum",
    "subsets",
    "topk",
    "weights",
]
