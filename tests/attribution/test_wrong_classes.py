"""The curvature between wrong classes, against explicit Jacobians and solves in float64."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn

import trakdask as td

RNG = np.random.default_rng(0)
N_CLASSES = 5
EXACT = {"projector": td.Identity(), "dtype": "float64"}


def arrays(n: int) -> dict[str, np.ndarray]:
    return {"x": RNG.normal(size=(n, 4)), "label": np.arange(n) % N_CLASSES}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, N_CLASSES)).double()


SAMPLES = td.from_arrays(arrays(60), chunks=16)
STATES = []
for seed in range(3):
    torch.manual_seed(seed)
    STATES.append({name: 2 * tensor for name, tensor in net().state_dict().items()})
MODEL = td.Model(net, dict(zip("abc", STATES, strict=True)), task="classification")


@functools.cache
def features() -> xr.Dataset:
    return td.featurize(SAMPLES, MODEL, **EXACT).compute()


@functools.cache
def targets() -> xr.Dataset:
    return td.featurize(td.from_arrays(arrays(7)), MODEL, **EXACT).compute()


@functools.cache
def matrix() -> xr.DataArray:
    return td.wrong_classes(SAMPLES, MODEL, **EXACT).compute()


def jacobians(state: dict[str, torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Return logits (sample, class) and their derivative (sample, class, parameter)."""
    module = net()

    def logits(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, weights, (x[None],))[0]

    x = torch.tensor(SAMPLES.x.values)
    by_name = torch.func.vmap(torch.func.jacrev(logits), in_dims=(None, 0))(state, x)
    flat = torch.cat([by_name[name].flatten(2) for name in state], 2)
    return torch.func.vmap(logits, in_dims=(None, 0))(state, x).detach().numpy(), flat.numpy()


def explicit(state: dict[str, torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Return K with h = √q (1 - q), and Σ 2 √q ψ ψᵀ with ψ = vᵀ (e_k - r), sample by sample."""
    total, between = 0.0, 0.0
    for z, v, y in zip(*jacobians(state), SAMPLES.label.values, strict=True):
        p = np.exp(z) / np.exp(z).sum()
        r = np.where(np.arange(N_CLASSES) == y, 0, p) / (1 - p[y])
        margin, wrong = np.eye(N_CLASSES)[y] - r, np.eye(N_CLASSES)[r.argmax()] - r
        total += np.sqrt(1 - p[y]) * p[y] * np.outer(margin @ v, margin @ v)
        between += 2 * np.sqrt(1 - p[y]) * np.outer(wrong @ v, wrong @ v)
        # What the outer product stands for: over all k, its mean is the covariance of classes.
        drawn = np.einsum("k,ki,kj->ij", r, np.eye(N_CLASSES) - r, np.eye(N_CLASSES) - r)
        np.testing.assert_allclose(drawn, np.diag(r) - np.outer(r, r), atol=1e-12)
    return np.asarray(total), np.asarray(between)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_scores__are_those_of_the_sum_of_both_matrices_with_the_lambda_of_one() -> None:
    with_matrix = features().assign(wrong_classes=matrix())
    scores = td.score(with_matrix, targets(), td.Soft(power=0.5), average=False)
    influence = td.self_influence(with_matrix, td.Soft(power=0.5), average=False)
    lam = td.damping(features()).damping.values
    assert "wrong classes" in scores.attrs["gram_weights"]
    g = np.sqrt(features().out_to_loss.values.astype(float)).mean(1)
    for c, state in enumerate(STATES):
        total, between = explicit(state)
        np.testing.assert_allclose(matrix()[..., c], between, rtol=1e-5, atol=1e-7)
        phi, psi = (ds.feature.values[:, :, c].astype(float) for ds in (features(), targets()))
        inverse = np.linalg.inv(total + between + lam[c] * np.eye(len(total)))
        expected = g[:, None] * (phi @ inverse @ psi.T)
        np.testing.assert_allclose(scores[..., c], expected, rtol=1e-4, atol=1e-6)
        forms = np.einsum("ij,jk,ik->i", phi, inverse, phi)
        np.testing.assert_allclose(influence[:, c], g**2 * forms, rtol=1e-4, atol=1e-6)
    without = td.score(features(), targets(), estimator="trak")
    np.testing.assert_array_equal(td.score(with_matrix, targets(), estimator="trak"), without)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_matrix__kept_beside_a_store_that_grows(tmp_path: Path) -> None:
    halves = [SAMPLES.isel(sample=rows) for rows in (slice(32), slice(32, None))]
    for half in halves:
        made = td.featurize(half, MODEL, **EXACT)
        td.save(made, tmp_path / "f.zarr", append_dim="sample", progress=False)
    parts = [td.wrong_classes(half, MODEL, batch_size=5, **EXACT) for half in halves]
    (parts[0] + parts[1]).to_zarr(tmp_path / "wrong.zarr")
    opened = td.open(tmp_path / "f.zarr")
    opened["wrong_classes"] = xr.open_zarr(tmp_path / "wrong.zarr").wrong_classes
    expected = td.score(features().assign(wrong_classes=matrix()), targets())
    np.testing.assert_allclose(td.score(opened, targets()), expected, rtol=1e-5, atol=1e-6)
    some = opened.isel(sample=[3, 40], checkpoint=slice(2))
    picked = td.score(some, targets().isel(checkpoint=slice(2)), td.Soft(damping=td.Absolute(1.0)))
    whole = [ds.isel(checkpoint=slice(2)) for ds in (opened, targets())]
    of_all = td.score(*whole, estimator=td.Soft(damping=td.Absolute(1.0)))
    np.testing.assert_allclose(picked, of_all.isel(sample=[3, 40]), rtol=1e-5)


def test_matrix__of_another_model_or_task_is_refused() -> None:
    other = matrix().assign_attrs(projector={"kind": "SJLT"})
    with pytest.raises(td.errors.StoreMismatchError, match="projector"):
        td.score(features().assign(wrong_classes=other), targets(), td.Soft(damping=0.1))
    fewer = features().assign(wrong_classes=matrix().isel(checkpoint=slice(2)))
    with pytest.raises((td.errors.StoreMismatchError, ValueError), match="finite"):
        td.score(fewer, targets(), td.Soft(damping=0.1)).compute()
    model = td.Model(nn.Linear(4, 1).double(), task="regression")
    with pytest.raises(TypeError, match="Regression"):
        td.wrong_classes(SAMPLES, model)


def test_matrix__of_two_classes_is_zero() -> None:
    model = td.Model(nn.Linear(4, 2).double(), task="classification")
    samples = SAMPLES.assign(label=SAMPLES.label % 2)
    assert not td.wrong_classes(samples, model, **EXACT).values.any()
