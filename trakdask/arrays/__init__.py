"""Plain numpy blocks and dask arrays: the arithmetic of attribution, without labels."""

from trakdask.arrays import (
    combinations,
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
    top_fraction,
    topk,
    weights,
)

__all__ = [
    "combinations",
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
    "top_fraction",
    "topk",
    "weights",
]
