"""The oracle is the original package: it writes the directories and computes the scores."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

import trakdask as td
from tests.laziness import raise_if_dask_computes
from tests.trak._runs import BATCH, N, Run
from trakdask.provenance import as_values
from trakdask.trak import open_traker

trak = pytest.importorskip("trak")

PROJ_DIM, WRITTEN = 8, 2 * BATCH
SINGLE = {"use_half_precision": False, "lambda_reg": 0.5}
INTERRUPTED = range(0, WRITTEN, BATCH)


def run_of(*ids: int, **options: Any) -> Run:
    return Run(ids=ids, options={**SINGLE, **options})


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run_of(0, 1, 2).whole(trak.TRAKer, folder)
    return folder


def on_disk(folder: Path, id: int, file: str) -> np.ndarray:
    return np.array(np.load(folder / str(id) / file, mmap_mode="r"))


def test_open_traker__features_are_the_stored_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_of(3, 10, use_half_precision=True, lambda_reg=3.0).whole(trak.TRAKer, tmp_path)
    monkeypatch.setattr("trakdask.trak.opening._BLOCK_BYTES", 4 * PROJ_DIM * 9)
    features, targets = open_traker(tmp_path, "test")
    assert features.feature.chunks == ((9,) * 5 + (3,), (PROJ_DIM,), (1, 1))
    assert features.checkpoint.values.tolist() == ["3", "10"]
    assert as_values(features.attrs)["checkpoint_ids"] == {"3": 3, "10": 10}
    assert features.feature.dims == targets.feature.dims == ("sample", "proj_dim", "checkpoint")
    assert features.feature.dtype == features.out_to_loss.dtype == targets.feature.dtype == "f4"
    for name, id in (("3", 3), ("10", 10)):
        at = {"checkpoint": name}
        grads = on_disk(tmp_path, id, "grads.mmap")
        assert grads.dtype == "f2"
        np.testing.assert_array_equal(features.feature.sel(at), grads)
        np.testing.assert_array_equal(
            features.out_to_loss.sel(at), on_disk(tmp_path, id, "out_to_loss.mmap")[:, 0]
        )
        np.testing.assert_array_equal(
            targets.feature.sel(at), on_disk(tmp_path, id, "test_grads.mmap")
        )


def test_open_traker__rows_never_featurized_take_no_part(tmp_path: Path) -> None:
    """A run that stopped has the scores of a run with fewer training samples."""
    traker = run_of(0).make(trak.TRAKer, tmp_path)
    run_of(0).featurize(traker)
    run_of(1).featurize(traker, INTERRUPTED)
    features = open_traker(tmp_path).assign_coords(label=("sample", np.arange(N) % 2))
    is_nan = np.isnan(features.feature).all("proj_dim").compute()
    assert not is_nan.sel(checkpoint="0").any()
    assert is_nan.sel(checkpoint="1").values.nonzero()[0].tolist() == list(range(WRITTEN, N))
    assert (np.isnan(features.out_to_loss) == is_nan).all()
    one = features.sel(checkpoint=["1"])
    done = one.isel(sample=slice(WRITTEN))
    targets, estimator = done.isel(sample=slice(5)), td.Trak(damping=td.Absolute(0.5))
    scores = td.score(one, targets, estimator)
    assert np.isnan(scores[WRITTEN:]).all()
    np.testing.assert_allclose(scores[:WRITTEN], td.score(done, targets, estimator), rtol=1e-5)
    np.testing.assert_allclose(
        td.group_score(one, targets, estimator, by="label"),
        td.group_score(done, targets, estimator, by="label"),
        rtol=1e-5,
    )
    assert int(td.top_k(scores, 5).position.max()) < WRITTEN


@pytest.mark.slow
def test_open_traker__computes_on_worker_processes(written: Path, process_client) -> None:
    features = open_traker(written)
    expected = np.stack([on_disk(written, id, "grads.mmap") for id in (0, 1, 2)], axis=-1)
    np.testing.assert_array_equal(process_client.compute(features.feature.data).result(), expected)


@pytest.mark.parity
def test_open_traker__scores_are_those_of_finalize_scores(tmp_path: Path) -> None:
    """Up to one factor per checkpoint: the mean absolute entry of the inverse gram matrix."""
    ids, lambda_reg = (0, 1, 2), 3.0
    expected = run_of(*ids, lambda_reg=lambda_reg).whole(trak.TRAKer, tmp_path)
    features, targets = open_traker(tmp_path, "test")
    apart = td.score(features, targets, td.Trak(damping=td.Absolute(lambda_reg)), average=False)
    factors = []
    for id in ids:
        g = on_disk(tmp_path, id, "grads.mmap").astype("f8")
        factors.append(np.abs(np.linalg.inv(g.T @ g + lambda_reg * np.eye(PROJ_DIM))).mean())
    scaled = (apart / xr.DataArray(factors, dims="checkpoint")).mean("checkpoint")
    np.testing.assert_allclose(scaled, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())


def test_open_traker__an_appended_checkpoint_goes_into_the_store(tmp_path: Path) -> None:
    run, store = tmp_path / "run", tmp_path / "features.zarr"
    traker = run_of(0).make(trak.TRAKer, run)
    run_of(0, 1).featurize(traker)
    td.save(open_traker(run), store, progress=False)
    run_of(2).featurize(traker)
    both = td.save(open_traker(run, model_ids=[2]), store, append_dim="checkpoint", progress=False)
    xr.testing.assert_equal(both.feature.compute(), open_traker(run).feature.compute())


def test_open_traker__a_moved_directory_opens(written: Path, tmp_path: Path) -> None:
    """experiments.json holds the absolute path of before."""
    run = shutil.copytree(written, tmp_path / "run", ignore=shutil.ignore_patterns("scores"))
    with raise_if_dask_computes():
        features, targets = open_traker(run, "test")
        scores = td.score(features, targets, td.Trak(damping=td.Absolute(1.0)))
    assert np.isfinite(scores).all()
