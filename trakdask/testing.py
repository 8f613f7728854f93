"""Simulated features, and a check of laziness, for tests, doctests and benchmarks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import md5
from typing import Any, NoReturn

import dask
import dask.array as da
import numpy as np
import xarray as xr

from trakdask.arrays.blocks import take
from trakdask.checks import require_integer
from trakdask.variables import CHECKPOINT, SAMPLE, VARIABLES

__all__ = ["raise_if_dask_computes", "simulate_features"]


def __dir__() -> list[str]:
    return __all__


@contextmanager
def raise_if_dask_computes() -> Iterator[None]:
    """Fail if Dask computes anything inside the block.

    Raises
    ------
    AssertionError
        If it does.

    Examples
    --------
    >>> import dask.array as da
    >>> with raise_if_dask_computes():
    ...     total = da.ones(3).sum()
    """

    def fail(*args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError(
            "expected lazy results only, got a computation by Dask; try building them without "
            "compute(), load() or .values"
        )

    with dask.config.set(scheduler=fail):
        yield


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
    chunk_sizes = da.core.normalize_chunks((chunks, 1), shape=(n_samples, n_checkpoints))
    token = f"{seed}-{n_samples}-{proj_dim}-{n_checkpoints}-{chunks}"
    bundle = da.map_blocks(
        functools.partial(_simulate_block, seed, proj_dim, n_samples, chunks),
        chunks=chunk_sizes, name=f"simulate-{token}",
        dtype=object, meta=np.empty((0, 0), object),
    )  # fmt: skip
    names = ("feature", "output", "out_to_loss")
    data = {n: (VARIABLES[n].dims, _item(bundle, i, proj_dim, n)) for i, n in enumerate(names)}
    checkpoints = [f"c{i}" for i in range(n_checkpoints)]
    coords = {
        "label": (SAMPLE, np.arange(n_samples) % 2),
        CHECKPOINT: (CHECKPOINT, np.array(checkpoints, dtype=object)),
    }
    attrs = {
        "projector": {"kind": "simulated", "proj_dim": proj_dim},
        "checkpoints": {name: name for name in checkpoints},
        "checkpoint_ids": {name: i for i, name in enumerate(checkpoints)},
        "parameters": {},
        "task": "simulated",
        "source": token,
    }
    return xr.Dataset(data, coords=coords, attrs=attrs)


def _simulate_block(
    seed: int, proj_dim: int, n_samples: int, chunks: int, block_id: tuple[int, int]
) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng([seed, *block_id])
    n = min(chunks, n_samples - block_id[0] * chunks)
    feature = rng.standard_normal((n, proj_dim, 1), dtype=np.float32)
    return feature, rng.random((n, 1), dtype=np.float32), rng.random((n, 1), dtype=np.float32)


def _item(bundle: da.Array, item: int, proj_dim: int, name: str) -> da.Array:
    is_feature = item == 0
    item_of: da.Array = da.blockwise(
        take, "spc" if is_feature else "sc", bundle, "sc", item, None,
        new_axes={"p": proj_dim} if is_feature else None,
        name=f"{name}-{md5(bundle.name.encode()).hexdigest()}", dtype=np.float32,
        meta=np.empty((0,) * (3 if is_feature else 2), np.float32),
    )  # fmt: skip
    return item_of
