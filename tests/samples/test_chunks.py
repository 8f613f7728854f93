"""Blocks of ``chunks="auto"``: how large they are, and that features do not depend on them."""

from __future__ import annotations

from typing import Any

import dask
import dask.array as da
import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr

import trakdask as td
from trakdask.samples import sources

N = 25 * 512
X = np.random.default_rng(0).normal(size=(N, 3)).astype("f4")
MODEL = td.Model(torch.nn.Linear(3, 2), task="image_classification")


def samples(**options: Any) -> xr.Dataset:
    return td.from_arrays({"image": X, "label": np.arange(N) % 2}, **options)


def block_of(ds: xr.Dataset) -> int:
    return max(ds.chunksizes["sample"])


@pytest.mark.parametrize(
    ("n", "feature_bytes", "input_bytes", "expected"),
    [
        (10**6, 4 * 2048, 0, 2048),  # 16 MB
        (10**6, 4 * 512, 0, 8192),
        (10**6, 4 * 3000, 0, 1536),  # no less than 16 MB
        (10**6, 4 * 8192, 0, 512),
        (512 * 64 * 3 - 1, 4 * 512, 0, 1024),  # 64 blocks are left
        (10**6, 4 * 512, 40_000, 1536),  # 64 MB of inputs
        (10**6, 4 * 512, 10**6, 512),
        (100, 1, 0, 512),
    ],
)
def test_joined_rows(n: int, feature_bytes: int, input_bytes: int, expected: int) -> None:
    with dask.config.set(scheduler="sync"):
        assert sources.joined_rows(n, feature_bytes, input_bytes) == expected


def test_joined_rows__leaves_four_blocks_for_each_thread() -> None:
    with dask.config.set(scheduler="threads", num_workers=100):
        assert sources.joined_rows(10**6, 4 * 512) == 512 * 4  # 489 blocks


def test_featurize__joins_blocks_and_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_FEATURE_BYTES", 4 * 4 * 1500)
    monkeypatch.setattr(sources, "_LEAST_BLOCKS", 8)
    auto, plain = samples(), samples(chunks=512)
    assert block_of(auto) == block_of(plain) == 512
    assert auto.attrs["source"] == plain.attrs["source"]
    with dask.config.set(scheduler="threads", num_workers=2):
        joined, apart = (td.featurize(ds, MODEL, td.SJLT(4)) for ds in (auto, plain))
        assert (block_of(joined), block_of(apart)) == (1536, 512)
        assert joined.attrs == apart.attrs
        assert "9 blocks of 24.00 kiB" in str(td.plan(joined))
        for name in ("feature", "output", "out_to_loss"):
            np.testing.assert_array_equal(joined[name], apart[name])
        again = td.featurize(auto.chunk(sample=700), MODEL, td.SJLT(4))
        assert block_of(again) == 700  # as asked for
        part = td.featurize(auto.isel(sample=slice(100, None)), MODEL, td.SJLT(4))
        np.testing.assert_array_equal(part.output[:9], apart.output[100:109])


def test_auto__is_the_default_of_all_sources() -> None:
    data = torch.utils.data.TensorDataset(torch.as_tensor(X[:9]))
    frame = pd.DataFrame({"x": np.arange(9.0)})
    made = [
        samples(),
        td.from_torch(data, names="image"),
        td.from_dataframe(frame, variables={"x": "x"}),
    ]
    assert [ds.attrs["chunks"] for ds in made] == ["auto"] * 3
    wide = da.ones((64 * 1024, 2048), dtype=np.float32, chunks=4096)
    with dask.config.set(scheduler="sync"):
        labelled = xr.DataArray(wide, dims=("sample", "proj_dim"))
        assert block_of(td.from_features(labelled, "ones")) == 1024
    with pytest.raises(ValueError, match="try chunks=512"):
        samples(chunks=0)
