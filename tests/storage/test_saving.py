"""Stores: complete or resumable, refused when they do not fit, readable by others."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import dask
import dask.array as da
import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
import zarr
from distributed import Client

import trakdask as td
from tests.storage.integers import counted, interrupted, save
from trakdask.attribution.protocol import KINDS, GramEstimator
from trakdask.provenance import as_values
from trakdask.storage import reading
from trakdask.testing import simulate_features

FEATURES = simulate_features(n_samples=40, proj_dim=8, chunks=16)


def test_save__values_coords_and_attrs_survive(tmp_path: Path) -> None:
    names = np.array([f"id-{i}" for i in range(40)], dtype=object)
    days = pd.date_range("2026-01-01", periods=40).values
    features = FEATURES.assign_coords(name=("sample", names), day=("sample", days))
    opened = save(features, tmp_path / "f.zarr")
    computed = features.compute()
    for name in ("feature", "output", "out_to_loss"):
        np.testing.assert_array_equal(opened[name], computed[name])
        assert opened[name].dims == computed[name].dims
        assert opened[name].chunks[0] == (16, 16, 8)
    for name in ("label", "name", "day", "checkpoint"):
        np.testing.assert_array_equal(opened[name].values, features[name].values)
    saved = json.loads(opened.attrs.pop("saved"))
    assert opened.attrs == features.attrs
    assert saved["at"] < pd.Timestamp.now("UTC").isoformat()
    assert saved["versions"]["trakdask"] == td.__version__
    expected = np.einsum("npc,nqc->pqc", *[computed.feature.values.astype("f8")] * 2)
    np.testing.assert_allclose(opened.gram, expected, rtol=1e-5, atol=1e-4)


def test_save__dimensions_in_any_order_make_the_same_store(tmp_path: Path) -> None:
    features, calls = counted(FEATURES)
    opened = save(features.transpose("checkpoint", "proj_dim", "sample"), tmp_path / "f.zarr")
    assert len(calls) == 6
    xr.testing.assert_equal(opened[[*FEATURES]], FEATURES)
    save(features, tmp_path / "f.zarr")
    assert len(calls) == 7  # one to compare


def test_save__resumes_and_computes_only_what_is_missing(tmp_path: Path) -> None:
    first = interrupted(FEATURES, tmp_path / "f.zarr", limit=2)
    assert len(list(tmp_path.glob("f.zarr/feature/records/*"))) == len(first) == 2
    with pytest.raises(td.errors.IncompleteFeaturesError):
        td.open(tmp_path / "f.zarr")
    (row,) = td.verify(tmp_path / "f.zarr").query("found.str.contains('not finished')").found
    assert "lacks 4 blocks of the samples 0:40" in row
    whole, second = counted(FEATURES)
    opened = save(whole, tmp_path / "f.zarr")
    assert len(second) == 4 + 1  # and one to compare
    np.testing.assert_array_equal(opened.feature, FEATURES.feature)
    again, third = counted(FEATURES)
    save(again, tmp_path / "f.zarr")
    assert third == [1]  # to compare


SHIFT = {"by": 0.0}


class Shift(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x) + SHIFT["by"])


def test_save__a_change_that_no_source_shows_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = td.from_arrays(
        {"image": np.ones((6, 3), "f4")}, coords={"label": [0, 1] * 3}, chunks=2
    )
    model = td.Model(Shift(3, 2))
    with dask.config.set(scheduler="sync"):
        save(td.featurize(samples, model, projector=td.SJLT(4)), tmp_path / "f.zarr")
        save(td.featurize(samples, model, projector=td.SJLT(4)), tmp_path / "f.zarr")
        monkeypatch.setitem(SHIFT, "by", 1.0)
        with pytest.raises(td.errors.StoreMismatchError, match="computed again"):
            save(td.featurize(samples, model, projector=td.SJLT(4)), tmp_path / "f.zarr")


def test_save__rounding_is_no_change_of_the_code(tmp_path: Path) -> None:
    save(FEATURES, tmp_path / "f.zarr", dtype="float16")
    rounded = FEATURES.assign(feature=FEATURES.feature * np.float32(1 + 1e-3))
    save(rounded, tmp_path / "f.zarr", dtype="float16")
    with pytest.raises(td.errors.StoreMismatchError):
        save(FEATURES.assign(feature=FEATURES.feature * 2), tmp_path / "f.zarr", dtype="float16")


def test_save__gram_asked_for_later(tmp_path: Path) -> None:
    assert "gram" not in save(FEATURES, tmp_path / "f.zarr", estimator=None)
    opened = save(FEATURES, tmp_path / "f.zarr", estimator="soft")
    assert opened.gram.attrs["power"] is not None
    assert "loss_gradient" in opened
    opened = save(FEATURES, tmp_path / "f.zarr", estimator="trak")
    assert "loss_gradient" not in opened
    np.testing.assert_allclose(opened.gram, td.gram(FEATURES), rtol=1e-12)
    assert "gram" in save(FEATURES, tmp_path / "f.zarr", estimator=None)


def test_save__variables_that_features_have_besides(tmp_path: Path) -> None:
    loss = 2 * FEATURES.out_to_loss
    opened = save(FEATURES.assign(loss=loss), tmp_path / "f.zarr")
    np.testing.assert_array_equal(opened.loss, loss)
    norm = (FEATURES.feature.astype("f8") ** 2).sum("proj_dim")
    np.testing.assert_allclose(opened.feature_norm, norm, rtol=1e-12)
    with pytest.raises(td.errors.StoreMismatchError, match="loss"):
        save(FEATURES, tmp_path / "f.zarr")


def test_save__runs_on_the_active_client(
    process_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path is the notebook's, not the workers', which work elsewhere."""
    monkeypatch.chdir(tmp_path)

    def mark(block: np.ndarray) -> np.ndarray:
        return np.full_like(block, os.getpid())

    data = da.map_blocks(mark, FEATURES.out_to_loss.data, dtype="f4", meta=np.empty((0, 0), "f4"))
    opened = save(FEATURES.assign(out_to_loss=(("sample", "checkpoint"), data)), Path("f.zarr"))
    workers = set(process_client.run(os.getpid).values())
    assert set(opened.out_to_loss.values.astype(int).ravel().tolist()) <= workers
    assert (tmp_path / "f.zarr" / "zarr.json").exists()
    np.testing.assert_array_equal(opened.feature, FEATURES.feature)
    td.to_zarr(td.score(opened, FEATURES), "scores.zarr")
    assert xr.open_zarr(tmp_path / "scores.zarr", consolidated=False).score.notnull().all()


