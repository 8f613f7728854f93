"""Plain numpy blocks and dask arrays: the arithmetic of attribution, without labels."""
# ruff: noqa: F401

from trakdask.arrays import (
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
    topk,
    weights,
)
