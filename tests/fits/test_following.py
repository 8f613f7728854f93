"""Curvature is left out where outputs follow sums of scores clearly better without it."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn
from torch.nn.functional import cross_entropy

import trakdask as td
from trakdask.arrays.damping import GRID
from trakdask.featurization import block
from trakdask.fits.following import follows_better_without, left_out_totals
from trakdask.projection.fitted import Curvature, Fitted

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
N = 500


def table() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 5, (N,), generator=generator)
    centres = 0.3 * torch.randn(5, 20, generator=generator)
    return centres[y] + torch.randn(N, 20, generator=generator), y


@pytest.fixture(scope="module")
def samples() -> xr.Dataset:
    x, y = table()
    return td.from_arrays({"image": x.numpy(), "label": y.numpy()})


@functools.cache
def trained(n_epochs: int, lr: float) -> td.Model:
    states = []
    for seed in range(2):
        torch.manual_seed(seed)
        layers = nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 5)
        net = nn.Sequential(*layers)
        optimizer, (x, y) = torch.optim.Adam(net.parameters(), lr), table()
        for _ in range(n_epochs):
            for some in torch.randperm(N).split(32):
                optimizer.zero_grad()
                cross_entropy(net(x[some]), y[some]).backward()
                optimizer.step()
        states.append(net.state_dict())
    return td.Model(net, states, task="image_classification")


def fit(samples: xr.Dataset, model: td.Model, **options: Any) -> Fitted:
    return td.fit(samples, model, 16, sketch=td.SJLT(128), progress=False, **options)


def has_curvature(projector: Fitted) -> bool:
    """Return it, and check that the projector says the same of itself."""
    first = isinstance(projector.steps[0], Curvature)
    assert json.loads(projector.origin)["curvature"] == first
    assert "totals" not in projector.arrays
    return first


def test_left_out_totals__are_those_of_gram_matrices_without_the_sample() -> None:
    rng = np.random.default_rng(0)
    x, q = rng.normal(size=(12, 5)), rng.uniform(0.1, 0.9, 12)
    h, g = np.sqrt(q) * (1 - q), np.sqrt(q)
    found = left_out_totals(x @ x.T, q)
    unit = np.trace((x.T * h) @ x) / 12
    for i in range(12):
        others = np.arange(12) != i
        gram = (x[others].T * h[others]) @ x[others]
        for j, rho in enumerate(GRID):
            solved = np.linalg.solve(gram + rho * unit * np.eye(5), x[i])
            expected = (x[others] @ solved) @ g[others]
            np.testing.assert_allclose(found[i, j], expected, rtol=1e-8)


def test_left_out_totals__of_gradients_that_are_0() -> None:
    assert np.isnan(left_out_totals(np.zeros((3, 3)), np.full(3, 0.5))).all()


@pytest.mark.parametrize(
    ("without", "with_curvature", "expected"),
    [(0.9, 0.8, True), (0.8, 0.9, False), (0.85, 0.8, False), (0.9, np.nan, True), (0, 0, False)],
)
def test_follows_better_without(without: float, with_curvature: float, expected: bool) -> None:
    rng = np.random.default_rng(0)
    f, noise = np.linalg.qr(rng.normal(size=(100, 2)) - rng.normal(size=(100, 2)).mean(0))[0].T
    f, noise = f - f.mean(), noise - noise.mean()
    noise -= f * (f @ noise) / (f @ f)

    def of_correlation(r: float) -> np.ndarray:
        if not r:
            return np.ones(100)  # all the same
        return r * f / np.linalg.norm(f) + np.sqrt(1 - r**2) * noise / np.linalg.norm(noise)

    totals = np.column_stack([f, of_correlation(without), of_correlation(with_curvature)])
    assert follows_better_without(totals[..., None]) is expected


def test_fit__leaves_curvature_out_after_a_short_training(samples: xr.Dataset) -> None:
    short, long = trained(5, 1e-3), trained(30, 1e-2)
    assert not has_curvature(fit(samples, short))
    assert has_curvature(fit(samples, long))
    assert has_curvature(fit(samples, short, curvature=True))
    plain = fit(samples, short, curvature=False)
    assert fit(samples, short).digests == plain.digests


@pytest.mark.parametrize("curvature", ["auto", False])
def test_fit__does_as_the_store_for_one_more_checkpoint(
    tmp_path: Path, samples: xr.Dataset, curvature: Any
) -> None:
    short, store = trained(5, 1e-3), tmp_path / "f.zarr"
    first, second = (short.at_checkpoints([name]) for name in ("0", "1"))
    made = fit(samples, first, store=store)
    td.save(td.featurize(samples, first, made), store, progress=False)
    both = fit(samples, short, store=store, curvature=curvature)
    assert not has_curvature(both)
    assert both.digests["0"] == made.digests["0"]
    features = td.save(td.featurize(samples, short, both), store, append_dim="checkpoint")
    assert features.sizes["checkpoint"] == 2
    assert fit(samples, short, store=store).digests == both.digests
    with pytest.raises(td.errors.StoreMismatchError, match="curvature"):
        fit(samples, second, store=store, curvature=True)


def test_fit__decides_the_same_again_after_a_stop(
    tmp_path: Path, samples: xr.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever block Ctrl-C stops, and also where the store was removed."""
    short, begun, last = trained(5, 1e-3), 0, 0
    at_work = block.at_work

    @contextmanager
    def begin(what: str) -> Iterator[None]:
        nonlocal begun
        begun += 1
        if begun == last:
            raise KeyboardInterrupt
        with at_work(what):
            yield

    expected = fit(samples, short).digests
    monkeypatch.setattr(block, "at_work", begin)
    with dask.config.set(scheduler="sync"):
        for stop in range(1, 20):
            begun, last = 0, stop
            try:
                found = fit(samples, short, store=tmp_path / "f.zarr")
                break
            except KeyboardInterrupt:
                continue
    assert found.digests == expected
    assert not has_curvature(found)
