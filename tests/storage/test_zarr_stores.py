"""Stores of features that others have copied: xarray reads them as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from zarr.abc.store import Store
from zarr.storage import MemoryStore

import trakdask as td
from trakdask.testing import simulate_features

pytestmark = pytest.mark.filterwarnings(
    "ignore:Consolidated metadata is currently not part", "ignore:Failed to open Zarr store with"
)

TARGETS = simulate_features(n_samples=3, proj_dim=8, seed=1)


def saved(folder: Path, **options: Any) -> xr.Dataset:
    """Save features with an append, failed samples and labels of which xarray copies no chunk."""
    features = simulate_features(n_samples=40, proj_dim=8, chunks=16).compute()
    features["label"] = "sample", np.zeros(40, int)
    for name in ("feature", "output", "out_to_loss"):
        features[name][16:32] = np.nan
    lazy, options = features.chunk(sample=16), {"progress": False, **options}
    td.save(lazy, folder, **options)
    return td.save(lazy.assign_attrs(source="more"), folder, append_dim="sample", **options)


def of_icechunk(folder: Path) -> Store:
    icechunk = pytest.importorskip("icechunk")
    place = icechunk.local_filesystem_storage(f"{folder}.ice")
    session = icechunk.Repository.create(place).writable_session("main")
    return session.store


@pytest.mark.parametrize("make", [lambda _: MemoryStore(), of_icechunk])
def test_open_zarr__of_a_copy_in_a_store_of_zarr(
    tmp_path: Path, make: Callable[[Path], Store]
) -> None:
    """No td.open is needed for them: scores and rankings are the same."""
    ours, store = saved(tmp_path / "f.zarr"), make(tmp_path / "f.zarr")
    xr.open_zarr(tmp_path / "f.zarr").to_zarr(store)
    opened = xr.open_zarr(store)
    stored = ours.compute().assign(gram=ours.gram.copy(data=np.tril(ours.gram.values.T).T))
    xr.testing.assert_equal(opened.compute(), stored)
    mine, theirs = (td.top_k(td.score(ds, TARGETS), k=5) for ds in (ours, opened))
    xr.testing.assert_equal(theirs.compute(), mine.compute())


def test_open_zarr__of_float16_is_decoded_by_its_scale(tmp_path: Path) -> None:
    """Without their scale, rows would have the wrong lengths, and scores the wrong order."""
    ours, plain = saved(tmp_path / "f.zarr", dtype="float16"), xr.open_zarr(tmp_path / "f.zarr")
    with pytest.raises(ValueError, match=r"in float16.*ds\.feature\.astype\('f4'\) \* ds\.scale"):
        td.score(plain, TARGETS)
    decoded = plain.assign(feature=plain.feature.astype("f4") * plain.scale.astype("f4"))
    scores = td.score(decoded.drop_vars("scale"), TARGETS)
    np.testing.assert_allclose(scores, td.score(ours, TARGETS), rtol=1e-6)


@pytest.mark.parametrize("consolidated", [None, True, False])
def test_open__a_copy_in_a_folder_is_for_xarray(tmp_path: Path, consolidated: bool | None) -> None:
    ours, copy = saved(tmp_path / "f.zarr"), tmp_path / "copy.zarr"
    xr.open_zarr(tmp_path / "f.zarr").to_zarr(copy, consolidated=consolidated)
    for call in (
        lambda: td.open(copy),
        lambda: td.verify(copy),
        lambda: td.save(ours, copy),
        lambda: td.drop(copy, where="label == 3"),
    ):
        with pytest.raises(ValueError, match=r"got a copy .*td\.save\(xr\.open_zarr\(copy\), 'new"):
            call()
    if consolidated:
        new = td.save(xr.open_zarr(copy), tmp_path / "new.zarr", progress=False)
        xr.testing.assert_equal(new[["feature", "output"]], ours[["feature", "output"]])
