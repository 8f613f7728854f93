"""Plain numpy blocks and dask arrays: the arithmetic of attribution, without labels."""

from trakdask.arrays import (
    agreement,
    combinations,
    damping,
    detection,
    gram,
    groups,
    intervals,
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
    "agreement",
    "combinations",
    "damping",
    "detection",
    "gram",
    "groups",
    "intervals",
    "ranks",
    "score",
    "solve",
    "spectrum",
    "subsets",
    "top_fraction",
    "topk",
    "weights",
]
