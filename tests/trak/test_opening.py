"""The oracle is the original package: it writes the directories and computes the scores."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import trakdask as td
from trakdask.testing import raise_if_dask_computes
from trakdask.trak import open_traker

trak = pytest.importorskip("trak")

N, M, PROJ_DIM = 60, 7, 16
N_PIXELS, N_CLASSES = 12, 4


def model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(N_PIXELS, 9), torch.nn.ReLU(), torch.nn.Linear(9, N_CLASSES)
    )


def batch_of(n: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, N_PIXELS, generator=generator)
    return [x, torch.randint(N_CLASSES, (n,), generator=generator)]


TRAIN, TARGETS = batch_of(N, 1), batch_of(M, 2)


def traker_of(folder: Path, half: bool = False, lambda_reg: float = 0.5) -> trak.TRAKer:
    return trak.TRAKer(
        model=model(0),
        task="image_classification",
        train_set_size=N,
        save_dir=folder,
        device="cpu",
        proj_dim=PROJ_DIM,
        use_half_precision=half,
        lambda_reg=lambda_reg,
        logging_level=logging.CRITICAL,
    )


def write_features(traker: trak.TRAKer, ids: tuple[int, ...], rows: int = N) -> None:
    for id in ids:
        traker.load_checkpoint(model(id).state_dict(), model_id=id)
        for start in range(0, rows, 20):
            inds = np.arange(start, min(start + 20, rows))
            traker.featurize([part[inds] for part in TRAIN], inds=inds)


def write_targets(traker: trak.TRAKer, ids: tuple[int, ...], exp_name: str, n: int = M) -> None:
    for id in ids:
        traker.start_scoring_checkpoint(exp_name, model(id).state_dict(), id, num_targets=n)
        traker.score([part[:n] for part in TARGETS], num_samples=n)


def run_of(folder: Path, ids: tuple[int, ...] = (0, 1, 2), **options: object) -> np.ndarray:
    """Write a whole run of the original and return its scores."""
    traker = traker_of(folder, **options)
    write_features(traker, ids)
    traker.finalize_features()
    traker = traker_of(folder, **options)  # the original cannot score with the one that finalized
    write_targets(traker, ids, "test")
    return np.array(traker.finalize_scores("test"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run_of(folder)
    return folder


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(written, tmp_path / "run"))


def on_disk(folder: Path, id: int, file: str) -> np.ndarray:
    return np.array(np.load(folder / str(id) / file, mmap_mode="r"))


@pytest.mark.parametrize("half", [False, True])
def test_open_traker__features_are_the_stored_gradients(tmp_path: Path, half: bool) -> None:
    run_of(tmp_path, ids=(3, 10), half=half)
    features, targets = open_traker(tmp_path, "test")
    assert features.checkpoint.values.tolist() == ["3", "10"]
    assert features.attrs["checkpoint_ids"] == {"3": 3, "10": 10}
    assert features.feature.dims == targets.feature.dims == ("sample", "proj_dim", "checkpoint")
    assert features.feature.dtype == features.out_to_loss.dtype == targets.feature.dtype == "f4"
    for name, id in (("3", 3), ("10", 10)):
        at = {"checkpoint": name}
        grads = on_disk(tmp_path, id, "grads.mmap")
        assert grads.dtype == ("f2" if half else "f4")
        np.testing.assert_array_equal(features.feature.sel(at), grads)
        np.testing.assert_array_equal(
            features.out_to_loss.sel(at), on_disk(tmp_path, id, "out_to_loss.mmap")[:, 0]
        )
        np.testing.assert_array_equal(
            targets.feature.sel(at), on_disk(tmp_path, id, "test_grads.mmap")
        )


def test_open_traker__rows_never_featurized_are_nan(tmp_path: Path) -> None:
    traker = traker_of(tmp_path)
    write_features(traker, ids=(0,))
    write_features(traker, ids=(1,), rows=40)
    features = open_traker(tmp_path)
    is_nan = np.isnan(features.feature).all("proj_dim").compute()
    assert not is_nan.sel(checkpoint="0").any()
    assert is_nan.sel(checkpoint="1").values.nonzero()[0].tolist() == list(range(40, N))
    assert (np.isnan(features.out_to_loss) == is_nan).all()
    done = features.isel(sample=slice(40))
    xr.testing.assert_allclose(
        td.gram(features).sel(checkpoint="1"), td.gram(done).sel(checkpoint="1")
    )


def test_open_traker__chunks_do_not_change_the_values(written: Path, monkeypatch) -> None:
    whole, whole_targets = open_traker(written, "test")
    monkeypatch.setattr("trakdask.trak.savers._BLOCK_BYTES", 4 * PROJ_DIM * 9)
    parts, parts_targets = open_traker(written, "test")
    assert parts.feature.chunks == ((9,) * 6 + (6,), (PROJ_DIM,), (1, 1, 1))
    xr.testing.assert_equal(whole.compute(), parts.compute())
    xr.testing.assert_equal(whole_targets.compute(), parts_targets.compute())


def test_open_traker__computes_nothing(written: Path) -> None:
    with raise_if_dask_computes():
        features, targets = open_traker(written, "test")
        td.top_k(td.score(features, targets, damping=td.Absolute(1.0)), 3)


@pytest.mark.slow
def test_open_traker__computes_on_worker_processes(written: Path, process_client) -> None:
    features = open_traker(written)
    expected = np.stack([on_disk(written, id, "grads.mmap") for id in (0, 1, 2)], axis=-1)
    np.testing.assert_array_equal(process_client.compute(features.feature.data).result(), expected)


@pytest.mark.parity
@pytest.mark.parametrize(("ids", "lambda_reg"), [((0,), 0.01), ((0, 1, 2), 3.0)])
def test_open_traker__scores_are_those_of_finalize_scores(
    tmp_path: Path, ids: tuple[int, ...], lambda_reg: float
) -> None:
    """Up to one factor per checkpoint: the mean absolute entry of the inverse gram matrix."""
    expected = run_of(tmp_path, ids=ids, lambda_reg=lambda_reg)
    features, targets = open_traker(tmp_path, "test")
    apart = td.score(
        features, targets, estimator="trak", damping=td.Absolute(lambda_reg), average=False
    )
    factors = []
    for id in ids:
        g = on_disk(tmp_path, id, "grads.mmap").astype("f8")
        factors.append(np.abs(np.linalg.inv(g.T @ g + lambda_reg * np.eye(PROJ_DIM))).mean())
    scaled = (apart / xr.DataArray(factors, dims="checkpoint")).mean("checkpoint")
    np.testing.assert_allclose(scaled, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())


def test_open_traker__rows_never_featurized_take_no_part_in_scores(tmp_path: Path) -> None:
    """A run that stopped: its scores are those of a run with fewer training samples."""
    traker = traker_of(tmp_path)
    write_features(traker, ids=(0,), rows=40)
    features = open_traker(tmp_path)
    features = features.assign_coords(label=("sample", np.arange(N) % 2))
    done = features.isel(sample=slice(40))
    targets, options = done.isel(sample=slice(5)), {"damping": td.Absolute(0.5)}
    scores = td.score(features, targets, **options)
    assert np.isnan(scores[40:]).all()
    np.testing.assert_allclose(scores[:40], td.score(done, targets, **options), rtol=1e-5)
    np.testing.assert_allclose(
        td.group_score(features, targets, by="label", **options),
        td.group_score(done, targets, by="label", **options),
        rtol=1e-5,
    )
    assert int(td.top_k(scores, 5).position.max()) < 40


def test_open_traker__an_appended_checkpoint_goes_into_the_store(tmp_path: Path) -> None:
    run, store = tmp_path / "run", tmp_path / "features.zarr"
    traker = traker_of(run)
    write_features(traker, ids=(0, 1))
    td.save(open_traker(run), store, progress=False)
    write_features(traker, ids=(2,))
    both = td.save(open_traker(run, model_ids=[2]), store, append_dim="checkpoint", progress=False)
    xr.testing.assert_equal(both.feature.compute(), open_traker(run).feature.compute())


def test_open_traker__a_moved_directory_opens(run: Path) -> None:
    """experiments.json holds the absolute path of before."""
    scores_path = json.loads((run / "experiments.json").read_text())["test"]["scores_path"]
    assert Path(scores_path).parent.parent != run
    shutil.rmtree(run / "scores")
    features, targets = open_traker(run, "test")
    assert np.isfinite(td.score(features, targets, damping=td.Absolute(1.0))).all()
