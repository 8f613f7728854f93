"""Features of small integers: sums of them are exact, and the same bits however they are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest
import xarray as xr

import trakdask as td
from trakdask.testing import simulate_features

N, P = 70, 6
NAMES = ("c0", "c1", "c2")
VALUES = np.random.default_rng(0).integers(-4, 5, (N, P, len(NAMES))).astype("f4")
A, B = slice(0, 40), slice(40, 60)
"""Rows that are saved first, and that are appended: the boundary is within a block."""


def features(
    rows: slice = A,
    names: Sequence[str] = NAMES,
    source: str | None = None,
    *,
    block: int = 16,
    each: Callable[[np.ndarray], np.ndarray] | None = None,
) -> xr.Dataset:
    """Return lazy features of some rows and checkpoints, as featurize would make them.

    ``each`` is called with every block of them that is computed.
    """
    positions, number = [NAMES.index(name) for name in names], np.arange(N)[rows]
    values, source = VALUES[rows][..., positions], source or f"{rows.start}:{rows.stop}"
    feature = da.from_array(values, chunks=(block, -1, 1))
    if each is not None:
        feature = da.map_blocks(
            lambda x: each(x) if x.size else x, feature, meta=np.empty((0, 0, 0), "f4"),
            name="feature-" + dask.base.tokenize(source, names),
        )  # fmt: skip
    numbers = {"output": values[:, 0], "out_to_loss": (4 + values[:, 1]) / 16}
    return xr.Dataset(
        {
            "feature": (("sample", "proj_dim", "checkpoint"), feature),
            **{
                name: (("sample", "checkpoint"), da.from_array(array, chunks=(block, 1)))
                for name, array in numbers.items()
            },
        },
        coords={
            "label": ("sample", number % 2),
            "number": ("sample", number),
            "checkpoint": np.array(names, object),
        },
        attrs=simulate_features(1, P).attrs | {
            "source": source,
            "checkpoints": {name: name for name in names},
            "checkpoint_ids": {name: NAMES.index(name) for name in names},
        },
    )  # fmt: skip


def save(features: xr.Dataset, store: Path | str, **options: object) -> xr.Dataset:
    return td.save(features, store, progress=False, **options)


def counted(features: xr.Dataset, limit: int | None = None) -> tuple[xr.Dataset, list[int]]:
    """Return the same features; each block counts itself, and all beyond the limit fail."""
    calls: list[int] = []

    def count(block: np.ndarray) -> np.ndarray:
        if block.size:
            if limit is not None and len(calls) >= limit:
                raise RuntimeError("out of budget")
            calls.append(1)
        return block

    data = da.map_blocks(count, features.feature.data, dtype="f4", meta=np.empty((0, 0, 0), "f4"))
    return features.assign(feature=(features.feature.dims, data)), calls


def interrupted(features: xr.Dataset, store: Path, limit: int = 1, **options: object) -> list[int]:
    """Save until a block fails, by default the second; return the calls that made blocks."""
    broken, calls = counted(features, limit)
    with dask.config.set(scheduler="sync"), pytest.raises(RuntimeError, match="out of budget"):
        save(broken, store, **options)
    return calls


def gram(x: np.ndarray) -> np.ndarray:
    """Return the gram matrix of each checkpoint."""
    return np.einsum("npc,nqc->pqc", x.astype("f8"), x.astype("f8"))


def assert_rows(opened: xr.Dataset, rows: Sequence[int] | range, n_checkpoints: int = 3) -> None:
    """Require a store to show these rows at the first checkpoints, and their gram matrix."""
    rows, names = list(rows), NAMES[:n_checkpoints]
    expected = features(slice(0, N), names).isel(sample=rows).compute()
    for name in ("feature", "output", "out_to_loss", "label", "number", "checkpoint"):
        np.testing.assert_array_equal(opened[name], expected[name])
        assert opened[name].dims == expected[name].dims
    np.testing.assert_array_equal(opened.gram, gram(expected.feature.values))
    assert opened.gram.attrs["n_samples"] == len(rows)
    assert "dropped" not in opened.coords
