"""Features that come with a fit are those that featurize computes, and used for nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import torch
import xarray as xr
from distributed import Client
from torch import Tensor, nn

import trakdask as td
from trakdask.projection.fitted import Fitted

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
N_CHECKPOINTS = 2
runs: list[np.ndarray] = []


class Counted(nn.Linear):
    """Notes the samples that it is called with."""

    def forward(self, x: Tensor) -> Tensor:
        runs.extend(np.asarray(x.detach()))
        return super().forward(x)


def model(scale: float = 1.0, **options: Any) -> td.Model:
    rng = np.random.default_rng(0)
    states = {
        f"c{i}": {
            "weight": scale * torch.tensor(rng.normal(size=(3, 5)).astype("f4")),
            "bias": torch.zeros(3),
        }
        for i in range(N_CHECKPOINTS)
    }
    return td.Model(Counted(5, 3), states, task="image_classification", **options)


def in_chunks(chunks: int) -> xr.Dataset:
    images = np.random.default_rng(1).normal(size=(20, 5)).astype("f4")
    return td.from_arrays({"image": images, "label": np.arange(20) % 3}, chunks=chunks)


@pytest.fixture(scope="module")
def samples() -> xr.Dataset:
    return in_chunks(8)


@pytest.fixture(scope="module")
def projector(samples: xr.Dataset) -> Fitted:
    return td.fit(samples, model(), 4, sketch=td.SJLT(16), curvature=True, progress=False)


def computed(features: xr.Dataset) -> tuple[xr.Dataset, bool]:
    """Return features, and whether a model ran for them."""
    runs.clear()
    with dask.config.set(scheduler="sync"):
        return features.compute(), bool(runs)


def test_featurize__takes_what_the_fit_has(samples: xr.Dataset, projector: Fitted) -> None:
    known, ran = computed(td.featurize(samples, model(), projector))
    again, ran_again = computed(td.featurize(samples, model(), replace(projector, rows={})))
    assert (ran, ran_again) == (False, True)
    xr.testing.assert_allclose(known, again, rtol=1e-5, atol=1e-5)
    assert known.attrs == again.attrs
    assert {n: a.dtype for n, a in known.items()} == {n: a.dtype for n, a in again.items()}


@pytest.mark.parametrize(("chunks", "names"), [(5, ["c1", "c0"]), (20, ["c1"])])
def test_featurize__takes_it_in_other_chunks_of_some_checkpoints(
    projector: Fitted, chunks: int, names: list[str]
) -> None:
    asked, of = in_chunks(chunks), model().at_checkpoints(names)
    known, ran = computed(td.featurize(asked, of, projector))
    assert not ran
    plain = td.featurize(asked, of, replace(projector, rows={})).compute()
    xr.testing.assert_allclose(known, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"rows": slice(0, 8)}, id="some of the samples"),
        pytest.param({"rows": slice(None, None, -1)}, id="another order"),
        pytest.param({"on_error": "record"}, id="failures recorded"),
        pytest.param({"dtype": "float64"}, id="another precision"),
        pytest.param({"gradients": "loop"}, id="another engine"),
        pytest.param({"task": td.tasks.ImageClassification(temperature=2.0)}, id="another task"),
    ],
)
def test_featurize__computes_whatever_differs(
    samples: xr.Dataset, projector: Fitted, asked: dict[str, Any]
) -> None:
    options = dict(asked)
    some = samples.isel(sample=options.pop("rows", slice(None)))
    of = model()
    of.task = options.pop("task", of.task)
    known, ran = computed(td.featurize(some, of, projector, **options))
    assert ran
    expected = td.featurize(some, of, replace(projector, rows={}), **options).compute()
    xr.testing.assert_equal(known, expected)


@pytest.mark.parametrize("chunks", [8, 5, 20])
def test_featurize__computes_only_samples_that_were_not_drawn(chunks: int) -> None:
    samples = in_chunks(chunks)
    projector = td.fit(samples, model(), 4, n_samples=10, sketch=td.SJLT(16), progress=False)
    (_, places, _), *_ = projector.rows.values()
    known, _ = computed(td.featurize(samples, model(), projector))
    drawn = np.isin(np.arange(20), places)
    assert {*map(tuple, runs)} == {*map(tuple, samples.image.values[~drawn])}
    plain = td.featurize(samples, model(), replace(projector, rows={})).compute()
    xr.testing.assert_allclose(known, plain, rtol=1e-5, atol=1e-5)


def test_fit__has_no_features_without_components(samples: xr.Dataset) -> None:
    projector = td.fit(samples, model(), 4, components=False, sketch=td.SJLT(16), progress=False)
    assert not projector.rows


def test_attribute__runs_no_sample_again(tmp_path: Path, samples: xr.Dataset) -> None:
    """The store of a fit that was there already, and one more checkpoint, are as the first."""
    options: dict[str, Any] = {"sketch": td.SJLT(16), "progress": False}
    store, targets = tmp_path / "f.zarr", samples.isel(sample=slice(0, 2))
    with dask.config.set(scheduler="sync"):
        td.fit(samples, model(), 4, store=store, **options)
        runs.clear()
        projector = td.fit(samples, model(), 4, store=store, **options)  # from the files
        features = td.save(td.featurize(samples, model(), projector), store, progress=False)
        assert not runs
        scores = td.attribute(samples, targets, model(), store, proj_dim=4, **options)
        plain = td.featurize(samples, model(), replace(projector, rows={})).compute()
    np.testing.assert_allclose(features.feature, plain.feature, rtol=1e-5, atol=1e-5)
    expected = td.score(plain, td.featurize(targets, model(), like=plain))
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-6)


def test_featurize__takes_it_on_a_cluster(
    samples: xr.Dataset, projector: Fitted, process_client: Client
) -> None:
    here = td.fit(samples, model(), 4, sketch=td.SJLT(16), curvature=True, progress=False)
    known = td.featurize(samples, model(), here).compute()
    with dask.config.set(scheduler="sync"):
        expected = td.featurize(samples, model(), replace(projector, rows={})).compute()
    xr.testing.assert_allclose(known, expected, rtol=1e-5, atol=1e-5)