def test_save__selections_in_memory_or_of_a_store(tmp_path: Path) -> None:
    opened = save(FEATURES.isel(checkpoint=[1]).compute(), tmp_path / "f.zarr")
    np.testing.assert_array_equal(opened.feature, FEATURES.feature[..., 1:])
    assert as_values(opened.attrs)["checkpoints"] == {"c1": "c1"}
    part = save(opened.isel(sample=slice(16, 40)), tmp_path / "part.zarr")
    np.testing.assert_array_equal(part.feature, FEATURES.feature[16:, :, 1:])
    rest = FEATURES.isel(sample=slice(16, 40), checkpoint=[1])
    np.testing.assert_allclose(part.gram, td.gram(rest), rtol=1e-5)
    assert td.score(part, rest).shape == (24, 24)


def test_save__float16(tmp_path: Path) -> None:
    opened = save(FEATURES, tmp_path / "f.zarr", dtype="float16")
    assert zarr.open_group(tmp_path / "f.zarr", mode="r")["feature"].dtype == np.float16
    assert opened.feature.dtype == np.float32
    np.testing.assert_allclose(opened.gram, td.gram(opened), rtol=1e-12)
    with pytest.raises(
        td.errors.StoreMismatchError, match=r"stored_dtype: expected .float16., got .float32"
    ):
        save(FEATURES, tmp_path / "f.zarr")


