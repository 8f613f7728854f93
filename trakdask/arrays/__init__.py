"""Plain numpy blocks and dask arrays: the arithmetic of attribution, without labels."""
# ruff: noqa: F401

from trakdask.arrays import (
    damping,
    effects,
    evaluation,
    folds,
    gram,
    groups,
    jackknife,
    memory,
    metrics,
    score,
    solve,
    spectra,
    subsets,
    topk,
    weights,
)
