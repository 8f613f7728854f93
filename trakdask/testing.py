"""Simulated features, for tests, doctests and benchmarks."""

from __future__ import annotations

import functools
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr

from trakdask.checks import require_integer
from trakdask.provenance import as_text
from trakdask.samples.computed_elsewhere import from_features
from trakdask.variables import CHECKPOINT, VARIABLES

__all__ = ["simulate_features"]


def __dir__() -> list[str]:
    return __all__


def simulate_features(
    n_samples: int = 64,
    proj_dim: int = 16,
    n_checkpoints: int = 2,
    *,
    chunks: int = 16,
    seed: int = 0,
) -> xr.Dataset:
    """Make lazy Gaussian features with labels, shaped as :func:`trakdask.featurize` returns them.

    Parameters
    ----------
    n_samples, proj_dim, n_checkpoints
        Sizes of the dimensions, at least 1.
    chunks
        Samples per block.
    seed
        Seed. A block depends only on the seed, its position and the checkpoint.

    Returns
    -------
    Dataset with ``feature``, ``output``, ``out_to_loss`` and the coord ``label`` (sample), int64.

    Raises
    ------
    TypeError, ValueError
        If a size is not an integer, or not positive.
    """
    sizes = {"n_samples": n_samples, "proj_dim": proj_dim, "n_checkpoints": n_checkpoints}
    for name, size in {**sizes, "chunks": chunks}.items():
        require_integer(name, size, 1, remedy=f"try {name}=16")
    by_block = da.core.normalize_chunks((chunks, 1), shape=(n_samples, n_checkpoints))
    token = f"{seed}-{n_samples}-{proj_dim}-{n_checkpoints}-{chunks}"
    data: dict[str, Any] = {}
    for item, name in enumerate(("feature", "output", "out_to_loss")):
        dims = VARIABLES[name].dims
        data[name] = da.map_blocks(
            functools.partial(_simulate_block, item, seed, proj_dim, n_samples, chunks),
            chunks=(by_block[0], (proj_dim,), by_block[1]) if item == 0 else by_block,
            name=f"{name}-simulated-{token}", meta=np.empty((0,) * len(dims), np.float32),
        )  # fmt: skip
    of_checkpoints = {CHECKPOINT: [f"c{i}" for i in range(n_checkpoints)]}
    feature = xr.DataArray(data.pop("feature"), of_checkpoints, VARIABLES["feature"].dims)
    label = np.arange(n_samples) % 2
    ds = from_features(feature, "simulation", **data, coords={"label": label}, chunks=chunks)
    projector = {"kind": "simulated", "proj_dim": proj_dim}
    ds = ds.assign_attrs(as_text({"projector": projector}), task="simulated", source=token)
    # As of a classifier, whose rule for λ is another one than that of features by other programs.
    ds.attrs["loss_kind"] = "cross-entropy"
    del ds.attrs["default_damping"]
    return ds


def _simulate_block(
    item: int, seed: int, proj_dim: int, n_samples: int, chunks: int, block_id: tuple[int, ...]
) -> np.ndarray:
    """Draw the features of a block, its outputs and Q, one after the other; return one of them."""
    start, checkpoint = block_id[0], block_id[-1]
    # Three graphs call this, and no task of one is part of another: what a block draws before its
    # own numbers is drawn again.
    rng = np.random.default_rng([seed, start, checkpoint])
    n = min(chunks, n_samples - start * chunks)
    feature = rng.standard_normal((n, proj_dim, 1), dtype=np.float32)
    others = [rng.random((n, 1), dtype=np.float32) for _ in range(item)]
    return [feature, *others][item]