def test_query__reads_only_the_blocks_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Top 10 of 5 targets among the samples of one source: 2 of 20 blocks, 1 of 4 of targets."""
    sources = np.where(np.arange(320) // 16 < 2, "web", "book").astype(object)
    train = simulate_features(n_samples=320, proj_dim=8, chunks=16)
    train = train.assign_coords(source=("sample", sources))
    targets = simulate_features(n_samples=40, proj_dim=8, chunks=10, seed=1)
    features = save(train, tmp_path / "train.zarr")
    saved_targets = save(targets, tmp_path / "targets.zarr", estimator=None)
    read: set[str] = set()
    mapped = reading._mapped
    monkeypatch.setattr(
        reading, "_mapped", lambda path, *args: read.add(path) or mapped(path, *args)
    )
    scores = td.score(features, saved_targets)
    top = td.top_k(scores.isel(target=slice(12, 17)), 10, where=scores.source == "web").compute()
    assert set(top.source.values.ravel().tolist()) == {"web"}
    for name, n_blocks in (("train", 2), ("targets", 1)):
        n_checkpoints = 2
        assert sum(f"{name}.zarr/feature/c." in path for path in read) == n_blocks * n_checkpoints


def test_save__store_that_a_worker_does_not_see(tmp_path: Path) -> None:
    """As on a machine with another disk: the store is gone before the first block is written."""
    store = tmp_path / "f.zarr"

    def move(block: np.ndarray) -> np.ndarray:
        if block.size:
            store.rename(tmp_path / "elsewhere")
        return block

    data = da.map_blocks(move, FEATURES.feature.data, meta=np.empty((0, 0, 0), "f4"))
    with (
        dask.config.set(scheduler="sync"),
        pytest.raises((OSError, td.errors.IncompleteFeaturesError)),
    ):
        save(FEATURES.assign(feature=(FEATURES.feature.dims, data)), store)


def test_save__names_rows_with_features_that_are_far_longer(tmp_path: Path) -> None:
    """The remedy of the warning gives the λ that the others have without them."""
    long = FEATURES.compute()
    long.feature[{"sample": [3, 7], "checkpoint": 1}] *= 100
    td.errors.forget_warnings()
    with pytest.warns(UserWarning, match=r"the samples \[3, 7\] that are up to") as caught:
        damping = save(long, tmp_path / "f.zarr").damping.values
    (remedy,) = re.findall(r"where=(lambda ds: .*)\)$", str(caught[0].message))
    left = td.drop(tmp_path / "f.zarr", where=eval(remedy))
    others = save(
        FEATURES.isel(sample=[*range(3), *range(4, 7), *range(8, 40)]), tmp_path / "g.zarr"
    )
    assert left.sizes["sample"] == 38
    np.testing.assert_allclose(left.damping, others.damping)
    assert damping[1] > 10 * others.damping[1]


@dataclass(frozen=True, eq=False, repr=False)
class Third(GramEstimator):
    name: ClassVar[str] = "third"
    damping: Any = "auto"
    scale: float = 2.0

    @property
    def gram_weights(self) -> str:
        return f"{self.scale}"

    def h(self, features: xr.Dataset) -> Any:
        return 0 * features.out_to_loss.data + self.scale


class Derived(td.Trak):
    """Has no name of its own."""

    gram_weights = "4"

    def h(self, features: xr.Dataset) -> Any:
        return 0 * features.out_to_loss.data + 4


def test_drop__of_an_estimator_without_a_name_does_not_take_its_base(tmp_path: Path) -> None:
    save(FEATURES, tmp_path / "f.zarr", estimator=Derived())
    with pytest.raises(ValueError, match="got 'Derived'"):
        td.drop(tmp_path / "f.zarr", where="label == 1")
    assert td.open(tmp_path / "f.zarr").sizes["sample"] == 40


@pytest.mark.parametrize(
    "estimator",
    [Third(scale=3.0), td.RelatIF(), td.Soft(0.7, wrong_classes=False), td.Trak()],
    ids=lambda e: e.name,
)
def test_drop__keeps_the_estimator_of_the_gram_matrix(
    tmp_path: Path, estimator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "f.zarr"
    save(FEATURES.assign_coords(sample_id=("sample", np.arange(40))), store, estimator=estimator)
    dropped = td.drop(store, where="label == 1")
    attrs = dropped.gram.attrs
    assert as_values(attrs)["estimator"]["name"] == estimator.name
    assert attrs["gram_weights"] == estimator.gram_weights
    expected = td.gram(dropped.drop_vars("gram"))
    if estimator.name == "third":
        np.testing.assert_allclose(dropped.gram, 3 * expected, rtol=1e-6)
    monkeypatch.delitem(KINDS, estimator.name)
    with pytest.raises(ValueError, match="this process knows"):
        td.drop(store, where="sample_id == 4")
